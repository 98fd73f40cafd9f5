"""Cross entropy of a softmax over the last axis.

loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse**2
lse = log(sum(exp(z)))        z = softcap * tanh(logits / softcap), or the logits

Label smoothing: Szegedy et al., 2016.  z_loss: Chowdhery et al., PaLM, 2022.
"""

from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ._launch import launch_gradients, launch_losses, refused
from ._rows import Options, check_labels, check_options, logit_gradients, losses


def cross_entropy(
    logits: Array,
    labels: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weights: Array | None = None,
) -> Array:
    """Return the cross entropy of each row: ``-log(softmax(z)[label])`` with default options.

    ``loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse**2``,
    with ``lse = log(sum(exp(z)))`` and ``z = softcap * tanh(logits / softcap)``.  With weights w
    of the classes it is ``(1 - smoothing) * w[label] * (lse - z[label])
    + smoothing * mean(w * (lse - z)) + z_loss * lse**2``.

    Parameters
    ----------
    logits : (*rows, vocab) float
        The scores before the softmax.
    labels : (*rows) int32 or int64
        Each in 0 .. vocab - 1, or equal to ignore.
    ignore : int
        Rows with this label have a loss and a gradient of 0, even if their logits are NaN.
    smoothing : float
        Label smoothing: the share of the target probability, in [0, 1], that is spread evenly over
        the vocabulary.
    z_loss : float
        Weight of the term ``lse**2``, which keeps logits near 0.
    softcap : float, optional
        Bound of the absolute values of z; None for no bound.
    class_weights : (vocab,) dtype of logits or float32, optional
        Factor of the loss of each class, 0 or more, as ``weight`` in torch; a constant.  Torch's
        mean is ``loss.sum() / class_weights[labels].sum()``, without rows whose label is ignore.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 logits
        The loss of each row in nats; neither summed nor averaged.

    Raises
    ------
    RangeError
        A label is neither in the vocabulary nor equal to ignore.  On a GPU the host does not read
        the labels: the loss of that row is NaN, and the next ``check_errors()`` raises.
    ConfigError
        An option is out of its range; a class weight is NaN, infinite or negative (on a GPU the
        loss of its rows is then NaN).
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import cross_entropy, cross_entropy_, cross_entropy_backward
    >>> from unsloth_cupy import cross_entropy_forward
    >>> logits, labels = np.zeros((3, 10), np.float32), np.array([1, 7, -100])  # one is ignored
    >>> loss, lse = cross_entropy_forward(logits, labels)
    >>> np.testing.assert_allclose(loss, [np.log(10), np.log(10), 0], rtol=1e-6)
    >>> np.testing.assert_array_equal(loss, cross_entropy(logits, labels))
    >>> dlogits, _ = cross_entropy_backward(np.ones_like(loss), None, logits, labels, lse)
    >>> loss = cross_entropy_(logits, labels)  # writes the gradient over the logits
    >>> np.testing.assert_allclose(logits, dlogits, atol=1e-7)
    """
    return cross_entropy_forward(
        logits, labels, class_weights=class_weights, ignore=ignore, smoothing=smoothing,
        z_loss=z_loss, softcap=softcap,
    )[0]  # fmt: skip


@op(
    "logits(*rows, vocab), labels(*rows): int, class_weights?(vocab): table"
    " -> loss(*rows): stat, lse(*rows): stat",
    autocast="float32",
    torch=lambda nn, t, o: nn.cross_entropy(
        t["logits"], t["labels"], t.get("class_weights"), reduction="none"
    ),
)
def cross_entropy_forward(
    logits: Array,
    labels: Array,
    *,
    class_weights: Array | None = None,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Return the loss of cross_entropy, and lse, which the backward op needs."""
    options = Options(ignore, smoothing, z_loss, softcap, class_weights)
    check_labels("cross_entropy", labels, ignore, logits.shape[-1], class_weights)
    return losses(logits, labels, options)


@cross_entropy_forward.kernel
def _launch(
    logits: Array,
    labels: Array,
    **options: Any,
) -> tuple[Array, Array]:
    """Return loss and lse from the kernel."""
    chosen = Options(**options)
    if (refusal := refused(chosen)) is not None:
        return refusal
    loss, lse = (empty(labels.shape, np.float32, like=logits) for _ in range(2))
    launch_losses(logits, labels, chosen, loss, lse)
    return loss, lse


@cross_entropy_forward.gradient
def cross_entropy_backward(
    dloss: Array,
    dlse: Array | None,
    logits: Array,
    labels: Array,
    lse: Array,
    **options: Any,
) -> tuple[Array, None]:
    """Return the gradient of the logits."""
    chosen = Options(**options)
    check_labels(
        "cross_entropy_backward", labels, chosen.ignore, logits.shape[-1], chosen.class_weights
    )
    out = np.empty_like(logits, order="C")
    return logit_gradients(logits, labels, lse, dloss, dlse, chosen, out), None


@cross_entropy_backward.kernel
def _launch_backward(
    dloss: Array,
    dlse: Array | None,
    logits: Array,
    labels: Array,
    lse: Array,
    **options: Any,
) -> tuple[Array, None]:
    """Return the gradient of the logits from the kernel."""
    chosen = Options(**options)
    if (refusal := refused(chosen)) is not None:
        return refusal
    dlogits = empty(logits.shape, logits.dtype, like=logits)
    launch_gradients(logits, labels, lse, dloss, dlse, chosen, dlogits)
    return dlogits, None


cross_entropy_forward.require(check_options)
cross_entropy_backward.require(check_options)
