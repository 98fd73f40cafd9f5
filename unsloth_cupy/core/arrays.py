"""Helpers of ops for arrays of any library."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import DTypeError, FrameworkError
from .dtypes import Stored
from .frameworks import DLPACK, FRAMEWORKS
from .stand_in import StandIn, is_planned
from .target import target_of


class Unwritten(NamedTuple):
    """An array that is computed, or gathered from ranks, when it is written."""

    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    read: Callable[[], Any]

    @property
    def bytes(self) -> int:
        """The size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def framework_of(array: Any, what: str) -> str:
    """Return the name of the library of an array; raise DTypeError for other objects."""
    if isinstance(array, (np.ndarray, np.generic)) or is_planned(array):
        return "numpy"
    if isinstance(array, Stored):
        return framework_of(array.home, what)
    name = type(array).__module__.partition(".")[0].replace("jaxlib", "jax")
    exported = hasattr(array, "__dlpack__") or hasattr(array, "__cuda_array_interface__")
    if exported or name in ("cupy", "torch", "jax", "tensorflow"):
        return name
    problem = f"{what} is not an array but {type(array).__name__}"
    raise DTypeError(f"{problem}; wrap it in numpy.asarray(...)")


def common(op: str, names: Sequence[str], arrays: Sequence[Any]) -> str:
    """Return the one library of all arrays of a call; raise FrameworkError if there are several."""
    places: dict[str, str] = {}
    for name, array in zip(names, arrays, strict=False):
        if isinstance(array, Stored) and not native(arrays):
            continue  # checked after the other arrays have been adopted
        if array is not None and type(array) is not int:
            library = framework_of(array, f"{op}: {name}")
            places[name] = f"{library} {getattr(array, 'device', '')}".strip()
    if len(set(places.values())) > 1:
        others = [place for place in {*places.values()} if place.partition(" ")[0] != "numpy"]
        library = others[0].partition(" ")[0] if len(others) == 1 else "numpy"
        floats = any(isinstance(a, np.ndarray) and a.dtype.kind not in "iub" for a in arrays)
        if not floats and FRAMEWORKS.get(library, DLPACK).takes_integers:
            return library
        listed = ", ".join(f"{name} from {place}" for name, place in places.items())
        raise FrameworkError(
            f"{op}: arrays of one call must share library and device; bring these to one: {listed}"
        )
    return next(iter(places.values()), "numpy").partition(" ")[0]


def native(arrays: Sequence[Any]) -> bool:
    """Return whether definitions and kernels accept these arrays without conversion."""
    # ``type``, not isinstance: subclasses of ndarray are converted
    exact = (np.ndarray, int, type(None))
    own = (a for a in arrays if type(a) not in exact and not isinstance(a, Stored))
    return all(is_planned(a) or type(a).__module__.startswith("cupy") for a in own)


def empty(shape: Any, dtype: Any, like: Any) -> Any:
    """Return a new, uninitialised array of the library and on the device of ``like``."""
    if isinstance(like, StandIn):
        return like.empty(shape, dtype)
    target = None if type(like) is np.ndarray else target_of(like)
    return np.empty(shape, dtype) if target is None else target.empty(shape, dtype, like)


def contiguous(array: Any) -> Any:
    """Return the array itself if its elements are in C order, else a copy in C order."""
    plain = array is None or type(array) is int or array.flags.c_contiguous
    # copy() is a method of CuPy's arrays, too; np.ascontiguousarray refuses them
    return array if plain else array.copy()


def rounded(array: Any, dtype: Any) -> Any:
    """Return the array cast to a dtype, or itself if it has that dtype; overflow gives infinity."""
    with np.errstate(over="ignore"):  # as on a GPU
        if isinstance(array, np.generic):
            return np.asarray(array, dtype)
        return array if array is None else array.astype(dtype, copy=False)


def zeroed(array: Any, kept: Any) -> Any:
    """Return array with zeros where ``kept``, of its leading axes, is False.

    ``where`` selects bits, as unsigned integers: CuPy's has no bfloat16, and returns float32.
    """
    bits = array.view(f"u{array.itemsize}")
    where = kept.reshape(*kept.shape, *[1] * (array.ndim - kept.ndim))  # (*kept.shape, 1, ...)
    return np.where(where, bits, bits.dtype.type(0)).view(array.dtype)


def lanes(row: int, *arrays: Any) -> int:
    """Return how many values of the first array's dtype one memory access moves.

    The number is a power of two, at most 16 bytes (the widest access of a GPU), that divides the
    row length and to whose size the address of every array is aligned.
    """
    size = arrays[0].dtype.itemsize
    lowest = 16 | row * size  # the lowest bit set is the largest power of two that divides all
    for array in arrays:
        if array is not None:
            address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
            if address % 16:
                lowest |= address * size // array.dtype.itemsize
    return (lowest & -lowest) // size


def between_elements(array: Any) -> bool:
    """Return whether an address is not a multiple of its element size: a GPU cannot read it."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    steps = [step for n, step in zip(array.shape, array.strides, strict=True) if n > 1]
    return array.size > 0 and any(step % array.itemsize for step in (address, *steps))
