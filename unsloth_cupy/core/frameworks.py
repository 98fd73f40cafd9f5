"""Arrays of other libraries, without copies.

They are adopted: NumPy or CuPy sees the same memory.  Results go back the same way, on the
stream that the other library works on.  DLPack does for most; ``interop`` enters the libraries
that ask for more.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..errors import FrameworkError
from . import gpu
from .dtypes import NOT_ARRAYS


class Framework(NamedTuple):
    """How arrays of another library are adopted, and how results go back to where one was."""

    adopt: Callable[[Any], Any]
    give_back: Callable[[Any, Any], Any]  # (result, an operand)
    stream: Callable[[Any], AbstractContextManager[Any]] = nullcontext  # of an operand
    door: Callable[[Any, list[Any], dict[str, Any]], Any] | None = None  # see ``door_of``


def _plain(array: Any) -> Any:
    if isinstance(array, np.ma.MaskedArray):
        raise FrameworkError("has a mask, which would be lost; pass its .filled(value)")
    return np.asarray(array)


def _dlpack_adopt(array: Any) -> Any:
    if not hasattr(array, "__dlpack__"):
        return cupy().asarray(array)  # by __cuda_array_interface__
    on_gpu = array.__dlpack_device__()[0] == 2
    return (cupy() if on_gpu else np).from_dlpack(array)


def _dlpack_give_back(array: Any, operand: Any) -> Any:
    if not hasattr(operand, "__array_namespace__"):
        return array
    return operand.__array_namespace__().from_dlpack(array)


FRAMEWORKS = {"numpy": Framework(_plain, lambda array, operand: array)}  # subclasses and scalars
DLPACK = Framework(_dlpack_adopt, _dlpack_give_back)
OWN = ("numpy", "cupy", "unsloth_cupy")  # whose arrays ops take as they are


def door_of(array: Any) -> Any:
    """Return ``door(op, arrays, options)`` of a library that differentiates or traces calls itself.

    None where the library of the array does not.  Compilers of other libraries trace this function,
    and watch all that it reads.
    """
    for kind in array.__class__.__mro__:
        name = kind.__module__.partition(".")[0].replace("jaxlib", "jax")
        if name in OWN:
            return None
        if name in FRAMEWORKS and FRAMEWORKS[name].door is not None:
            return FRAMEWORKS[name].door
    return None


def cupy() -> Any:
    """Return CuPy, which sees what other libraries keep on a GPU."""
    try:
        return gpu.cupy()
    except ImportError as error:
        raise FrameworkError("lies on a GPU; install unsloth-cupy[cuda12] or [cuda13]") from error


def elsewhere(library: str, op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run op on adopted arrays of another library, on its stream, and give results back."""
    there = FRAMEWORKS.get(library, DLPACK)
    if there.door is not None:  # of a call without its first array
        return there.door(op, [*arrays], options)
    operand = next(array for array in arrays if not isinstance(array, NOT_ARRAYS))
    with there.stream(operand):
        result = op.call(adopted(there, op.called, op.names, arrays), options)
        if type(result) is tuple:
            return tuple(a if a is None else there.give_back(a, operand) for a in result)
        return there.give_back(result, operand)


def adopted(there: Framework, call: str, names: Iterable[str], arrays: Iterable[Any]) -> list[Any]:
    """Return the arrays of a call as NumPy's or CuPy's; None and numbers stay what they are."""
    found: list[Any] = []
    for name, array in zip(names, arrays, strict=True):
        try:
            found.append(array if isinstance(array, NOT_ARRAYS) else there.adopt(array))
        except (TypeError, RuntimeError, BufferError) as error:
            raise FrameworkError(f"{call}: {name} {error}") from error
    return found
