"""A vocabulary divided among ranks: its embedding, and the loss of logits that are never whole.

lse = log(sum over ranks of exp(lse of the rank))      loss = lse - z[label] + z_loss * lse**2

Each rank makes the lse of its own words; numbers by row are all that is exchanged.
"""

import math
from typing import Any

import numpy as np

from ..core.arrays import rounded
from ..errors import ConfigError, ShapeError
from ..ops.linear.embedding import embedding, embedding_backward
from ..ops.losses.cross_entropy import cross_entropy_backward, cross_entropy_forward
from ..ops.losses.linear_cross_entropy import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from ._taped import taped, value_of
from .communicator import Communicator, part

NONE = -100  # the label of a row whose word another rank holds


def vocab_parallel_embedding(tokens: Any, weight: Any, vocab: int, *, comm: Communicator) -> Any:
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

    Returns
    -------
    x : (*rows, hidden) float
        Alike in all ranks.

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
    x = embedding(local, table)
    x[~here] = 0

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        own = dy.copy()
        own[~here] = 0
        return {"weight": embedding_backward(own, local, table)[1]}

    return taped("vocab_parallel_embedding", comm.all_reduce(x), back, weight=weight)


def vocab_parallel_cross_entropy(
    logits: Any,
    labels: Any,
    vocab: int,
    *,
    comm: Communicator,
    ignore: int = -100,
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
    ignore, z_loss, softcap
        As in ``cross_entropy``.

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
    words = _words("vocab_parallel_cross_entropy", z.shape[-1], vocab, comm)
    local, here = _local(labels, words, ignore, vocab)
    one, lse_here = cross_entropy_forward(z, local, ignore=NONE, softcap=softcap)
    loss, lse = _joined(one, lse_here, here, labels != ignore, z_loss, comm)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dloss, dlse = _seeds(dy, lse, here, labels != ignore, z_loss)
        found = cross_entropy_backward(dloss, dlse, z, local, lse, ignore=NONE, softcap=softcap)
        return {"logits": found[0] if type(found) is tuple else found}

    return taped("vocab_parallel_cross_entropy", loss, back, logits=logits)


def vocab_parallel_linear_cross_entropy(
    x: Any,
    weight: Any,
    labels: Any,
    vocab: int,
    *,
    comm: Communicator,
    ignore: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> Any:
    """Return ``linear_cross_entropy`` of a head whose rows are divided among ranks.

    Parameters
    ----------
    x : (*rows, hidden) float
        Alike in all ranks; so is its gradient, summed over ranks.
    weight : (this rank's words, hidden) float
        ``shard(weight, 0, comm)``.
    labels : (*rows) int32 or int64
        Alike in all ranks, each in 0 .. vocab - 1, or equal to ignore.
    vocab : int
        Words of all ranks; at least one a rank.
    comm : Communicator
    ignore, z_loss, softcap, max_bytes
        As in ``linear_cross_entropy``.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        Alike in all ranks.

    Raises
    ------
    ShapeError, ConfigError
        weight is not this rank's part of vocab, or there are more ranks than words.
    """
    rows, table = value_of(x), value_of(weight)
    words = _words("vocab_parallel_linear_cross_entropy", len(table), vocab, comm)
    local, here = _local(labels, words, ignore, vocab)
    options: dict[str, Any] = {"ignore": NONE, "softcap": softcap, "max_bytes": max_bytes}
    one, lse_here = linear_cross_entropy_forward(rows, table, local, **options)
    loss, lse = _joined(one, lse_here, here, labels != ignore, z_loss, comm)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dloss, dlse = _seeds(dy, lse, here, labels != ignore, z_loss)
        dx, dweight, _ = linear_cross_entropy_backward(
            dloss, dlse, rows, table, local, lse, wanted=wanted, **options
        )
        return {"x": None if dx is None else comm.all_reduce(dx), "weight": dweight}

    return taped("vocab_parallel_linear_cross_entropy", loss, back, x=x, weight=weight)


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


def _joined(
    one: Any, lse_here: Any, here: Any, counts: Any, z_loss: float, comm: Communicator
) -> tuple[Any, Any]:
    """Return loss and lse over all words, of those over this rank's."""
    top = comm.all_reduce(lse_here, "max")
    top = np.where(top == -math.inf, 0, top)
    with np.errstate(divide="ignore"):
        lse = np.log(comm.all_reduce(np.exp(lse_here - top))) + top
    loss = comm.all_reduce(np.where(here, one + (lse - lse_here), 0).astype(one.dtype))
    if z_loss:
        loss = loss + np.where(counts, z_loss * lse**2, 0)
    return rounded(loss, one.dtype), rounded(lse, one.dtype)


def _seeds(dloss: Any, lse: Any, here: Any, counts: Any, z_loss: float) -> tuple[Any, Any]:
    """Return the gradients of this rank's loss and lse that make those of its logits."""
    dloss = np.where(counts, dloss, 0).astype(lse.dtype)
    return dloss, (dloss * (2 * z_loss * lse + ~here)).astype(lse.dtype)
