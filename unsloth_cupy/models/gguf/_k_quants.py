"""K quants: blocks of 256 weights in groups; the scales of groups are codes with few bits, too.

    q2_k, q4_k, q5_k    w = d s q - e t    q in 0 .. levels, s and t in 0 .. most
    q3_k, q6_k          w = d s q          q in -half .. half - 1, s in -most - 1 .. most

A block has d and e in float16; each of its groups has s and t.  The codes are chosen in steps:

1. Each group gets the scale (and offset) with the least squared error among several divisions of
   its range.
2. d and e are set from the largest scale and offset of the block.
3. s and t become the best of their neighbouring codes, and q the nearest codes.
4. d and e become those with the least squared error for these codes, and 3 is repeated.

d and e of q2_k are enlarged at the end, so that products with the weights have no bias.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Type

from ...core.dtypes import FLOAT32, Array

BLOCK = 256  # weights per block
# Blocks per call: larger arrays do not fit into the cache; with smaller ones, calls dominate.
MOST, LEAST = 1024, 128
NEIGHBOURS = (0, -1, 1)
REFITS = 2  # times that d and e are fitted to the codes


class Format(NamedTuple):
    """The format of one type."""

    groups: int  # groups per block
    levels: int  # largest q
    most: int  # largest s
    steps: Sequence[float]  # added to the number of steps in a group's range: divisions to try
    pack: Callable[..., Array]


class Codes(NamedTuple):
    """Codes of blocks: d and e (blocks, 1), s and t (blocks, groups), q (size, blocks, groups)."""

    d: Array
    e: Array
    s: Array
    t: Array
    q: Array

    def errors(self, x: Array) -> Array:
        """Return the squared error of each group, (blocks, groups)."""
        difference = self.q * (self.d * self.s)
        difference -= self.e * self.t
        difference -= x
        return _dot(difference, difference)


def quantize(rows: Array, kind: Type) -> Array:
    """Return the bytes of rows that consist of whole blocks: (rows, bytes)."""
    form = FORMATS[kind]
    choose = _signed if kind in (Type.Q3_K, Type.Q6_K) else _unsigned
    blocks = rows.reshape(-1, form.groups, BLOCK // form.groups)

    def packed(first: int) -> Array:
        # sums of groups are over the first axis: NumPy then adds 8 groups at a time
        x = np.ascontiguousarray(np.moveaxis(blocks[first : first + many], -1, 0))
        d, e, s, t, q = choose(x, form)
        return form.pack(d, e, s, t, np.moveaxis(q, 0, -1))

    cores = os.cpu_count() or 1
    many = min(MOST, max(LEAST, -(-len(blocks) // cores)))
    with ThreadPoolExecutor(cores) as threads:
        parts = [*threads.map(packed, range(0, len(blocks), many))]
    return np.concatenate(parts).reshape(len(rows), -1)


# ---- choice of codes ----------------------------------------------------------------------------


def _unsigned(x: Array, form: Format) -> Codes:
    """Return the codes of blocks whose groups have offsets."""
    low = np.minimum(x.min(axis=0), 0)
    above = x - low
    span, size, total = above.max(axis=0), len(x), x.sum(axis=0)
    best = np.full_like(low, np.inf)
    scale, offset = np.zeros_like(low), -low
    for step in form.steps:
        q = _rounded(above, _inverse(span, form.levels + step), 0, form.levels)
        sum_q, sum_qq, sum_qx = q.sum(axis=0), _dot(q, q), _dot(q, x)
        slope = _over(size * sum_qx - sum_q * total, size * sum_qq - sum_q * sum_q)
        below = np.maximum((slope * sum_q - total) / size, 0)  # offsets are 0 or more
        slope = np.where(below > 0, slope, _over(sum_qx, sum_qq))
        # the squared error without its constant term, the sum of x * x
        error = slope * (slope * sum_qq - 2 * sum_qx)
        error += below * (2 * total - 2 * slope * sum_q + size * below)
        better = error < best
        best = np.where(better, error, best)
        scale, offset = np.where(better, slope, scale), np.where(better, below, offset)
    d, e = (_half(array.max(axis=1, keepdims=True) / form.most) for array in (scale, offset))
    s, t = (_codes(a, b, 0, form.most) for a, b in ((scale, d), (offset, e)))
    codes = _best_neighbours(x, Codes(d, e, s, t, x), form, 0)
    for _ in range(REFITS):  # least squares: d and e for which d sq - e t is nearest to x
        sq, t = codes.q * codes.s, codes.t
        aa, ab, bb = _dot(sq, sq), sq.sum(axis=0) * t, size * t * t
        aa, ab, bb, ax, bx = (
            array.sum(axis=1, keepdims=True) for array in (aa, ab, bb, _dot(sq, x), t * total)
        )
        determinant = aa * bb - ab * ab
        d = np.where(determinant > 0, _over(ax * bb - bx * ab, determinant), _over(ax, aa))
        e = np.where(determinant > 0, _over(ax * ab - bx * aa, determinant), codes.e)
        codes = _better(x, codes, np.maximum(d, 0), np.maximum(e, 0), form, 0)
    errors, squares = (array.sum(axis=1, keepdims=True) for array in (codes.errors(x), _dot(x, x)))
    if form.levels == 3:
        # Least squares makes products with the weights smaller by errors / squares, a tenth with 2
        # bits.  Correcting this bias increases the error by the same share of itself.
        larger = 1 / (1 - np.minimum(_over(errors, squares), 0.5))
        codes = codes._replace(d=_half(codes.d * larger), e=_half(codes.e * larger))
        errors = codes.errors(x).sum(axis=1, keepdims=True)
    # weights that are too small for float16 scales become 0, not the least weight of their group
    worse = errors > squares
    return codes._replace(d=np.where(worse, 0, codes.d), e=np.where(worse, 0, codes.e))


def _signed(x: Array, form: Format) -> Codes:
    """Return the codes of blocks whose groups have scales of either sign, and no offsets."""
    half = form.levels + 1
    largest, least = x.max(axis=0), x.min(axis=0)
    largest = np.where(largest > -least, largest, least)
    best, scale = np.full_like(largest, -np.inf), np.zeros_like(largest)
    for step in form.steps:
        q = _rounded(x, _inverse(largest, -(half + step)), -half, form.levels)
        sum_qx, sum_qq = _dot(q, x), _dot(q, q)
        slope = _over(sum_qx, sum_qq)
        better = slope * sum_qx > best
        best = np.where(better, slope * sum_qx, best)
        scale = np.where(better, slope, scale)
    place = np.abs(scale).argmax(axis=1)[:, None]
    d = _half(np.take_along_axis(scale, place, axis=1) / -(form.most + 1))
    s = _codes(scale, d, -form.most - 1, form.most)
    zero = np.zeros_like(d)
    codes = _best_neighbours(x, Codes(d, zero, s, np.zeros_like(s), x), form, half)
    for _ in range(REFITS):
        sq = codes.q * codes.s
        ax, aa = (_dot(sq, array).sum(axis=1, keepdims=True) for array in (x, sq))
        codes = _better(x, codes, _over(ax, aa), zero, form, half)
    return codes


def _best_neighbours(x: Array, codes: Codes, form: Format, half: int) -> Codes:
    """Return the codes with the least error whose s and t differ by at most 1 from these."""
    least = -form.most - 1 if half else 0
    best = np.full_like(codes.s, np.inf)
    s, t, q = codes.s, codes.t, np.zeros_like(x)
    for more in (0,) if half else NEIGHBOURS:
        shifted, tried_t = x, codes.t
        if not half:
            tried_t = np.clip(codes.t + more, 0, form.most)
            shifted = x + codes.e * tried_t
        for add in NEIGHBOURS:
            tried_s = np.clip(codes.s + add, least, form.most)
            inverse = _inverse(codes.d * tried_s, 1)
            tried = Codes(
                codes.d, codes.e, tried_s, tried_t, _rounded(shifted, inverse, -half, form.levels)
            )
            error = tried.errors(x)
            better = error < best
            best = np.where(better, error, best)
            s, t = np.where(better, tried_s, s), np.where(better, tried_t, t)
            np.copyto(q, tried.q, where=better)
    return codes._replace(s=s, t=t, q=q)


def _better(x: Array, codes: Codes, d: Array, e: Array, form: Format, half: int) -> Codes:
    """Return the better codes of each block: with these d and e, or unchanged."""
    other = _best_neighbours(x, codes._replace(d=_half(d), e=_half(e)), form, half)
    errors = [each.errors(x).sum(axis=1, keepdims=True) for each in (other, codes)]
    pairs = zip(other, codes, strict=True)
    return Codes(*(np.where(errors[0] < errors[1], new, old) for new, old in pairs))


def _rounded(x: Array, inverse: Array, least: int, most: int) -> Array:
    q = x * inverse
    return np.clip(np.rint(q, out=q), least, most, out=q)


def _codes(values: Array, unit: Array, least: int, most: int) -> Array:
    return np.clip(np.rint(values * _inverse(unit, 1)), least, most)


def _dot(a: Array, b: Array) -> Array:
    return np.einsum("ibg,ibg->bg", a, b)


def _over(a: Array, b: Array) -> Array:
    """Return a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def _inverse(array: Array, number: float) -> Array:
    """Return number / array, and 0 where the quotient is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = FLOAT32.type(number) / array
    return np.where(np.isfinite(inverse), inverse, 0)


def _half(array: Array) -> Array:
    """Round to float16; the caller checks the range."""
    return array.astype(np.float16).astype(FLOAT32)


# ---- bytes --------------------------------------------------------------------------------------


def _bits(codes: Array, width: int, bits: int) -> Array:
    """Return bytes with one code from each of 8 / bits consecutive runs of ``width`` codes."""
    runs = codes.reshape(len(codes), -1, 8 // bits, width).astype(np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(runs << shifts, axis=2).reshape(len(codes), -1)


def _floats(*arrays: Array) -> list[Array]:
    return [array.astype("<f2").view(np.uint8) for array in arrays]


def _pairs_of_6_bits(s: Array, t: Array) -> Array:
    """Return 12 bytes: s and t of groups 0 to 3, with high bits of groups 4 to 7 in their own."""
    s, t = s.astype(np.uint8), t.astype(np.uint8)
    high = [array[:, :4] | (array[:, 4:] >> 4) << 6 for array in (s, t)]
    return np.concatenate([*high, s[:, 4:] & 15 | (t[:, 4:] & 15) << 4], axis=1)


def _pack_q2(d: Array, e: Array, s: Array, t: Array, q: Array) -> Array:
    scales = s.astype(np.uint8) | t.astype(np.uint8) << 4
    return np.concatenate([scales, _bits(q, 32, 2), *_floats(d, e)], axis=1)


def _pack_q3(d: Array, _: Array, s: Array, __: Array, q: Array) -> Array:
    q, s = (q + 4).astype(np.uint8), (s + 32).astype(np.uint8)
    scales = [_bits(s & 15, 8, 4), _bits(s >> 4, 4, 2)]
    return np.concatenate([_bits(q >> 2, 32, 1), _bits(q & 3, 32, 2), *scales, *_floats(d)], axis=1)


def _pack_q4(d: Array, e: Array, s: Array, t: Array, q: Array) -> Array:
    return np.concatenate([*_floats(d, e), _pairs_of_6_bits(s, t), _bits(q, 32, 4)], axis=1)


def _pack_q5(d: Array, e: Array, s: Array, t: Array, q: Array) -> Array:
    q = q.astype(np.uint8)
    parts = [_pairs_of_6_bits(s, t), _bits(q >> 4, 32, 1), _bits(q & 15, 32, 4)]
    return np.concatenate([*_floats(d, e), *parts], axis=1)


def _pack_q6(d: Array, _: Array, s: Array, __: Array, q: Array) -> Array:
    q = (q + 32).astype(np.uint8)
    scales = s.astype(np.int8).view(np.uint8)
    return np.concatenate([_bits(q & 15, 64, 4), _bits(q >> 4, 32, 2), scales, *_floats(d)], axis=1)


def _steps(first: float, last: float) -> Sequence[float]:
    return [float(step) for step in np.linspace(first, last, 11)]


FORMATS: Mapping[Type, Format] = {
    Type.Q2_K: Format(16, 3, 15, _steps(-0.9, 0.9), _pack_q2),
    Type.Q3_K: Format(16, 3, 31, _steps(-0.9, 0.9), _pack_q3),
    Type.Q4_K: Format(8, 15, 63, _steps(-1, 1), _pack_q4),
    Type.Q5_K: Format(8, 31, 63, _steps(-0.5, 1), _pack_q5),
    Type.Q6_K: Format(16, 31, 127, _steps(-0.9, 0.9), _pack_q6),
}
