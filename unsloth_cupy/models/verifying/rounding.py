"""The rounding that the types of a file explain.

A type has ``levels`` steps in a group of ``size`` weights, so it moves a weight by at most

    h = max|w| / levels                             over the weights w of the group
    h = eps |w|                                     for a float type with the unit of rounding eps

An error that is uniform in -h .. h has the norm sqrt(sum h**2 / 3) in expectation.
"""

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...core.dtypes import FLOAT32, Array


class Steps(NamedTuple):
    """Groups of ``size`` weights with ``levels`` steps between -max|w| and max|w|."""

    size: int
    levels: float


# A type's steps in its groups; min and max of types with an offset are near -max|w| and max|w|.
GROUPS: Mapping[str, Steps] = {
    "Q8_0": Steps(32, 254), "Q5_0": Steps(32, 31), "Q5_1": Steps(32, 31), "Q4_0": Steps(32, 15),
    "Q4_1": Steps(32, 15), "Q2_K": Steps(16, 3), "Q3_K": Steps(16, 7), "Q4_K": Steps(32, 15),
    "Q5_K": Steps(32, 31), "Q6_K": Steps(16, 63), "Q8_K": Steps(256, 254),
    # largest gaps between levels: a third of the largest level, a fifth, a half
    "MXFP4": Steps(32, 6), "IQ4_NL": Steps(32, 9), "IQ4_XS": Steps(32, 9),
    "TQ1_0": Steps(256, 2), "TQ2_0": Steps(256, 2),
    # kinds of folders
    "NF4": Steps(64, 6), "NF4-DOUBLE": Steps(64, 6), "FP4": Steps(64, 5), "INT8": Steps(256, 200),
}  # fmt: skip
COARSE = Steps(32, 3)  # types of 1 to 3 bits whose levels are tables, and others
FLOATS = {"F64": 2.0**-24, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
LEAST = 2.0**-22  # weights are also scaled, shifted by 1 and taken to logarithms, in float32
SMALLEST = {"F16": 2.0**-25}  # half of the smallest number


class Rounding(NamedTuple):
    """The largest errors h of weights: (..., groups), one for each ``size`` weights of a row."""

    steps: Array
    size: int

    def norms(self) -> Array:
        """Return sqrt(sum h**2 / 3) of each row."""
        norms: Array = np.linalg.norm(rows_of(self.steps), axis=1) * np.sqrt(self.size / 3)
        return norms

    def moved(self, name: str, array: Array) -> Array:
        """Return weights moved by errors that are uniform in -h .. h; the name is the seed."""
        draw = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
        errors: Array = draw.random((*self.steps.shape, self.size), FLOAT32)
        errors *= 2
        errors -= 1
        errors *= self.steps[..., None]
        errors = errors.reshape(array.shape)
        errors += array
        return errors


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
    most = np.maximum(groups.max(-1), -groups.min(-1)) / np.float32(steps.levels)
    if whole == columns:
        return Rounding(most, steps.size)
    rest = np.abs(array[..., whole:]).max(-1, keepdims=True) / np.float32(steps.levels)
    each = [np.repeat(most, steps.size, axis=-1), np.repeat(rest, columns - whole, axis=-1)]
    return Rounding(np.concatenate(each, axis=-1), 1)


def rows_of(array: Array) -> Array:
    """Return an array as (rows, columns)."""
    return array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)


def worst_row(trained: Array, stored: Array, rounding: Rounding) -> tuple[float, float, int]:
    """Return (difference, rounding, row) of the row whose difference exceeds rounding most.

    Both are relative to the norm of the trained row; rounding is sqrt(sum h**2 / 3).
    """
    off, bound = np.linalg.norm(rows_of(stored - trained), axis=1), rounding.norms()
    with np.errstate(all="ignore"):
        excess = np.where(np.isfinite(off), off / np.maximum(bound, 1e-38), np.inf)
    row = int(np.argmax(excess))
    size = float(np.linalg.norm(rows_of(trained)[row])) or 1.0
    return float(off[row]) / size, float(bound[row]) / size, row
