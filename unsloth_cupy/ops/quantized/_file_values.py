"""What a reader of a file gets for values that are written in its types, block by block.

nf4, fp4       level[code] * absmax of 64 values, the code of the nearest level
mxfp4          level[code] * 2^e of 32 values
int8           round(v * (127 / absmax)) * absmax / 127, absmax of a row
q8_0           round(v / d) * d        d = max |v| / 127 of 32 values, as for the others
q4_0, q5_0     trunc(v / d + n + 1/2) * d - n d        d = (the first v of the largest |v|) / -n
q4_1, q5_1     trunc((v - m) / d + 1/2) * d + m        d = (max v - m) / (2 n - 1), m = min v
ternary        sign(v) * d where |v| / d > 1/2, else 0        d = the mean of |v| of all values

n is 8 for four bits, 16 for five.  Divisions are products with the rounded inverse; the factors d
and m of GGUF's types are rounded to float16 after that.

ggml-quants.c of llama.cpp: the types of GGUF; bytes are those that the package gguf writes.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ..common.int8_codes import quantized
from . import _four_bits
from .mxfp4 import encoded

# as in the kernel
KINDS = ("nf4", "fp4", "mxfp4", "q4_0", "int8", "q8_0", "q5_0", "q4_1", "q5_1", "ternary")
HALF = np.dtype("float16")


def block_of(kind: str) -> int:
    """Return how many values of a row share what a kind stores; of int8 and ternary, more do."""
    return 64 if kind in ("nf4", "fp4") else 32


def file_values(values: Array, kind: str, sizes: Array | None) -> Array:
    """Return what a reader gets for rows of whole blocks, float32.

    ``sizes`` are the absmax of rows for int8, 127 if there are none; d for ternary, or 1; and what
    multiplies the levels of blocks of nf4 and fp4, if that is not their own absmax.
    """
    block = block_of(kind)
    blocks = values.reshape(-1, block)
    if kind == "int8":
        most = np.full_like(values[:, 0], 127) if sizes is None else sizes
        codes, scales, _ = quantized(values, np.broadcast_to(most[:, None], values.shape))
        return codes.astype(FLOAT32) * scales[:, None]
    if kind == "ternary":
        d = np.ones_like(values[:1, :1]) if sizes is None else sizes.reshape(1, 1)
        wide = np.abs(values) * (1 / d) > FLOAT32.type(0.5)
        return np.where(wide, np.copysign(d, values), 0 * d)  # d that is not finite shows in all
    with np.errstate(all="ignore"):  # as kernels do: what is not finite shows in every value
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
    """Return 1 / d; 0 where d is."""
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _half(d: Array) -> Array:
    return d.astype(HALF).astype(FLOAT32)


def _q8_0(v: Array) -> Array:
    d = np.abs(v).max(axis=1, keepdims=True) / np.float32(127)
    x = v * _inverse(d)
    size = np.abs(x)
    down = np.floor(size)
    size -= down
    down += np.floor(np.multiply(size, np.float32(2), out=size), out=size)
    np.copysign(down, x, out=x)
    x *= _half(d)
    return x


def _from_zero(n: int) -> Callable[[Array], Array]:
    def form(v: Array) -> Array:
        first = np.abs(v).argmax(axis=1)[:, None]
        d = np.take_along_axis(v, first, axis=1) / np.float32(-n)
        return _coded(v * _inverse(d), n + 0.5, 2 * n - 1, n, d)

    return form


def _from_least(steps: int) -> Callable[[Array], Array]:
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
    """Return ``(min(trunc(x + more), most) - zero) d``, in place of x."""
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
