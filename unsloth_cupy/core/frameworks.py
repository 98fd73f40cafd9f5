"""Runs ops on arrays of other libraries without copying them.

An array is adopted: NumPy or CuPy gets a view of the same memory.  Results are returned in the same
way, and kernels run on the stream that the other library uses.  DLPack is enough for most
libraries; ``interop`` registers the libraries that need more.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..errors import FrameworkError
from . import gpu
from .dtypes import NOT_ARRAYS


class Framework(NamedTuple):
    """How to adopt arrays of another library, and how to return results as its arrays."""

    adopt: Callable[[Any], Any]
    give_back: Callable[[Any, Any], Any]  # (result, an operand)
    stream: Callable[[Any], AbstractContextManager[Any]] = nullcontext  # (operand): its stream
    handler: Callable[[Any, list[Any], dict[str, Any]], Any] | None = None  # see ``handler_of``
    takes_integers: bool = False  # the handler accepts integers of NumPy beside its own arrays


def _plain(array: Any) -> Any:
    """Return a NumPy scalar, or an array of a subclass, as a plain array."""
    if isinstance(array, np.ma.MaskedArray):
        raise FrameworkError("has a mask, which would be lost; pass its .filled(value)")
    return np.asarray(array)


def _dlpack_adopt(array: Any) -> Any:
    """Return a view of an array of another library as NumPy's or CuPy's array."""
    if (library := type(array).__module__.partition(".")[0]) in REFUSED:
        raise FrameworkError(f"would lose its {library} gradient; pass numpy.asarray of it")
    if not hasattr(array, "__dlpack__"):
        return cupy().asarray(array)  # reads __cuda_array_interface__
    on_gpu = array.__dlpack_device__()[0] == 2  # kDLCUDA of DLPack
    return (cupy() if on_gpu else np).from_dlpack(array)


def _dlpack_give_back(array: Any, operand: Any) -> Any:
    """Return a result as an array of the operand's library, if it follows the array API."""
    if not hasattr(operand, "__array_namespace__"):
        return array
    return operand.__array_namespace__().from_dlpack(array)


FRAMEWORKS = {"numpy": Framework(_plain, lambda array, operand: array)}  # subclasses, scalars
DLPACK = Framework(_dlpack_adopt, _dlpack_give_back)  # libraries without an entry of their own
REFUSED = ("tensorflow", "paddle", "mlx")  # they compute gradients, and have no handler here
OWN = ("numpy", "cupy", "unsloth_cupy")  # libraries whose arrays need no adoption


def handler_of(array: Any) -> Any:
    """Return ``handler(op, arrays, options)`` of a library that differentiates or traces calls.

    None for other libraries.  Compilers such as torch.compile trace this function and add a guard
    for each value that it reads, so it reads little.
    """
    for kind in array.__class__.__mro__:
        name = kind.__module__.partition(".")[0].replace("jaxlib", "jax")
        if name in OWN:
            return None
        if name in FRAMEWORKS and FRAMEWORKS[name].handler is not None:
            return FRAMEWORKS[name].handler
    return None


def cupy() -> Any:
    """Return CuPy, which adopts other libraries' GPU arrays; raise FrameworkError if missing."""
    try:
        return gpu.cupy()
    except ImportError as error:
        raise FrameworkError("is on a GPU; install unsloth-cupy[cuda12] or [cuda13]") from error


def run_adopted(library: str, op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Adopt arrays of another library, run op on its stream and return results as its arrays."""
    home = FRAMEWORKS.get(library, DLPACK)
    if home.handler is not None:  # the call looks for a handler of its first array only
        return home.handler(op, [*arrays], options)
    operand = next(array for array in arrays if not isinstance(array, NOT_ARRAYS))
    with home.stream(operand):
        result = op.call(adopt_all(home, op.called, op.names, arrays), options)
        if type(result) is tuple:
            return tuple(a if a is None else home.give_back(a, operand) for a in result)
        return home.give_back(result, operand)


def adopt_all(home: Framework, call: str, names: Iterable[str], arrays: Iterable[Any]) -> list[Any]:
    """Return the arrays of a call as NumPy's or CuPy's; None and integers are left unchanged."""
    result: list[Any] = []
    for name, array in zip(names, arrays, strict=True):
        try:
            result.append(array if isinstance(array, NOT_ARRAYS) else home.adopt(array))
        except (TypeError, RuntimeError, BufferError) as error:
            raise FrameworkError(f"{call}: {name} {error}") from error
    return result
