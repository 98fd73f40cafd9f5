"""Vocabulary-parallel embedding, cross entropy and log-probabilities: ranks divide the vocabulary.

lse = log(sum over ranks of exp(lse of the rank))      loss = lse - z[label] + z_loss * lse**2

Each rank computes the lse over its part of the vocabulary.  Ranks exchange only a few numbers per
row, never logits.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import rounded
from ..core.call import check_options, is_integer, is_number
from ..errors import ConfigError, DTypeError, ShapeError, naming
from ..ops.activations.softmax import finite
from ..ops.linear.embedding import embedding, embedding_backward
from ..ops.losses.cross_entropy import cross_entropy_backward, cross_entropy_forward
from ..ops.losses.linear_cross_entropy import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from ..ops.losses.linear_log_probs import (
    LogProbs,
    linear_log_probs_backward,
    linear_log_probs_forward,
)
from ..training.tape import add_up
from .communicator import Communicator, check_axis, check_communicator, part
from .taped import Back, taped, values_of
from .tensor import entered

NONE = -100  # replaces labels in another rank's part of the vocabulary


@naming("vocab_parallel_embedding", "embedding", "reduce_scatter")
@check_options
def vocab_parallel_embedding(
    tokens: Any, weight: Any, vocab: int, *, comm: Communicator, sequence_axis: int | None = None
) -> Any:
    """Return the embedding of each token, from a table whose rows are divided among ranks.

    Parameters
    ----------
    tokens : (*rows) int32 or int64
        Equal in all ranks, each in 0 .. vocab - 1.
    weight : (this rank's vocabulary, hidden) float
        ``shard(weight, 0, comm)``.
    vocab : int
        Size of the whole vocabulary; at least the number of ranks.
    comm : Communicator
    sequence_axis : int, optional
        Axis along which only this rank's part is returned.

    Returns
    -------
    x : (*rows, hidden) float
        Equal in all ranks, or this rank's part.

    Raises
    ------
    ShapeError, ConfigError
        weight is not this rank's part of the vocabulary, or vocab is less than the number of ranks.
    """
    table = values_of("vocab_parallel_embedding", weight=weight, tokens=tokens)[0]
    words = _words("vocab_parallel_embedding", len(table), vocab, comm)
    _check_integers("vocab_parallel_embedding: tokens", tokens)
    is_local = (tokens >= words.start) & (tokens < words.stop)
    local = np.where(is_local, tokens - words.start, 0).astype(tokens.dtype)
    invalid = (tokens < 0) | (tokens >= vocab)
    if isinstance(tokens, np.ndarray) and invalid.any():
        embedding(tokens, np.broadcast_to(table[:1], (vocab, table.shape[1])))  # raises
    x = _where(is_local, embedding(local, table))
    axis = None if sequence_axis is None else check_axis("reduce_scatter", x, sequence_axis)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        own = _where(is_local, dy if axis is None else comm.all_gather(dy, axis))
        return {"weight": embedding_backward(own, local, table)[1]}

    y = comm.all_reduce(x) if axis is None else comm.reduce_scatter(x, axis)
    return taped("vocab_parallel_embedding", y, back, weight=weight)


@naming("vocab_parallel_cross_entropy", "cross_entropy")
@check_options
def vocab_parallel_cross_entropy(
    logits: Any,
    labels: Any,
    vocab: int,
    *,
    comm: Communicator,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Any:
    """Return ``cross_entropy`` of logits whose columns are divided among ranks.

    Parameters
    ----------
    logits : (*rows, this rank's vocabulary) float
    labels : (*rows) int32 or int64
        Equal in all ranks, each in 0 .. vocab - 1, or equal to ignore.
    vocab : int
        Size of the whole vocabulary; at least the number of ranks.
    comm : Communicator
    ignore, smoothing, z_loss, softcap
        As in ``cross_entropy``.  With smoothing, each rank calls the op twice.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        Equal in all ranks.

    Raises
    ------
    ShapeError, ConfigError
        logits are not this rank's columns, or vocab is less than the number of ranks.
    """
    call = "vocab_parallel_cross_entropy"
    z = values_of(call, logits=logits, labels=labels)[0]
    _check_smoothing(call, smoothing)
    _check_integers(f"{call}: labels", labels)
    words = _words(call, z.shape[-1], vocab, comm)
    options: dict[str, Any] = {"ignore": NONE, "softcap": softcap}

    def forward(local: Any, smoothing: float) -> Any:
        return cross_entropy_forward(z, local, smoothing=smoothing, **options)

    def backward(seeds: Any, local: Any, lse: Any, smoothing: float, wanted: Any) -> Any:
        dz = cross_entropy_backward(*seeds, z, local, lse, smoothing=smoothing, **options)
        return {"logits": dz[0] if type(dz) is tuple else dz}

    rows = Rows(labels, words, vocab, ignore, smoothing, z_loss)
    loss, back = _loss(rows, forward, backward, comm)
    return taped(call, loss, back, logits=logits)


@naming("vocab_parallel_linear_cross_entropy", "linear_cross_entropy", "all_gather")
@check_options
def vocab_parallel_linear_cross_entropy(
    x: Any,
    weight: Any,
    labels: Any,
    vocab: int,
    *,
    comm: Communicator,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
    sequence_axis: int | None = None,
) -> Any:
    """Return ``linear_cross_entropy`` of a head whose rows are divided among ranks.

    Parameters
    ----------
    x : (*rows, hidden) float
        Equal in all ranks, or this rank's part along sequence_axis.  Its gradient has the same
        form, and is summed over ranks.
    weight : (this rank's vocabulary, hidden) float
        ``shard(weight, 0, comm)``.
    labels : (*rows) int32 or int64
        Equal in all ranks, each in 0 .. vocab - 1, or equal to ignore.
    vocab : int
        Size of the whole vocabulary; at least the number of ranks.
    comm : Communicator
    ignore, smoothing, z_loss, softcap, max_bytes
        As in ``linear_cross_entropy``.  With smoothing, each rank calls the op twice.
    sequence_axis : int, optional
        Axis along which x is gathered first.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        Equal in all ranks.

    Raises
    ------
    ShapeError, ConfigError
        weight is not this rank's part of the vocabulary, or vocab is less than the number of ranks.
    """
    call = "vocab_parallel_linear_cross_entropy"
    x = entered(x, comm, sequence_axis)
    rows, table, _ = values_of(call, x=x, weight=weight, labels=labels)
    _check_smoothing(call, smoothing)
    _check_integers(f"{call}: labels", labels)
    words = _words(call, len(table), vocab, comm)
    options: dict[str, Any] = {"ignore": NONE, "softcap": softcap, "max_bytes": max_bytes}

    def forward(local: Any, smoothing: float) -> Any:
        return linear_cross_entropy_forward(rows, table, local, smoothing=smoothing, **options)

    def backward(seeds: Any, local: Any, lse: Any, smoothing: float, wanted: Any) -> Any:
        more = options | {"smoothing": smoothing, "wanted": wanted}
        dx, dweight, _ = linear_cross_entropy_backward(*seeds, rows, table, local, lse, **more)
        return {"x": dx, "weight": dweight}

    labelled = Rows(labels, words, vocab, ignore, smoothing, z_loss)
    loss, back = _loss(labelled, forward, backward, comm)

    return taped(call, loss, back, x=x, weight=weight)


@naming("vocab_parallel_linear_log_probs", "linear_log_probs", "all_gather")
@check_options
def vocab_parallel_linear_log_probs(
    x: Any,
    weight: Any,
    labels: Any,
    vocab: int,
    *,
    comm: Communicator,
    ignore: int = -100,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
    sequence_axis: int | None = None,
) -> LogProbs:
    """Return ``linear_log_probs`` of a head whose rows are divided among ranks.

    Ranks exchange seven numbers per row, and never logits.

    Parameters
    ----------
    x : (*rows, hidden) float
        Equal in all ranks, or this rank's part along sequence_axis.  Its gradient has the same
        form, and is summed over ranks.
    weight : (this rank's vocabulary, hidden) float
        ``shard(weight, 0, comm)``.
    labels : (*rows) int32 or int64
        Equal in all ranks, each in 0 .. vocab - 1, or equal to ignore.
    vocab : int
        Size of the whole vocabulary; at least the number of ranks.
    comm : Communicator
    ignore, temperature, scale, softcap, max_bytes
        As in ``linear_log_probs``.
    sequence_axis : int, optional
        Axis along which x is gathered first.

    Returns
    -------
    result : LogProbs
        Each ``(*rows)``, equal in all ranks; float32, or float64 for float64 arrays.

    Raises
    ------
    ShapeError, ConfigError
        weight is not this rank's part of the vocabulary, or vocab is less than the number of ranks.
    """
    call = "vocab_parallel_linear_log_probs"
    x = entered(x, comm, sequence_axis)
    rows, table, _ = values_of(call, x=x, weight=weight, labels=labels)
    _check_integers(f"{call}: labels", labels)
    words = _words(call, len(table), vocab, comm)
    local, is_local = _local(labels, words, ignore, vocab)
    local = np.where((labels != ignore) & (local == NONE), 0, local).astype(labels.dtype)
    options: dict[str, Any] = {
        "ignore": NONE, "temperature": temperature, "scale": scale, "softcap": softcap,
        "max_bytes": max_bytes,
    }  # fmt: skip
    log_probs, entropy, squares, mean, top1, own_lse, largest = linear_log_probs_forward(
        rows, table, local, **options
    )
    kind, words_share = log_probs.dtype, (words.stop - words.start) / vocab
    counts = is_local | np.isnan(log_probs)  # an invalid label is NaN in all ranks
    own = log_probs, entropy, squares, words_share * mean, counts * (1 + top1), own_lse, largest
    # each (ranks, *rows), in the order of ranks, so that all ranks compute equal bits
    every = comm.all_gather(np.stack([result.astype(kind) for result in own])[None])
    log_probs, entropies, squares, means, flags, lses, largest = every.swapaxes(0, 1)
    lse = _log_sum(lses)
    share = finite(lses) - finite(lse)  # log of each rank's part of the probability
    some, best = lses > -math.inf, (largest == largest.max(axis=0)).argmax(axis=0)[None]
    entropy = np.where(some, np.exp(share) * (entropies - share), 0).sum(axis=0)
    results = (
        np.where(flags > 0, log_probs + share, 0).sum(axis=0),
        entropy,
        _log_sum(np.where(some, squares + 2 * share, -math.inf)),
        means.sum(axis=0),
        np.take_along_axis(flags, best, axis=0)[0] > 1,
    )
    counted = [np.where(labels != ignore, each, each.dtype.type(0)) for each in results]

    def back(dlog_probs: Any, dentropy: Any, wanted: Any) -> dict[str, Any]:
        dlse = dlocal = None
        # A log-probability is z[label] - lse: one rank has the label, all ranks contribute to lse.
        if dlog_probs is not None:
            dlocal = np.where(is_local, dlog_probs, 0).astype(kind)
            dlse = (dlocal - dlog_probs).astype(kind)
        arrays = rows, table, local, None, entropy, lse
        dx, dweight, *_ = linear_log_probs_backward(
            dlocal, dentropy, dlse, *arrays, wanted=wanted, **options
        )
        return {"x": dx, "weight": dweight}

    differentiable = taped(call, tuple(counted[:2]), back, x=x, weight=weight)
    return LogProbs(*differentiable, *counted[2:])


class Rows(NamedTuple):
    """The labels of a loss, this rank's part of the vocabulary, and the options."""

    labels: Any
    words: slice
    vocab: int
    ignore: int
    smoothing: float
    z_loss: float


def _loss(rows: Rows, forward: Any, backward: Any, comm: Communicator) -> tuple[Any, Back]:
    """Return the loss over the whole vocabulary, and the function of its backward pass.

    loss = (1 - smoothing) * (lse - z[label]) + smoothing * (lse - mean(z)) + z_loss * lse**2, where
    lse - mean(z) is the sum over ranks of words / vocab * (lse - mean(z of the rank's words)).
    """
    labels, words, vocab, ignore, smoothing, z_loss = rows
    local, is_local = _local(labels, words, ignore, vocab)
    counts, share = labels != ignore, smoothing * (words.stop - words.start) / vocab
    losses, own_lse = forward(local, 0.0)
    lse = _lse(own_lse, comm)
    own_loss = np.where(is_local, (1 - smoothing) * (losses + (lse - own_lse)), 0)
    any_word = np.where(counts, 0, NONE).astype(labels.dtype)
    if smoothing:
        uniform, _ = forward(any_word, 1.0)
        own_loss = own_loss + np.where(counts, share * (uniform + (lse - own_lse)), 0)
    loss = comm.all_reduce(own_loss.astype(losses.dtype))
    if z_loss:
        loss = loss + np.where(counts, z_loss * lse**2, 0)
    loss, lse = rounded(loss, losses.dtype), rounded(lse, losses.dtype)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dloss = np.where(counts, dy, 0).astype(lse.dtype)
        # The factor of exp(z - lse) is 1 + 2 * z_loss * lse.  The loss of a local label contributes
        # 1 - smoothing, the smoothing term contributes share, and the gradient of lse the rest.
        rest = 1 + 2 * z_loss * lse - (1 - smoothing) * is_local - share
        seeds = ((1 - smoothing) * dloss).astype(lse.dtype), (dloss * rest).astype(lse.dtype)
        grads: dict[str, Any] = backward(seeds, local, lse, 0.0, wanted)
        if smoothing:
            seeds = (share * dloss).astype(lse.dtype), None
            more = backward(seeds, any_word, lse, 1.0, wanted)
            grads = {n: g if g is None else add_up(g, more[n]) for n, g in grads.items()}
        return grads

    return loss, back


def _where(mask: Any, x: Any) -> Any:
    """Return x with zeros in rows where mask is False.

    Indexing by a mask would make the host wait for the GPU.
    """
    return np.where(mask[..., None], x, x.dtype.type(0))


def _check_smoothing(call: str, smoothing: float) -> None:
    """Raise ConfigError unless smoothing is a number in [0, 1]."""
    if not is_number(smoothing) or not 0 <= smoothing <= 1:
        raise ConfigError(f"{call}(smoothing={smoothing!r}): pass a number in [0, 1]")


def _words(call: str, own: int, vocab: int, comm: Communicator) -> slice:
    """Return this rank's slice of the vocabulary; raise if its array has another size."""
    check_communicator(call, comm)
    if not is_integer(vocab, comm.size):
        cure = "use at most vocab ranks"
        raise ConfigError(f"{call}: vocab={vocab} is not enough for {comm.size} ranks; {cure}")
    words = part(vocab, comm)
    expected = words.stop - words.start
    if own != expected:
        problem = f"{call}: rank {comm.rank} has {own} of vocab={vocab}, not {expected}"
        cure = "divide the weight with shard(weight, 0, comm)"
        raise ShapeError(f"{problem}; {cure}", expected=expected, actual=own)
    return words


def _check_integers(what: str, array: Any) -> None:
    """Raise DTypeError unless an array has an integer dtype."""
    if array.dtype.kind not in "iu":
        raise DTypeError(f"{what} is {array.dtype}; it must contain integers")


def _local(labels: Any, words: slice, ignore: int, vocab: int) -> tuple[Any, Any]:
    """Return labels as indices in this rank's part, and a mask of the labels in this part.

    A label outside of the vocabulary becomes ``vocab``, for which the op raises or returns NaN.
    """
    wrong = (labels != ignore) & ((labels < 0) | (labels >= vocab))
    is_local = (labels != ignore) & (labels >= words.start) & (labels < words.stop)
    local = np.where(is_local, labels - words.start, NONE)
    return np.where(wrong, vocab, local).astype(labels.dtype), is_local


def _lse(own_lse: Any, comm: Communicator) -> Any:
    """Return the lse over the whole vocabulary, from the lse over each rank's part."""
    top = finite(comm.all_reduce(own_lse, "max"))
    with np.errstate(divide="ignore"):
        return np.log(comm.all_reduce(np.exp(own_lse - top))) + top


def _log_sum(x: Any) -> Any:
    """Return log(sum(exp(x))) over the first axis."""
    top = finite(x.max(axis=0))
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - top).sum(axis=0)) + top
