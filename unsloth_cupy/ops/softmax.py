"""Softmax over the last axis.

y = exp(scale * x) / sum(exp(scale * x))
"""

from typing import Any

import numpy as np

from .._arrays import empty, lanes
from .._jit import load
from .._op import op
from .._typing import Array
from ._rows import aligned, constants, lie


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
    y = empty(x.shape, x.dtype, like=x)
    _launch_rows("softmax", (x,), y, scale)
    return y


softmax.strided = ("x",)


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
    dx = empty(y.shape, y.dtype, like=y)
    _launch_rows("softmax_backward", (dy, y), dx, scale)
    return dx


softmax_backward.strided = "dy", "y"


def _launch_rows(name: str, arrays: tuple[Any, ...], made: Any, scale: float) -> None:
    """Launch a kernel of softmax.cu, with the rows shared out to blocks."""
    columns = made.shape[-1]
    given, layout = lie(*arrays)
    width = lanes(aligned(columns, layout), *given)
    chosen = constants(made.dtype, columns, width, len(given))  # a register holds a value of each
    rows, threads = made.size // columns, chosen["THREADS"]
    kernel = load("softmax.cu", name, made, chosen)
    kernel[-(-rows * chosen["ROW_THREADS"] // threads), threads](*given, made, rows, *layout, scale)


def finite(top: Array) -> Array:
    """Return top, with 0 for -inf: so a row of nothing but -inf stays free of -inf - -inf."""
    return np.where(top == -np.inf, top.dtype.type(0), top)
