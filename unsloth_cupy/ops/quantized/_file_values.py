"""The values that are read back from a file after they were written in its types.

nf4, fp4       level[code] * absmax of 64 values, the code of the nearest level
mxfp4          level[code] * 2^e of 32 values
int8           round(v * (127 / absmax)) * absmax / 127, absmax of a row
q8_0           round(v / d) * d        d = max |v| / 127 of 32 values, as for the others
q4_0, q5_0     trunc(v / d + n + 1/2) * d - n d        d = (the first v of the largest |v|) / -n
q4_1, q5_1     trunc((v - m) / d + 1/2) * d + m        d = (max v - m) / (2 n - 1), m = min v
ternary        sign(v) * d where |v| / d > 1/2, else 0        d = the mean of |v| of all values

n is 8 for four bits, 16 for five.  Divisions are products with the rounded inverse; after that the
factors d and m of GGUF's types are rounded to float16.

Source of GGUF's types: ggml-quants.c of llama.cpp; bytes equal those that the package gguf writes.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ..common.int8_codes import quantized
from . import _four_bits
from .mxfp4 import encoded

# numbered as in the kernel
KINDS = ("nf4", "fp4", "mxfp4", "q4_0", "int8", "q8_0", "q5_0", "q4_1", "q5_1", "ternary")
HALF = np.dtype("float16")


def block_of(kind: str) -> int:
    """Return the values of a block, which share a scale; for int8 and ternary, rows do, or all."""
    return 64 if kind in ("nf4", "fp4") else 32


def file_values(values: Array, kind: str, sizes: Array | None) -> Array:
    """Return the values that are read back for float32 rows of whole blocks.

    ``sizes``: the absmax of rows for int8, by default 127; d for ternary, by default 1; the factors
    of the levels of blocks for nf4 and fp4, by default the absmax of each block.
    """
    block = block_of(kind)
    blocks = values.reshape(-1, block)  # (blocks, block)
    if kind == "int8":
        most = np.full_like(values[:, 0], 127) if sizes is None else sizes
        codes, scales, _ = quantized(values, np.broadcast_to(most[:, None], values.shape))
        return codes.astype(FLOAT32) * scales[:, None]
    if kind == "ternary":
        d = np.ones_like(values[:1, :1]) if sizes is None else sizes.reshape(1, 1)
        wide = np.abs(values) * (1 / d) > FLOAT32.type(0.5)
        return np.where(wide, np.copysign(d, values), 0 * d)  # 0 * d: NaN if d is not finite
    # as in kernels, a block with a value that is not finite becomes NaN, without a warning
    with np.errstate(all="ignore"):
        if kind == "mxfp4":
            packed, exponents, tops = encoded(blocks)
            powers = np.ldexp(np.ones_like(tops), exponents.astype(np.int32) - 127)
            back = np.where(np.isfinite(tops), powers, np.float32(np.nan))
        elif kind in ("nf4", "fp4"):
            packed, tops = _four_bits.encode(values, block, kind)
            own = tops if sizes is None else sizes
            back = np.where(np.isfinite(tops), own, np.float32(np.nan))
        else:
            result: Array = FORMS[kind](blocks)
            broken = ~np.isfinite(blocks).all(axis=1)
            result[broken] = np.nan
            return result.reshape(values.shape)
    rows, columns = (slice(0, length) for length in values.shape)
    flat = packed.reshape(-1), back, rows, columns, values.shape[1], block, kind
    return _four_bits.decode(*flat)


def _inverse(d: Array) -> Array:
    """Return 1 / d, and 0 where d is 0."""
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _half(d: Array) -> Array:
    """Return d rounded to float16, in float32."""
    return d.astype(HALF).astype(FLOAT32)


def _q8_0(v: Array) -> Array:
    """Return the values of Q8_0 for blocks; ties are rounded away from 0."""
    d = np.abs(v).max(axis=1, keepdims=True) / np.float32(127)
    x = v * _inverse(d)
    # round(size) is floor(size) + floor(2 * fraction)
    size = np.abs(x)
    down = np.floor(size)
    size -= down
    down += np.floor(np.multiply(size, np.float32(2), out=size), out=size)
    np.copysign(down, x, out=x)
    x *= _half(d)
    return x


def _from_zero(n: int) -> Callable[[Array], Array]:
    """Return the function for Q4_0 (n = 8) or Q5_0 (n = 16): scales with a sign, and no offset."""

    def form(v: Array) -> Array:
        first = np.abs(v).argmax(axis=1)[:, None]
        d = np.take_along_axis(v, first, axis=1) / np.float32(-n)
        return _coded(v * _inverse(d), n + 0.5, 2 * n - 1, n, d)

    return form


def _from_least(steps: int) -> Callable[[Array], Array]:
    """Return the function for Q4_1 (15 steps) or Q5_1 (31): an offset, the minimum of a block."""

    def form(v: Array) -> Array:
        least = v.min(axis=1, keepdims=True)
        d = (v.max(axis=1, keepdims=True) - least) / np.float32(steps)
        codes = v - least
        codes *= _inverse(d)
        values = _coded(codes, 0.5, steps, 0, d)
        values += _half(least)
        return values

    return form


def _coded(x: Array, more: float, most: int, zero: int, d: Array) -> Array:
    """Overwrite x with ``(min(trunc(x + more), most) - zero) * d``, and return it."""
    x += np.float32(more)
    np.minimum(np.trunc(x, out=x), np.float32(most), out=x)
    x -= np.float32(zero)
    x *= _half(d)
    return x


FORMS: Mapping[str, Callable[[Array], Array]] = {
    "q8_0": _q8_0,
    "q4_0": _from_zero(8),
    "q5_0": _from_zero(16),
    "q4_1": _from_least(15),
    "q5_1": _from_least(31),
}
