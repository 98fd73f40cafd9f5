"""Ulysses attention over divided tokens: each rank computes some heads for all tokens.

    (tokens / ranks, heads) -> (tokens, heads / ranks) -> attention -> (tokens / ranks, heads)

It needs four exchanges of this rank's tokens (q, k, v and out), whatever the number of ranks.
``ring_attention`` sends only keys and values, but as many times as there are ranks.  Jacobs et al.,
DeepSpeed Ulysses, 2023.
"""

from typing import Any

import numpy as np

from ..core.arrays import rounded
from ..core.call import check_options
from ..errors import ShapeError, naming
from ..ops.attention.attention import attention
from ..ops.attention.attention_varlen import attention_varlen
from .communicator import Communicator, sum_dtype
from .taped import taped, value_of, values_of
from .tensor import all_to_all


@naming("ulysses_attention", "attention", "attention_varlen", "all_to_all", q_offsets="offsets")
@check_options
def ulysses_attention(
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
        This rank's tokens, in order: ``shard(q, 1, comm)``.
    k : (batch, tokens, kv_heads, dim) float
        Keys of the same tokens; kv_heads divides heads.
    v : (batch, tokens, kv_heads, value_dim) float
    comm : Communicator
        heads must be a multiple of its size; kv_heads must be a multiple or a divisor of it.
    causal, window, scale, softcap
        As in ``attention``, for positions among the tokens of all ranks.
    offsets : (texts + 1,) int, optional
        As in ``attention_varlen``, among the tokens of all ranks; the batch must be 1.

    Returns
    -------
    out : (batch, tokens, heads, value_dim) float

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        As in ``attention``; or heads is not a multiple of the number of ranks.
    """
    values_of("ulysses_attention", q=q, k=k, v=v)
    heads, kv_heads = q.shape[2], k.shape[2]
    check_heads(heads, kv_heads, comm)
    if kv_heads % comm.size:
        k, v = (_repeated(x, comm.size // kv_heads) for x in (k, v))
    q, k, v = (all_to_all(x, 2, 1, comm) for x in (q, k, v))
    options: dict[str, Any] = {"causal": causal, "window": window}
    options |= {"scale": scale, "softcap": softcap}
    if offsets is None:
        return all_to_all(attention(q, k, v, **options), 1, 2, comm)
    for x in (q, k, v):
        if x.shape[0] != 1:
            problem = f"ulysses_attention: offsets need a batch of 1, not of {x.shape[0]}"
            cure = "pass all texts in one row"
            raise ShapeError(f"{problem}; {cure}", expected=1, actual=x.shape[0])
    q, k, v = (x.reshape(x.shape[1:]) for x in (q, k, v))  # (tokens, heads, dim)
    out: Any = attention_varlen(q, k, v, offsets, offsets, **options)
    return all_to_all(out.reshape((1, *out.shape)), 1, 2, comm)


def check_heads(heads: int, kv_heads: int, comm: Communicator) -> None:
    """Raise unless the number of ranks divides the heads; the message lists valid numbers."""
    fits = dividing(heads, kv_heads)
    if comm.size not in fits:
        problem = f"ulysses_attention: {heads} heads, {kv_heads} KV heads, are not a multiple of"
        cure = f"use {', '.join(map(str, fits))} ranks, or ring_attention"
        raise ShapeError(f"{problem} {comm.size} ranks; {cure}", expected=fits, actual=comm.size)


def dividing(heads: int, kv_heads: int) -> list[int]:
    """Return the numbers of ranks that divide the heads; several ranks may share a KV head."""
    sizes = (ranks for ranks in range(1, heads + 1) if heads % ranks == 0)
    return [ranks for ranks in sizes if kv_heads % ranks == 0 or ranks % kv_heads == 0]


def _repeated(x: Any, times: int) -> Any:
    """Repeat each KV head ``times`` times, for more ranks than KV heads."""
    value = value_of(x)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        copies = dy.reshape(*dy.shape[:2], -1, times, dy.shape[3])
        return {"x": rounded(copies.sum(axis=3, dtype=sum_dtype(dy.dtype)), dy.dtype)}

    return taped("ulysses_attention", np.repeat(value, times, axis=2), back, x=x)
