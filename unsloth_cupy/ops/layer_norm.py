"""Layer normalisation.

y = (h - mean) * rstd * weight + bias      h = x + residual,  rstd = 1 / sqrt(var(h) + eps)

Ba, Kiros and Hinton, Layer Normalization, 2016.
"""

from functools import cache
from typing import Any

import numpy as np

from .._arrays import empty, lanes
from .._jit import Constants, load
from .._op import op
from .._typing import Array
from ..errors import ConfigError
from . import rms_norm
from ._device import processors


def layer_norm(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    residual: Array | None = None,
) -> Array:
    """Shift each row of ``h = x + residual`` to mean 0, scale it to variance 1, then by weight.

    ``y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias``, over the last axis; the variance
    is the mean square of ``h - mean(h)``.

    Parameters
    ----------
    x : (*rows, hidden) float
        Rows to normalise.
    weight : (hidden,) dtype of x or float32
        Scale of each column.
    bias : (hidden,) dtype of x or float32, optional
        Added last.
    eps : float
        Added to the variance, in units of x squared.
    residual : (*rows, hidden) float, optional
        Added to x first.

    Returns
    -------
    y : (*rows, hidden) float

    Raises
    ------
    ConfigError
        eps is negative.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    return layer_norm_forward(x, weight, bias, residual, eps=eps)[0]


@op(
    "x(*rows, hidden), weight(hidden): param, bias?(hidden): param, residual?(*rows, hidden)"
    " -> y(*rows, hidden), h(*rows, hidden), mean(*rows): stat, rstd(*rows): stat"
)
def layer_norm_forward(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Array, Array, Array, Array]:
    """Return y as layer_norm does; h, which the next layer adds to; what the backward op needs.

    Without a residual, h may lie in the memory of x: copy it before writing to either.
    """
    _check(eps)
    h = x if residual is None else x + residual
    hidden = max(1, x.shape[-1])
    mean = h.sum(axis=-1) / hidden
    y = h - mean[..., None]
    rstd = 1 / np.sqrt(np.square(y).sum(axis=-1) / hidden + eps)
    y *= rstd[..., None]
    y *= weight
    if bias is not None:
        y += bias
    return y, h, mean, rstd


@cache
def _constants(
    x: Any, weight: Any, bias: Any, residual: bool, hidden: int, lanes: int, backward: bool
) -> Constants:
    """Return the constants of layer_norm.cu: rows are shared out as those of rms_norm are.

    A second mean and a second difference take registers.  Forward, 1024 threads hold 16 values
    each, not 32.  Backward, an SM holds 512 threads, or 640 where there is neither bias nor dh,
    and rows beyond 16 values a thread are read twice.
    """
    shared = rms_norm._constants(x, weight, bias, residual, hidden, lanes, backward)
    held = 640 if bias is None and not residual else 512
    changed = {
        "RESIDENT": max(1, held // shared["THREADS"]),
        "KEEP": shared["KEEP"] and hidden <= 16 * 1024,
        "KEEP_BACKWARD": hidden <= 16 * 512,
    }
    return Constants(**{**shared, **changed})


@layer_norm_forward.kernel
def _launch_forward(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Array, Array, Array, Array]:
    _check(eps)
    hidden, rows = x.shape[-1], x.size // x.shape[-1]
    y, h = empty(x.shape, x.dtype, like=x), x
    if residual is not None:
        h = empty(x.shape, x.dtype, like=x)
    mean, rstd = (empty(x.shape[:-1], np.float32, like=x) for _ in range(2))
    constants = _constants(
        x.dtype,
        weight.dtype,
        None if bias is None else bias.dtype,
        residual is not None,
        hidden,
        lanes(hidden, x, residual, weight, bias),
        False,
    )
    blocks = -(-rows * constants["ROW_THREADS"] // constants["THREADS"])
    kernel = load("layer_norm.cu", "layer_norm_forward", x, constants)
    kernel[blocks, constants["THREADS"]](
        x, weight, residual, bias, y, None if h is x else h, mean, rstd, rows, eps
    )
    return y, h, mean, rstd


def _check(eps: float) -> None:
    if not eps >= 0:
        raise ConfigError(f"layer_norm(eps={eps}): eps must be 0 or more")


@layer_norm_forward.gradient(
    "dy(*rows, hidden), dh?(*rows, hidden), h(*rows, hidden), weight(hidden): param,"
    " bias?(hidden): param, residual?(*rows, hidden), mean(*rows): stat, rstd(*rows): stat"
    " -> dx(*rows, hidden), dweight(hidden), dbias(hidden), dresidual(*rows, hidden)"
)
def layer_norm_backward(
    dy: Array,
    dh: Array | None,
    h: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    mean: Array,
    rstd: Array,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Return the gradients of x, weight, bias and residual; x and residual share theirs."""
    rows, hidden = tuple(range(dy.ndim - 1)), max(1, h.shape[-1])
    hhat = h - mean[..., None]
    hhat *= rstd[..., None]
    dx = dy * hhat
    dweight = dx.sum(axis=rows)
    dx *= weight
    hhat *= dx.sum(axis=-1, keepdims=True) / hidden
    np.multiply(dy, weight, out=dx)
    dx -= dx.sum(axis=-1, keepdims=True) / hidden
    dx -= hhat
    dx *= rstd[..., None]
    if dh is not None:
        dx += dh
    return (
        dx,
        dweight,
        None if bias is None else dy.sum(axis=rows),
        None if residual is None else dx,
    )


@layer_norm_backward.kernel
def _launch_backward(
    dy: Array,
    dh: Array | None,
    h: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    mean: Array,
    rstd: Array,
) -> tuple[Array, Array, Array | None, Array | None]:
    hidden, rows = h.shape[-1], h.size // h.shape[-1]
    dx, dweight = empty(h.shape, h.dtype, like=h), empty((hidden,), weight.dtype, like=h)
    dbias = None if bias is None else empty((hidden,), bias.dtype, like=h)
    constants = _constants(
        h.dtype,
        weight.dtype,
        None if bias is None else bias.dtype,
        dh is not None,
        hidden,
        lanes(hidden, h, dy, dh, weight),
        True,
    )
    # as many blocks as the device holds at once, so that each sums many rows before it writes
    blocks = -(-rows * constants["ROW_THREADS"] // constants["THREADS"])
    blocks = min(blocks, processors(h) * constants["RESIDENT"])
    partial = empty((1 if bias is None else 2, blocks, hidden), np.float32, like=h)
    kernel = load("layer_norm.cu", "layer_norm_backward", h, constants)
    kernel[blocks, constants["THREADS"]](dy, dh, h, weight, mean, rstd, dx, partial, rows)

    dtypes = rms_norm._sum_constants(constants["W"], constants["B"])
    kernel = load("column_sum.cu", "column_sum", h, dtypes)
    warps = min(32, -(-blocks // 2))  # a warp adds at least 2 rows
    grid = (-(-hidden // 32), len(partial))
    kernel[grid, 32 * warps](partial, dweight, dbias, blocks, hidden)
    return dx, dweight, dbias, None if residual is None else dx
