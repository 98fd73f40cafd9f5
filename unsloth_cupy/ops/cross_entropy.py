"""Cross entropy of a softmax over the last axis.

loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse**2
lse = log(sum(exp(z)))        z = softcap * tanh(logits / softcap), or the logits

Label smoothing: Szegedy et al., 2016.  z_loss: Chowdhery et al., PaLM, 2022.
"""

from functools import cache
from typing import Any

import numpy as np

from .._arrays import empty, lanes
from .._jit import Constants, load
from .._op import op
from .._typing import Array
from ..errors import ConfigError, RangeError
from .softmax import finite


def cross_entropy(
    logits: Array,
    labels: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Array:
    """Return, row by row, ``-log(softmax(z)[label])``.

    ``loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse**2``,
    with ``lse = log(sum(exp(z)))`` and ``z = softcap * tanh(logits / softcap)``.

    Parameters
    ----------
    logits : (*rows, vocab) float
        Before the softmax.
    labels : (*rows) int32 or int64
        Each in 0 .. vocab - 1, or equal to ignore.
    ignore : int
        Rows with this label have a loss and a gradient of 0, whatever their logits hold.
    smoothing : float
        Share of the target, in [0, 1], that is spread evenly over the vocabulary.
    z_loss : float
        Weight of the square of lse, which keeps logits near 0.
    softcap : float, optional
        Bound of the logits; None leaves them as they are.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 logits
        In nats; neither summed nor averaged.

    Raises
    ------
    RangeError
        A label is neither in the vocabulary nor equal to ignore.
    ConfigError
        An option is out of its range.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    return cross_entropy_forward(
        logits, labels, ignore=ignore, smoothing=smoothing, z_loss=z_loss, softcap=softcap
    )[0]


@op("logits(*rows, vocab), labels(*rows): int -> loss(*rows): stat, lse(*rows): stat")
def cross_entropy_forward(
    logits: Array,
    labels: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Return loss as cross_entropy does, and lse, for the backward op."""
    check_options("cross_entropy", smoothing, z_loss, softcap)
    check_labels("cross_entropy", labels, ignore, logits.shape[-1])
    out = np.empty_like(logits, order="C")
    z = logits if softcap is None else capped(logits, softcap, out)
    return losses(z, labels, ignore, smoothing, z_loss, out)


@cache
def _constants(
    logits: Any, labels: Any, vocab: int, lanes: int, cap: bool, smoothing: bool, backward: bool
) -> Constants:
    """Return the constants of cross_entropy.cu for these dtypes and this vocabulary.

    Forward, a thread has four accesses in flight: rows of up to 128 accesses share a warp, and
    512 threads walk a long one.  Backward, a thread has one access, and a row many blocks.
    """
    vectors = -(-vocab // lanes)
    if backward:
        row_threads = max(64, min(256, -(-vectors // 32) * 32))
    elif vectors <= 128:
        row_threads = 1 << (-(-vectors // 4) - 1).bit_length()
    else:
        row_threads = min(512, -(-vectors // 128) * 32)
    return Constants(
        T=logits,
        I=labels,
        COLUMNS=vocab,
        LANES=lanes,
        ROW_THREADS=row_threads,
        THREADS=row_threads if row_threads > 32 or backward else 128,
        SOFTCAP=cap,
        SMOOTHING=smoothing,
    )


@cross_entropy_forward.kernel
def _launch(
    logits: Array,
    labels: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    check_options("cross_entropy", smoothing, z_loss, softcap)
    vocab = logits.shape[-1]
    loss, lse = (empty(labels.shape, np.float32, like=logits) for _ in range(2))
    constants = _constants(
        logits.dtype,
        labels.dtype,
        vocab,
        lanes(vocab, logits),
        softcap is not None,
        smoothing > 0,
        False,
    )
    blocks = -(-labels.size * constants["ROW_THREADS"] // constants["THREADS"])
    kernel = load("cross_entropy.cu", "cross_entropy_forward", logits, constants)
    kernel[blocks, constants["THREADS"]](
        logits, labels, loss, lse, labels.size, ignore, smoothing, z_loss, softcap or 0
    )
    return loss, lse


@cross_entropy_forward.gradient(
    "dloss(*rows): stat, dlse?(*rows): stat, logits(*rows, vocab), labels(*rows): int,"
    " lse(*rows): stat -> dlogits(*rows, vocab), dlabels: none"
)
def cross_entropy_backward(
    dloss: Array,
    dlse: Array | None,
    logits: Array,
    labels: Array,
    lse: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Array, None]:
    """Return the gradient of the logits; lse may have a gradient of its own."""
    check_options("cross_entropy_backward", smoothing, z_loss, softcap)
    check_labels("cross_entropy_backward", labels, ignore, logits.shape[-1])
    out = np.empty_like(logits, order="C")
    dlogits = slopes(logits, labels, lse, dloss, dlse, ignore, smoothing, z_loss, softcap, out)
    return dlogits, None


@cross_entropy_backward.kernel
def _launch_backward(
    dloss: Array,
    dlse: Array | None,
    logits: Array,
    labels: Array,
    lse: Array,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Array, None]:
    check_options("cross_entropy_backward", smoothing, z_loss, softcap)
    vocab, dlogits = logits.shape[-1], empty(logits.shape, logits.dtype, like=logits)
    constants = _constants(
        logits.dtype,
        labels.dtype,
        vocab,
        lanes(vocab, logits),
        softcap is not None,
        smoothing > 0,
        True,
    )
    threads = constants["THREADS"]
    blocks = labels.size * -(-vocab // (threads * constants["LANES"]))
    kernel = load("cross_entropy.cu", "cross_entropy_backward", logits, constants)
    kernel[blocks, threads](
        dloss, dlse, logits, labels, lse, dlogits, ignore, smoothing, z_loss, softcap or 0
    )
    return dlogits, None


def check_options(call: str, smoothing: float, z_loss: float, softcap: float | None) -> None:
    """Raise for an option that makes no sense."""
    if not 0 <= smoothing <= 1:
        raise ConfigError(f"{call}(smoothing={smoothing}): smoothing must be in [0, 1]")
    if not 0 <= z_loss < np.inf:
        raise ConfigError(f"{call}(z_loss={z_loss}): z_loss must be 0 or more")
    if softcap is not None and not 0 < softcap < np.inf:
        raise ConfigError(f"{call}(softcap={softcap}): softcap must be positive; None for no cap")


def check_labels(call: str, labels: Array, ignore: int, vocab: int) -> None:
    """Raise for a label outside the vocabulary, on the host: reading a GPU's would stall it."""
    if isinstance(labels, np.ndarray):
        wrong = labels[(labels != ignore) & ((labels < 0) | (labels >= vocab))]
        if wrong.size:
            raise RangeError(
                f"{call}: labels holds {wrong[0]}; it must be in 0 .. {vocab - 1}, the vocab axis,"
                f" or ignore={ignore}, for a row without a label"
            )


def capped(logits: Array, softcap: float, out: Array) -> Array:
    """Write ``softcap * tanh(logits / softcap)`` to out and return it."""
    np.divide(logits, softcap, out=out)
    np.tanh(out, out=out)
    out *= softcap
    return out


def losses(
    z: Array, labels: Array, ignore: int, smoothing: float, z_loss: float, out: Array
) -> tuple[Array, Array]:
    """Return loss and lse; out, which may be z itself, holds the exponentials."""
    if not z.size:
        loss = np.zeros_like(z, shape=labels.shape)
        return loss, np.full_like(loss, -np.inf)
    counts = labels != ignore
    target = np.take_along_axis(z, np.where(counts, labels, 0)[..., None], axis=-1)[..., 0]
    if smoothing:
        target = (1 - smoothing) * target + smoothing * z.mean(axis=-1)
    top = finite(z.max(axis=-1))
    np.subtract(z, top[..., None], out=out)
    np.exp(out, out=out)
    with np.errstate(divide="ignore"):  # a row that holds nothing but -inf: log(0) is its lse
        log = np.log(out.sum(axis=-1))
    lse = log + top
    loss = finite(log) + (top - target)  # not lse - target, which cancels far from 0
    if z_loss:
        loss = loss + z_loss * finite(lse) ** 2
    return np.where(counts, loss, 0), lse


def slopes(
    logits: Array,
    labels: Array,
    lse: Array,
    dloss: Array,
    dlse: Array | None,
    ignore: int,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
    out: Array,
) -> Array:
    """Write the gradient of the logits to out, which may be the logits, and return it."""
    vocab = logits.shape[-1]
    if not logits.size:
        return out
    z, slope = logits, None
    if softcap is not None:
        z = capped(logits, softcap, out)
        slope = z / softcap
        np.square(slope, out=slope)
        np.subtract(1, slope, out=slope)  # the derivative of the cap
    counts, lse = labels != ignore, finite(lse)
    weight = np.where(counts, dloss, 0)
    share = weight * (1 + 2 * z_loss * lse)
    share = share if dlse is None else share + dlse
    np.subtract(z, lse[..., None], out=out)
    np.exp(out, out=out)
    out *= share[..., None]
    if smoothing:
        out -= (weight * (smoothing / vocab))[..., None]
    rows = out.reshape(labels.size, vocab)
    chosen = np.where(counts, labels, 0).ravel()
    rows[np.arange(labels.size, like=chosen), chosen] -= ((1 - smoothing) * weight).ravel()
    if slope is not None:
        out *= slope
    if dlse is None:
        rows[~counts.ravel()] = 0  # whatever their logits hold, NaN too
    return out
