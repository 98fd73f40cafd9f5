"""Cross entropy and its gradient in NumPy, a few rows at a time.

loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse**2
     = (1 - smoothing) * w[label] * (lse - z[label]) + smoothing * mean(w * (lse - z))
       + z_loss * lse**2 with weights w of the classes
lse = log(sum(exp(z)))        z = softcap * tanh(logits / softcap), or the logits
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...core.stand_in import representative_steps
from ...errors import ConfigError, RangeError
from ..activations.softmax import finite
from ..common.checks import refuse_number

CACHED = 2**15  # logits at a time: 128 KiB in float32, and as much for each temporary array


class Options(NamedTuple):
    """The options of ``cross_entropy``."""

    ignore: int
    smoothing: float
    z_loss: float
    softcap: float | None
    class_weights: Array | None = None


def check_options(
    call: str, labels: Any, smoothing: float, z_loss: float, softcap: float | None
) -> None:
    """Raise ConfigError for an option out of its range, DTypeError for a number as labels."""
    refuse_number(call, "labels", labels)
    if not 0 <= smoothing <= 1:
        raise ConfigError(f"{call}(smoothing={smoothing}): smoothing must be in [0, 1]")
    if not 0 <= z_loss < np.inf:
        raise ConfigError(f"{call}(z_loss={z_loss}): z_loss must be 0 or more")
    if softcap is not None and not 0 < softcap < np.inf:
        raise ConfigError(f"{call}(softcap={softcap}): softcap must be positive; None for no cap")


def check_labels(
    call: str, labels: Array, ignore: int, vocab: int, class_weights: Any = None
) -> None:
    """Raise for a label outside the vocabulary or an invalid class weight, in NumPy arrays only.

    The host does not wait for arrays of a GPU: kernels report such labels, and the loss of a label
    whose weight is NaN or negative is NaN.

    Raises
    ------
    RangeError
        A label is neither a class nor ``ignore``.
    ConfigError
        The weight of a class is NaN, infinite or negative.
    """
    if isinstance(class_weights, np.ndarray):
        wrong = np.flatnonzero(~((class_weights >= 0) & np.isfinite(class_weights)))
        if wrong.size:
            problem = f"class_weights holds {class_weights[wrong[0]]} for class {wrong[0]}"
            raise ConfigError(f"{call}: {problem}; a weight must be finite, and 0 or more")
    if isinstance(labels, np.ndarray):
        wrong = labels[(labels != ignore) & ((labels < 0) | (labels >= vocab))]
        if wrong.size:
            raise RangeError(
                f"{call}: labels holds {wrong[0]}; it must be in 0 .. {vocab - 1}, the vocab axis,"
                f" or ignore={ignore}, for a row without a label"
            )


def losses(logits: Array, labels: Array, options: Options) -> tuple[Array, Array]:
    """Return the loss and lse of each row."""
    # (all rows, vocab), (all rows,)
    rows, flat = logits.reshape(labels.size, logits.shape[-1]), labels.reshape(-1)
    loss, lse = (np.empty_like(logits, shape=flat.shape) for _ in range(2))
    for part in parts(rows):
        loss[part], lse[part] = _losses(rows[part], flat[part], options)
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
    rows, results = logits.reshape(shape), out.reshape(shape)  # (all rows, vocab)
    labels, lse, dloss = (array.reshape(-1) for array in (labels, lse, dloss))
    dlse = None if dlse is None else dlse.reshape(-1)
    for part in parts(rows):
        inputs = labels[part], lse[part], dloss[part], None if dlse is None else dlse[part]
        _logit_gradients(rows[part], *inputs, options, results[part])
    return out


def parts(rows: Array) -> Iterator[slice]:
    """Yield slices of rows that fit into a cache with temporary arrays; one slice on a GPU."""
    count, columns = rows.shape
    array: Any = rows
    step = max(1, CACHED // max(1, columns)) if isinstance(array, np.ndarray) else max(1, count)
    for start in representative_steps(rows, range(0, count, step)):
        yield slice(start, start + step)


def _capped(logits: Array, softcap: float | None) -> tuple[Array, Array | None]:
    """Return z and tanh(logits / softcap); without a cap, the logits and None."""
    if softcap is None:
        return logits, None
    tanh = logits / softcap
    np.tanh(tanh, out=tanh)
    return softcap * tanh, tanh


def _not_negative(weights: Array, dtype: Any) -> Array:
    """Return class weights in a dtype, with NaN in place of negative ones."""
    return np.where(weights >= 0, weights, np.nan).astype(dtype)


def _losses(logits: Array, labels: Array, options: Options) -> tuple[Array, Array]:
    """Return the loss and lse of some rows."""
    ignore, smoothing, z_loss, softcap, weights = options
    if not logits.size:
        loss = np.zeros_like(logits, shape=labels.shape)
        return loss, np.full_like(loss, -np.inf)
    z, _ = _capped(logits, softcap)
    labelled = labels != ignore
    targets = np.where(labelled, labels, 0)
    target = np.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
    if smoothing and weights is None:
        target = (1 - smoothing) * target + smoothing * z.mean(axis=-1)
    top = finite(z.max(axis=-1))
    # loss = log + (top - target): lse - target would lose digits if both are large
    below, share = top - target, np.ones_like(top)
    if weights is not None:
        weights = _not_negative(weights, z.dtype)
        of_label = (1 - smoothing) * weights[targets]
        below, share = of_label * below, of_label
        if smoothing:
            below += smoothing * (weights * (top[:, None] - z)).mean(axis=-1)
            share = share + smoothing * weights.mean()
    exponentials = np.subtract(z, top[:, None], out=None if softcap is None else z)
    np.exp(exponentials, out=exponentials)
    with np.errstate(divide="ignore"):  # if all logits of a row are -inf, its lse is log(0)
        log = np.log(exponentials.sum(axis=-1))
    lse = log + top
    loss = share * finite(log) + below
    if z_loss:
        loss = loss + z_loss * finite(lse) ** 2
    return np.where(labelled, loss, 0), lse


def _logit_gradients(
    logits: Array,
    labels: Array,
    lse: Array,
    dloss: Array,
    dlse: Array | None,
    options: Options,
    out: Array,
) -> None:
    """Write the gradient of the logits of some rows to out."""
    ignore, smoothing, z_loss, softcap, weights = options
    if not logits.size:
        return
    z, tanh = _capped(logits, softcap)
    labelled, lse = labels != ignore, finite(lse)
    dloss = np.where(labelled, dloss, 0)
    # rows without a label read class 0
    targets, share = np.where(labelled, labels, 0), np.ones_like(dloss)
    of_all = of_label = share[:1]
    if weights is not None:
        of_all = _not_negative(weights, z.dtype)
        of_label = of_all[targets]
        share = (1 - smoothing) * of_label + smoothing * of_all.mean()
    weight = dloss * (share + 2 * z_loss * lse)
    weight = weight if dlse is None else weight + dlse
    np.subtract(z, lse[:, None], out=out)
    np.exp(out, out=out)
    out *= weight[:, None]
    if smoothing:
        out -= (dloss * (smoothing / logits.shape[-1]))[:, None] * of_all
    out[np.arange(labels.size, like=targets), targets] -= (1 - smoothing) * dloss * of_label
    if tanh is not None:
        np.square(tanh, out=tanh)
        out *= np.subtract(1, tanh, out=tanh)  # dz / dlogits
    if dlse is None:
        out[~labelled] = 0  # even if their logits are NaN
