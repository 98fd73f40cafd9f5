"""Attention over tokens that are divided among ranks: keys and values go around.

    lse = log(sum over ranks of exp(lse over the keys of that rank))      out: merge_attention

The memory is that of two blocks of keys and values.  With ``causal`` a rank holds one piece of the
first half and its mirror in the second, so that all have as many pairs to compute (zigzag).
Liu et al., Ring Attention with Blockwise Transformers, 2023.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import empty, packed, rounded
from ..errors import RangeError, ShapeError
from ..ops.attention.attention import attention_backward, attention_forward
from ..ops.attention.merge_attention import merge_attention
from ..placement import to_numpy
from ._taped import taped, value_of
from .communicator import Communicator, sum_dtype

Texts = list[tuple[int, int]]  # where each begins and ends among the tokens of all ranks


class Piece(NamedTuple):
    """Tokens that lie side by side: where in a rank's arrays, and their first position."""

    where: slice
    start: int

    def within(self, start: int, stop: int) -> tuple[slice, int]:
        """Return where its tokens of a text lie, and the first position of those."""
        first = max(self.start, start)
        size = self.where.stop - self.where.start
        skip, end = first - self.start, min(size, stop - self.start)
        return slice(self.where.start + skip, self.where.start + end), first


def ring_order(tokens: int, comm: Communicator, *, causal: bool) -> Any:
    """Return the positions of the tokens that this rank holds, in order.

    ``x[:, ring_order(x.shape[1], comm, causal=True)]`` is what it passes to ``ring_attention``.

    Raises
    ------
    ShapeError
        tokens do not divide by the ranks, or by twice as many with ``causal``.
    """
    pieces = comm.size * (1 + causal)
    if tokens % pieces:
        problem = f"ring_order: {tokens} tokens are not a multiple of {pieces}"
        raise ShapeError(f"{problem}; pad them", expected=pieces, actual=tokens)
    held = _pieces(tokens // comm.size, comm.rank, comm, causal)
    return np.concatenate(
        [np.arange(p.start, p.start + p.where.stop - p.where.start) for p in held]
    )


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
        This rank's tokens, as many as every rank has: those of ``ring_order``.
    k : (batch, tokens, kv_heads, dim) float
        Of the same tokens; kv_heads divides heads.
    v : (batch, tokens, kv_heads, value_dim) float
    comm : Communicator
    causal, window, scale, softcap
        As in ``attention``, of positions among the tokens of all ranks.
    offsets : (texts + 1,) int, optional
        Several texts lie end to end: where each one starts among the tokens of all ranks, and
        their number last.  None sees another.  The host reads them.

    Returns
    -------
    out : (batch, tokens, heads, value_dim) float
        Merged in float32 and rounded once.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        As ``attention`` raises; tokens of q and k differ, or are odd with ``causal``.
    RangeError
        offsets do not rise from 0 to the number of tokens of all ranks.
    """
    rows, keys, values = (packed(value_of(x)) for x in (q, k, v))
    tokens = rows.shape[1]
    if keys.shape[1] != tokens or tokens % (1 + causal):
        problem = f"ring_attention: q{rows.shape}, k{keys.shape}: tokens are not"
        kind = "alike and even" if causal else "alike"
        cure = "pass those of ring_order"
        raise ShapeError(f"{problem} {kind}; {cure}", expected=tokens, actual=keys.shape[1])
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
    texts = texts_of("ring_attention", offsets, tokens * comm.size)
    wide, lse = _forward(rows, keys, values, comm, texts, options)
    out = rounded(wide, rows.dtype)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        grads = _backward(packed(dy), rows, keys, values, out, lse, comm, texts, options)
        return dict(zip(("q", "k", "v"), grads, strict=True))

    return taped("ring_attention", out, back, q=q, k=k, v=v)


def texts_of(call: str, offsets: Any, tokens: int) -> Texts | None:
    """Return where texts begin and end, empty ones left out, or None where there are no offsets."""
    if offsets is None:
        return None
    read = to_numpy(offsets)
    whole = read.ndim == 1 and len(read) > 1 and read.dtype.kind in "iu"
    if not whole or read[0] != 0 or read[-1] != tokens or (np.diff(read) < 0).any():
        problem = f"{call}: offsets {read.tolist()} do not rise from 0 to {tokens}"
        raise RangeError(f"{problem}; pass where each text starts, and the number of tokens last")
    return [(int(a), int(b)) for a, b in pairwise(read) if a < b]


def _pieces(tokens: int, rank: int, comm: Communicator, causal: bool) -> list[Piece]:
    """Return the pieces of a rank's tokens: two with ``causal``, else one."""
    if not causal:
        return [Piece(slice(0, tokens), rank * tokens)]
    half = tokens // 2
    first, second = rank * half, (2 * comm.size - 1 - rank) * half
    return [Piece(slice(0, half), first), Piece(slice(half, tokens), second)]


def _pairs(
    tokens: int, owner: int, comm: Communicator, causal: bool, texts: Texts | None
) -> Iterator[tuple[slice, slice, int]]:
    """Yield where queries lie, where keys do, and where the first query stands among the keys."""
    for own in _pieces(tokens, comm.rank, comm, causal):
        for other in _pieces(tokens, owner, comm, causal):
            if not causal or other.start <= own.start:  # pieces are equally long
                for start, stop in texts or [(0, tokens * comm.size)]:
                    (mine, first), (keys, before) = (p.within(start, stop) for p in (own, other))
                    if mine.start < mine.stop and keys.start < keys.stop:
                        yield mine, keys, first - before


def _round(comm: Communicator, *arrays: Any) -> tuple[Any, ...]:
    """Give arrays to the next rank and return those of the one before."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return arrays
    return tuple(comm.exchange(x, to, empty(x.shape, x.dtype, like=x), source) for x in arrays)


def _forward(
    q: Any, k: Any, v: Any, comm: Communicator, texts: Texts | None, options: Any
) -> tuple[Any, Any]:
    """Return out in float32 at least, and lse over the keys of all ranks."""
    wide = sum_dtype(q.dtype)
    out = np.zeros_like(q, wide, shape=(*q.shape[:3], v.shape[3]))
    lse = np.full_like(q, -np.inf, wide, shape=(q.shape[0], q.shape[2], q.shape[1]))
    for step in range(comm.size):
        owner = (comm.rank - step) % comm.size
        for own, other, start in _pairs(q.shape[1], owner, comm, options["causal"], texts):
            part, part_lse = attention_forward(
                packed(q[:, own]), k[:, other], v[:, other], query_start=start, **options
            )
            out[:, own], lse[..., own] = merge_attention(
                packed(out[:, own]), packed(lse[..., own]), part.astype(wide), part_lse
            )
        if step + 1 < comm.size:
            k, v = _round(comm, k, v)
    return out, lse


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, comm: Communicator,
    texts: Texts | None, options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return dq, dk and dv; those of keys go around with them, and come home."""
    dtype, wide = q.dtype, sum_dtype(q.dtype)
    dq, dk, dv = (np.zeros_like(x, wide) for x in (q, k, v))
    for step in range(comm.size):
        owner = (comm.rank - step) % comm.size
        for own, other, start in _pairs(q.shape[1], owner, comm, options["causal"], texts):
            rows = [packed(x[:, own]) for x in (dout, q)]
            keys = [packed(x[:, other]) for x in (k, v)]
            after = packed(out[:, own]), packed(lse[..., own])
            found = attention_backward(*rows, *keys, *after, query_start=start, **options)
            dq[:, own] += found[0]
            dk[:, other] += found[1]
            dv[:, other] += found[2]
        if step + 1 < comm.size:
            k, v = _round(comm, k, v)
        dk, dv = _round(comm, dk, dv)
    return rounded(dq, dtype), rounded(dk, dtype), rounded(dv, dtype)
