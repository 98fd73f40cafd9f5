"""Blocks of 256 values as 8-bit codes and one float32 scale: bitsandbytes' optimizer state format.

value = map[code] * scale, where scale is the largest absolute value of the block, and map[code] is
the map value nearest to value / scale.  Decade i of a map, 0.1 .. 1 times 10**(i - 6) for
i = 0 .. 6, is divided into 2**i equal intervals for each sign, or 2**(i + 1) in a map without
negative values; the map has the middle of each interval, and 0 and 1.

Unsigned values are averages of squares, by whose roots an optimizer's step divides.  Below 1e-4 of
the scale codes are far apart, so these values are rounded up: rounded to the nearest, a square
would become 0 while the average of its gradient does not, or would never grow.

Dettmers, Lewis, Shleifer and Zettlemoyer, 8-bit Optimizers via Block-wise Quantization, 2022.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...placement import to_device_of

BLOCK = 256
TINY = np.finfo(np.float32).tiny  # a smaller scale counts as 0: its reciprocal can overflow
LARGE = 1 / TINY  # the reciprocal of a larger scale is denormal, and 0 in kernels


@cache
def dynamic_map(signed: bool) -> Array:
    """Return the 256 float32 values in ascending order; a code is an index into them."""
    values, tenth = [0.0, 1.0], np.float32(0.1)
    for decade in range(7):
        cells = (1 if signed else 2) << decade
        step, index = float((1 - tenth) / np.float32(cells)), np.arange(cells + 1)
        # each bound from the nearer end of the decade: bitsandbytes' map has this rounding
        from_low, from_high = float(tenth) + step * index, 1 - step * index[::-1]
        bounds = np.where(index < (cells + 1) // 2, from_low, from_high).astype(np.float32)
        middles = (bounds[:-1] + bounds[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        values += [*middles, *(-middles if signed else [])]
    return np.sort(np.array(values, np.float32))


@cache
def bounds(signed: bool) -> Array:
    """Return the upper bound of each of the first 255 codes, relative to the scale.

    It is the midpoint to the next value; of unsigned values below 1e-4, the value itself, as
    values are rounded up there.
    """
    values = dynamic_map(signed)
    middles = (values[:-1] + values[1:]) * np.float32(0.5)
    # 1e-5 covers roundings, of 1e-7 each: a square that decays with its block keeps its code
    own = values[:-1] * np.float32(1 + 1e-5)
    return middles if signed else np.where(values[:-1] < 1e-4, own, middles)


@cache
def _lookup(signed: bool) -> tuple[Array, Array]:
    """Return two tables, indexed by the upper 16 bits of a float32: code, and bound of that code.

    No two bounds have equal upper bits, so a lookup and a comparison replace a binary search, which
    took 226 ms where this takes 14 (2**20 values on an AMD EPYC).
    """
    own, upper = bounds(signed), np.arange(1 << 16, dtype=np.uint32) << 16
    ends = np.sort([upper.view(np.float32), (upper | 0xFFFF).view(np.float32)], axis=0)
    infinite = np.isinf(ends[0])  # then the other end is NaN, which sorts last
    low, high = np.searchsorted(own, np.where(infinite, ends[0], ends))
    bound = np.where(low < high, np.append(own, np.inf)[low], np.inf)
    return low.astype(np.uint8), bound.astype(np.float32)


def tables(like: Any) -> Array:
    """Return the tables of the kernels on the device of ``like``.

    They are (4, 256): the signed map, its bounds, the unsigned map and its bounds.
    """
    stacked = [
        row
        for signed in (True, False)
        for row in (dynamic_map(signed), np.append(bounds(signed), np.float32(1)))
    ]
    return to_device_of(np.stack(stacked), like)


def decode(codes: Any, scale: Any, *, signed: bool) -> Array:
    """Return the float32 values of a 1-D array of codes."""
    values: Any = to_device_of(dynamic_map(signed), codes)[codes]
    return values * _spread(scale, codes.size)


def encode(values: Any, *, signed: bool) -> tuple[Array, Array]:
    """Return the codes of a 1-D float32 array, and the scale of every block.

    Unsigned, only the value 0 has code 0.
    """
    blocks = -(-values.size // BLOCK)
    padded = np.zeros_like(values, shape=(blocks * BLOCK,))
    padded[: values.size] = np.abs(values)
    scale = padded.reshape(blocks, BLOCK).max(1)  # (blocks,)
    # a quarter of a large scale has a reciprocal that is a normal number; values get the factor too
    unit = np.where(scale > LARGE, np.float32(0.25), np.float32(1))
    inverse = np.where(scale < TINY, 0, 1 / np.maximum(scale * unit, TINY)).astype(np.float32)
    share = values * _spread(inverse, values.size) * _spread(unit, values.size)
    first, bound = (to_device_of(table, values) for table in _lookup(signed))
    upper = (share.view(np.uint32) >> np.uint32(16)).astype(np.intp)
    codes = first[upper]
    codes += share > bound[upper]
    # a positive value keeps a code above 0, even if value / scale is rounded to 0; a block whose
    # scale counts as 0 has its largest code
    if not signed:
        least = np.where(scale < TINY, np.uint8(255), np.uint8(1))
        codes = np.maximum(codes, _spread(least, values.size) * (values > 0))
    return codes, scale


def without_zeros(squares: Any, means: Any) -> Any:
    """Return the codes of squares, with 1 for 0 where the mean of the gradient is not 0.

    Earlier versions, and bitsandbytes, round small squares to 0, by which a step would divide.
    """
    return np.maximum(squares, means != np.flatnonzero(dynamic_map(True) == 0)[0])


def _spread(scale: Any, size: int) -> Any:
    """Return the scale of each of ``size`` values."""
    return np.repeat(scale, BLOCK)[:size]
