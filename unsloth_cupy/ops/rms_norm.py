"""Root-mean-square normalisation.

y = h * rstd * (weight + offset) + bias        h = x + residual,  rstd = 1 / sqrt(mean(h**2) + eps)

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

import numpy as np

from .._op import op
from .._typing import Array


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
    """Return y as rms_norm does; h, which the next layer adds to; rstd, for the backward op."""
    h = x if residual is None else x + residual
    rstd = 1 / np.sqrt(np.mean(h * h, axis=-1) + eps)
    y = h * rstd[..., None] * (weight + offset)
    return y if bias is None else y + bias, h, rstd


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
    hhat, g = h * rstd[..., None], dy * (weight + offset)
    dx = rstd[..., None] * (g - hhat * np.mean(g * hhat, axis=-1, keepdims=True))
    dx = dx if dh is None else dx + dh
    rows = tuple(range(dy.ndim - 1))
    dbias = None if bias is None else dy.sum(axis=rows)
    return dx, (dy * hhat).sum(axis=rows), None if residual is None else dx, dbias
