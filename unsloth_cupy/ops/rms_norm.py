"""Root-mean-square normalisation.

y = h * rstd * (weight + offset) + bias        h = x + residual,  rstd = 1 / sqrt(mean(h**2) + eps)

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from functools import cache
from typing import Any

import numpy as np

from .._arrays import empty, lanes
from .._jit import Constants, load
from .._op import op
from .._typing import Array
from ..errors import ConfigError
from ._device import processors


def rms_norm(
    x: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    residual: Array | None = None,
    bias: Array | None = None,
    offset: float = 0.0,
) -> Array:
    """Scale each row of ``h = x + residual`` to unit mean square, then by weight.

    ``y = h / sqrt(mean(h**2) + eps) * (weight + offset) + bias``, the mean over the last axis.

    Parameters
    ----------
    x : (*rows, hidden) float
        Rows to normalise.
    weight : (hidden,) dtype of x or float32
        Scale of each column.
    eps : float
        Added to the mean square, in units of x squared.
    residual : (*rows, hidden) float, optional
        Added to x first.
    bias : (hidden,) dtype of x or float32, optional
        Added last.
    offset : float
        1.0 where the weight is stored minus one, as in Gemma.

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
    return rms_norm_forward(x, weight, residual, bias, eps=eps, offset=offset)[0]


@op(
    "x(*rows, hidden), weight(hidden): param, residual?(*rows, hidden), bias?(hidden): param"
    " -> y(*rows, hidden), h(*rows, hidden), rstd(*rows): stat"
)
def rms_norm_forward(
    x: Array,
    weight: Array,
    residual: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Return y as rms_norm does; h, which the next layer adds to; rstd, for the backward op.

    Without a residual, h may lie in the memory of x: copy it before writing to either.
    """
    _check(eps)
    h = x if residual is None else x + residual
    y = h * h
    rstd = 1 / np.sqrt(y.sum(axis=-1) / max(h.shape[-1], 1) + eps)  # 1: no columns
    np.multiply(h, rstd[..., None], out=y)
    y *= weight + offset
    if bias is not None:
        y += bias
    return y, h, rstd


@cache
def _constants(
    x: Any, weight: Any, bias: Any, residual: bool, hidden: int, lanes: int, backward: bool
) -> Constants:
    """Return the constants of rms_norm.cu for these dtypes (bias None: there is none) and rows.

    A thread holds 16 values of a row: two 16-byte accesses in flight for 16-bit dtypes, four for
    float32, and few enough registers for 512 to 768 threads an SM in the backward kernel.

        hidden <= 512     a power of two of threads a row, several rows a block: no barrier
        hidden <= 8192    the block takes a row, 16 values a thread
        beyond, forward   512 threads, then 1024, hold up to 32 values each; float32 up to 16
        beyond, backward  512 threads hold up to 32 values each where 128 registers allow it
        else              rows are read twice
    """
    # of a value, backward: dw, dbias in float32; dy, h, dh as they lie in memory
    registers = 1 + (bias is not None) + (2 + residual) * max(x.itemsize / 4, 1 / lanes)
    wanted = -(-hidden // 16)
    if wanted <= 32:
        row_threads = 1 << (wanted - 1).bit_length()
    elif wanted <= 512:
        row_threads = -(-wanted // 32) * 32
    else:
        row_threads = 512 if backward or (hidden <= 16384 and x.itemsize == 2) else 1024
    threads = row_threads if row_threads > 32 else 128
    values = -(-hidden // (row_threads * lanes)) * lanes
    return Constants(
        T=x,
        W=weight,
        B=bias or weight,
        HIDDEN=hidden,
        LANES=lanes,
        ROW_THREADS=row_threads,
        THREADS=threads,
        RESIDENT=max(1, (768 if values * registers <= 64 else 512) // threads),
        KEEP=values <= (32 if x.itemsize == 2 else 16),
        KEEP_BACKWARD=values * registers <= 80,
        RESIDUAL=residual,
        BIAS=bias is not None,
    )


@cache
def _sum_constants(weight: Any, bias: Any) -> Constants:
    """Return the constants of column_sum.cu."""
    return Constants(W=weight, B=bias or weight)


@rms_norm_forward.kernel
def _launch_forward(
    x: Array,
    weight: Array,
    residual: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Array, Array, Array]:
    _check(eps)
    hidden, rows = x.shape[-1], x.size // x.shape[-1]
    y, rstd = empty(x.shape, x.dtype, like=x), empty(x.shape[:-1], np.float32, like=x)
    h = x if residual is None else empty(x.shape, x.dtype, like=x)
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
    kernel = load("rms_norm.cu", "rms_norm_forward", x, constants)
    kernel[blocks, constants["THREADS"]](
        x, weight, residual, bias, y, None if h is x else h, rstd, rows, eps, offset
    )
    return y, h, rstd


def _check(eps: float) -> None:
    if eps < 0:
        raise ConfigError(f"rms_norm(eps={eps}): eps must be 0 or more")


@rms_norm_forward.gradient(
    "dy(*rows, hidden), dh?(*rows, hidden), h(*rows, hidden), weight(hidden): param,"
    " residual?(*rows, hidden), bias?(hidden): param, rstd(*rows): stat"
    " -> dx(*rows, hidden), dweight(hidden), dresidual(*rows, hidden), dbias(hidden)"
)
def rms_norm_backward(
    dy: Array,
    dh: Array | None,
    h: Array,
    weight: Array,
    residual: Array | None,
    bias: Array | None,
    rstd: Array,
    *,
    offset: float = 0.0,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Return the gradients of x, weight, residual and bias; x and residual share theirs."""
    rows, scale = tuple(range(dy.ndim - 1)), weight + offset
    hhat = h * rstd[..., None]
    dx = dy * hhat
    dweight = dx.sum(axis=rows)
    dx *= scale
    hhat *= dx.sum(axis=-1, keepdims=True) / max(h.shape[-1], 1)
    np.multiply(dy, scale, out=dx)
    dx -= hhat
    dx *= rstd[..., None]
    if dh is not None:
        dx += dh
    dbias = None if bias is None else dy.sum(axis=rows)
    return dx, dweight, None if residual is None else dx, dbias


@rms_norm_backward.kernel
def _launch_backward(
    dy: Array,
    dh: Array | None,
    h: Array,
    weight: Array,
    residual: Array | None,
    bias: Array | None,
    rstd: Array,
    *,
    offset: float = 0.0,
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
    kernel = load("rms_norm.cu", "rms_norm_backward", h, constants)
    kernel[blocks, constants["THREADS"]](dy, dh, h, weight, rstd, dx, partial, rows, offset)

    kernel = load("column_sum.cu", "column_sum", h, _sum_constants(constants["W"], constants["B"]))
    warps = min(32, -(-blocks // 2))  # a warp adds at least 2 rows
    grid = (-(-hidden // 32), len(partial))
    kernel[grid, 32 * warps](partial, dweight, dbias, blocks, hidden)
    return dx, dweight, None if residual is None else dx, dbias
