"""Cross entropy of a linear layer, whose logits never exist as a whole.

loss = cross_entropy(x weight^T, labels), chunk by chunk of rows; backward makes logits anew

Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024.
"""

from collections.abc import Set
from typing import Any

import numpy as np

from ...core.arrays import empty, packed
from ...core.dtypes import FLOAT32, Array
from ...core.op import op
from ._head import chunks, gradients
from ._launch import launch_gradients, launch_losses
from ._rows import Options, check_labels, check_options, logit_gradients, losses


def linear_cross_entropy(
    x: Array,
    weight: Array,
    labels: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> Array:
    """Return ``cross_entropy(linear(x, weight), labels)`` in little memory.

    Parameters
    ----------
    x : (*rows, hidden) float
        Rows of the last layer.
    weight : (vocab, hidden) float
        The output head; its gradient is accumulated in float32.
    labels : (*rows) int32 or int64
        Each in 0 .. vocab - 1, or equal to ignore.
    ignore, smoothing, z_loss, softcap
        As in ``cross_entropy``.
    max_bytes : int, optional
        Most bytes of logits, and of their gradient, at a time, though never less than one row;
        512 MiB where absent.  Logits are float32, and their gradient lies over them, or beside
        them in 16 bits where x has as many.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        In nats; neither summed nor averaged; 0 where the label is ignore.

    Raises
    ------
    RangeError
        A label is neither in the vocabulary nor equal to ignore.  On a GPU, whose labels nobody
        reads, its loss is NaN, and the next ``check_errors()`` raises.
    ConfigError
        An option is out of its range.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import cross_entropy, linear, linear_cross_entropy
    >>> from unsloth_cupy import linear_cross_entropy_backward, linear_cross_entropy_forward
    >>> from unsloth_cupy import linear_cross_entropy_gradients
    >>> weight = np.random.default_rng(0).standard_normal((50, 16), np.float32)
    >>> x, labels = weight[:6], np.arange(6)
    >>> loss = linear_cross_entropy(x, weight, labels)  # no array of all logits is made
    >>> expected = cross_entropy(linear(x, weight), labels)
    >>> np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
    >>> loss, lse = linear_cross_entropy_forward(x, weight, labels)
    >>> dloss = np.ones_like(loss)
    >>> dx, dweight, _ = linear_cross_entropy_backward(dloss, None, x, weight, labels, lse)
    >>> loss, dx, dweight = linear_cross_entropy_gradients(x, weight, labels)  # logits once
    """
    return linear_cross_entropy_forward(
        x,
        weight,
        labels,
        ignore=ignore,
        smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
        max_bytes=max_bytes,
    )[0]


@op(
    "x(*rows, hidden), weight(vocab, hidden), labels(*rows): int"
    " -> loss(*rows): stat, lse(*rows): stat",
    widen=False,
    torch=lambda nn, t, o: nn.cross_entropy(
        nn.linear(t["x"], t["weight"]), t["labels"], reduction="none"
    ),  # products take 16-bit operands as they are
    operations=lambda a: 2 * a["x"].size * a["weight"].shape[0],
)
def linear_cross_entropy_forward(
    x: Array,
    weight: Array,
    labels: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> tuple[Array, Array]:
    """Return loss as linear_cross_entropy does, and lse, for the backward op."""
    options = Options(ignore, smoothing, z_loss, softcap)
    check_labels("linear_cross_entropy", labels, ignore, len(weight))
    flat, wide = labels.reshape(-1), np.promote_types(x.dtype, FLOAT32)
    loss, lse = (np.empty_like(x, wide, shape=flat.shape) for _ in range(2))
    for part, logits in chunks(x, weight, max_bytes):
        loss[part], lse[part] = losses(logits, flat[part], options)
    return loss.reshape(labels.shape), lse.reshape(labels.shape)


@linear_cross_entropy_forward.kernel
def _launch(
    x: Array,
    weight: Array,
    labels: Array,
    max_bytes: int | None,
    **options: Any,
) -> tuple[Array, Array]:
    loss, lse = (empty(labels.shape, np.float32, like=x) for _ in range(2))
    flat, loss_rows, lse_rows = packed(labels).reshape(-1), loss.reshape(-1), lse.reshape(-1)
    for part, logits in chunks(x, weight, max_bytes):
        launch_losses(logits, flat[part], Options(**options), loss_rows[part], lse_rows[part])
    return loss, lse


@linear_cross_entropy_forward.gradient(widen=False)
def linear_cross_entropy_backward(
    dloss: Array,
    dlse: Array | None,
    x: Array,
    weight: Array,
    labels: Array,
    lse: Array,
    *,
    max_bytes: int | None = None,
    wanted: Set[str] | None = None,
    **options: Any,
) -> tuple[Array | None, Array | None, None]:
    """Return the gradients of x and weight; None for one that is not ``wanted``."""
    chosen = Options(**options)
    check_labels("linear_cross_entropy_backward", labels, chosen.ignore, len(weight))
    labels, lse, dloss = (array.reshape(-1) for array in (labels, lse, dloss))
    dlse = None if dlse is None else dlse.reshape(-1)

    def write(part: slice, logits: Array, out: Array) -> None:
        own = labels[part], lse[part], dloss[part], None if dlse is None else dlse[part]
        logit_gradients(logits, *own, chosen, out)

    return *gradients(x, weight, max_bytes, write, beside=False, wanted=wanted), None


@linear_cross_entropy_backward.kernel
def _launch_backward(
    dloss: Array,
    dlse: Array | None,
    x: Array,
    weight: Array,
    labels: Array,
    lse: Array,
    max_bytes: int | None,
    wanted: Set[str] | None,
    **options: Any,
) -> tuple[Array | None, Array | None, None]:
    labels, lse, dloss = (packed(array).reshape(-1) for array in (labels, lse, dloss))
    dlse = None if dlse is None else packed(dlse).reshape(-1)

    def write(part: slice, logits: Array, out: Array) -> None:
        own = labels[part], lse[part], dloss[part], None if dlse is None else dlse[part]
        launch_gradients(logits, *own, Options(**options), out)

    beside = x.dtype != FLOAT32
    return *gradients(x, weight, max_bytes, write, beside=beside, wanted=wanted), None


linear_cross_entropy_forward.require(check_options)
linear_cross_entropy_backward.require(check_options)


linear_cross_entropy_backward.facts["operations"] = lambda a: (
    2
    * a["x"].size
    * a["weight"].shape[0]
    * (1 + sum(a.get(n) is not None for n in ("dx", "dweight")))
)
