"""Attention of packed sequences: there is no padding, and no sequence sees another.

sequence i has the queries q_offsets[i] .. q_offsets[i + 1] - 1, and its keys likewise by k_offsets

The result for each sequence equals one attention call, in which its number is the batch index.
"""

from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ...core.replay import is_fixed
from ._backward import launch_backward
from ._decode import launch_attention
from ._forward import launch_forward
from ._options import TILE, Options, Window, check_options
from ._products import operations_varlen
from ._scores import Scores
from .attention import attend, attend_backward
from .sequences import Padded, check_longest, longest, share_of, sides_of

PACKED = (
    "q(tokens, heads, dim), k(key_tokens, kv_heads, dim), v(key_tokens, kv_heads, value_dim),"
    " q_offsets(sequences+1): int, k_offsets(sequences+1): int"
)
OPERANDS = (
    "alibi?(sequences?, heads): param, sinks?(heads): param,"
    " mask?(sequences|1, heads|1, max_queries|1, max_keys|1): bool,"
    " bias?(sequences|1, heads|1, max_queries|1, max_keys|1): param,"
    " block_mask?(sequences|1, heads|1, max_queries/128, max_keys/128): bool"
)


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Array,
    k_offsets: Array,
    *,
    max_queries: int | None = None,
    max_keys: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    block_mask: Array | None = None,
) -> Array:
    """Return the attention of each sequence over its own keys; sequences are stored end to end.

    Parameters
    ----------
    q : (tokens, heads, dim) float
        Queries of all sequences; query head h reads key head ``h // (heads // kv_heads)``.
    k, v : (key_tokens, kv_heads, dim or value_dim) float
        Keys and values of all sequences.
    q_offsets, k_offsets : (sequences + 1,) int
        Index of the first token of each sequence, then the number of tokens.
    max_queries, max_keys : int, optional
        The length of the longest sequence, or more.  By default the size of the axis in mask, bias
        or block_mask or, on a GPU, where the host does not read offsets, the number of all tokens.
    causal, window, scale, softcap, alibi, sinks, dropout, seed
        As in attention, with positions that are counted within each sequence; alibi may be
        (sequences, heads).  Dropout drops the same pairs as in a padded batch of the sequences.
    mask, bias : up to 4 axes that broadcast to (sequences, heads, max_queries, max_keys), optional
        As in attention with key_lengths, of the sequences in a batch that is padded at the end:
        query i of a sequence reads row i.  Elements past the tokens of a sequence are not read;
        their gradient is 0.
    block_mask : bool (sequences or 1, heads or 1, max_queries / 128, max_keys / 128), optional
        As in attention, rounded up: tiles of 128 queries by 128 keys of a sequence.

    Returns
    -------
    out : (tokens, heads, value_dim) float
        For each query and head, the weighted sum of the values of its sequence.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other, max_queries or max_keys; the message shows the whole call.
    RangeError
        Offsets do not rise from 0 to the number of tokens, or a sequence is longer than
        max_queries or max_keys.
    ConfigError
        An option is invalid, or dropout has no seed.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import attention, attention_varlen, attention_varlen_backward
    >>> from unsloth_cupy import attention_varlen_forward
    >>> q = np.random.default_rng(0).standard_normal((7, 2, 16), np.float32)  # tokens, heads, dim
    >>> offsets = np.array([0, 3, 7], np.int32)  # sequences of 3 and 4 tokens
    >>> out = attention_varlen(q, q, q, offsets, offsets, causal=True)
    >>> second = attention(q[None, 3:], q[None, 3:], q[None, 3:], causal=True)[0]
    >>> np.testing.assert_allclose(out[3:], second, rtol=1e-5, atol=1e-5)
    >>> out, lse = attention_varlen_forward(q, q, q, offsets, offsets)
    >>> dq, dk, dv, *_ = attention_varlen_backward(out, q, q, q, offsets, offsets, out, lse)
    """
    return attention_varlen_forward(
        q, k, v, q_offsets, k_offsets, max_queries=max_queries, max_keys=max_keys, causal=causal,
        window=window, scale=scale, softcap=softcap, alibi=alibi, sinks=sinks, dropout=dropout,
        seed=seed, mask=mask, bias=bias, block_mask=block_mask,
    )[0]  # fmt: skip


@op(
    f"{PACKED}, {OPERANDS} -> out(tokens, heads, value_dim), lse(heads, tokens): stat"
    " where heads % kv_heads",
    operations=operations_varlen,
)
def attention_varlen_forward(
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Array,
    k_offsets: Array,
    *,
    alibi: Array | None = None,
    sinks: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    block_mask: Array | None = None,
    max_queries: int | None = None,
    max_keys: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """Return the out of ``attention_varlen``, and ``lse = log(sum(exp(score)))`` of each row."""
    arrays = mask, bias, alibi, sinks, None, None, block_mask
    options = Options(*arrays, causal, window, scale, softcap, dropout, seed)
    sizes = longest(options, max_queries, max_keys)
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype, like=q)
    lse = np.zeros((q.shape[1], q.shape[0]), q.dtype, like=q)
    for number, (rows, keys) in enumerate(
        sides_of("attention_varlen", q, k, q_offsets, k_offsets, *sizes)
    ):
        out_part, lse_part = attend(_scores(number, rows, keys, q, k, v, options))
        rows.give(out, out_part)
        rows.give(lse.T, lse_part.transpose(0, 2, 1))  # (batch, queries, heads)
    return out, lse


@attention_varlen_forward.kernel(strided=("k", "v"))
def _launch(
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Array,
    k_offsets: Array,
    max_queries: int | None,
    max_keys: int | None,
    **optional: Any,
) -> Any:
    if is_fixed():
        return _launch_padded(q, k, v, q_offsets, k_offsets, max_queries, max_keys, **optional)
    return launch_forward(q, k, v, Options(**optional, offsets=(q_offsets, k_offsets)))


def _launch_padded(
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Array,
    k_offsets: Array,
    max_queries: int | None,
    max_keys: int | None,
    **optional: Any,
) -> tuple[Array, Array]:
    """Return out and lse by the kernel with a fixed order, on sequences padded at the end."""
    rows, keys = Padded(q_offsets, max_queries, len(q)), Padded(k_offsets, max_keys, len(k))
    optional |= {"key_lengths": keys.lengths, "query_start": keys.lengths - rows.lengths}
    padded = rows.take(q, 0), keys.take(k, 0), keys.take(v, 0)
    out_part, lse_part = launch_attention(*padded, **optional)
    out = empty((*q.shape[:2], v.shape[2]), q.dtype, like=q)
    lse = empty((q.shape[1], len(q)), lse_part.dtype, like=q)
    rows.give(out, out_part)
    rows.give(lse.T, lse_part.transpose(0, 2, 1))  # (batch, queries, heads)
    return out, lse


@attention_varlen_forward.gradient
def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Array,
    k_offsets: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    max_queries: int | None = None,
    max_keys: int | None = None,
    **more: Any,
) -> tuple[Array, Array, Array, None, None, Array | None, Array | None, Array | None]:
    """Return the gradients of q, k, v, alibi, sinks and bias; a dlse of None counts as 0."""
    options = Options(**more)
    alibi, sinks, bias = options.alibi, options.sinks, options.bias
    sizes = longest(options, max_queries, max_keys)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dalibi = None if alibi is None else np.zeros_like(alibi, dtype=q.dtype)
    dsinks = None if sinks is None else np.zeros_like(sinks, dtype=q.dtype)
    dbias = None if bias is None else np.zeros_like(bias, dtype=q.dtype)
    for number, (rows, keys) in enumerate(
        sides_of("attention_varlen_backward", q, k, q_offsets, k_offsets, *sizes)
    ):
        scores = _scores(number, rows, keys, q, k, v, options)
        # (batch, heads, queries); inf: padding has p = 0
        lse_part = rows.take(lse.T, np.inf).transpose(0, 2, 1)
        dlse_part = None if dlse is None else rows.take(dlse.T, 0).transpose(0, 2, 1)
        parts = attend_backward(scores, rows.take(dout, 0), rows.take(out, 0), lse_part, dlse_part)
        rows.give(dq, parts[0])
        keys.give(dk, parts[1])
        keys.give(dv, parts[2])
        if dalibi is not None and parts[4] is not None:
            each = slice(None) if dalibi.ndim == 1 else slice(number, number + len(parts[4]))
            dalibi[each] += parts[4].sum(axis=0) if dalibi.ndim == 1 else parts[4]
        if dsinks is not None:
            dsinks += parts[5]
        if dbias is not None and parts[3] is not None:
            share_of(dbias, number, rows, keys)[...] += parts[3]
    return dq, dk, dv, None, None, dalibi, dsinks, dbias


@attention_varlen_backward.kernel(strided=("k", "v"))
def _launch_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Array,
    k_offsets: Array,
    out: Array,
    lse: Array,
    max_queries: int | None,  # checked before; the kernels do not use it
    max_keys: int | None,
    **optional: Any,
) -> Any:
    gradients = launch_backward(dout, q, k, v, out, lse, offsets=(q_offsets, k_offsets), **optional)
    if gradients is NotImplemented:
        return gradients
    dq, dk, dv, dbias, dalibi, dsinks = gradients
    return dq, dk, dv, None, None, dalibi, dsinks, dbias


def _scores(
    number: int, rows: Any, keys: Any, q: Array, k: Array, v: Array, options: Options
) -> Scores:
    """Return the scores of one sequence, or of all sequences if rows and keys are ``Padded``."""
    arrays, alibi = (rows.take(q, 0), keys.take(k, 0), keys.take(v, 0)), options.alibi
    options = options._replace(
        mask=share_of(options.mask, number, rows, keys),
        bias=share_of(options.bias, number, rows, keys),
        block_mask=share_of(options.block_mask, number, rows, keys, TILE),
    )
    if keys.lengths is not None:
        start = keys.lengths - rows.lengths
        return Scores(*arrays, options._replace(key_lengths=keys.lengths, query_start=start))
    if alibi is not None and alibi.ndim == 2:
        options = options._replace(alibi=alibi[number : number + 1])
    return Scores(*arrays, options, number)


attention_varlen_forward.require(check_options)
attention_varlen_forward.require(check_longest)
attention_varlen_backward.require(check_options)
attention_varlen_backward.require(check_longest)
attention_varlen_backward.facts["operations"] = lambda a: operations_varlen(a) * 5 // 2
