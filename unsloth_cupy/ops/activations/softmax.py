"""Softmax over the last axis.

y = exp(scale * x) / sum(exp(scale * x))
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.target import limits
from ...errors import ConfigError
from ..common.rows import held_rows
from ..common.strides import row_layout

HELD = 32  # registers per thread for values of a row: two blocks of 512 threads fit on an SM


@op(
    "x(*rows, columns) -> y(*rows, columns)",
    autocast="float32",
    torch=lambda nn, t, o: nn.softmax(t["x"], dim=-1),
)
def softmax(x: Array, *, scale: float = 1.0, axis: int = -1) -> Array:
    """Return the softmax of each row, ``y = exp(scale * x) / sum(exp(scale * x))``.

    Parameters
    ----------
    x : (*rows, columns) float
        An element of -inf gets 0, even in a row of only -inf.
    scale : float
        Inverse temperature.
    axis : int
        The last axis.  For another axis, the message of the error has the call that moves it.

    Returns
    -------
    y : (*rows, columns) float
        Each row sums to 1, or to 0 if all its elements are -inf.

    Raises
    ------
    ConfigError
        scale is not finite, or axis is not the last one.
    ShapeError, DTypeError
        x is not a float array, or has no axis.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import softmax, softmax_backward
    >>> y = softmax(np.array([[0.0, np.log(3)]], np.float32))
    >>> np.testing.assert_allclose(y, [[0.25, 0.75]])
    >>> np.testing.assert_allclose(softmax_backward(np.ones_like(y), y), 0, atol=1e-7)
    """
    y = x * x.dtype.type(scale)
    if y.size:
        y -= finite(y.max(axis=-1, keepdims=True))
        np.exp(y, out=y)
        # tiny: a row of only -inf has the sum 0, and stays 0
        y /= np.maximum(y.sum(axis=-1, keepdims=True), np.finfo(y.dtype).tiny)
    return y


@softmax.require
def _check_axis(x: Array, axis: int) -> None:
    """Raise ConfigError unless axis is the last axis."""
    if axis not in (-1, x.ndim - 1):
        cure = f"softmax(np.moveaxis(x, {axis}, -1)), and move the axis of the result back"
        raise ConfigError(f"softmax(axis={axis}): softmax is over the last axis; call {cure}")


@softmax.kernel(strided=("x",))
def _launch(x: Array, scale: float) -> Array:
    """Launch softmax."""
    y = empty(x.shape, x.dtype, like=x)
    _launch_rows("softmax", (x,), y, scale)
    return y


@softmax.gradient
def softmax_backward(dy: Array, y: Array, *, scale: float = 1.0) -> Array:
    """Return the gradient of x: ``scale * y * (dy - sum(y * dy))``."""
    dx = dy * y
    np.subtract(dy, dx.sum(axis=-1, keepdims=True), out=dx)
    dx *= y
    dx *= y.dtype.type(scale)
    return dx


@softmax_backward.kernel(strided=("dy", "y"))
def _launch_backward(dy: Array, y: Array, scale: float) -> Array:
    """Launch softmax_backward."""
    dx = empty(y.shape, y.dtype, like=y)
    _launch_rows("softmax_backward", (dy, y), dx, scale)
    return dx


def _launch_rows(name: str, operands: tuple[Any, ...], result: Any, scale: float) -> None:
    """Launch a kernel of softmax.cu; some threads, a block or a cluster compute each row."""
    columns = result.shape[-1]
    arrays, layout = row_layout(*operands)
    width = lanes(layout.alignment(columns), *arrays)
    chosen = _constants(result.dtype, columns, width, len(operands), limits(result).clusters)
    rows, threads = result.size // columns, chosen["THREADS"]
    blocks = -(-rows * chosen["ROW_THREADS"] // threads) * chosen["CLUSTER"]
    kernel = load("softmax.cu", name, result, chosen)
    kernel[blocks, threads](*arrays, result, rows, layout.inner, *layout.strides, scale)


@cache
def _constants(dtype: Any, columns: int, lanes: int, arrays: int, clusters: bool) -> Constants:
    """Return the constants of softmax.cu, whose threads hold the values of all arrays in registers.

    Rows are read only once up to 262,144 columns in the forward and 131,072 in the backward pass;
    before sm_90 up to 32,768 and 16,384.
    """
    return Constants(T=dtype, **held_rows(columns, HELD // arrays, lanes, clusters))


def finite(top: Array) -> Array:
    """Return row maxima, with 0 for -inf: in a row of only -inf, -inf minus -inf would be NaN."""
    return np.where(top == -np.inf, top.dtype.type(0), top)
