"""Ternary quantization: rules for the weights that become 0, scales of the others, and errors."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import FLOAT32, Array
from ...core.stand_in import is_planned
from ...errors import RangeError
from ._planes import codes_of, planes_of, row_blocks, row_bytes, scale_of_columns

LEAST = 1e-5  # lower bound of absmean's scale, as in BitNet
TINY = np.finfo(np.float32).tiny  # reciprocals of smaller numbers can overflow float32


class Sums(NamedTuple):
    """Float64 sums over the weights with one scale: (rows, groups), or (1, 1) for a tensor."""

    number: Any  # number of values
    total: Any  # sum of |w|
    squares: Any  # sum of w**2
    top: Any  # largest |w|


class Rule(NamedTuple):
    """A code is not 0 if |w| * factor > bound.

    A scale of None stands for the mean of |w| over the codes that are not 0.
    """

    factor: Any
    bound: Any
    scale: Any = None


def parts_of(
    w: Any,
    per: str,
    group: int,
    method: str = "absmean",
    percentile: float = 50.0,
    deviations: float = 0.5,
    threshold: float | None = None,
    scale: float | None = None,
) -> tuple[Array, Array, tuple[float, float]]:
    """Return planes, scales, and the mean and the largest error."""
    rows, columns = w.shape
    if is_planned(w):  # without values: only the shapes of the results are needed
        shape = () if per == "tensor" else (rows, -(-columns // group) if per == "group" else 1)
        planes = empty((rows, 2, row_bytes(columns)), np.uint8, like=w)
        return planes, empty(shape, _wide(w), like=w), (0.0, 0.0)
    width = min(group, max(columns, 1)) if per == "group" else max(columns, 1)
    whole = per == "tensor"
    if method == "percentile":
        rule = Rule(1, _percentiles(w, percentile, width, whole))
    elif method == "manual":
        rule = Rule(1, threshold, scale)
    else:
        sums = _sums(w, width)
        rule = _rule(_joined(sums) if whole else sums, method, deviations, _wide(w))
    planes, nonzero = _apply(w, rule, width)
    nonzero = _joined(nonzero) if whole else nonzero
    scales = np.zeros_like(nonzero.total, dtype=_wide(w))
    scales[...] = (
        nonzero.total / np.maximum(nonzero.number, 1) if rule.scale is None else rule.scale
    )
    return planes, scales.reshape(()) if whole else scales, _errors(w, planes, scales, width)


def _wide(w: Any) -> np.dtype[Any]:
    """Return the dtype of comparisons: float32, or float64 for float64 weights."""
    return np.promote_types(w.dtype, FLOAT32)


def _sizes(w: Any) -> Iterator[tuple[slice, Array]]:
    """Yield |w| in blocks of rows; raise RangeError if a value is not finite."""
    for part in row_blocks(*w.shape):
        size = np.abs(w[part].astype(_wide(w), copy=False))
        if size.size and not np.isfinite(size.max()):
            row, column = (int(axis[0]) for axis in np.nonzero(~np.isfinite(size)))
            value = float(w[part.start + row, column])
            raise RangeError(
                f"ternary_quantize: w[{part.start + row}, {column}] is {value}; weights must be"
                " finite"
            )
        yield part, size


def _grouped(size: Any, width: int) -> Array:
    """Return the array as (rows, groups, width), the last group padded with zeros."""
    rows, columns = size.shape
    groups = -(-columns // width) or 1
    if groups * width != columns:
        padded = np.zeros_like(size, shape=(rows, groups * width))
        padded[:, :columns] = size
        size = padded
    return size.reshape(rows, groups, width)  # (rows, groups, width)


def totals(sizes: Array) -> Array:
    """Return the float64 sum of each group of |w|."""
    result: Array = sizes.sum(axis=-1, dtype=np.float64)
    return result


def absmean(total: Any, number: Any, wide: np.dtype[Any]) -> Any:
    """Return the scale of absmean: the mean of |w|, or ``LEAST``."""
    return np.maximum(total / number, LEAST).astype(wide)


def _sums(w: Any, width: int) -> Sums:
    """Return the sums of each group of ``width`` columns."""
    rows, columns = w.shape
    groups = -(-columns // width) or 1
    number = np.full_like(w, width, dtype=np.float64, shape=(rows, groups))
    number[:, -1:] = columns - (groups - 1) * width
    total, squares, top = (np.zeros_like(number) for _ in range(3))
    for part, size in _sizes(w):
        grouped = _grouped(size, width)
        total[part] = totals(grouped)
        with np.errstate(over="ignore"):  # large float64 weights: mean_std's threshold is infinite
            squares[part] = np.square(grouped, dtype=np.float64).sum(axis=-1)
        top[part] = grouped.max(axis=-1)
    return Sums(number, total, squares, top)


def _joined(sums: Sums) -> Sums:
    """Return the sums of the whole tensor."""
    top = sums.top.max() if sums.top.size else sums.top.sum()
    number, total, squares = (each.sum().reshape(1, 1) for each in sums[:3])
    return Sums(number, total, squares, top.reshape(1, 1))


def _percentiles(w: Any, percentile: float, width: int, whole: bool) -> Array:
    """Return the percentile of |w| in each group, (rows, groups), or in the tensor, (1, 1)."""
    sizes = [size for _, size in _sizes(w)]
    size = np.concatenate(sizes) if sizes else np.zeros_like(w, dtype=_wide(w))
    if not size.size:
        return np.zeros_like(size, shape=(1, 1) if whole else (len(w), 1))
    if whole:
        return np.percentile(size, percentile).reshape(1, 1).astype(size.dtype)
    full = w.shape[1] // width * width
    # whole groups (rows, groups, width), and the last group without padding (rows, 1, rest)
    parts = [size[:, :full].reshape(len(w), -1, width), size[:, None, full:]]
    thresholds = [np.percentile(part, percentile, axis=-1) for part in parts if part.size]
    return np.concatenate(thresholds, axis=1).astype(size.dtype)


def _rule(sums: Sums, method: str, deviations: float, wide: np.dtype[Any]) -> Rule:
    """Return the rule of a method, rounded to the dtype of comparisons."""
    number = np.maximum(sums.number, 1)
    mean, top = sums.total / number, sums.top.astype(wide)
    if method == "absmean":
        scale = absmean(sums.total, number, wide)
        return Rule(1 / scale, wide.type(0.5), scale)
    if method == "absmax":
        inverse = np.where(top < TINY, 0, 1 / np.maximum(top, TINY)).astype(wide)
        # >= 1/2 is > the number before 1/2
        return Rule(inverse, np.nextafter(wide.type(0.5), wide.type(0)), top)
    if method == "twn":
        return Rule(1, (0.7 * mean).astype(wide))
    variance = np.maximum(sums.squares / number - mean**2, 0)
    return Rule(1, (mean + deviations * np.sqrt(variance)).astype(wide))


def _of(values: Any, part: slice) -> Any:
    """Return the values of a block of rows as (rows or 1, groups, 1)."""
    if np.ndim(values) == 0:
        return values
    return values[..., None] if len(values) == 1 else values[part, :, None]


def _apply(w: Any, rule: Rule, width: int) -> tuple[Array, Sums]:
    """Return the planes, and the number and total of |w| where the code is not 0."""
    rows, columns = w.shape
    planes = np.zeros_like(w, dtype=np.uint8, shape=(rows, 2, row_bytes(columns)))
    number, total = (
        np.zeros_like(w, dtype=np.float64, shape=(rows, -(-columns // width) or 1))
        for _ in range(2)
    )
    for part, size in _sizes(w):
        grouped = _grouped(size, width)
        nonzero = grouped * _of(rule.factor, part) > _of(rule.bound, part)
        number[part] = nonzero.sum(axis=-1)
        total[part] = np.where(nonzero, grouped, 0).sum(axis=-1, dtype=np.float64)
        signs = np.where(w[part] > 0, 1, -1).astype(np.int8)
        planes[part] = planes_of(signs * nonzero.reshape(len(size), -1)[:, :columns])
    return planes, Sums(number, total, total, total)


def _errors(w: Any, planes: Any, scales: Any, width: int) -> tuple[float, float]:
    """Return the mean and the largest of |w - codes * scale|."""
    total, largest = 0.0, 0.0
    for part in row_blocks(*w.shape):
        codes = codes_of(planes[part], w.shape[1])
        scale = scale_of_columns(scales if len(scales) == 1 else scales[part], width, w.shape[1])
        error = np.abs(w[part].astype(_wide(w), copy=False) - codes * scale)
        total += float(error.sum(dtype=np.float64))
        largest = max(largest, float(error.max()) if error.size else 0.0)
    return total / max(w.size, 1), largest
