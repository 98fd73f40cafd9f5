"""Root-mean-square normalisation.

y = h * rstd * (weight + offset) + bias        h = x + residual,  rstd = 1 / sqrt(mean(h**2) + eps)

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from collections.abc import Set

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ..common.checks import check_eps
from ._norm import backward, forward, needs_sums, only


def rms_norm(
    x: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    residual: Array | None = None,
    bias: Array | None = None,
    offset: float = 0.0,
) -> Array:
    """Normalise each row of ``h = x + residual`` to mean square 1, then scale it by weight.

    ``y = h / sqrt(mean(h**2) + eps) * (weight + offset) + bias``, where the mean is over the last
    axis.

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
        Added to the scaled rows.
    offset : float
        Added to weight.  Pass 1.0 if the checkpoint stores the weight minus 1, as Gemma's does.

    Returns
    -------
    y : (*rows, hidden) float
        The normalised rows.

    Raises
    ------
    ConfigError
        eps is negative.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import rms_norm, rms_norm_backward, rms_norm_forward
    >>> x = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    >>> weight = np.ones(64, np.float32)
    >>> np.testing.assert_allclose((rms_norm(x, weight) ** 2).mean(axis=1), 1, rtol=1e-4)
    >>> y, h, rstd = rms_norm_forward(x, weight, residual=x)  # of h = x + residual
    >>> np.testing.assert_array_equal(h, 2 * x)
    >>> y, h, rstd = rms_norm_forward(x, weight)
    >>> dx, dweight, *_ = rms_norm_backward(y, None, h, weight, None, None, rstd)
    """
    return rms_norm_forward(x, weight, residual, bias, eps=eps, offset=offset)[0]


@op(
    "x(*rows, hidden), weight(hidden): param, residual?(*rows, hidden), bias?(hidden): param"
    " -> y(*rows, hidden), h(*rows, hidden) = x + residual, rstd(*rows): stat",
    torch=lambda nn, t, o: nn.rms_norm(t["x"], t["weight"].shape, t["weight"], o["eps"]),
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
    """Return y as rms_norm does, h for the next residual, and rstd for backward.

    Without a residual, h may share the memory of x: copy it before writing to either.
    """
    h = x if residual is None else x + residual
    y = h * h
    # max: without columns rstd is 1 / sqrt(eps), not a division by 0
    rstd = 1 / np.sqrt(y.sum(axis=-1) / max(h.shape[-1], 1) + eps)
    np.multiply(h, rstd[..., None], out=y)
    y *= weight + offset
    if bias is not None:
        y += bias
    return y, h, rstd


rms_norm_forward.require(check_eps)


@rms_norm_forward.kernel(strided=("x", "residual"))
def _launch_forward(
    x: Array, weight: Array, residual: Array | None, bias: Array | None, eps: float, offset: float
) -> tuple[Array, Array, Array]:
    """Launch norm_forward without means."""
    y, h, _, rstd = forward(x, weight, residual, bias, eps=eps, offset=offset)
    return y, h, rstd


@rms_norm_forward.gradient
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
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """Return the gradients of x, weight, residual and bias; x and residual share one array.

    dy and dh are the upstream gradients of y and h; None stands for a dh of 0.  Gradients that are
    not ``wanted`` are None.
    """
    weights = needs_sums(wanted)
    rows, scale = tuple(range(dy.ndim - 1)), weight + offset
    hhat = h * rstd[..., None]
    dx = dy * hhat
    dweight = dx.sum(axis=rows) if weights else None
    dx *= scale
    hhat *= dx.sum(axis=-1, keepdims=True) / max(h.shape[-1], 1)
    np.multiply(dy, scale, out=dx)
    dx -= hhat
    dx *= rstd[..., None]
    if dh is not None:
        dx += dh
    dbias = None if bias is None or not weights else dy.sum(axis=rows)
    own = {"weight": dweight, "residual": None if residual is None else dx, "bias": dbias}
    return only(wanted, x=dx, **own)


@rms_norm_backward.kernel(strided=("dy", "dh", "h"))
def _launch_backward(
    dy: Array,
    dh: Array | None,
    h: Array,
    weight: Array,
    residual: Array | None,
    bias: Array | None,
    rstd: Array,
    offset: float,
    wanted: Set[str] | None,
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """Launch norm_backward without means."""
    arrays = dy, dh, h, weight, bias, None, rstd
    dx, dweight, dbias, _ = backward(*arrays, offset=offset, wanted=wanted)
    own = {"weight": dweight, "residual": None if residual is None else dx, "bias": dbias}
    return only(wanted, x=dx, **own)


# h has the shape of residual, of which backward reads only whether it is None
rms_norm_backward.facts["alike"] = {"residual": "h"}
