"""Arrays of NumPy, CuPy, torch, JAX and of anything that speaks DLPack, without copies."""

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .errors import DTypeError, FrameworkError


class Framework(NamedTuple):
    """A foreign library: how its arrays become NumPy's or CuPy's, and how results go back."""

    name: str
    adopt: Callable[[Any], Any]
    give_back: Callable[[Any], Any]
    stream: Callable[[], AbstractContextManager[Any]] = nullcontext


def _torch_adopt(tensor: Any) -> Any:
    import torch

    if tensor.requires_grad and torch.is_grad_enabled():
        raise FrameworkError(
            "torch's autograd would not see this call: use unsloth_cupy.interop.torch,"
            " pass tensor.detach(), or call under torch.no_grad()"
        )
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _torch_give_back(array: Any) -> Any:
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _jax_give_back(array: Any) -> Any:
    import jax.numpy

    return jax.numpy.asarray(array)


FRAMEWORKS = {
    "torch": Framework("torch", _torch_adopt, _torch_give_back),
    "jax": Framework("jax", np.asarray, _jax_give_back),
}
DLPACK = Framework("dlpack", np.from_dlpack, lambda array: array)


def empty(shape: Any, dtype: Any, like: Any) -> Any:
    """Return a new array, uninitialised, of like's library and device."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype)
    return sys.modules["cupy"].empty(shape, dtype)


def full_like(array: Any, number: float) -> Any:
    """Return a new array of array's library, shape, dtype and device, filled with a number."""
    library = framework_of(array, "the model of a new array")
    if library in ("numpy", "cupy"):
        return np.full_like(array, number)
    there = sys.modules["jax.numpy" if library == "jax" else library]
    return there.full_like(array, number)


def placed(array: Any, like: Any) -> Any:
    """Return a NumPy array as one of like's library and device."""
    library = framework_of(like, "the model of a new array")
    if library in FRAMEWORKS:
        given = FRAMEWORKS[library].give_back(array)
        return given.to(like.device) if library == "torch" else given
    return np.asarray(array, like=like) if library == "cupy" else array


def scipy_of(module: str, like: Any) -> Any:
    """Return a module of SciPy, or of CuPy's twin of it, by where an array lives."""
    home = "scipy" if isinstance(like, np.ndarray) else "cupyx.scipy"
    return importlib.import_module(f"{home}.{module}")


class Planned(np.ndarray[Any, Any]):
    """A shape and a dtype that ops compute with instead of numbers; it takes no memory."""

    @classmethod
    def of(cls, shape: Any, dtype: Any) -> "Planned":
        """Return zeros whose strides are all 0, on a base of their own."""
        return np.broadcast_to(np.zeros((), dtype), shape).view(cls)


def on_host(array: Any) -> Any:
    """Return array as NumPy's, copied from its GPU where it lives on one."""
    return array if isinstance(array, np.ndarray) else array.get()


def framework_of(array: Any, what: str) -> str:
    """Return the name of the library an array comes from; raise for what is no array."""
    if isinstance(array, np.ndarray):
        return "numpy"
    name = type(array).__module__.partition(".")[0]
    name = {"jaxlib": "jax"}.get(name, name)
    if name in ("cupy", "torch", "jax") or hasattr(array, "__dlpack__"):
        return name
    kind = type(array).__name__
    raise DTypeError(f"{what} is no array but {kind}; wrap it in numpy.asarray(...)")


def common(op: str, names: Sequence[str], arrays: Sequence[Any]) -> str:
    """Return the one library that all arrays of a call come from, or raise."""
    places: dict[str, str] = {}
    for name, array in zip(names, arrays, strict=True):
        if array is not None and not isinstance(array, int):
            places[name] = framework_of(array, f"{op}: {name}")
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} from {place}" for name, place in places.items())
        raise FrameworkError(f"{op}: arrays of one call must come from one library: {listed}")
    return next(iter(places.values()), "numpy")


def packed(array: Any) -> Any:
    """Return array with its elements in C order, copied only where they are not."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def lanes(row: int, *arrays: Any) -> int:
    """Return how many values of a row one access of at most 16 bytes moves, by the first's dtype.

    A power of two that divides the row and that the address of every array allows.
    """
    size = arrays[0].dtype.itemsize
    lowest = 16 | row * size
    for array in arrays:
        if array is not None:
            address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
            if address % 16:
                lowest |= address * size // array.dtype.itemsize
    return (lowest & -lowest) // size


def check_devices(op: str, names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Raise if the arrays of a call live on more than one device."""
    places = {
        name: str(array.device)
        for name, array in zip(names, arrays, strict=True)
        if array is not None and type(array) is not int
    }
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise FrameworkError(f"{op}: arrays of one call must be on one device: {listed}")


def elsewhere(
    library: str,
    call: Callable[[list[Any], dict[str, Any]], Any],
    arrays: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    """Run call on adopted arrays of another library, on its stream, and give results back."""
    there = FRAMEWORKS.get(library, DLPACK)
    with there.stream():
        adopted = [a if a is None or type(a) is int else there.adopt(a) for a in arrays]
        result = call(adopted, options)
        if type(result) is tuple:
            return tuple(a if a is None else there.give_back(a) for a in result)
        return there.give_back(result)
