"""Rotary position embedding of queries and keys, and an append to a KV cache, in one launch.

turned_q, turned_k = rope_qk(q, k, cos, sin, positions)
keys[b, slot(starts[b] + i)] = turned_k[b, i]               and values from v; slot: see kv_append

With a page_table, tokens have the places of ``kv_append_paged_``.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ..common.no_kernel import no_kernel
from ..common.strides import token_strides, with_head_strides
from ..position.rope import INT64, REPORTER, check_tables, reports, tokens_of
from ..position.rope import constants as rope_constants
from ..position.rope_qk import rope_qk
from .kv_append import cache_numbers, check_rows, kv_append_, kv_append_paged_


@op(
    "q(batch, tokens, heads, dim), k(batch, tokens, kv_heads, dim),"
    " v(batch, tokens, kv_heads, dim), cos(length, half): table, sin(length, half): table,"
    " keys(pages, page, kv_heads, dim), values(pages, page, kv_heads, dim), starts(batch): int,"
    " positions?(batch|1, tokens): int < length, page_table?(batch, row_pages): int"
    " -> turned_q(batch, tokens, heads, dim), all_keys(pages, page, kv_heads, dim),"
    " all_values(pages, page, kv_heads, dim)",
    widen=False,
    no_gradient="it changes a cache, which exists only in inference",
    traffic=lambda a: 2 * (a["q"].nbytes + a["k"].nbytes + a["v"].nbytes),
)
def rope_append_(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    keys: Array,
    values: Array,
    starts: Array,
    positions: Array | None = None,
    page_table: Array | None = None,
    *,
    sinks: int = 0,
) -> tuple[Array, Array, Array]:
    """Return the rotated q; write the rotated k and v into keys and values from starts[b] on.

    Without a page_table, the axis ``pages`` is the batch, and ``page`` the slots of each sequence.
    With a page_table, sinks is not used.
    """
    turned_q, turned_k = rope_qk(q, k, cos, sin, positions)
    if page_table is None:
        kv_append_(turned_k, v, keys, values, starts, sinks=sinks)
    else:
        kv_append_paged_(turned_k, v, keys, values, page_table, starts)
    return turned_q, keys, values


@rope_append_.kernel(strided=("q", "k", "v"))
def _launch(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    keys: Array,
    values: Array,
    starts: Array,
    positions: Array | None,
    page_table: Array | None,
    sinks: int,
) -> Any:
    if not (keys.flags.c_contiguous and values.flags.c_contiguous):
        return no_kernel("keys or values are not contiguous")
    cos, sin, starts, positions = map(contiguous, (cos, sin, starts, positions))
    page_table = contiguous(page_table)
    turned_q = empty(q.shape, q.dtype, like=q)
    (batch, tokens, heads, dim), kv_heads = q.shape, k.shape[2]
    length, half = cos.shape
    shape = k.shape
    (flat_q, q_strides), (flat_k, k_strides) = with_head_strides(q), with_head_strides(k)
    flat_v, v_strides = token_strides(v)
    width = lanes(
        math.gcd(half, dim, *q_strides, *k_strides, *v_strides),
        *(flat_q, flat_k, flat_v, turned_q, keys, values, cos, sin),
    )
    dtypes = q.dtype, cos.dtype, INT64 if positions is None else positions.dtype
    of_pages = None if page_table is None else page_table.dtype
    chosen = _constants(dtypes, starts.dtype, of_pages, (heads, kv_heads, dim, half), width)
    threads = chosen["TOKENS"] * chosen["SLOTS"] * chosen["COLUMNS"]
    row_pages = 0 if page_table is None else page_table.shape[1]
    kernel = load("rope_append.cu", "rope_append_", q, chosen)
    kernel[-(-batch * tokens // chosen["TOKENS"]), threads](
        *(flat_q, flat_k, flat_v, cos, sin, positions, starts, page_table, turned_q, keys, values),
        tokens_of(q, length, positions, q_strides, k_strides),
        cache_numbers(shape, keys, (0, 0, *v_strides), sinks=sinks, row_pages=row_pages),
        *(reports(q, positions), REPORTER),
    )
    return turned_q, keys, values


rope_append_.require(check_tables)
rope_append_.require(check_rows)


@cache
def _constants(
    dtypes: tuple[Any, Any, Any],
    starts: Any,
    table: Any,
    token: tuple[int, int, int, int],
    lanes: int,
) -> Constants:
    """Return the constants of rope_append.cu: most constants of rope.cu, and the cache's."""
    chosen = rope_constants(dtypes, token, lanes, False, False, False, False)
    fixed = {name: value for name, value in chosen.items() if name not in UNUSED}
    of_pages = np.dtype("int32") if table is None else table
    return Constants(**fixed, P=starts, G=of_pages, PAGED=table is not None)


UNUSED = ("INVERSE", "IN_PLACE", "ANGLES")  # constants of rope.cu that rope_append.cu does not have
