"""Blocks of 256 values as 8-bit codes and one float32 scale: bitsandbytes' optimizer state format.

value = map[code] * scale, where scale is the largest absolute value of the block and the code is
the one whose map value is nearest to value / scale.  Decade i of a map, 0.1 .. 1 times 10**(i - 6)
for i = 0 .. 6, is cut into 2**i equal intervals for each sign, or 2**(i + 1) in a map without
negative values; the map holds the middle of each interval, and 0 and 1.

Dettmers, Lewis, Shleifer and Zettlemoyer, 8-bit Optimizers via Block-wise Quantization, 2022.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...placement import to_device_of

BLOCK = 256
TINY = np.finfo(np.float32).tiny  # smaller scales count as 0: their reciprocals can overflow
LARGE = 1 / TINY  # the reciprocal of a larger number is below TINY


@cache
def dynamic_map(signed: bool) -> Array:
    """Return the 256 float32 values in ascending order; a code is an index into them."""
    values, tenth = [0.0, 1.0], np.float32(0.1)
    for decade in range(7):
        cells = (1 if signed else 2) << decade
        step, index = float((1 - tenth) / np.float32(cells)), np.arange(cells + 1)
        # from the nearer end of the decade: the published format has this rounding
        from_low, from_high = float(tenth) + step * index, 1 - step * index[::-1]
        bounds = np.where(index < (cells + 1) // 2, from_low, from_high).astype(np.float32)
        middles = (bounds[:-1] + bounds[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        values += [*middles, *(-middles if signed else [])]
    return np.sort(np.array(values, np.float32))


@cache
def midpoints(signed: bool) -> Array:
    """Return the 255 midpoints between the values of neighbouring codes."""
    values = dynamic_map(signed)
    return (values[:-1] + values[1:]) * np.float32(0.5)


@cache
def _nearest(signed: bool) -> tuple[Array, Array]:
    """Return two tables by the upper 16 bits of a float32: code, and bound to the next code.

    No two midpoints share these bits, so a lookup and a comparison replace a binary search.
    """
    middles, upper = midpoints(signed), np.arange(1 << 16, dtype=np.uint32) << 16
    ends = np.sort([upper.view(np.float32), (upper | 0xFFFF).view(np.float32)], axis=0)
    infinite = np.isinf(ends[0])  # the other end is NaN, which sorts last
    low, high = np.searchsorted(middles, np.where(infinite, ends[0], ends))
    bound = np.where(low < high, np.append(middles, np.inf)[low], np.inf)
    return low.astype(np.uint8), bound.astype(np.float32)


def tables(like: Any) -> Array:
    """Return the kernel's tables, (4, 256): signed map, its midpoints, and the same unsigned.

    They are on the device of ``like``.
    """
    stacked = [
        row
        for signed in (True, False)
        for row in (dynamic_map(signed), np.append(midpoints(signed), np.float32(1)))
    ]
    return to_device_of(np.stack(stacked), like)


def decode(codes: Any, scale: Any, *, signed: bool) -> Array:
    """Return the float32 values of a 1-D array of codes."""
    values: Any = to_device_of(dynamic_map(signed), codes)[codes]
    return values * _spread(scale, codes.size)


def encode(values: Any, *, signed: bool) -> tuple[Array, Array]:
    """Return the codes of a 1-D float32 array, and the scale of every block."""
    blocks = -(-values.size // BLOCK)
    padded = np.zeros_like(values, shape=(blocks * BLOCK,))
    padded[: values.size] = np.abs(values)
    scale = padded.reshape(blocks, BLOCK).max(1)
    unit = np.where(scale > LARGE, np.float32(0.25), np.float32(1))
    inverse = np.where(scale < TINY, 0, 1 / np.maximum(scale * unit, TINY)).astype(np.float32)
    share = values * _spread(inverse, values.size) * _spread(unit, values.size)
    first, bound = (to_device_of(table, values) for table in _nearest(signed))
    upper = (share.view(np.uint32) >> np.uint32(16)).astype(np.intp)
    codes = first[upper]
    codes += share > bound[upper]
    return codes, scale


def _spread(scale: Any, size: int) -> Any:
    """Return the scale of each of ``size`` values."""
    return np.repeat(scale, BLOCK)[:size]
