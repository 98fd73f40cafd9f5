"""Attention over a cache that lies in pages, in any order.

k[b, i] = k_pages[page_table[b, i // page], i % page]      for i < lengths[b]

Kwon and others, Efficient Memory Management for Large Language Model Serving with
PagedAttention, 2023.
"""

import math
from typing import Any

import numpy as np

from .._arrays import packed
from .._op import op
from .._typing import Array
from ..errors import RangeError
from ._attention_decode import launch_decode
from ._blocks import Window
from ._scores import Scores, check_options
from .attention import attend


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
) -> Array:
    """Return attention over the first ``lengths[b]`` keys of the pages of each sequence.

    The last query of a sequence stands at its last key.  Options are those of attention.

    Parameters
    ----------
    q : (batch, queries, heads, dim) float
        Queries; query head h reads key head ``h // (heads // kv_heads)``.
    k_pages, v_pages : (pages, page, kv_heads, dim or value_dim) float
        Keys and values, ``page`` tokens to a page.
    page_table : (batch, max_pages) int
        The pages of each sequence, in order; entries past its length are not read.
    lengths : (batch,) int
        Tokens of each sequence, the queries' own included.
    causal, window, scale, softcap, alibi, sinks
        As in attention; causal is True here.

    Returns
    -------
    out : (batch, queries, heads, value_dim) float

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    RangeError
        A length is longer than its pages, or a page number is outside 0 .. pages - 1.
    ConfigError
        An option makes no sense.
    """
    arrays = (q, k_pages, v_pages, page_table, lengths)
    options: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    return attention_paged_forward(*arrays, alibi=alibi, sinks=sinks, causal=causal, **options)[0]


@op(
    "q(batch, queries, heads, dim), k_pages(pages, page, kv_heads, dim),"
    " v_pages(pages, page, kv_heads, value_dim), page_table(batch, max_pages): int,"
    " lengths(batch): int, alibi?(batch?, heads): param, sinks?(heads): param"
    " -> out(batch, queries, heads, value_dim), lse(batch, heads, queries): stat"
    " where heads % kv_heads",
    widen=False,  # a cache is large: only what is read is widened
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
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Return out as attention_paged does, and the natural log of each row's sum of exp(score)."""
    check_options("attention_paged", window, softcap, 0.0, None)
    wide = np.promote_types(q.dtype, np.float32) if q.dtype.kind == "f" else np.dtype(np.float32)
    q, page = q.astype(wide), k_pages.shape[1]
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    options["softcap"] = softcap

    def part(batch: slice, table: Array, exist: Array | None) -> tuple[Array, Array]:
        """Attend over the pages of a table, or over its first tokens where that is known."""
        k, v = (
            pages[table].astype(wide).reshape(len(table), table.shape[1] * page, *pages.shape[2:])
            for pages in (k_pages, v_pages)
        )
        if exist is None:
            k, v = k[:, : int(lengths[batch.start])], v[:, : int(lengths[batch.start])]
        slopes = alibi if alibi is None or alibi.ndim == 1 else alibi[batch]
        scores = Scores(q[batch], k, v, key_lengths=exist, alibi=slopes, **options)
        return attend(scores, sinks)

    if type(q) is not np.ndarray:  # reading lengths would stall a device: gather every page
        used = np.arange(page_table.shape[1], like=q) * page < lengths[:, None]
        return part(slice(None), np.where(used, page_table, 0), lengths)
    _check(page_table, lengths, k_pages.shape)
    out = np.empty((*q.shape[:3], v_pages.shape[3]), wide)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), wide)
    for b, length in enumerate(lengths.tolist()):
        one = slice(b, b + 1)
        out[one], lse[one] = part(one, page_table[one, : math.ceil(length / max(page, 1))], None)
    return out, lse


@attention_paged_forward.kernel
def _launch(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    lengths: Array,
    *,
    alibi: Array | None = None,
    sinks: Array | None = None,
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Any:
    check_options("attention_paged", window, softcap, 0.0, None)
    if not (k_pages.flags.c_contiguous and v_pages.flags.c_contiguous):
        return NotImplemented  # packing would copy the cache
    return launch_decode(
        packed(q),
        k_pages,
        v_pages,
        packed(page_table),
        key_lengths=packed(lengths),
        alibi=None if alibi is None else packed(alibi),
        sinks=None if sinks is None else packed(sinks),
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
    )


def _check(page_table: Array, lengths: Array, shape: tuple[int, ...]) -> None:
    """Raise RangeError where lengths or pages that are used lie outside the cache."""
    pages, page = shape[:2]
    room = page_table.shape[1] * page
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= room:
        found = f"lengths holds {lengths.min()} .. {lengths.max()}"
        raise RangeError(
            f"attention_paged: {found}; it must be in 0 .. {room}, the pages of a row of page_table"
        )
    used = np.arange(page_table.shape[1]) * page < lengths[:, None]
    outside = used & ((page_table < 0) | (page_table >= pages))
    if outside.any():
        bad = page_table[outside][0]
        raise RangeError(
            f"attention_paged: page_table holds {bad}; it must be in 0 .. {pages - 1}, the pages"
        )
