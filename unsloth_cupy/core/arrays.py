"""What ops ask of arrays, whichever library they come from."""

from typing import Any

import numpy as np

from .frameworks import (
    check_library,
    common,
    empty,
    framework_of,
    full_like,
    home_of,
    on_host,
    placed,
    scipy_of,
)

__all__ = [
    "check_library",
    "common",
    "empty",
    "framework_of",
    "full_like",
    "home_of",
    "on_host",
    "placed",
    "scipy_of",
]


def packed(array: Any) -> Any:
    """Return array with its elements in C order, copied only where they are not."""
    plain = array is None or type(array) is int or array.flags.c_contiguous
    return array if plain else array.copy()  # which CuPy has too, unlike np.ascontiguousarray


def rounded(array: Any, dtype: Any) -> Any:
    """Return array in a dtype, as it is where it has it; what float16 cannot hold is infinite."""
    with np.errstate(over="ignore"):  # as on a GPU
        if isinstance(array, np.generic):
            return np.asarray(array, dtype)
        return array if array is None else array.astype(dtype, copy=False)


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
