"""Cross entropy of a linear layer, whose logits never exist as a whole.

loss = cross_entropy(x weight^T, labels), chunk by chunk of rows; backward makes logits anew

Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024.
"""

from collections.abc import Iterator

import numpy as np

from .._op import op
from .._typing import Array
from ..errors import ConfigError
from .cross_entropy import capped, check_labels, check_options, losses, slopes
from .linear import accumulate, flat

CHUNK_BYTES = 64 * 2**20  # of logits: enough rows for the matrix product to run at full speed


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
        Most bytes of logits, and of their like, at a time, though never less than one row;
        64 MiB where absent.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        In nats; neither summed nor averaged; 0 where the label is ignore.

    Raises
    ------
    RangeError
        A label is neither in the vocabulary nor equal to ignore.
    ConfigError
        An option is out of its range.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
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
    " -> loss(*rows): stat, lse(*rows): stat"
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
    check_options("linear_cross_entropy", smoothing, z_loss, softcap)
    check_labels("linear_cross_entropy", labels, ignore, len(weight))
    loss, lse = (np.empty_like(x, shape=(labels.size,)) for _ in range(2))
    for part, logits in _chunks(flat(x), weight, max_bytes):
        z = logits if softcap is None else capped(logits, softcap, logits)
        loss[part], lse[part] = losses(z, labels.ravel()[part], ignore, smoothing, z_loss, z)
    return loss.reshape(labels.shape), lse.reshape(labels.shape)


@linear_cross_entropy_forward.gradient(
    "dloss(*rows): stat, dlse?(*rows): stat, x(*rows, hidden), weight(vocab, hidden),"
    " labels(*rows): int, lse(*rows): stat"
    " -> dx(*rows, hidden), dweight(vocab, hidden), dlabels: none"
)
def linear_cross_entropy_backward(
    dloss: Array,
    dlse: Array | None,
    x: Array,
    weight: Array,
    labels: Array,
    lse: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> tuple[Array, Array, None]:
    """Return the gradients of x and weight."""
    check_options("linear_cross_entropy_backward", smoothing, z_loss, softcap)
    check_labels("linear_cross_entropy_backward", labels, ignore, len(weight))
    rows, target, size, seed = flat(x), labels.ravel(), lse.ravel(), dloss.ravel()
    lse_seed = None if dlse is None else dlse.ravel()
    dx, dweight = np.empty_like(rows), np.zeros_like(weight)
    arrays = 1 if softcap is None else 2  # slopes keeps the derivative of the cap beside them
    for part, logits in _chunks(rows, weight, max_bytes, arrays):
        dlogits = slopes(
            logits,
            target[part],
            size[part],
            seed[part],
            None if lse_seed is None else lse_seed[part],
            ignore,
            smoothing,
            z_loss,
            softcap,
            out=logits,
        )
        np.matmul(dlogits, weight, out=dx[part])
        accumulate(dweight, dlogits, rows[part])
    return dx.reshape(x.shape), dweight, None


def _chunks(
    rows: Array, weight: Array, max_bytes: int | None, arrays: int = 1
) -> Iterator[tuple[slice, Array]]:
    """Yield slices of rows and their logits, all in one buffer, so small that arrays of it fit."""
    most = CHUNK_BYTES if max_bytes is None else max_bytes
    if most <= 0:
        raise ConfigError(f"linear_cross_entropy(max_bytes={max_bytes}): it must be positive")
    step = max(1, min(len(rows), most // max(1, arrays * len(weight) * rows.itemsize)))
    buffer = np.empty_like(rows, shape=(step, len(weight)), order="C")
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        logits = buffer[: len(rows[part])]
        yield part, np.matmul(rows[part], weight.T, out=logits)
