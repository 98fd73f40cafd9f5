"""A vocabulary divided among ranks: its embedding, and the loss of logits that are never whole.

lse = log(sum over ranks of exp(lse of the rank))      loss = lse - z[label] + z_loss * lse**2

Each rank makes the lse of its own words; numbers by row are all that is exchanged.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import rounded
from ..core.call import is_number
from ..errors import ConfigError, ShapeError
from ..ops.linear.embedding import embedding, embedding_backward
from ..ops.losses.cross_entropy import cross_entropy_backward, cross_entropy_forward
from ..ops.losses.linear_cross_entropy import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from ..training.tape import add_up
from ._taped import Back, taped, value_of
from .communicator import Communicator, check_axis, part
from .tensor import entered

NONE = -100  # the label of a row whose word another rank holds


def vocab_parallel_embedding(
    tokens: Any, weight: Any, vocab: int, *, comm: Communicator, sequence_axis: int | None = None
) -> Any:
    """Return the row of each token, of a table whose rows are divided among ranks.

    Parameters
    ----------
    tokens : (*rows) int32 or int64
        Alike in all ranks, each in 0 .. vocab - 1.
    weight : (this rank's words, hidden) float
        ``shard(weight, 0, comm)``.
    vocab : int
        Words of all ranks; at least one a rank.
    comm : Communicator
    sequence_axis : int, optional
        Return this rank's part along this axis alone.

    Returns
    -------
    x : (*rows, hidden) float
        Alike in all ranks, or this rank's part.

    Raises
    ------
    ShapeError, ConfigError
        weight is not this rank's part of vocab, or there are more ranks than words.
    """
    table = value_of(weight)
    words = _words("vocab_parallel_embedding", len(table), vocab, comm)
    here = (tokens >= words.start) & (tokens < words.stop)
    local = np.where(here, tokens - words.start, 0).astype(tokens.dtype)
    outside = (tokens < 0) | (tokens >= vocab)
    if isinstance(tokens, np.ndarray) and outside.any():
        embedding(tokens, np.broadcast_to(table[:1], (vocab, table.shape[1])))  # raises for it
    x = _where(here, embedding(local, table))
    axis = None if sequence_axis is None else check_axis("reduce_scatter", x, sequence_axis)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        own = _where(here, dy if axis is None else comm.all_gather(dy, axis))
        return {"weight": embedding_backward(own, local, table)[1]}

    y = comm.all_reduce(x) if axis is None else comm.reduce_scatter(x, axis)
    return taped("vocab_parallel_embedding", y, back, weight=weight)


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
    logits : (*rows, this rank's words) float
    labels : (*rows) int32 or int64
        Alike in all ranks, each in 0 .. vocab - 1, or equal to ignore.
    vocab : int
        Words of all ranks; at least one a rank.
    comm : Communicator
    ignore, smoothing, z_loss, softcap
        As in ``cross_entropy``.  With smoothing the op of this rank's words is called twice.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        Alike in all ranks.

    Raises
    ------
    ShapeError, ConfigError
        logits are not this rank's columns of vocab, or there are more ranks than words.
    """
    z = value_of(logits)
    call = "vocab_parallel_cross_entropy"
    _check_smoothing(call, smoothing)
    words = _words(call, z.shape[-1], vocab, comm)
    options: dict[str, Any] = {"ignore": NONE, "softcap": softcap}

    def forward(local: Any, smoothing: float) -> Any:
        return cross_entropy_forward(z, local, smoothing=smoothing, **options)

    def backward(seeds: Any, local: Any, lse: Any, smoothing: float, wanted: Any) -> Any:
        found = cross_entropy_backward(*seeds, z, local, lse, smoothing=smoothing, **options)
        return {"logits": found[0] if type(found) is tuple else found}

    rows = Rows(labels, words, vocab, ignore, smoothing, z_loss)
    loss, back = _loss(rows, forward, backward, comm)
    return taped(call, loss, back, logits=logits)


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
        Alike in all ranks, or this rank's part along sequence_axis; so is its gradient, which is
        summed over ranks.
    weight : (this rank's words, hidden) float
        ``shard(weight, 0, comm)``.
    labels : (*rows) int32 or int64
        Alike in all ranks, each in 0 .. vocab - 1, or equal to ignore.
    vocab : int
        Words of all ranks; at least one a rank.
    comm : Communicator
    ignore, smoothing, z_loss, softcap, max_bytes
        As in ``linear_cross_entropy``.  With smoothing the op of this rank's words is called twice.
    sequence_axis : int, optional
        Gather x along this axis first.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        Alike in all ranks.

    Raises
    ------
    ShapeError, ConfigError
        weight is not this rank's part of vocab, or there are more ranks than words.
    """
    x = entered(x, comm, sequence_axis)
    rows, table = value_of(x), value_of(weight)
    call = "vocab_parallel_linear_cross_entropy"
    _check_smoothing(call, smoothing)
    words = _words(call, len(table), vocab, comm)
    options: dict[str, Any] = {"ignore": NONE, "softcap": softcap, "max_bytes": max_bytes}

    def forward(local: Any, smoothing: float) -> Any:
        return linear_cross_entropy_forward(rows, table, local, smoothing=smoothing, **options)

    def backward(seeds: Any, local: Any, lse: Any, smoothing: float, wanted: Any) -> Any:
        more = options | {"smoothing": smoothing, "wanted": wanted}
        dx, dweight, _ = linear_cross_entropy_backward(*seeds, rows, table, local, lse, **more)
        return {"x": dx, "weight": dweight}

    given = Rows(labels, words, vocab, ignore, smoothing, z_loss)
    loss, back = _loss(given, forward, backward, comm)

    return taped(call, loss, back, x=x, weight=weight)


class Rows(NamedTuple):
    """The labels of a loss, the words of this rank, and the options."""

    labels: Any
    words: slice
    vocab: int
    ignore: int
    smoothing: float
    z_loss: float


def _loss(rows: Rows, forward: Any, backward: Any, comm: Communicator) -> tuple[Any, Back]:
    """Return the loss over all words, and what takes its gradient back.

    loss = (1 - smoothing) * (lse - z[label]) + smoothing * (lse - mean(z)) + z_loss * lse**2, where
    lse - mean(z) is the sum over ranks of words / vocab * (lse - mean(z of its words)).
    """
    labels, words, vocab, ignore, smoothing, z_loss = rows
    local, here = _local(labels, words, ignore, vocab)
    counts, share = labels != ignore, smoothing * (words.stop - words.start) / vocab
    one, lse_here = forward(local, 0.0)
    lse = _lse(lse_here, comm)
    mine = np.where(here, (1 - smoothing) * (one + (lse - lse_here)), 0)
    any_word = np.where(counts, 0, NONE).astype(labels.dtype)
    if smoothing:
        even, _ = forward(any_word, 1.0)
        mine = mine + np.where(counts, share * (even + (lse - lse_here)), 0)
    loss = comm.all_reduce(mine.astype(one.dtype))
    if z_loss:
        loss = loss + np.where(counts, z_loss * lse**2, 0)
    loss, lse = rounded(loss, one.dtype), rounded(lse, one.dtype)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dloss = np.where(counts, dy, 0).astype(lse.dtype)
        # each call brings exp(z - lse) of its own rows; what is missing to 1 goes by way of lse
        rest = 1 + 2 * z_loss * lse - (1 - smoothing) * here - share
        seeds = ((1 - smoothing) * dloss).astype(lse.dtype), (dloss * rest).astype(lse.dtype)
        found: dict[str, Any] = backward(seeds, local, lse, 0.0, wanted)
        if smoothing:
            seeds = (share * dloss).astype(lse.dtype), None
            more = backward(seeds, any_word, lse, 1.0, wanted)
            found = {n: g if g is None else add_up(g, more[n]) for n, g in found.items()}
        return found

    return loss, back


def _where(here: Any, x: Any) -> Any:
    """Return rows as they are here, and zeros elsewhere: a mask as a key would make a GPU wait."""
    return np.where(here[..., None], x, x.dtype.type(0))


def _check_smoothing(call: str, smoothing: float) -> None:
    """Raise ConfigError for what is not a share."""
    if not is_number(smoothing) or not 0 <= smoothing <= 1:
        raise ConfigError(f"{call}(smoothing={smoothing!r}) is not a share; pass one in [0, 1]")


def _words(call: str, own: int, vocab: int, comm: Communicator) -> slice:
    """Return which words this rank holds; raise where its array has others."""
    if vocab < comm.size:
        cure = "use at most as many ranks as words"
        raise ConfigError(f"{call}: vocab={vocab} is not enough for {comm.size} ranks; {cure}")
    words = part(vocab, comm)
    wanted = words.stop - words.start
    if own != wanted:
        problem = f"{call}: {own} words are not the part of {vocab} that rank {comm.rank} holds"
        cure = f"it is {wanted}: divide the weight with shard(weight, 0, comm)"
        raise ShapeError(f"{problem}; {cure}", expected=wanted, actual=own)
    return words


def _local(labels: Any, words: slice, ignore: int, vocab: int) -> tuple[Any, Any]:
    """Return labels among this rank's words, and where they are; a wrong one raises or is NaN."""
    wrong = (labels != ignore) & ((labels < 0) | (labels >= vocab))
    here = (labels != ignore) & (labels >= words.start) & (labels < words.stop)
    local = np.where(here, labels - words.start, NONE)
    return np.where(wrong, vocab, local).astype(labels.dtype), here


def _lse(lse_here: Any, comm: Communicator) -> Any:
    """Return lse over all words, of those over this rank's."""
    top = comm.all_reduce(lse_here, "max")
    top = np.where(top == -math.inf, 0, top)
    with np.errstate(divide="ignore"):
        return np.log(comm.all_reduce(np.exp(lse_here - top))) + top
