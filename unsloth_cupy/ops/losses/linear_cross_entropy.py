"""Cross entropy of a linear layer, without storing the full logits.

loss = cross_entropy(x weight^T, labels), by chunks of rows; backward recomputes the logits

Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024.
"""

from collections.abc import Set
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, Array
from ...core.op import op
from ._head import check_max_bytes, chunks, gradients, operations
from ._launch import launch_gradients, launch_losses, refused
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
    class_weights: Array | None = None,
    max_bytes: int | None = None,
) -> Array:
    """Return ``cross_entropy(linear(x, weight), labels)`` without storing the full logits.

    Parameters
    ----------
    x : (*rows, hidden) float
        The output of the last layer before the head.
    weight : (vocab, hidden) float, or a quantized weight
        The output head; its gradient is accumulated in float32.  A quantized weight is frozen.
    labels : (*rows) int32 or int64
        Indices in 0 .. vocab - 1, or ``ignore``.
    ignore, smoothing, z_loss, softcap, class_weights
        As in ``cross_entropy``.
    max_bytes : int, optional
        Limit on the memory for a chunk of logits and its gradient; a chunk has at least one row.
        By default 512 MiB, but at least 2,048 rows if dweight is computed.  Logits are float32; the
        gradient overwrites them or, if x has 16 bits, is written to a second buffer of 16 bits.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        The loss of each row in nats, without reduction; 0 where the label is ``ignore``.

    Raises
    ------
    RangeError
        A label is neither in the vocabulary nor equal to ignore.  On a GPU the host does not read
        the labels: the loss of that row is NaN, and the next ``check_errors()`` raises.
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
    >>> loss = linear_cross_entropy(x, weight, labels)  # the full logits are never stored
    >>> expected = cross_entropy(linear(x, weight), labels)
    >>> np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
    >>> loss, lse = linear_cross_entropy_forward(x, weight, labels)
    >>> dloss = np.ones_like(loss)
    >>> dx, dweight, _ = linear_cross_entropy_backward(dloss, None, x, weight, labels, lse)
    >>> loss, dx, dweight = linear_cross_entropy_gradients(x, weight, labels)  # one pass
    """
    return linear_cross_entropy_forward(
        x,
        weight,
        labels,
        class_weights=class_weights,
        ignore=ignore,
        smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
        max_bytes=max_bytes,
    )[0]


@op(
    "x(*rows, hidden), weight(vocab, hidden): weight, labels(*rows): int,"
    " class_weights?(vocab): table -> loss(*rows): stat, lse(*rows): stat",
    widen=False,  # products take 16-bit operands as they are
    torch=lambda nn, t, o: nn.cross_entropy(
        nn.linear(t["x"], t["weight"]), t["labels"], t.get("class_weights"), reduction="none"
    ),
    operations=operations,
)
def linear_cross_entropy_forward(
    x: Array,
    weight: Array,
    labels: Array,
    *,
    class_weights: Array | None = None,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> tuple[Array, Array]:
    """Return the loss of linear_cross_entropy, and lse, which the backward op needs."""
    options = Options(ignore, smoothing, z_loss, softcap, class_weights)
    check_labels("linear_cross_entropy", labels, ignore, len(weight), class_weights)
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
    """Return loss and lse: cuBLAS computes a chunk of logits, a kernel its losses."""
    chosen = Options(**options)
    if (refusal := refused(chosen)) is not None:
        return refusal
    loss, lse = (empty(labels.shape, np.float32, like=x) for _ in range(2))
    flat, loss_rows, lse_rows = contiguous(labels).reshape(-1), loss.reshape(-1), lse.reshape(-1)
    for part, logits in chunks(x, weight, max_bytes):
        launch_losses(logits, flat[part], chosen, loss_rows[part], lse_rows[part])
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
    """Return the gradients of x and weight; None for a gradient that is not ``wanted``."""
    chosen = Options(**options)
    check_labels(
        "linear_cross_entropy_backward", labels, chosen.ignore, len(weight), chosen.class_weights
    )
    labels, lse, dloss = (array.reshape(-1) for array in (labels, lse, dloss))
    dlse = None if dlse is None else dlse.reshape(-1)

    def write(part: slice, logits: Array, out: Array) -> None:
        inputs = labels[part], lse[part], dloss[part], None if dlse is None else dlse[part]
        logit_gradients(logits, *inputs, chosen, out)

    return *gradients(x, weight, max_bytes, write, own_buffer=False, wanted=wanted), None


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
    """Return dx and dweight, with the gradient of each chunk of logits from the kernel."""
    chosen = Options(**options)
    if (refusal := refused(chosen)) is not None:
        return refusal
    labels, lse, dloss = (contiguous(array).reshape(-1) for array in (labels, lse, dloss))
    dlse = None if dlse is None else contiguous(dlse).reshape(-1)

    def write(part: slice, logits: Array, out: Array) -> None:
        inputs = labels[part], lse[part], dloss[part], None if dlse is None else dlse[part]
        launch_gradients(logits, *inputs, chosen, out)

    own_buffer = x.dtype != FLOAT32  # float32 gradients are written over the logits
    return *gradients(x, weight, max_bytes, write, own_buffer=own_buffer, wanted=wanted), None


linear_cross_entropy_forward.require(check_options)
linear_cross_entropy_backward.require(check_options)
linear_cross_entropy_forward.require(check_max_bytes)
linear_cross_entropy_backward.require(check_max_bytes)


linear_cross_entropy_backward.facts["operations"] = operations
