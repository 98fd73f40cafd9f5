"""Attention over a paged KV cache of int8 codes.

k[b, i] = scales[0, n, j] * k_pages[n, j]        n = page_table[b, i // page], j = i % page

and the same for values, with scales[1].  Each token and head has its own scale.
"""

from typing import Any

from ...core.dtypes import Array
from ...core.op import op
from ._options import Options, Window, check_options
from ._pages import OPERANDS, attend_pages, check_keys, launch_pages
from ._products import operations_paged


@op(
    "q(batch, queries, heads, dim), k_pages(pages, page, kv_heads, dim): code,"
    " v_pages(pages, page, kv_heads, value_dim): code, scales(2, pages, page, kv_heads): stat,"
    f" {OPERANDS}"
    " -> out(batch, queries, heads, value_dim), lse(batch, heads, queries): stat"
    " where heads % kv_heads",
    widen=False,  # a cache is large: only the parts that are read are widened
    no_gradient="it reads a paged cache, which exists only in inference",
    operations=operations_paged,
)
def attention_paged_int8_forward(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    scales: Array,
    page_table: Array,
    lengths: Array,
    *,
    alibi: Array | None = None,
    sinks: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    query_start: Array | int | None = None,
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """Return out and lse of attention_paged_forward, for keys and values times their scales.

    The kernel for few queries multiplies codes of keys exactly.  It supports neither head dims that
    are not multiples of 16, nor float32 with head dims above 128 and a mask, bias or dropout.  For
    many queries on a GPU, keys times their scales are rounded to the dtype of q.
    """
    arrays = mask, bias, alibi, sinks, None, query_start, None
    options = Options(*arrays, causal, window, scale, softcap, dropout, seed)
    return attend_pages(q, k_pages, v_pages, page_table, lengths, options, scales)


@attention_paged_int8_forward.kernel
def _launch(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    scales: Array,
    page_table: Array,
    lengths: Array,
    **optional: Any,
) -> Any:
    return launch_pages(q, k_pages, v_pages, page_table, lengths, scales, **optional)


attention_paged_int8_forward.called = "attention_paged"  # messages name the public caller
attention_paged_int8_forward.require(check_options)


@attention_paged_int8_forward.require
def _check_keys(k_pages: Array, page_table: Array, mask: Any, bias: Any) -> None:
    check_keys(k_pages, page_table, mask, bias, None)
