"""Quantize new keys and values to int8 and write them into a KV cache, in place.

codes = round(k * (127 / absmax))        scale = absmax / 127        absmax = max |k[b, i, h]|

Each token and head has its own scale, so that codes in the cache never change.  Without pages,
tokens have the same slots as in ``kv_append_``, the ring buffer of a window included.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ..common.int8_codes import quantized
from ..common.no_kernel import no_kernel
from ..common.strides import token_strides
from .kv_append import NEW, cache_numbers, check_rows, kv_append_, kv_append_paged_

THREADS = 128  # of a block: few, because decoding appends few rows


@op(
    f"{NEW}, keys(pages, page, kv_heads, dim): code, values(pages, page, kv_heads, dim): code,"
    " scales(2, pages, page, kv_heads): stat, page_table?(batch, row_pages): int,"
    " starts?(batch): int -> all_scales(2, pages, page, kv_heads): stat",
    widen=False,
    no_gradient="it changes a cache, which exists only in inference",
    traffic=lambda a: 2 * a["k"].nbytes + 2 * a["k"].size,  # k and v are read, their codes written
)
def kv_append_int8_(
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    scales: Array,
    page_table: Array | None = None,
    starts: Array | None = None,
    *,
    start: int = 0,
    sinks: int = 0,
) -> Array:
    """Write the codes and scales of k and v; their first token has position start or starts[b].

    Without a page_table, the axis ``pages`` is the batch, and ``page`` the slots of each sequence.
    With a page_table, sinks is not used.
    """
    wide = np.promote_types(k.dtype, np.float32)
    both = [quantized(array.astype(wide))[:2] for array in (k, v)]
    append: Any = kv_append_.definition
    more: dict[str, Any] = {"starts": starts, "start": start, "sinks": sinks}
    if page_table is not None:
        starts = np.full(len(k), start, like=k) if starts is None else starts
        append, more = kv_append_paged_.definition, {"page_table": page_table, "starts": starts}
    (k_codes, k_scales), (v_codes, v_scales) = both
    append(k_codes, v_codes, keys, values, **more)
    append(k_scales[..., None], v_scales[..., None], *(s[..., None] for s in scales), **more)
    return scales


@kv_append_int8_.kernel
def _launch(
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    scales: Array,
    page_table: Array | None,
    starts: Array | None,
    start: int,
    sinks: int,
) -> Any:
    if not all(array.flags.c_contiguous for array in (keys, values, scales)):
        return no_kernel("keys, values or scales are not contiguous")
    page_table, starts = contiguous(page_table), contiguous(starts)
    shape, dim = k.shape, k.shape[3]
    groups = 2 * math.prod(shape[:3])
    (k, k_strides), (v, v_strides) = token_strides(k), token_strides(v)
    wide = lanes(math.gcd(dim, *k_strides, *v_strides), k, v, keys, values)
    plain = np.dtype("int32")
    dtypes = k.dtype, getattr(starts, "dtype", plain), getattr(page_table, "dtype", plain)
    chosen = _constants(dtypes, dim, wide, page_table is not None)
    kernel = load("kv_append_int8.cu", "kv_append_int8_", k, chosen)
    row_pages, strides = 0 if page_table is None else page_table.shape[1], k_strides + v_strides
    numbers = cache_numbers(shape, keys, strides, start=start, sinks=sinks, row_pages=row_pages)
    kernel[-(-groups * chosen["ROW_THREADS"] // THREADS), THREADS](
        *(k, v, keys, values, scales, page_table, starts, numbers)
    )
    return scales


@cache
def _constants(dtypes: tuple[Any, ...], dim: int, lanes: int, paged: bool) -> Constants:
    """Return the constants of kv_append_int8.cu: a head has a thread per access, at most a warp."""
    threads = min(32, 1 << (-(-dim // lanes) - 1).bit_length())
    k, starts, table = dtypes
    return Constants(
        T=k,
        P=starts,
        G=table,
        DIM=dim,
        LANES=lanes,
        ROW_THREADS=threads,
        THREADS=THREADS,
        PAGED=paged,
    )


kv_append_int8_.require(check_rows)
