"""Cross entropy of a linear layer and its gradients, which computes the logits once, not twice.

loss = cross_entropy(x weight^T, labels)        dx, dweight of sum(dloss * loss)

It is for training loops in which the gradient of each loss (dloss) is known in advance, as it is
for a mean.  It has three matrix products; ``linear_cross_entropy`` on a tape has four.
"""

from collections.abc import Set
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, Array
from ...core.op import op
from ...errors import ConfigError
from ._head import check_max_bytes, gradients, operations
from ._launch import launch_both, refused
from ._rows import Options, check_labels, check_options, logit_gradients, losses


@op(
    "x(*rows, hidden), weight(vocab, hidden): weight, labels(*rows): int,"
    " dloss?(*rows): stat,"
    " class_weights?(vocab): table"
    " -> loss(*rows): stat, dx(*rows, hidden), dweight(vocab, hidden)",
    widen=False,  # products take 16-bit operands as they are
    operations=operations,
    no_gradient="it returns the gradients",
)
def linear_cross_entropy_gradients(
    x: Array,
    weight: Array,
    labels: Array,
    dloss: Array | None = None,
    *,
    class_weights: Array | None = None,
    scale: float = 1.0,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """Return ``linear_cross_entropy`` and the gradients of x and weight.

    Parameters
    ----------
    x, weight, labels
        As in ``linear_cross_entropy``.
    dloss : (*rows) float32, or float64 for float64 arrays, optional
        The gradient of each loss, without scale; 1 by default.
    scale : float
        Factor of dloss: ``1 / count`` for the mean of the losses.
    class_weights, ignore, smoothing, z_loss, softcap, max_bytes
        As in ``linear_cross_entropy``.
    wanted : set of str, optional
        Which gradients to compute; the other one is None.  ``{"x"}`` for a frozen head,
        ``{"weight"}`` if x needs no gradient.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        The loss of each row in nats; not summed, averaged or weighted by dloss.
    dx : (*rows, hidden) float
        The gradient of x.
    dweight : (vocab, hidden) float
        The gradient of weight, summed in float32 and rounded once.

    Raises
    ------
    RangeError, ConfigError, ShapeError, DTypeError
        As ``linear_cross_entropy``.
    """
    options = Options(ignore, smoothing, z_loss, softcap, class_weights)
    check_labels("linear_cross_entropy_gradients", labels, ignore, len(weight), class_weights)
    flat, wide = labels.reshape(-1), np.promote_types(x.dtype, FLOAT32)
    loss = np.empty_like(x, wide, shape=flat.shape)
    scaled = np.full_like(loss, scale) if dloss is None else scale * dloss.reshape(-1)

    def write(part: slice, logits: Array, out: Array) -> None:
        loss[part], lse = losses(logits, flat[part], options)
        logit_gradients(logits, flat[part], lse, scaled[part], None, options, out)

    dx, dweight = gradients(x, weight, max_bytes, write, own_buffer=False, wanted=wanted)
    return loss.reshape(labels.shape), dx, dweight


@linear_cross_entropy_gradients.kernel
def _launch(
    x: Array,
    weight: Array,
    labels: Array,
    dloss: Array | None,
    scale: float,
    max_bytes: int | None,
    wanted: Set[str] | None,
    **options: Any,
) -> tuple[Array, Array | None, Array | None]:
    """Return loss, dx and dweight, with both results for each chunk from one kernel."""
    chosen = Options(**options)
    if (refusal := refused(chosen)) is not None:
        return refusal
    loss, flat = empty(labels.shape, np.float32, like=x), contiguous(labels).reshape(-1)
    loss_rows, dloss = loss.reshape(-1), None if dloss is None else contiguous(dloss).reshape(-1)

    def write(part: slice, logits: Array, out: Array) -> None:
        weights = None if dloss is None else dloss[part]
        launch_both(logits, flat[part], weights, scale, chosen, loss_rows[part], out)

    own_buffer = x.dtype != FLOAT32  # float32 gradients are written over the logits
    dx, dweight = gradients(x, weight, max_bytes, write, own_buffer=own_buffer, wanted=wanted)
    return loss, dx, dweight


linear_cross_entropy_gradients.require(check_options)
linear_cross_entropy_gradients.require(check_max_bytes)


@linear_cross_entropy_gradients.require
def _check_wanted(call: str, wanted: Any) -> None:
    """Raise ConfigError unless wanted is None or a set of x and weight."""
    if wanted is not None and not (isinstance(wanted, Set) and wanted <= {"x", "weight"}):
        cure = "pass {'x'}, {'weight'}, or None for both gradients"
        raise ConfigError(f"{call}: wanted={wanted!r}; {cure}")
