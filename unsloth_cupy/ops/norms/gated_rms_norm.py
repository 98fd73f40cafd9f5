"""Root-mean-square normalisation, then a gate.

y = x * rstd * weight * silu(gate)        rstd = 1 / sqrt(mean(x**2) + eps)

Dao and Gu, Transformers are SSMs, 2024; Yang et al., Gated Delta Networks, 2025.
"""

from collections.abc import Set

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ..activations.swiglu import swiglu, swiglu_backward
from ..common.checks import check_eps
from ._norm import backward, forward, needs_sums, only
from .rms_norm import rms_norm_backward


def gated_rms_norm(x: Array, gate: Array, weight: Array, *, eps: float = 1e-6) -> Array:
    """Normalise each row of x to mean square 1; multiply it by weight and by the swish of gate.

    ``y = x / sqrt(mean(x**2) + eps) * weight * gate * sigmoid(gate)``, the mean over the last axis:
    the norm comes before the gate.  All is computed in float32 and rounded once.

    Parameters
    ----------
    x : (*rows, hidden) float
        Rows to normalise; in a hybrid model, the heads of each token.
    gate : (*rows, hidden) float
        Argument of the swish, ``gate * sigmoid(gate)``.
    weight : (hidden,) dtype of x or float32
        Scale of each column.
    eps : float
        Added to the mean square, in units of x squared.

    Returns
    -------
    y : (*rows, hidden) float

    Raises
    ------
    ConfigError
        eps is negative.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import gated_rms_norm, gated_rms_norm_backward
    >>> from unsloth_cupy import gated_rms_norm_forward, rms_norm, swiglu
    >>> x, gate = np.random.default_rng(0).standard_normal((2, 4, 64), np.float32)
    >>> weight = np.ones(64, np.float32)
    >>> y = gated_rms_norm(x, gate, weight)
    >>> np.testing.assert_allclose(y, swiglu(gate, rms_norm(x, weight)), rtol=1e-5)
    >>> y, rstd = gated_rms_norm_forward(x, gate, weight)
    >>> dx, dgate, dweight = gated_rms_norm_backward(np.ones_like(y), x, gate, weight, rstd)
    """
    return gated_rms_norm_forward(x, gate, weight, eps=eps)[0]


@op(
    "x(*rows, hidden), gate(*rows, hidden), weight(hidden): param"
    " -> y(*rows, hidden), rstd(*rows): stat",
    torch=lambda nn, t, o: (
        nn.rms_norm(t["x"], t["weight"].shape, t["weight"], o["eps"]) * nn.silu(t["gate"])
    ),
)
def gated_rms_norm_forward(
    x: Array, gate: Array, weight: Array, *, eps: float = 1e-6
) -> tuple[Array, Array]:
    """Return y as gated_rms_norm does, and rstd for backward."""
    # max: without columns rstd is 1 / sqrt(eps), not a division by 0
    rstd = 1 / np.sqrt(np.square(x).sum(axis=-1) / max(x.shape[-1], 1) + eps)
    return swiglu(gate, x * rstd[..., None] * weight), rstd


gated_rms_norm_forward.require(check_eps)


@gated_rms_norm_forward.kernel(strided=("x", "gate"))
def _launch_forward(x: Array, gate: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """Launch norm_forward with a gate."""
    y, _, _, rstd = forward(x, weight, None, None, eps=eps, gate=gate)
    return y, rstd


@gated_rms_norm_forward.gradient
def gated_rms_norm_backward(
    dy: Array,
    x: Array,
    gate: Array,
    weight: Array,
    rstd: Array,
    *,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the gradients of x, gate and weight; None for gradients that are not ``wanted``."""
    dgate, dy = swiglu_backward(dy, gate, x * rstd[..., None] * weight)
    own = None if needs_sums(wanted) else {"x"}
    dx, dweight, *_ = rms_norm_backward(dy, None, x, weight, None, None, rstd, wanted=own)
    return only(wanted, x=dx, gate=dgate, weight=dweight)


@gated_rms_norm_backward.kernel(strided=("dy", "x", "gate"))
def _launch_backward(
    dy: Array,
    x: Array,
    gate: Array,
    weight: Array,
    rstd: Array,
    wanted: Set[str] | None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Launch norm_backward with a gate."""
    arrays = dy, None, x, weight, None, None, rstd
    dx, dweight, _, dgate = backward(*arrays, gate=gate, wanted=wanted)
    return only(wanted, x=dx, gate=dgate, weight=dweight)
