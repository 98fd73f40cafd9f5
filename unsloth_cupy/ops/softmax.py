"""Softmax over the last axis.

y = exp(scale * x) / sum(exp(scale * x))
"""

from typing import Any

import numpy as np

from .._arrays import empty, lanes
from .._jit import load
from .._op import op
from .._source import Constants
from .._typing import Array
from ._rows import constants


@op("x(*rows, columns) -> y(*rows, columns)")
def softmax(x: Array, *, scale: float = 1.0) -> Array:
    """Turn each row into shares that add up to 1: ``y = exp(scale * x) / sum(exp(scale * x))``.

    Parameters
    ----------
    x : (*rows, columns) float
        An element of -inf gets 0, and so does each element of a row that holds nothing else.
    scale : float
        Inverse temperature.

    Returns
    -------
    y : (*rows, columns) float

    Raises
    ------
    ConfigError
        scale is not finite.
    ShapeError, DTypeError
        x is no float array with an axis.
    """
    y = x * x.dtype.type(scale)
    if y.size:
        y -= finite(y.max(axis=-1, keepdims=True))
        np.exp(y, out=y)
        y /= np.maximum(y.sum(axis=-1, keepdims=True), np.finfo(y.dtype).tiny)
    return y


@softmax.kernel
def _launch(x: Array, *, scale: float = 1.0) -> Array:
    columns, y = x.shape[-1], empty(x.shape, x.dtype, like=x)
    chosen = constants(x.dtype, columns, lanes(columns, x), 1)
    _over_rows("softmax", chosen, x, y, scale)
    return y


@softmax.gradient("dy(*rows, columns), y(*rows, columns) -> dx(*rows, columns)")
def softmax_backward(dy: Array, y: Array, *, scale: float = 1.0) -> Array:
    """Return the gradient of x: ``scale * y * (dy - sum(y * dy))``."""
    dx = dy * y
    np.subtract(dy, dx.sum(axis=-1, keepdims=True), out=dx)
    dx *= y
    dx *= y.dtype.type(scale)
    return dx


@softmax_backward.kernel
def _launch_backward(dy: Array, y: Array, *, scale: float = 1.0) -> Array:
    columns, dx = y.shape[-1], empty(y.shape, y.dtype, like=y)
    chosen = constants(y.dtype, columns, lanes(columns, y, dy), 2)
    _over_rows("softmax_backward", chosen, dy, y, dx, scale)
    return dx


def _over_rows(name: str, chosen: Constants, *arguments: Any) -> None:
    """Launch with the rows of the first array shared out to blocks."""
    rows = arguments[0].size // chosen["COLUMNS"]
    blocks = -(-rows * chosen["ROW_THREADS"] // chosen["THREADS"])
    kernel = load("softmax.cu", name, arguments[0], chosen)
    kernel[blocks, chosen["THREADS"]](*arguments[:-1], rows, arguments[-1])


def finite(top: Array) -> Array:
    """Return top, with 0 for -inf: so a row of nothing but -inf stays free of -inf - -inf."""
    return np.where(top == -np.inf, top.dtype.type(0), top)
