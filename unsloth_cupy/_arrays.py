"""What ops ask of arrays, whichever library they come from."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .errors import FrameworkError
from .interop.exchange import empty, framework_of, full_like, on_host, placed, scipy_of

__all__ = ["empty", "framework_of", "full_like", "on_host", "placed", "scipy_of"]  # passed on


class Planned(np.ndarray[Any, Any]):
    """A shape and a dtype that ops compute with instead of numbers; it takes no memory."""

    @classmethod
    def of(cls, shape: Any, dtype: Any) -> "Planned":
        """Return zeros whose strides are all 0, on a base of their own."""
        return np.broadcast_to(np.zeros((), dtype), shape).view(cls)


def common(op: str, names: Sequence[str], arrays: Sequence[Any]) -> str:
    """Return the one library that all arrays of a call come from; raise where they mix."""
    places: dict[str, str] = {}
    for name, array in zip(names, arrays, strict=False):
        if array is not None and type(array) is not int:
            library = framework_of(array, f"{op}: {name}")
            places[name] = f"{library} {getattr(array, 'device', '')}"
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} from {place}" for name, place in places.items())
        raise FrameworkError(
            f"{op}: arrays of one call must share library and device; bring these to one: {listed}"
        )
    return next(iter(places.values()), "numpy").partition(" ")[0]


def native(arrays: Sequence[Any]) -> bool:
    """Say whether definitions and kernels take these arrays as they are."""
    exact = (np.ndarray, Planned, int, type(None))
    return all(type(a) in exact or type(a).__module__.startswith("cupy") for a in arrays)


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


def on_one_device(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return run, with what several GPUs ask for: a check, and their arrays' as the current one."""
    if sys.modules["cupy"].cuda.runtime.getDeviceCount() == 1:
        return run

    def run_there(arrays: list[Any], options: dict[str, Any]) -> Any:
        common(op.__name__, op.names, arrays)
        with next(a.device for a in arrays if a is not None and type(a) is not int):
            return run(arrays, options)

    return run_there
