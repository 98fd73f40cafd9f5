"""Blocks of 256 values as codes of 8 bits and one float32: the format of bitsandbytes' states.

value = map[code] * scale, where scale is the largest size in the block and the code is the one
whose map value lies nearest to value / scale.  In decade i of a map, 0.1 .. 1 times 10**(i - 6)
for i = 0 .. 6, there are 2**i values of either sign, or 2**(i + 1) where none are negative, each in
the middle of an equal share; beside them a map has 0 and 1.

Dettmers, Lewis, Shleifer and Zettlemoyer, 8-bit Optimizers via Block-wise Quantization, 2022.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...placement import placed

BLOCK = 256
TINY = np.finfo(np.float32).tiny  # below it float32 has no reciprocal: as good as 0
LARGE = 1 / TINY  # beyond it reciprocals are below TINY


@cache
def dynamic_map(signed: bool) -> Array:
    """Return the 256 float32 values, ascending; a code is a place among them."""
    values, tenth = [0.0, 1.0], np.float32(0.1)
    for decade in range(7):
        cells = (1 if signed else 2) << decade
        step, place = float((1 - tenth) / np.float32(cells)), np.arange(cells + 1)
        # counted from the nearer end: with that rounding the format has been published
        ahead, behind = float(tenth) + step * place, 1 - step * place[::-1]
        bounds = np.where(place < (cells + 1) // 2, ahead, behind).astype(np.float32)
        middles = (bounds[:-1] + bounds[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        values += [*middles, *(-middles if signed else [])]
    return np.sort(np.array(values, np.float32))


@cache
def midpoints(signed: bool) -> Array:
    """Return the 255 values half-way between a code and the next."""
    values = dynamic_map(signed)
    return (values[:-1] + values[1:]) * np.float32(0.5)


@cache
def _nearest(signed: bool) -> tuple[Array, Array]:
    """Return by the upper 16 bits of a float32 its code, and the value beyond which it is the next.

    No two midpoints share these bits, so a look and a comparison find what a binary search would.
    """
    middles, upper = midpoints(signed), np.arange(1 << 16, dtype=np.uint32) << 16
    ends = np.sort([upper.view(np.float32), (upper | 0xFFFF).view(np.float32)], axis=0)
    infinite = np.isinf(ends[0])  # the other end is NaN, which sorts last
    low, high = np.searchsorted(middles, np.where(infinite, ends[0], ends))
    bound = np.where(low < high, np.append(middles, np.inf)[low], np.inf)
    return low.astype(np.uint8), bound.astype(np.float32)


def tables(like: Any) -> Array:
    """Return what the kernel reads: map and midpoints of both kinds, (4, 256), by like's side."""
    both = [
        row
        for signed in (True, False)
        for row in (dynamic_map(signed), np.append(midpoints(signed), np.float32(1)))
    ]
    return placed(np.stack(both), like)


def decode(codes: Any, scale: Any, *, signed: bool) -> Array:
    """Return the float32 values of flat codes."""
    values: Any = placed(dynamic_map(signed), codes)[codes]
    return values * _spread(scale, codes.size)


def encode(values: Any, *, signed: bool) -> tuple[Array, Array]:
    """Return flat float32 values as codes, and the scale of every block."""
    blocks = -(-values.size // BLOCK)
    padded = np.zeros_like(values, shape=blocks * BLOCK)
    padded[: values.size] = np.abs(values)
    scale = padded.reshape(blocks, BLOCK).max(1)
    unit = np.where(scale > LARGE, np.float32(0.25), np.float32(1))
    inverse = np.where(scale < TINY, 0, 1 / np.maximum(scale * unit, TINY)).astype(np.float32)
    share = values * _spread(inverse, values.size) * _spread(unit, values.size)
    first, bound = (placed(table, values) for table in _nearest(signed))
    upper = (share.view(np.uint32) >> np.uint32(16)).astype(np.intp)
    codes = first[upper]
    codes += share > bound[upper]
    return codes, scale


def _spread(scale: Any, size: int) -> Any:
    return np.repeat(scale, BLOCK)[:size]
