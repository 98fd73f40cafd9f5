"""Layer normalisation.

y = (h - mean) * rstd * weight + bias      h = x + residual,  rstd = 1 / sqrt(var(h) + eps)

Ba, Kiros and Hinton, Layer Normalization, 2016.
"""

from collections.abc import Set

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ..common.checks import check_eps
from ._norm import backward, forward, needs_sums, only


def layer_norm(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    residual: Array | None = None,
) -> Array:
    """Normalise each row of ``h = x + residual`` to mean 0 and variance 1; scale it by weight.

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
    >>> from unsloth_cupy import layer_norm, layer_norm_backward, layer_norm_forward
    >>> x = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    >>> weight, bias = np.ones(64, np.float32), np.zeros(64, np.float32)
    >>> y = layer_norm(x, weight, bias)
    >>> np.testing.assert_allclose(y.mean(axis=1), 0, rtol=1e-5, atol=1e-5)
    >>> y, h, mean, rstd = layer_norm_forward(x, weight, bias)
    >>> dx, dweight, dbias, _ = layer_norm_backward(y, None, h, weight, bias, None, mean, rstd)
    """
    return layer_norm_forward(x, weight, bias, residual, eps=eps)[0]


@op(
    "x(*rows, hidden), weight(hidden): param, bias?(hidden): param, residual?(*rows, hidden)"
    " -> y(*rows, hidden), h(*rows, hidden) = x + residual, mean(*rows): stat, rstd(*rows): stat",
    torch=lambda nn, t, o: nn.layer_norm(t["x"], t["weight"].shape, t["weight"], None, o["eps"]),
)
def layer_norm_forward(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Array, Array, Array, Array]:
    """Return y as layer_norm does, h for the next residual, and mean and rstd for backward.

    Without a residual, h may share the memory of x: copy it before writing to either.
    """
    h = x if residual is None else x + residual
    hidden = max(1, x.shape[-1])  # without columns all sums are 0
    mean = h.sum(axis=-1) / hidden
    y = h - mean[..., None]
    rstd = 1 / np.sqrt(np.square(y).sum(axis=-1) / hidden + eps)
    y *= rstd[..., None]
    y *= weight
    if bias is not None:
        y += bias
    return y, h, mean, rstd


layer_norm_forward.require(check_eps)


@layer_norm_forward.kernel(strided=("x", "residual"))
def _launch_forward(
    x: Array, weight: Array, bias: Array | None, residual: Array | None, eps: float
) -> tuple[Array, Array, Array, Array]:
    """Launch norm_forward with means."""
    return forward(x, weight, residual, bias, eps=eps, centred=True)


@layer_norm_forward.gradient
def layer_norm_backward(
    dy: Array,
    dh: Array | None,
    h: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    mean: Array,
    rstd: Array,
    *,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """Return the gradients of x, weight, bias and residual; x and residual share one array.

    dy and dh are the upstream gradients of y and h; None stands for a dh of 0.  Gradients that are
    not ``wanted`` are None.
    """
    weights = needs_sums(wanted)
    rows, hidden = tuple(range(dy.ndim - 1)), max(1, h.shape[-1])
    hhat = h - mean[..., None]
    hhat *= rstd[..., None]
    dx = dy * hhat
    dweight = dx.sum(axis=rows) if weights else None
    dx *= weight
    hhat *= dx.sum(axis=-1, keepdims=True) / hidden
    np.multiply(dy, weight, out=dx)
    dx -= dx.sum(axis=-1, keepdims=True) / hidden
    dx -= hhat
    dx *= rstd[..., None]
    if dh is not None:
        dx += dh
    dbias = None if bias is None or not weights else dy.sum(axis=rows)
    own = {"bias": dbias, "residual": None if residual is None else dx}
    return only(wanted, x=dx, weight=dweight, **own)


@layer_norm_backward.kernel(strided=("dy", "dh", "h"))
def _launch_backward(
    dy: Array,
    dh: Array | None,
    h: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    mean: Array,
    rstd: Array,
    wanted: Set[str] | None,
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """Launch norm_backward with means."""
    dx, dweight, dbias, _ = backward(dy, dh, h, weight, bias, mean, rstd, wanted=wanted)
    own = {"bias": dbias, "residual": None if residual is None else dx}
    return only(wanted, x=dx, weight=dweight, **own)


# h has the shape of residual, of which backward reads only whether it is None
layer_norm_backward.facts["alike"] = {"residual": "h"}
