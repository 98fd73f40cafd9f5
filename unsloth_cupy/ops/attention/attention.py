"""Attention: out = softmax(score) @ v, row by row, with the options that models use.

score = cap * tanh(scale * q @ k.T / cap) + bias - slope * abs(query position - key position)
lse = log(sum(exp(score)))      out = exp(score - lse) @ v

    dv = p.T @ dout      ds = p * (dout @ v.T - rowsum(dout * out) + dlse)      p = exp(score - lse)
    dq = scale * ds @ k      dk = scale * ds.T @ q

Dao and others, FlashAttention, 2022: the rows are computed in blocks, and backward recomputes p
from lse.
"""

import math
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ..elements.reductions import broadcast_to
from ._backward import launch_backward
from ._blocks import Block
from ._decode import launch_attention
from ._options import ROUNDED, Options, Window, check_options, warn_of_heads_first
from ._products import for_keys, operations, stacked, unstacked
from ._scores import Scores

OPERANDS = (
    "mask?(batch|1, heads|1, queries|1, keys|1): bool,"
    " bias?(batch|1, heads|1, queries|1, keys|1): param, alibi?(batch?, heads): param,"
    " sinks?(heads): param, key_lengths?(batch): int, query_start?(batch?): int,"
    " block_mask?(batch|1, heads|1, queries/128, keys/128): bool"
)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    key_lengths: Array | None = None,
    query_start: Array | int | None = None,
    block_mask: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Array:
    """Return ``softmax(score) @ v``, where ``score = scale * q @ k.T``, changed by the options.

    The options apply in this order: ``scale``; ``softcap * tanh(score / softcap)``; plus bias,
    minus alibi; -inf where mask, causal, window, key_lengths or block_mask hide a key; softmax;
    dropout.  All options can be combined.  A query that sees no key gets zeros and zero gradients.

    The token axis comes before the head axis.  Arrays for torch's ``scaled_dot_product_attention``
    are (batch, heads, tokens, dim): swap axes 1 and 2 first.  Without the swap, shapes may still be
    valid; the result is then wrong, and a warning is given only in some cases.

    Parameters
    ----------
    q : (batch, queries, heads, dim) float
        Queries.  Query head h reads key head ``h // (heads // kv_heads)``.
    k : (batch, keys, kv_heads, dim) float
        Keys; kv_heads divides heads.
    v : (batch, keys, kv_heads, value_dim) float
        Values.  If any of q, k and v has a batch axis, an array without one is shared by the whole
        batch.
    causal : bool
        Whether each query sees only the keys up to its own position.
    window : (left, right), optional
        The query at position p sees the keys p - left .. p + right; None is unbounded.
    scale : float, optional
        1 / sqrt(dim) by default.
    softcap : float, optional
        Bounds the scaled scores to -softcap .. softcap.
    mask : bool, up to 4 axes that broadcast to (batch, heads, queries, keys), optional
        True where a query may see a key.
    bias : dtype of q or float32, axes as mask, optional
        Added to the scores; -inf hides a key.
    alibi : (heads,) or (batch, heads) dtype of q or float32, optional
        Slopes; ``slope * abs(query position - key position)`` is subtracted.
    sinks : (heads,) dtype of q or float32, optional
        Score of an additional key that every query sees and that has no value.
    key_lengths : (batch,) int, optional
        Number of keys of each batch element; later keys are ignored, whatever their values.
    query_start : int or (batch,) int, optional
        Position of the first query among the keys.  By default the last query has the position of
        the last key: ``keys - queries``, or ``key_lengths - queries``.  For alibi, the position is
        clipped to -2**29 .. 2**29.
    block_mask : bool (batch or 1, heads or 1, queries / 128, keys / 128), rounded up, optional
        Tiles of 128 queries by 128 keys that are False are skipped.
    dropout : float
        Fraction of the probabilities that become 0; the others are multiplied by
        ``1 / (1 - dropout)``.
    seed : int, optional
        Seed of dropout, in 0 .. 2**64 - 1; the same seed drops the same (batch, head, query, key).

    Returns
    -------
    out : (batch, queries, heads, value_dim) float
        For each query and head, the weighted sum of the values.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    ConfigError
        An option is invalid, or dropout has no seed.
    RangeError
        key_lengths contains a number outside 0 .. keys.

    Notes
    -----
    Vaswani and others, Attention Is All You Need, 2017.  Ainslie and others, GQA, 2023.  Press
    and others, Train Short, Test Long (ALiBi), 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import attention, attention_backward, attention_forward
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 6, 8, 64), np.float32)  # batch, tokens, heads, dim
    >>> k, v = rng.standard_normal((2, 1, 6, 2, 64), np.float32)  # 4 query heads share a key head
    >>> out = attention(q, k, v, causal=True)  # the first token sees only itself
    >>> np.testing.assert_allclose(out[:, 0], v[:, 0].repeat(4, axis=1), rtol=1e-6)
    >>> out, lse = attention_forward(q, k, v, causal=True)
    >>> dq, dk, dv, *_ = attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> assert dk.shape == k.shape
    """
    axes = [getattr(a, "ndim", 0) for a in (q, k, v)]
    if 3 in axes and 4 in axes:
        batch: int = (q, k, v)[axes.index(4)].shape[0]
        q, k, v = (
            broadcast_to(a, shape=(batch, *a.shape)) if n == 3 else a
            for n, a in zip(axes, (q, k, v), strict=True)
        )
    return attention_forward(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, mask=mask, bias=bias,
        alibi=alibi, sinks=sinks, key_lengths=key_lengths, query_start=query_start,
        block_mask=block_mask, dropout=dropout, seed=seed,
    )[0]  # fmt: skip


@op(
    "q(batch, queries, heads, dim), k(batch, keys, kv_heads, dim),"
    f" v(batch, keys, kv_heads, value_dim), {OPERANDS}"
    " -> out(batch, queries, heads, value_dim), lse(batch, heads, queries): stat"
    " where heads % kv_heads",
    torch=lambda nn, t, o: nn.attended(t, o),
    operations=operations,
)
def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    key_lengths: Array | None = None,
    query_start: Array | int | None = None,
    block_mask: Array | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """Return the out of ``attention``, and ``lse = log(sum(exp(score)))`` of each row."""
    arrays = mask, bias, alibi, sinks, key_lengths, query_start, block_mask
    return attend(Scores(q, k, v, Options(*arrays, causal, window, scale, softcap, dropout, seed)))


def attend(scores: Scores) -> tuple[Array, Array]:
    """Return out = softmax(scores) @ v, and lse, block by block."""
    q, v, group, sinks = scores.q, scores.v, scores.group, scores.sinks
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype, like=q)
    lse = np.full_like(q, -math.inf, shape=(scores.batch, scores.heads, scores.queries))
    if sinks is not None:
        sinks = sinks.astype(q.dtype)
        lse[:] = sinks[:, None]

    def step(block: Block) -> None:
        """Write out and lse of the block's queries."""
        rows = (block.batch, block.heads, block.rows)
        _, p, _ = scores.logits(block)  # (batch, kv_heads, group * queries, keys)
        by_head = scores.by_head(p, block)  # (batch, kv_heads, group, queries, keys)
        top = by_head.max(axis=-1, keepdims=True)
        if sinks is not None:
            sink = sinks[block.heads].reshape(-1, group, 1, 1)  # (kv_heads, group, 1, 1)
            top = np.maximum(top, sink)
        top[top == -math.inf] = 0  # rows that see no key: -inf - -inf would be NaN
        by_head -= top  # the largest is exactly 1: a row that sees one key gets its values
        np.exp(p, out=p)
        total = scores.row_sums(p, block)
        if sinks is not None:
            total += np.exp(sink - top)
        empty = total == 0
        total[empty] = 1  # rows that see no key: 0 / 1, not 0 / 0, is their out
        top += np.log(total)
        top[empty] = -math.inf
        lse[rows] = top.reshape(lse[rows].shape)
        if scores.dropout:
            by_head *= scores.kept(block)
            total *= 1 - scores.dropout
        part = scores.over_keys(p, v[block.batch, block.keys, block.kv_heads])
        part /= total.reshape(*part.shape[:-1], 1)  # (batch, kv_heads, group * queries, value_dim)
        out[block.batch, block.rows, block.heads] = unstacked(part, group)

    scores.walk(step)
    return out, lse


@attention_forward.gradient
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    **options: Any,
) -> tuple[Array, Array, Array, Array | None, Array | None, Array | None]:
    """Return the gradients of q, k, v, bias, alibi and sinks; a dlse of None counts as 0."""
    chosen = Options(**options)
    dq, dk, dv, dbias, dalibi, dsinks = attend_backward(
        Scores(q, k, v, chosen), dout, out, lse, dlse
    )
    if chosen.bias is not None and dbias is not None:
        dbias = dbias.reshape(chosen.bias.shape)
    if chosen.alibi is not None and dalibi is not None:
        dalibi = dalibi if chosen.alibi.ndim == 2 else dalibi.sum(axis=0)
    return dq, dk, dv, dbias, dalibi, dsinks


def attend_backward(
    scores: Scores, dout: Array, out: Array, lse: Array, dlse: Array | None
) -> tuple[Array, Array, Array, Array | None, Array | None, Array | None]:
    """Return the gradients of q, k, v, bias, alibi (for each batch) and sinks.

    The scores are recomputed.
    """
    q, k, v, group, sinks = scores.q, scores.k, scores.v, scores.group, scores.sinks
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dbias = None if scores.bias is None else np.zeros_like(scores.bias, dtype=q.dtype)
    by_head = (scores.batch, scores.heads, 1, 1)
    dalibi = None if scores.alibi is None else np.zeros(by_head, q.dtype, like=q)
    # With a single key p is 1 and ds is 0, whatever its score.  (If lse also covers keys of other
    # calls, as in ring attention, p is below 1: step() looks at each p.)
    alone = scores.keys == 1 and sinks is None and dlse is None
    delta = np.einsum("bqhd,bqhd->bhq", dout, out)  # rowsum(p * dp), subtracted in ds below
    delta = delta if dlse is None else delta - dlse
    lse = np.where(lse == -math.inf, 0, lse)  # rows that see no key: p = exp(-inf - 0) is still 0
    dsinks = None
    if sinks is not None:
        dsinks = -(np.exp(sinks[:, None] - lse) * delta).sum(axis=(0, 2))

    def step(block: Block) -> None:
        """Write dq of the block's queries, and add to the other gradients."""
        rows = (block.batch, block.heads, block.rows)
        keys = (block.batch, block.keys, block.kv_heads)
        rows_of_q, p, tanh = scores.logits(block)  # (batch, kv_heads, group * queries, keys)
        p_by_head = scores.by_head(p, block)  # (batch, kv_heads, group, queries, keys)
        shape = (*p_by_head.shape[:-1], 1)
        p_by_head -= lse[rows].reshape(shape)
        np.exp(p, out=p)
        rows_of_dout = stacked(dout, block, group)
        ds = scores.by_keys(rows_of_dout, v[keys])  # (batch, kv_heads, group * queries, keys)
        ds_by_head = scores.by_head(ds, block)
        weights = p
        if scores.dropout:
            kept = scores.kept(block) * q.dtype.type(1 / (1 - scores.dropout))
            # (batch, kv_heads, group * queries, keys)
            weights = (p_by_head * kept).reshape(p.shape)
            ds_by_head *= kept
        dv[keys] += for_keys(weights, rows_of_dout, scores.width)
        ds_by_head -= delta[rows].reshape(shape)
        ds *= p
        if alone:
            ds *= np.abs(p - 1) > ROUNDED * np.finfo(p.dtype).eps  # 0 where p is 1 but for rounding
        if dbias is not None:
            scores.add_sum(dbias, ds_by_head, block)
        if dalibi is not None:
            distance = scores.distances(block).astype(q.dtype)
            scores.add_sum(dalibi, ds_by_head * -distance, block)
        if tanh is not None:
            ds *= 1 - tanh * tanh
        part = scores.over_keys(ds, k[keys]) * scores.scale
        dq[block.batch, block.rows, block.heads] = unstacked(part, group)
        dk[keys] += for_keys(ds, rows_of_q, scores.width)

    # blocks that share elements of bias must not add to dbias at the same time: serial
    scores.walk(step, in_order=True, serial=dbias is not None)
    dalibi = None if dalibi is None else dalibi[:, :, 0, 0]
    return dq, dk, dv, dbias, dalibi, dsinks


attention_forward.require(check_options)
attention_forward.require(warn_of_heads_first)
# strided: k and v may be the first tokens of a cache, or columns of a joint projection of q, k, v
attention_forward.kernel(launch_attention, strided=("k", "v"))
attention_backward.require(check_options)
attention_backward.kernel(launch_backward, strided=("k", "v"))
# five matrix products; forward has two
attention_backward.facts["operations"] = lambda a: operations(a) * 5 // 2
