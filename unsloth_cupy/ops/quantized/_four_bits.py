"""Blocks of values as 4-bit codes and the largest absolute value (absmax) of each block.

value = level[code] * absmax, where level[code] is the level nearest to value / absmax; of two
equally near levels, the lower one.  Blocks are consecutive values of the flattened matrix; the last
block may be short.  A byte stores two codes.

NF4     levels divide a normal distribution into equal shares; first code in the high bits of a byte
FP4     a sign, two bits of exponent, one of mantissa, divided by the largest; first code as in NF4
MXFP4   the same numbers, times a power of two instead of absmax; first code in the low bits
Q4_0    levels -8 .. 7; first code in the low bits

Dettmers, Pagnoni, Holtzman and Zettlemoyer, QLoRA, 2023; bytes and levels of NF4 and FP4 are
bitsandbytes'.  OCP Microscaling Formats Specification 1.0, 2023: the levels of MXFP4.  Q4_0 is
llama.cpp's.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import FLOAT32, Array
from ...core.stand_in import representative_steps
from ...placement import to_device_of

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
KINDS = ("nf4", "fp4", "mxfp4", "q4_0")  # numbered as in four_bits.cuh
EXPONENTS = ("mxfp4",)  # kinds whose codes of absmax are exponents of two
LOW_FIRST = KINDS[2:]  # kinds with the first code of a byte in its low bits
SIZES = {  # levels of codes 0 .. 7; codes 8 .. 15 have their negatives
    "fp4": (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4),
    "mxfp4": (0, 0.5, 1, 1.5, 2, 3, 4, 6),
}
SMALLEST = np.float32(1e-38)  # lower bound of absmax as a divisor
STEP = 2**18  # values that are encoded at a time, which bounds the memory of temporary arrays


class Format(NamedTuple):
    """The tables of a format: levels for decoding, the bounds between them for encoding."""

    levels: Array  # (16,) float32, by code
    ascending: Array  # (16,) uint8, the codes in ascending order of their levels
    bounds: Array  # (15,) float32, the midpoints between neighbouring levels
    pairs: Array  # (256, 2) float32, the two levels of each byte


@cache
def format_of(kind: str) -> Format:
    """Return the tables of a kind."""
    levels = np.array(NF4_LEVELS if kind == "nf4" else range(-8, 8), np.float32)
    if kind in SIZES:
        sizes = np.array(SIZES[kind], np.float32)
        levels = np.concatenate([sizes, -sizes])
        levels += np.float32(0 if kind == "fp4" else -0.0)  # the level -0 becomes 0 in fp4 alone
    ascending = np.argsort(levels, kind="stable").astype(np.uint8)
    ordered = levels[ascending]
    bounds = (ordered[:-1] + ordered[1:]) / np.float32(2)
    byte = np.arange(256)
    high, low = levels[byte >> 4], levels[byte & 15]
    pairs = np.stack([low, high] if kind in LOW_FIRST else [high, low], axis=1)
    return Format(levels, ascending, bounds, pairs)


def encode(w: Array, block: int, kind: str) -> tuple[Array, Array]:
    """Return the packed codes and absmax of float32 values."""
    flat = w.reshape(-1)
    blocks, codes = -(-flat.size // block), empty((flat.size + flat.size % 2,), np.uint8, like=w)
    absmax, whole = empty((blocks,), FLOAT32, like=w), flat.size // block
    rows = max(1, STEP // block)
    for top in representative_steps(w, range(0, whole, rows)):
        stop = min(top + rows, whole)
        part = flat[top * block : stop * block].reshape(-1, block)  # (blocks of the part, block)
        absmax[top:stop] = size = np.abs(part).max(axis=1)
        with np.errstate(invalid="ignore"):  # absmax is infinite or NaN then: callers check it
            share = part * (1 / np.maximum(size, SMALLEST))[:, None]
        codes[top * block : stop * block] = _nearest(share, kind).reshape(-1)
    if whole < blocks:  # as in bitsandbytes, which divides values of the short block by absmax
        part = flat[whole * block :]
        absmax[whole] = size = np.maximum(np.abs(part).max(), SMALLEST)
        with np.errstate(invalid="ignore"):
            codes[whole * block : flat.size] = _nearest(part / size, kind)
    if flat.size % 2:
        codes[flat.size :] = _nearest(flat[:1] * 0, kind)  # the second code of the last byte
    return codes[::2] << 4 | codes[1::2], absmax


def _nearest(share: Array, kind: str) -> Array:
    """Return the codes whose levels are nearest to value / absmax."""
    ranks = np.zeros_like(share, dtype=np.uint8)
    for bound in format_of(kind).bounds:
        ranks += share > bound
    return to_device_of(format_of(kind).ascending, share)[ranks] if kind != "nf4" else ranks


def decode(
    packed: Array,
    absmax: Array,
    rows: slice,
    columns: slice,
    inputs: int,
    block: int,
    kind: str,
) -> Array:
    """Return a part of a matrix with ``inputs`` columns, in float32.

    Parts of whole bytes are decoded byte by byte, parts of whole blocks scaled block by block;
    other parts value by value, which takes longer.
    """
    top, left, width = rows.start, columns.start, columns.stop - columns.start
    count = rows.stop - top
    if not count * width:
        return empty((count, width), FLOAT32, like=packed)
    if inputs % 2 == left % 2 == width % 2 == 0:
        byte_columns = slice(left // 2, (left + width) // 2)
        codes = packed.reshape(len(packed) // max(1, inputs // 2), inputs // 2)[rows, byte_columns]
        pairs = to_device_of(format_of(kind).pairs.view(np.complex64)[:, 0], packed)
        # two float32 levels as one complex64 value; indexing would convert codes to intp, too
        values = pairs[codes.astype(np.intp)].view(np.float32)  # (rows, columns)
    else:
        values = _one_by_one(packed, _indices(packed, rows, columns, inputs), kind)
    if inputs % block == left % block == width % block == 0:
        scales = absmax.reshape(len(absmax) // max(1, inputs // block), inputs // block)
        scales = scales[rows, left // block : (left + width) // block, None]
        parts = values.reshape(count, width // block, block)  # (rows, blocks of a row, block)
        parts *= scales
        return parts.reshape(count, width)  # (rows, columns)
    first, last = top * inputs, rows.stop * inputs
    if width == inputs and first % block == 0 and values.size:
        flat, whole = values.reshape(-1), (last - first) // block * block
        sizes = absmax[first // block : -(-last // block)]
        parts = flat[:whole].reshape(-1, block)  # (whole blocks, block)
        parts *= sizes[: len(parts), None]
        flat[whole:] *= sizes[len(parts) :]
        return flat.reshape(count, width)  # (rows, columns)
    return values * absmax[_indices(packed, rows, columns, inputs) // block]


def _indices(like: Any, rows: slice, columns: slice, inputs: int) -> Array:
    """Return the indices of the values of a part in the flattened matrix."""
    row_starts = np.arange(rows.start, rows.stop, like=like)[:, None] * inputs
    return row_starts + np.arange(columns.start, columns.stop, like=like)


def _one_by_one(packed: Array, indices: Array, kind: str) -> Array:
    """Return the levels of the codes at these indices."""
    bytes_of = packed[indices >> 1]
    high = (indices & 1) == (kind in LOW_FIRST)
    codes = np.where(high, bytes_of >> 4, bytes_of & 15)
    return to_device_of(format_of(kind).levels, packed)[codes]
