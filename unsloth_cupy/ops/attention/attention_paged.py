"""Attention over a paged KV cache, whose pages may be in any order.

k[b, i] = k_pages[page_table[b, i // page], i % page]      for i < lengths[b]

Kwon and others, Efficient Memory Management for Large Language Model Serving with
PagedAttention, 2023.
"""

from typing import Any

from ...core.dtypes import Array
from ...core.op import op
from ...errors import ConfigError
from ._options import Options, Window, check_options
from ._pages import OPERANDS, attend_pages, check_keys, launch_pages
from ._products import operations_paged
from .attention_paged_int8 import attention_paged_int8_forward


def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    lengths: Array,
    *,
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    query_start: Array | int | None = None,
    block_mask: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    scales: Array | None = None,
) -> Array:
    """Return attention over the first ``lengths[b]`` keys of the pages of each sequence.

    It is the same as ``attention`` over the keys in order, with ``key_lengths=lengths``.  The last
    query of a sequence has the position of its last key, unless ``query_start`` sets the position
    of the first query.

    Parameters
    ----------
    q : (batch, queries, heads, dim) float
        Queries; query head h reads key head ``h // (heads // kv_heads)``.
    k_pages, v_pages : (pages, page, kv_heads, dim or value_dim) float
        Keys and values, ``page`` tokens per page.
    page_table : (batch, max_pages) int
        The pages of each sequence, in order; entries past its length are not read.
    lengths : (batch,) int
        Number of tokens of each sequence, the tokens of the queries included.
    causal, window, scale, softcap, alibi, sinks, query_start, dropout, seed
        As in attention, but causal is True by default.
    mask, bias : up to 4 axes that broadcast to (batch, heads, queries, keys), optional
        As in attention, for ``keys = max_pages * page``; elements past a length are not read.
    block_mask : bool (batch or 1, heads or 1, queries / 128, keys / 128), rounded up, optional
        As in attention.  If a tile is False for all heads of a group, its pages are not read.
    scales : (2, pages, page, kv_heads) float32, optional
        For int8 k_pages and v_pages: the factors of their codes, first for keys, then for values;
        one for each token and head.

    Returns
    -------
    out : (batch, queries, heads, value_dim) float
        For each query and head, the weighted sum of the values.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    RangeError
        A length exceeds its pages, or a page number is outside 0 .. pages - 1.
    ConfigError
        An option is invalid, dropout has no seed, or block_mask is combined with scales.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import attention, attention_paged, attention_paged_forward
    >>> rng = np.random.default_rng(0)
    >>> pages = rng.standard_normal((5, 4, 2, 16), np.float32)  # pages, tokens, heads, dim
    >>> table, lengths = np.array([[3, 1]]), np.array([6])  # 6 tokens in pages 3 and 1
    >>> q = rng.standard_normal((1, 1, 2, 16), np.float32)  # of the newest token
    >>> out = attention_paged(q, pages, pages, table, lengths)
    >>> k = np.concatenate([pages[3], pages[1]])[None, :6]
    >>> np.testing.assert_allclose(out, attention(q, k, k), rtol=1e-5, atol=1e-5)
    >>> out, lse = attention_paged_forward(q, pages, pages, table, lengths)
    """
    options: Any = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "alibi": alibi,
        "sinks": sinks, "mask": mask, "bias": bias, "query_start": query_start,
        "dropout": dropout, "seed": seed,
    }  # fmt: skip
    if scales is None:
        options = {**options, "block_mask": block_mask}
        return attention_paged_forward(q, k_pages, v_pages, page_table, lengths, **options)[0]
    if block_mask is not None:
        cure = "pass a mask, or leave scales out and pass floats"
        raise ConfigError(f"attention_paged: block_mask does not go with scales; {cure}")
    cache = scales, page_table, lengths
    return attention_paged_int8_forward(q, k_pages, v_pages, *cache, **options)[0]


@op(
    "q(batch, queries, heads, dim), k_pages(pages, page, kv_heads, dim),"
    f" v_pages(pages, page, kv_heads, value_dim), {OPERANDS},"
    " block_mask?(batch|1, heads|1, queries/128, keys/128): bool"
    " -> out(batch, queries, heads, value_dim), lse(batch, heads, queries): stat"
    " where heads % kv_heads",
    widen=False,  # a cache is large: only the parts that are read are widened
    no_gradient="it reads a paged cache, which exists only in inference",
    operations=operations_paged,
)
def attention_paged_forward(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    lengths: Array,
    *,
    alibi: Array | None = None,
    sinks: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    query_start: Array | int | None = None,
    block_mask: Array | None = None,
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """Return the out of ``attention_paged``, and ``lse = log(sum(exp(score)))`` of each row."""
    arrays = mask, bias, alibi, sinks, None, query_start, block_mask
    options = Options(*arrays, causal, window, scale, softcap, dropout, seed)
    return attend_pages(q, k_pages, v_pages, page_table, lengths, options)


@attention_paged_forward.kernel
def _launch(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, **optional: Any
) -> Any:
    return launch_pages(q, k_pages, v_pages, page_table, lengths, None, **optional)


attention_paged_forward.require(check_options)
attention_paged_forward.require(check_keys)
