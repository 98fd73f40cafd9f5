"""The rounding that the types of a file explain.

A type has ``levels`` steps in a group of ``size`` weights, so it moves a weight by at most

    h = max|w| / levels + codes 2^-25               over the weights w of the group
    h = eps |w|                                     for a float type with the unit of rounding eps

A scale in float16 is rounded by at most 2^-25 below 2^-14, and ``codes`` is the largest product of
the integers that it multiplies: rows of tiny weights may become zeros.

An error that is uniform in -h .. h has the norm sqrt(sum h**2 / 3) in expectation.
"""

import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import FLOAT32, Array


class Steps(NamedTuple):
    """Groups of ``size`` weights with ``levels`` steps between -max|w| and max|w|."""

    size: int
    levels: float
    codes: int = 0  # the largest product of integers that a scale in float16 multiplies


# A type's steps in its groups; min and max of types with an offset are near -max|w| and max|w|.
GROUPS: Mapping[str, Steps] = {
    "Q8_0": Steps(32, 254, 127), "Q5_0": Steps(32, 31, 16), "Q5_1": Steps(32, 31, 31),
    "Q4_0": Steps(32, 15, 8), "Q4_1": Steps(32, 15, 15), "Q2_K": Steps(16, 3, 15 * 3),
    "Q3_K": Steps(16, 7, 32 * 4), "Q4_K": Steps(32, 15, 63 * 15), "Q5_K": Steps(32, 31, 63 * 31),
    "Q6_K": Steps(16, 63, 128 * 32), "Q8_K": Steps(256, 254),
    # largest gaps between levels: a third of the largest level, a fifth, a half
    "MXFP4": Steps(32, 6), "IQ4_NL": Steps(32, 9, 127), "IQ4_XS": Steps(32, 9, 32 * 127),
    "TQ1_0": Steps(256, 2, 1), "TQ2_0": Steps(256, 2, 1),
    # kinds of folders
    "NF4": Steps(64, 6), "NF4-DOUBLE": Steps(64, 6), "FP4": Steps(64, 5), "INT8": Steps(256, 200),
}  # fmt: skip
COARSE = Steps(32, 3, 32 * 127)  # types of 1 to 3 bits whose levels are tables, and others
FLOATS = {"F64": 2.0**-24, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
LEAST = 2.0**-22  # weights are also scaled, shifted by 1 and taken to logarithms, in float32
SMALLEST = {"F16": 2.0**-25}  # half of the smallest number
LEAST_NORM = 1e-17  # of a row's errors: float32 holds the squares of larger ones
PART = 1 << 16  # weights at a time: 256 KiB, which a cache of the CPU holds


class Rounding(NamedTuple):
    """The largest errors h of weights: (..., groups), one for each ``size`` weights of a row."""

    steps: Array
    size: int

    def norms(self) -> Array:
        """Return sqrt(sum h**2 / 3) of each row."""
        norms: Array = np.sqrt(_squares(rows_of(self.steps)) * (self.size / 3))
        return norms


def rounding_of(array: Array, kind: str) -> Rounding:
    """Return the rounding of weights, (..., columns) float32, by a type."""
    if kind in FLOATS or array.ndim < 2:
        kind = kind if kind in FLOATS else "F32"  # vectors are float32 in files of any type
        size = np.abs(array)
        size += SMALLEST.get(kind, 0.0) / FLOATS[kind] if array.ndim > 1 else 1
        size *= np.float32(max(FLOATS[kind], LEAST))
        return Rounding(size, 1)
    steps, columns = GROUPS.get(kind, COARSE), array.shape[-1]
    whole = columns - columns % steps.size
    groups = array[..., :whole].reshape(*array.shape[:-1], -1, steps.size)
    levels, least = np.float32(steps.levels), np.float32(steps.codes * SMALLEST["F16"])
    most = np.abs(groups).max(-1) / levels + least
    if whole == columns:
        return Rounding(most, steps.size)
    rest = np.abs(array[..., whole:]).max(-1, keepdims=True) / levels + least
    each = [np.repeat(most, steps.size, axis=-1), np.repeat(rest, columns - whole, axis=-1)]
    return Rounding(np.concatenate(each, axis=-1), 1)


def rows_of(array: Array) -> Array:
    """Return an array as (rows, columns)."""
    return array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)


def _squares(rows: Array) -> Array:
    """Return the sum of the squares of each row."""
    squares: Array = np.einsum("ij,ij->i", rows, rows)
    return squares


def _parts(array: Array) -> Iterator[tuple[slice, Any]]:
    """Yield slices of rows of about ``PART`` weights, and the index that keeps a vector one."""
    rows = rows_of(array)
    step = max(1, PART // max(1, rows.shape[1]))
    for top in range(0, len(rows), step):
        yield slice(top, top + step), (0 if array.ndim < 2 else slice(top, top + step))


class Rows:
    """The differences of the rows of two weights, which may be added in parts.

    Attributes
    ----------
    off, bound, size : (rows,)
        |w' - w|, sqrt(sum h**2 / 3) and |w|, squared.
    equal : bool
        Whether both weights have equal bits.
    """

    def __init__(self, rows: int) -> None:
        self.off, self.bound, self.size = (np.zeros(rows, FLOAT32) for _ in range(3))
        self.equal = True

    def add(self, trained: Array, stored: Array, kind: str, first: int = 0) -> "Rows":
        """Add some rows, from row ``first`` on; return self."""
        mine, theirs = rows_of(trained), rows_of(stored)
        with np.errstate(all="ignore"):
            for part, index in _parts(trained):
                place = slice(first + part.start, first + min(part.stop, len(mine)))
                self.equal = self.equal and np.array_equal(mine[part], theirs[part])
                self.off[place] = _squares(theirs[part] - mine[part])
                rounding = rounding_of(theirs[index], kind)
                steps = rows_of(rounding.steps)
                self.bound[place] = _squares(steps) * np.float32(rounding.size / 3)
                self.size[place] = _squares(mine[part])
        return self

    def worst(self) -> tuple[float, float, int]:
        """Return (difference, rounding, row) of the row whose difference exceeds rounding most.

        Both are relative to the norm of the trained row.
        """
        off, bound = np.sqrt(self.off), np.sqrt(self.bound)
        with np.errstate(all="ignore"):
            excess = np.where(np.isfinite(off), off / np.maximum(bound, LEAST_NORM), np.inf)
        row = int(np.argmax(excess))
        size = float(np.sqrt(self.size[row])) or 1.0
        return float(off[row]) / size, float(bound[row]) / size, row


def worst_row(trained: Array, stored: Array, kind: str) -> tuple[float, float, int]:
    """Return ``Rows.worst`` of a trained weight and a weight that a file stores by a type."""
    return Rows(len(rows_of(trained))).add(trained, stored, kind).worst()


def shaken(name: str, array: Array, kind: str) -> Array:
    """Return weights moved by errors in -h .. h; the name is the seed.

    The array itself is changed if it can be.
    """
    draw = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    array = np.require(array, FLOAT32, ["C", "W"])
    rows = rows_of(array)
    for part, index in _parts(array):
        steps, size = rounding_of(rows[index], kind)
        errors = _errors(draw, rows[part].size).reshape(-1, size) * steps.reshape(-1, 1)
        rows[part] += errors.reshape(rows[part].shape)
    return array


def _errors(draw: np.random.Generator, count: int) -> Array:
    """Return numbers that are uniform in -1 .. 1: some of a fixed list, which is faster."""
    if count > PART:
        return np.asarray(draw.random(count, FLOAT32) * 2 - 1)
    start = int(draw.integers(0, PART))
    return _noise()[start : start + count]


@functools.cache
def _noise() -> Array:
    draw = np.random.Generator(np.random.SFC64(0))
    return np.asarray(draw.random(2 * PART, FLOAT32) * 2 - 1)
