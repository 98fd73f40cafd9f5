"""Write new keys and values into a KV cache, in place.

keys[b, slot(start + i)] = k[b, i]                                  and the same for values

slot(p) = p for p < sinks: these tokens stay in the cache.  Of later tokens the most recent stay, in
a ring buffer: slot(p) = sinks + (p - sinks) % (slots - sinks)

A token without a slot is dropped; the caches that call these ops raise an error before that.
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
from ...errors import ShapeError
from ..common.no_kernel import no_kernel
from ..common.strides import token_strides

NEW = "k(batch, tokens, kv_heads, dim), v(batch, tokens, kv_heads, dim)"


@op(
    f"{NEW}, keys(batch, slots, kv_heads, dim), values(batch, slots, kv_heads, dim),"
    " starts?(batch): int"
    " -> all_keys(batch, slots, kv_heads, dim), all_values(batch, slots, kv_heads, dim)",
    widen=False,
    no_gradient="it changes a cache, which exists only in inference",
    traffic=lambda a: 4 * a["k"].nbytes,  # k and v are read, and as many bytes written
)
def kv_append_(
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    starts: Array | None = None,
    *,
    start: int = 0,
    sinks: int = 0,
) -> tuple[Array, Array]:
    """Write k and v into keys and values; their first token has position start or starts[b]."""
    tokens, slots = k.shape[1], keys.shape[1]
    if starts is None and 0 <= start <= start + tokens <= slots:
        keys[:, start : start + tokens], values[:, start : start + tokens] = k, v
        return keys, values
    if not k.size:
        return keys, values
    # the new token that each slot stores: the last one that maps to it
    first: Any = start if starts is None else starts[:, None].astype(np.int64)
    stop, slot = first + tokens, np.arange(slots, like=keys)
    last = stop - 1 - (stop - 1 - slot) % max(slots - sinks, 1)
    token = np.where(slot < sinks, slot, last) - first
    new = (token >= 0) & (token < tokens) & ((slot < sinks) | (last >= sinks))
    # (batch, slots, 1, 1)
    token = np.broadcast_to(np.where(new, token, 0), keys.shape[:2])[..., None, None]
    for stored, new_tokens in ((keys, k), (values, v)):
        written = new[..., None, None]  # (batch or 1, slots, 1, 1)
        stored[...] = np.where(written, np.take_along_axis(new_tokens, token, axis=1), stored)
    return keys, values


@kv_append_.kernel
def _launch(
    k: Array, v: Array, keys: Array, values: Array, starts: Array | None, start: int, sinks: int
) -> Any:
    if not (keys.flags.c_contiguous and values.flags.c_contiguous):
        return no_kernel("keys or values are not contiguous")
    starts = contiguous(starts)
    shape, size, row = k.shape, k.size, k.shape[2] * k.shape[3]
    (k, k_strides), (v, v_strides) = token_strides(k), token_strides(v)
    wide = lanes(math.gcd(row, *k_strides, *v_strides), k, v, keys, values)
    constants = _constants(k.dtype, getattr(starts, "dtype", np.dtype("int32")), None, row, wide)
    kernel = load("kv_append.cu", "kv_append_", k, constants)
    threads = constants["THREADS"]
    numbers = cache_numbers(shape, keys, k_strides + v_strides, start=start, sinks=sinks)
    kernel[-(-size // (wide * threads)), threads](k, v, keys, values, starts, numbers)
    return keys, values


@op(
    f"{NEW}, k_pages(pages, page, kv_heads, dim), v_pages(pages, page, kv_heads, dim),"
    " page_table(batch, row_pages): int, starts(batch): int"
    " -> all_keys(pages, page, kv_heads, dim), all_values(pages, page, kv_heads, dim)",
    widen=False,
    no_gradient="it changes a cache, which exists only in inference",
    traffic=lambda a: 4 * a["k"].nbytes,  # k and v are read, and as many bytes written
)
def kv_append_paged_(
    k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array, starts: Array
) -> tuple[Array, Array]:
    """Write k and v, from position starts[b] on, into pages that no other sequence uses."""
    pages, page = k_pages.shape[:2]
    if not (k.size and k_pages.size and page_table.size):
        return k_pages, v_pages
    position = starts[:, None].astype(np.int64) + np.arange(k.shape[1], like=k)  # (batch, tokens)
    index = position // page
    valid = (position >= 0) & (index < page_table.shape[1])
    number = np.take_along_axis(page_table, np.where(valid, index, 0), axis=1)
    valid &= (number >= 0) & (number < pages)
    slot = number[valid], position[valid] % page
    k_pages[slot], v_pages[slot] = k[valid], v[valid]
    return k_pages, v_pages


@kv_append_paged_.kernel
def _launch_paged(
    k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array, starts: Array
) -> Any:
    if not (k_pages.flags.c_contiguous and v_pages.flags.c_contiguous):
        return no_kernel("k_pages or v_pages are not contiguous")
    page_table, starts = contiguous(page_table), contiguous(starts)
    shape, size, row = k.shape, k.size, k.shape[2] * k.shape[3]
    (k, k_strides), (v, v_strides) = token_strides(k), token_strides(v)
    wide = lanes(math.gcd(row, *k_strides, *v_strides), k, v, k_pages, v_pages)
    constants = _constants(k.dtype, starts.dtype, page_table.dtype, row, wide)
    kernel = load("kv_append.cu", "kv_append_paged_", k, constants)
    threads = constants["THREADS"]
    strides = k_strides + v_strides
    numbers = cache_numbers(shape, k_pages, strides, row_pages=page_table.shape[1])
    kernel[-(-size // (wide * threads)), threads](
        k, v, k_pages, v_pages, page_table, starts, numbers
    )
    return k_pages, v_pages


def check_rows(call: str, k: Array, keys: Array, page_table: Array | None) -> None:
    """Raise ShapeError if, without a page_table, keys and k have different batches."""
    if page_table is None and keys.shape[0] != k.shape[0]:
        problem = f"{call}: keys have {keys.shape[0]} rows and k has {k.shape[0]}"
        expected, actual = k.shape[0], keys.shape[0]
        raise ShapeError(f"{problem}; pass a page_table", expected=expected, actual=actual)


def cache_numbers(
    shape: tuple[int, ...],
    keys: Array,
    strides: tuple[int, ...],
    *,
    start: int = 0,
    sinks: int = 0,
    row_pages: int = 0,
) -> dict[str, int]:
    """Return the struct Cache of kv_cache.cuh, for the shape of k and the strides of k and v."""
    (batch, tokens, kv_heads, _), (pages, slots) = shape, keys.shape[:2]
    numbers = {"start": start, "count": batch * tokens, "tokens": tokens, "kv_heads": kv_heads}
    numbers |= {"pages": pages, "slots": slots, "sinks": sinks, "row_pages": row_pages}
    return numbers | dict(zip(("k_row", "k_token", "v_row", "v_token"), strides, strict=True))


@cache
def _constants(dtype: Any, starts: Any, table: Any, row: int, lanes: int) -> Constants:
    """Return the constants of kv_append.cu: only 128 threads, because decoding appends few rows."""
    table = np.dtype("int32") if table is None else table
    return Constants(T=dtype, P=starts, G=table, ROW=row, LANES=lanes, THREADS=128)
