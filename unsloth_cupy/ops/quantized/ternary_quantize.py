"""Weights as -1, 0 or 1 times a scale.

w is about code * scale, of a tensor, a row or a group of columns; code is the sign of w where |w|
is large enough, else 0:

absmean     |w| > mean(|w|) / 2           scale mean(|w|), at least 1e-5
twn         |w| > 0.7 mean(|w|)           scale the mean of |w| where the code is not 0
absmax      |w| >= max(|w|) / 2           scale max(|w|)
percentile  |w| > its percentile          scale as twn
mean_std    |w| > mean + c std of |w|     scale as twn
manual      |w| > threshold               scale as twn, or given

Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits, 2024 (absmean).
Li, Zhang and Liu, Ternary Weight Networks, 2016 (twn).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import FLOAT32, FLOATS, Array
from ...errors import ConfigError, DTypeError, RangeError, ShapeError
from ...placement import check_library
from ._planes import check_group, codes_of, planes_of, row_blocks, row_bytes, spread
from .ternary import Ternary

LEAST = 1e-5  # of absmean's scale, as BitNet has it
TINY = np.finfo(np.float32).tiny  # below it float32 has no reciprocal
METHODS = ("absmean", "twn", "absmax", "percentile", "mean_std", "manual")
PER = ("tensor", "row", "group")


class Sums(NamedTuple):
    """Of |w| over what shares a scale, float64: (rows, groups), or (1, 1) of a tensor."""

    number: Any  # of values
    total: Any
    squares: Any
    top: Any


class Rule(NamedTuple):
    """Which codes are not 0: where |w| * factor > bound; scale None is the mean of |w| there."""

    factor: Any
    bound: Any
    scale: Any = None


def ternary_quantize(
    w: Array,
    *,
    method: str = "absmean",
    per: str = "tensor",
    group: int = 128,
    percentile: float = 50.0,
    deviations: float = 0.5,
    threshold: float | None = None,
    scale: float | None = None,
) -> Ternary:
    """Keep a weight as codes -1, 0 and 1, two bits each, and scales: ``w`` is about codes * scale.

    Parameters
    ----------
    w : (outputs, inputs) float
        NumPy's or CuPy's.
    method : str
        ``absmean``, ``twn``, ``absmax``, ``percentile``, ``mean_std`` or ``manual``: which codes
        are 0 and what the scale is, as the module says.
    per : str
        What shares a scale: the ``tensor``, a ``row``, or a ``group`` of neighbours in a row.
    group : int
        Columns of a group: a multiple of 32.
    percentile : float
        Of ``abs(w)``, from 0 to 100, of the method of that name.
    deviations : float
        How many standard deviations above the mean of ``abs(w)`` the
        threshold of ``mean_std`` lies.
    threshold, scale : float, optional
        Those of ``manual``.

    Returns
    -------
    quantized : Ternary
        With ``statistics``: the share of zeros and of ones, the mean and the largest error.

    Raises
    ------
    ConfigError
        An option does not make sense, or ``w`` is quantized already.
    RangeError
        ``w`` holds NaN or an infinity; the message names the place.
    ShapeError, DTypeError
        ``w`` is not a matrix of floats.
    """
    _check(w, per, group)
    _check_method(method, percentile, deviations, threshold, scale)
    rows, columns = w.shape
    width = group if per == "group" else max(columns, 1)
    whole = per == "tensor"
    if method == "percentile":
        rule = Rule(1, _percentiles(w, percentile, width, whole))
    elif method == "manual":
        rule = Rule(1, threshold, scale)
    else:
        sums = _sums(w, width)
        rule = _rule(_joined(sums) if whole else sums, method, deviations, _wide(w))
    planes, kept = _chosen(w, rule, width)
    kept = _joined(kept) if whole else kept
    scales = kept.total / np.maximum(kept.number, 1) if rule.scale is None else rule.scale
    scales = np.zeros_like(kept.total, dtype=_wide(w)) + scales.astype(_wide(w))
    statistics = _errors(w, planes, scales, width)
    return Ternary(
        planes,
        scales.reshape(()) if whole else scales,
        (rows, columns),
        group=group if per == "group" else None,
        dtype=w.dtype,
        errors=statistics,
    )


# ---- what is asked ------------------------------------------------------------------------------
def _check(w: Any, per: str, group: int) -> None:
    if hasattr(w, "dequantize"):
        raise ConfigError(
            f"ternary_quantize: w is quantized already, as {type(w).__name__}; pass w.dequantize()"
        )
    check_library("ternary_quantize: w", w)
    if w.dtype not in FLOATS:
        raise DTypeError(f"ternary_quantize: w is {w.dtype}; it must be one of float16 to float64")
    if w.ndim != 2:
        raise ShapeError(
            f"ternary_quantize: w has {w.ndim} axes, {w.shape}; it must be (outputs, inputs)",
            expected=("outputs", "inputs"),
            actual=tuple(w.shape),
        )
    if per not in PER:
        raise ConfigError(f"ternary_quantize: per={per!r}; choose from {', '.join(PER)}")
    if per == "group":
        check_group("ternary_quantize", group)


def _check_method(
    method: str, percentile: float, deviations: float, threshold: float | None, scale: float | None
) -> None:
    if method not in METHODS:
        raise ConfigError(f"ternary_quantize: method={method!r}; choose from {', '.join(METHODS)}")
    if not 0 <= percentile <= 100:
        raise ConfigError(f"ternary_quantize: percentile={percentile!r}; it must be in 0 .. 100")
    if not (math.isfinite(deviations) and deviations >= 0):
        raise ConfigError(f"ternary_quantize: deviations={deviations!r}; it must be 0 or more")
    given = {"threshold": threshold, "scale": scale}
    for name, value in given.items():
        if value is None:
            continue
        if method != "manual":
            raise ConfigError(f"ternary_quantize: {name} is an option of method='manual' alone")
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"ternary_quantize: {name}={value!r}; it must be 0 or more")
    if method == "manual" and threshold is None:
        raise ConfigError("ternary_quantize: method='manual' needs a threshold; pass threshold=...")


# ---- what is measured ---------------------------------------------------------------------------
def _wide(w: Any) -> np.dtype[Any]:
    return np.promote_types(w.dtype, FLOAT32)


def _sizes(w: Any) -> Iterator[tuple[slice, Array]]:
    """Return |w| by blocks of rows; raise where it is not finite."""
    for part in row_blocks(*w.shape):
        size = np.abs(w[part].astype(_wide(w), copy=False))
        if not np.isfinite(size.max(initial=0)):
            row, column = (int(axis[0]) for axis in np.nonzero(~np.isfinite(size)))
            found = float(w[part.start + row, column])
            raise RangeError(
                f"ternary_quantize: w[{part.start + row}, {column}] is {found}; weights must be"
                " finite"
            )
        yield part, size


def _grouped(size: Any, width: int) -> Array:
    """Return (rows, groups, width), the last group filled up with zeros."""
    rows, columns = size.shape
    groups = -(-columns // width) or 1
    if groups * width != columns:
        filled = np.zeros_like(size, shape=(rows, groups * width))
        filled[:, :columns] = size
        size = filled
    return size.reshape(rows, groups, width)


def _sums(w: Any, width: int) -> Sums:
    rows, columns = w.shape
    groups = -(-columns // width) or 1
    number = np.full_like(w, width, dtype=np.float64, shape=(rows, groups))
    number[:, -1:] = columns - (groups - 1) * width
    total, squares, top = (np.zeros_like(number) for _ in range(3))
    for part, size in _sizes(w):
        grouped = _grouped(size, width)
        total[part] = grouped.sum(axis=-1, dtype=np.float64)
        squares[part] = np.square(grouped, dtype=np.float64).sum(axis=-1)
        top[part] = grouped.max(axis=-1)
    return Sums(number, total, squares, top)


def _joined(sums: Sums) -> Sums:
    """Return those of the whole tensor."""
    number, total, squares = (each.sum().reshape(1, 1) for each in sums[:3])
    return Sums(number, total, squares, sums.top.max(initial=0).reshape(1, 1))


def _percentiles(w: Any, percentile: float, width: int, whole: bool) -> Array:
    sizes = [size for _, size in _sizes(w)]
    size = np.concatenate(sizes) if sizes else np.zeros_like(w, dtype=_wide(w))
    if not size.size:
        return np.zeros_like(size, shape=(1, 1) if whole else (len(w), 1))
    if whole:
        return np.percentile(size, percentile).reshape(1, 1).astype(size.dtype)
    full = w.shape[1] // width * width
    parts = [size[:, :full].reshape(len(w), -1, width), size[:, None, full:]]
    found = [np.percentile(part, percentile, axis=-1) for part in parts if part.size]
    return np.concatenate(found, axis=1).astype(size.dtype)


def _rule(sums: Sums, method: str, deviations: float, wide: np.dtype[Any]) -> Rule:
    """Return the rule, rounded to the dtype that weights are compared in."""
    number = np.maximum(sums.number, 1)
    mean, top = sums.total / number, sums.top.astype(wide)
    if method == "absmean":
        scale = np.maximum(mean, LEAST).astype(wide)
        return Rule(1 / scale, wide.type(0.5), scale)
    if method == "absmax":
        inverse = np.where(top < TINY, 0, 1 / np.maximum(top, TINY)).astype(wide)
        return Rule(inverse, np.nextafter(wide.type(0.5), wide.type(0)), top)
    if method == "twn":
        return Rule(1, (0.7 * mean).astype(wide))
    variance = np.maximum(sums.squares / number - mean**2, 0)
    return Rule(1, (mean + deviations * np.sqrt(variance)).astype(wide))


def _of(values: Any, part: slice) -> Any:
    """Return what belongs to a block of rows, beside (rows, groups, width)."""
    if np.ndim(values) == 0:
        return values
    return values[..., None] if len(values) == 1 else values[part, :, None]


def _chosen(w: Any, rule: Rule, width: int) -> tuple[Array, Sums]:
    """Return the planes, and what is summed up over the codes that are not 0."""
    rows, columns = w.shape
    planes = np.zeros_like(w, dtype=np.uint8, shape=(rows, 2, row_bytes(columns)))
    number, total = (
        np.zeros_like(w, dtype=np.float64, shape=(rows, -(-columns // width) or 1))
        for _ in range(2)
    )
    for part, size in _sizes(w):
        grouped = _grouped(size, width)
        chosen = grouped * _of(rule.factor, part) > _of(rule.bound, part)
        number[part] = chosen.sum(axis=-1)
        total[part] = np.where(chosen, grouped, 0).sum(axis=-1, dtype=np.float64)
        signs = np.where(w[part] > 0, 1, -1).astype(np.int8)
        planes[part] = planes_of(signs * chosen.reshape(len(size), -1)[:, :columns])
    return planes, Sums(number, total, total, total)


def _errors(w: Any, planes: Any, scales: Any, width: int) -> tuple[float, float]:
    """Return the mean and the largest of |w - codes * scale|."""
    total, largest = 0.0, 0.0
    for part in row_blocks(*w.shape):
        codes = codes_of(planes[part], w.shape[1])
        scale = spread(scales if len(scales) == 1 else scales[part], width, w.shape[1])
        error = np.abs(w[part].astype(_wide(w), copy=False) - codes * scale)
        total += float(error.sum(dtype=np.float64))
        largest = max(largest, float(error.max(initial=0)))
    return total / max(w.size, 1), largest
