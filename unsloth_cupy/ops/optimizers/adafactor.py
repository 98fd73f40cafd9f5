"""Adafactor: the second moment of a matrix is the product of a mean per row and one per column.

share = step**beta2_decay
row = (1 - share) * row + share * (mean of gradient**2 along a row);  column: likewise
square = row * column / max(mean of row, eps1)
u = gradient / sqrt(max(square, eps1**2))
parameter = parameter * (1 - lr * weight_decay)
            - min(lr, 1 / sqrt(step)) * max(eps2, rms(parameter)) * u / max(1, rms(u) / d)

A parameter with one axis or none has a whole ``square`` instead.  With more than two axes, the last
two are the axes of matrices.  Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear
Memory Cost, 2018.
"""

from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """A parameter and the other arrays that a step of Adafactor changes."""

    parameter: Any
    copy: Any | None  # the parameter rounded to 16 bits
    row: Any | None  # (*matrices, rows)
    column: Any | None  # (*matrices, columns)
    square: Any | None  # (size,), of a vector


def adafactor(
    parameter: Any,
    gradient: Any,
    row: Any,
    column: Any,
    square: Any,
    *,
    lr: float,
    beta2_decay: float,
    eps: tuple[float | None, float],
    d: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update a parameter and its moments in place; all are float32, or float64."""
    if not parameter.size:
        return
    share, smallest = step**beta2_decay, eps[0]
    if smallest is None:  # torch's default
        smallest = float(np.finfo(parameter.dtype).eps)
    size = np.maximum(rms(parameter), eps[1]) * min(lr, step**-0.5)
    parameter *= 1 - lr * weight_decay
    if square is None:
        change = np.square(gradient)
        _move(row, change.mean(-1), share)
        _move(column, change.mean(-2), share)
        level = np.maximum(row.mean(-1), smallest)
        np.multiply(row[..., None], column[..., None, :], out=change)
        change /= level[..., None, None]
    else:
        _move(square, np.square(gradient), share)
        change = square.copy()
    np.maximum(change, smallest**2, out=change)
    np.sqrt(change, out=change)
    np.divide(gradient, change, out=change)
    size = size / np.maximum(rms(change) / d, 1)
    change *= size
    parameter -= change


def _move(moment: Any, to: Any, share: float) -> None:
    """Move a moment towards a new value by a share of the difference, in place."""
    moment *= 1 - share
    moment += to * share


def rms(array: Any) -> Any:
    """Return the root mean square."""
    return np.sqrt(np.square(array).mean())
