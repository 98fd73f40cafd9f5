"""The maths of cross entropy, a few rows at a time.

loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse**2
lse = log(sum(exp(z)))        z = softcap * tanh(logits / softcap), or the logits
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError, RangeError
from ..activations.softmax import finite
from ..common.numbers import refuse_number
from ..common.steps import representative_steps

CACHED = 2**15  # logits at a time: 128 KiB in float32, and of what is computed with them


class Options(NamedTuple):
    """The options of a loss, as ``cross_entropy`` has them."""

    ignore: int
    smoothing: float
    z_loss: float
    softcap: float | None


def check_options(
    call: str, labels: Any, ignore: int, smoothing: float, z_loss: float, softcap: float | None
) -> None:
    """Raise ConfigError for options that make no sense, DTypeError for a number as labels."""
    refuse_number(call, "labels", labels)
    if not -(2**63) <= ignore < 2**63:
        raise ConfigError(f"{call}(ignore={ignore}): ignore must be an integer of 64 bits")
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


def losses(logits: Array, labels: Array, options: Options) -> tuple[Array, Array]:
    """Return loss and lse."""
    rows, chosen = logits.reshape(labels.size, logits.shape[-1]), labels.reshape(-1)
    loss, lse = (np.empty_like(logits, shape=chosen.shape) for _ in range(2))
    for part in _parts(rows):
        loss[part], lse[part] = _losses(rows[part], chosen[part], options)
    return loss.reshape(labels.shape), lse.reshape(labels.shape)


def logit_gradients(
    logits: Array,
    labels: Array,
    lse: Array,
    dloss: Array,
    dlse: Array | None,
    options: Options,
    out: Array,
) -> Array:
    """Write the gradient of the logits to out, which may be the logits, and return it."""
    shape = labels.size, logits.shape[-1]
    rows, results = logits.reshape(shape), out.reshape(shape)
    labels, lse, dloss = (array.reshape(-1) for array in (labels, lse, dloss))
    dlse = None if dlse is None else dlse.reshape(-1)
    for part in _parts(rows):
        own = labels[part], lse[part], dloss[part], None if dlse is None else dlse[part]
        _logit_gradients(rows[part], *own, options, results[part])
    return out


def _parts(rows: Array) -> Iterator[slice]:
    """Yield rows that fit a cache with what is computed beside them; a GPU's all at once."""
    count, columns = rows.shape
    there: Any = rows
    step = max(1, CACHED // max(1, columns)) if isinstance(there, np.ndarray) else max(1, count)
    for start in representative_steps(rows, range(0, count, step)):
        yield slice(start, start + step)


def _capped(logits: Array, softcap: float | None) -> tuple[Array, Array | None]:
    """Return z and, where there is a cap, tanh(logits / softcap)."""
    if softcap is None:
        return logits, None
    share = logits / softcap
    np.tanh(share, out=share)
    return softcap * share, share


def _losses(logits: Array, labels: Array, options: Options) -> tuple[Array, Array]:
    ignore, smoothing, z_loss, softcap = options
    if not logits.size:
        loss = np.zeros_like(logits, shape=labels.shape)
        return loss, np.full_like(loss, -np.inf)
    z, _ = _capped(logits, softcap)
    counts = labels != ignore
    target = np.take_along_axis(z, np.where(counts, labels, 0)[:, None], axis=-1)[:, 0]
    if smoothing:
        target = (1 - smoothing) * target + smoothing * z.mean(axis=-1)
    top = finite(z.max(axis=-1))
    exponentials = np.subtract(z, top[:, None], out=None if softcap is None else z)
    np.exp(exponentials, out=exponentials)
    with np.errstate(divide="ignore"):  # a row that holds nothing but -inf: log(0) is its lse
        log = np.log(exponentials.sum(axis=-1))
    lse = log + top
    loss = finite(log) + (top - target)  # not lse - target, which cancels far from 0
    if z_loss:
        loss = loss + z_loss * finite(lse) ** 2
    return np.where(counts, loss, 0), lse


def _logit_gradients(
    logits: Array,
    labels: Array,
    lse: Array,
    dloss: Array,
    dlse: Array | None,
    options: Options,
    out: Array,
) -> None:
    ignore, smoothing, z_loss, softcap = options
    if not logits.size:
        return
    z, tanh = _capped(logits, softcap)
    counts, lse = labels != ignore, finite(lse)
    dloss = np.where(counts, dloss, 0)
    weight = dloss * (1 + 2 * z_loss * lse)
    weight = weight if dlse is None else weight + dlse
    np.subtract(z, lse[:, None], out=out)
    np.exp(out, out=out)
    out *= weight[:, None]
    if smoothing:
        out -= (dloss * (smoothing / logits.shape[-1]))[:, None]
    chosen = np.where(counts, labels, 0)
    out[np.arange(labels.size, like=chosen), chosen] -= (1 - smoothing) * dloss
    if tanh is not None:
        np.square(tanh, out=tanh)
        out *= np.subtract(1, tanh, out=tanh)  # the derivative of the cap
    if dlse is None:
        out[~counts] = 0  # whatever their logits hold, NaN too
