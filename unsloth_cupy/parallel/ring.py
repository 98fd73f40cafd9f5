"""Ring attention: ranks divide the tokens, and pass keys and values around in a ring.

    lse = log(sum over ranks of exp(lse over that rank's keys))      out: merge_attention

A rank stores two blocks of keys and values: its current one and the one that it receives.  With
``causal`` a rank has one piece of the first half of the tokens and the mirrored piece of the second
half, so that all ranks compute equally many pairs of queries and keys (zigzag).  Liu et al., Ring
Attention with Blockwise Transformers, 2023.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import contiguous, empty, framework_of, rounded
from ..core.call import check_options, is_integer
from ..errors import ConfigError, RangeError, ShapeError, naming
from ..machine import check_bytes
from ..ops.attention.attention import attention_backward, attention_forward
from ..ops.attention.merge_attention import merge_attention
from ..placement import to_numpy
from .communicator import Communicator, check_communicator, sum_dtype
from .taped import taped, values_of

Texts = list[tuple[int, int]]  # begin and end of each text among the tokens of all ranks


class Piece(NamedTuple):
    """Consecutive tokens: their slice of a rank's arrays, and the position of the first token."""

    where: slice
    start: int

    def within(self, start: int, stop: int) -> tuple[slice, int]:
        """Return the slice of this piece in a text, and the position of its first token."""
        first = max(self.start, start)
        size = self.where.stop - self.where.start
        skip, end = first - self.start, min(size, stop - self.start)
        return slice(self.where.start + skip, self.where.start + end), first


def ring_order(tokens: int, comm: Communicator, *, causal: bool) -> Any:
    """Return the positions of this rank's tokens, in order.

    Pass ``x[:, ring_order(x.shape[1], comm, causal=True)]`` to ``ring_attention``.

    Raises
    ------
    ShapeError
        tokens is not a multiple of the world size, or with ``causal`` of twice the world size.
    ConfigError
        comm is not a communicator, causal not a bool, or tokens not a number of tokens.
    """
    check_communicator("ring_order", comm)
    flag: Any = causal
    if not isinstance(flag, bool) or not is_integer(tokens):
        problem = f"ring_order(tokens={tokens!r}, causal={causal!r})"
        raise ConfigError(f"{problem}: pass an integer, 0 or more, and True or False")
    check_bytes(f"ring_order(tokens={tokens})", 8 * tokens // comm.size)
    pieces = comm.size * (1 + causal)
    if tokens % pieces:
        problem = f"ring_order: {tokens} tokens are not a multiple of {pieces}"
        raise ShapeError(f"{problem}; pad them", expected=pieces, actual=tokens)
    own_pieces = _pieces(tokens // comm.size, comm.rank, comm, causal)
    return np.concatenate(
        [np.arange(p.start, p.start + p.where.stop - p.where.start) for p in own_pieces]
    )


@naming("ring_attention", "attention")
@check_options
def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    comm: Communicator,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    offsets: Any = None,
) -> Any:
    """Return ``attention`` of this rank's queries over the keys of all ranks.

    Parameters
    ----------
    q : (batch, tokens, heads, dim) float
        This rank's tokens in the order of ``ring_order``; all ranks have equally many.
    k : (batch, tokens, kv_heads, dim) float
        Keys of the same tokens; kv_heads divides heads.
    v : (batch, tokens, kv_heads, value_dim) float
    comm : Communicator
    causal, window, scale, softcap
        As in ``attention``, for positions among the tokens of all ranks.
    offsets : (texts + 1,) int, optional
        Starts of packed texts among the tokens of all ranks, and the number of tokens last.  A text
        attends only to itself.  The host reads the offsets.

    Returns
    -------
    out : (batch, tokens, heads, value_dim) float
        Merged in float32 and rounded once.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        As in ``attention``; or q and k have different numbers of tokens, or with ``causal`` an odd
        number of tokens.
    RangeError
        offsets do not rise from 0 to the number of tokens of all ranks.
    """
    rows, keys, values = map(contiguous, values_of("ring_attention", q=q, k=k, v=v))
    tokens = rows.shape[1]
    if keys.shape[1] != tokens or tokens % (1 + causal):
        problem = f"ring_attention: q{rows.shape}, k{keys.shape}: numbers of tokens are not"
        kind = "equal and even" if causal else "equal"
        cure = "pass the tokens of ring_order"
        raise ShapeError(f"{problem} {kind}; {cure}", expected=tokens, actual=keys.shape[1])
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
    texts = texts_of("ring_attention", offsets, tokens * comm.size)
    wide_out, lse = _forward(rows, keys, values, comm, texts, options)
    out = rounded(wide_out, rows.dtype)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        grads = _backward(contiguous(dy), rows, keys, values, out, lse, comm, texts, options)
        return dict(zip(("q", "k", "v"), grads, strict=True))

    return taped("ring_attention", out, back, q=q, k=k, v=v)


def texts_of(call: str, offsets: Any, tokens: int) -> Texts | None:
    """Return begin and end of each text that is not empty; None without offsets."""
    if offsets is None:
        return None
    framework_of(offsets, f"{call}: offsets")  # raises for other objects
    starts = to_numpy(offsets)
    valid = starts.ndim == 1 and len(starts) > 1 and starts.dtype.kind in "iu"
    if not valid or starts[0] != 0 or starts[-1] != tokens or (np.diff(starts) < 0).any():
        problem = f"{call}: offsets {starts.tolist()} do not rise from 0 to {tokens}"
        raise RangeError(f"{problem}; pass the start of each text, and the number of tokens last")
    return [(int(a), int(b)) for a, b in pairwise(starts) if a < b]


def _pieces(tokens: int, rank: int, comm: Communicator, causal: bool) -> list[Piece]:
    """Return the pieces of a rank's tokens: two with ``causal``, otherwise one."""
    if not causal:
        return [Piece(slice(0, tokens), rank * tokens)]
    half = tokens // 2
    first, second = rank * half, (2 * comm.size - 1 - rank) * half
    return [Piece(slice(0, half), first), Piece(slice(half, tokens), second)]


def _pairs(
    tokens: int, owner: int, comm: Communicator, causal: bool, texts: Texts | None
) -> Iterator[tuple[slice, slice, int]]:
    """Yield slices of queries and of their keys, and the first query's index in the keys."""
    for own in _pieces(tokens, comm.rank, comm, causal):
        for other in _pieces(tokens, owner, comm, causal):
            # Pieces have equal lengths: one that starts later has no keys for these queries.
            if not causal or other.start <= own.start:
                for start, stop in texts or [(0, tokens * comm.size)]:
                    (queries, first), (keys, before) = (p.within(start, stop) for p in (own, other))
                    if queries.start < queries.stop and keys.start < keys.stop:
                        yield queries, keys, first - before


def _round(comm: Communicator, *arrays: Any) -> tuple[Any, ...]:
    """Send arrays to the next rank and return those of the previous rank."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return arrays
    return tuple(comm.exchange(x, to, empty(x.shape, x.dtype, like=x), source) for x in arrays)


def _forward(
    q: Any, k: Any, v: Any, comm: Communicator, texts: Texts | None, options: Any
) -> tuple[Any, Any]:
    """Return out in float32 or wider, and lse over the keys of all ranks."""
    sum_type = sum_dtype(q.dtype)
    out = np.zeros_like(q, sum_type, shape=(*q.shape[:3], v.shape[3]))
    lse = np.full_like(q, -np.inf, sum_type, shape=(q.shape[0], q.shape[2], q.shape[1]))
    for step in range(comm.size):
        owner = (comm.rank - step) % comm.size
        for own, other, start in _pairs(q.shape[1], owner, comm, options["causal"], texts):
            part, part_lse = attention_forward(
                contiguous(q[:, own]), k[:, other], v[:, other], query_start=start, **options
            )
            out[:, own], lse[..., own] = merge_attention(
                contiguous(out[:, own]), contiguous(lse[..., own]), part.astype(sum_type), part_lse
            )
        if step + 1 < comm.size:
            k, v = _round(comm, k, v)
    return out, lse


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, comm: Communicator,
    texts: Texts | None, options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return dq, dk and dv; dk and dv pass around the ring with their keys, back to their rank."""
    dtype, sum_type = q.dtype, sum_dtype(q.dtype)
    dq, dk, dv = (np.zeros_like(x, sum_type) for x in (q, k, v))
    for step in range(comm.size):
        owner = (comm.rank - step) % comm.size
        for own, other, start in _pairs(q.shape[1], owner, comm, options["causal"], texts):
            rows = [contiguous(x[:, own]) for x in (dout, q)]
            keys = [contiguous(x[:, other]) for x in (k, v)]
            after = contiguous(out[:, own]), contiguous(lse[..., own])
            grads = attention_backward(*rows, *keys, *after, query_start=start, **options)
            dq[:, own] += grads[0]
            dk[:, other] += grads[1]
            dv[:, other] += grads[2]
        if step + 1 < comm.size:
            k, v = _round(comm, k, v)
        dk, dv = _round(comm, dk, dv)
    return rounded(dq, dtype), rounded(dk, dtype), rounded(dv, dtype)
