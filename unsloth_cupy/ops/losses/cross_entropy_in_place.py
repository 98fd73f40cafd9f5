"""Cross entropy and its gradient in one pass, which writes the gradient over the logits.

loss = cross_entropy(logits, labels)        logits <- dloss * (d loss / d logits)

It is for training loops in which the gradient of each loss (dloss) is known in advance, as it is
for a mean.  The logits are read once and written once, and there is no second array of their size.
"""

import numbers
import reprlib
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.call import is_number
from ...core.dtypes import FLOAT32, Array
from ...core.op import op
from ...errors import ConfigError
from ..common.in_place import check_writable
from ._launch import launch_both, refused
from ._rows import Options, check_labels, check_options, logit_gradients, losses


def cross_entropy_(
    logits: Array,
    labels: Array,
    dloss: Array | float = 1.0,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weights: Array | None = None,
) -> Array:
    """Return ``cross_entropy`` and write the gradient of the logits over the logits.

    The logits become ``dloss * (d loss / d logits)``, row by row, rounded once; 0 in rows whose
    label is ignore.

    Parameters
    ----------
    logits : (*rows, vocab) float
        The scores before the softmax; overwritten with their gradient.
    labels : (*rows) int32 or int64
        Each in 0 .. vocab - 1, or equal to ignore.
    dloss : (*rows) float32, or float64 for float64 logits; or a number for all rows
        The gradient of each loss: ``1 / count`` for the mean of the losses.
    ignore, smoothing, z_loss, softcap, class_weights
        As in ``cross_entropy``.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 logits
        The loss of each row in nats; not summed, averaged or weighted by dloss.

    Raises
    ------
    ConfigError
        The logits cannot be written to, or an option is out of its range.
    GradientError
        The logits are on a tape, whose record a change would invalidate.
    RangeError, ShapeError, DTypeError
        As ``cross_entropy``; the logits are then unchanged.
    """
    check_writable("cross_entropy_", "call cross_entropy", logits=logits)
    weights: Any = dloss
    scalar = isinstance(weights, numbers.Real)
    if scalar and not is_number(weights):
        problem = f"cross_entropy_(dloss={reprlib.repr(weights)})"
        raise ConfigError(f"{problem}: dloss must be an array or a finite number")
    return cross_entropy_over_(
        logits,
        labels,
        None if scalar else weights,
        class_weights=class_weights,
        scale=float(weights) if scalar else 1.0,
        ignore=ignore,
        smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
    )


@op(
    "logits(*rows, vocab), labels(*rows): int, dloss?(*rows): stat,"
    " class_weights?(vocab): table -> loss(*rows): stat",
    widen=False,  # the gradient would be written to the widened copy, not to the logits
    no_gradient="it returns a gradient, and changes arrays that a tape would save",
    traffic=lambda a: 2 * a["logits"].nbytes + a["labels"].nbytes + a["loss"].nbytes,
)
def cross_entropy_over_(
    logits: Array,
    labels: Array,
    dloss: Array | None = None,
    *,
    class_weights: Array | None = None,
    scale: float = 1.0,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Array:
    """Return the loss, and write the gradient over the logits."""
    options = Options(ignore, smoothing, z_loss, softcap, class_weights)
    check_labels("cross_entropy_", labels, ignore, logits.shape[-1], class_weights)
    wide = logits.astype(np.promote_types(logits.dtype, FLOAT32), copy=False)
    loss, lse = losses(wide, labels, options)
    dloss = np.full_like(loss, scale) if dloss is None else scale * dloss
    with np.errstate(over="ignore"):  # values beyond float16 become inf, as on a GPU
        logits[...] = logit_gradients(
            wide, labels, lse, dloss, None, options, np.empty_like(wide, order="C")
        )
    return loss


@cross_entropy_over_.kernel
def _launch(
    logits: Array,
    labels: Array,
    dloss: Array | None,
    scale: float,
    **options: Any,
) -> Array:
    """Return the loss from the kernel, which writes the gradient over the logits."""
    chosen = Options(**options)
    if (refusal := refused(chosen)) is not None:
        return refusal
    labels, dloss = contiguous(labels), None if dloss is None else contiguous(dloss)
    rows = contiguous(logits)  # the logits themselves if they are contiguous
    loss = empty(labels.shape, np.float32, like=logits)
    launch_both(rows, labels, dloss, scale, chosen, loss, out=rows)
    if rows is not logits:
        logits[...] = rows
    return loss


cross_entropy_over_.require(check_options)
