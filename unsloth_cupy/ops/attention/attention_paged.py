"""Attention over a cache that lies in pages, in any order.

k[b, i] = k_pages[page_table[b, i // page], i % page]      for i < lengths[b]

Kwon and others, Efficient Memory Management for Large Language Model Serving with
PagedAttention, 2023.
"""

import math
from typing import Any

import numpy as np

from ...core.arrays import packed
from ...core.dtypes import Array
from ...core.op import op
from ...errors import RangeError, ShapeError
from ._blocks import four_axes
from ._decode import launch_decode
from ._options import TILE, Options, Window, check_options
from ._scores import Scores
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
    mask: Array | None = None,
    bias: Array | None = None,
    query_start: Array | int | None = None,
    block_mask: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Array:
    """Return attention over the first ``lengths[b]`` keys of the pages of each sequence.

    The result is that of attention on the keys in order, with ``key_lengths=lengths``; so are the
    options.  The last query of a sequence stands at its last key, or ``query_start`` says where the
    first one does.

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
    causal, window, scale, softcap, alibi, sinks, query_start, dropout, seed
        As in attention; causal is True here.
    mask, bias : up to 4 axes that broadcast to (batch, heads, queries, keys), optional
        As in attention, for ``keys = max_pages * page``; those past a length are not read.
    block_mask : bool (batch or 1, heads or 1, queries / 128, keys / 128), rounded up, optional
        As in attention: of a tile that is False for all heads of a group no page is read.

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
        An option makes no sense, or dropout comes without a seed.
    """
    return attention_paged_forward(
        q, k_pages, v_pages, page_table, lengths, causal=causal, window=window, scale=scale,
        softcap=softcap, alibi=alibi, sinks=sinks, mask=mask, bias=bias, query_start=query_start,
        block_mask=block_mask, dropout=dropout, seed=seed,
    )[0]  # fmt: skip


@op(
    "q(batch, queries, heads, dim), k_pages(pages, page, kv_heads, dim),"
    " v_pages(pages, page, kv_heads, value_dim), page_table(batch, max_pages): int,"
    " lengths(batch): int, alibi?(batch?, heads): param, sinks?(heads): param,"
    " mask?(batch|1, heads|1, queries|1, keys|1): bool,"
    " bias?(batch|1, heads|1, queries|1, keys|1): param, query_start?(batch?): int,"
    " block_mask?(batch|1, heads|1, queries/128, keys/128): bool"
    " -> out(batch, queries, heads, value_dim), lse(batch, heads, queries): stat"
    " where heads % kv_heads",
    widen=False,  # a cache is large: only what is read is widened
    no_gradient="it reads a cache of pages, which only inference has",
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
    """Return out as attention_paged does, and the natural log of each row's sum of exp(score)."""
    hiding = mask, bias, alibi, sinks, None, query_start, block_mask
    options = Options(*hiding, causal, window, scale, softcap, dropout, seed)
    page = k_pages.shape[1]
    wide = np.promote_types(q.dtype, np.float32) if q.dtype.kind == "f" else np.dtype(np.float32)
    q = q.astype(wide)
    starts_of_all = getattr(query_start, "ndim", 0) == 1

    def part(batch: slice, table: Array, exist: Array | None) -> tuple[Array, Array]:
        """Attend over the pages of a table, or over its first tokens where that is known."""
        k, v = (
            pages[table].astype(wide).reshape(len(table), table.shape[1] * page, *pages.shape[2:])
            for pages in (k_pages, v_pages)
        )
        start: Any = query_start
        if exist is None:
            k, v = k[:, : int(lengths[batch.start])], v[:, : int(lengths[batch.start])]
            start = start[batch.start] if starts_of_all else start
        shared: dict[str, Any] = {"mask": mask, "bias": bias, "block_mask": block_mask}
        own = {name: _of(batch, four_axes(array)) for name, array in shared.items()}
        own["bias"] = None if bias is None else own["bias"].astype(wide)
        own["alibi"] = alibi if alibi is None or alibi.ndim == 1 else alibi[batch]
        own |= {"key_lengths": exist, "query_start": start}
        return attend(Scores(q[batch], k, v, options._replace(**own), batch.start or 0))

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
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, **optional: Any
) -> Any:
    options = Options(**{n: packed(a) if hasattr(a, "dtype") else a for n, a in optional.items()})
    if not (k_pages.flags.c_contiguous and v_pages.flags.c_contiguous):
        return NotImplemented  # packing would copy the cache
    options = options._replace(key_lengths=packed(lengths))
    return launch_decode(packed(q), k_pages, v_pages, options, packed(page_table))


def _of(batch: slice, array: Any) -> Any:
    """Return what a batch has of an array that all may share."""
    return array if array is None or len(array) == 1 else array[batch]


attention_paged_forward.require(check_options)


@attention_paged_forward.require
def _check_keys(k_pages: Array, page_table: Array, mask: Any, bias: Any, block_mask: Any) -> None:
    """Raise ShapeError where an array is not for as many keys: no signature tells a product."""
    keys = page_table.shape[1] * k_pages.shape[1]
    fitting_of = ("mask", mask, {1, keys}), ("bias", bias, {1, keys})
    for name, array, fitting in (*fitting_of, ("block_mask", block_mask, {-(-keys // TILE)})):
        if array is not None and array.ndim and array.shape[-1] not in fitting:
            problem = f"{name} of shape {array.shape} has {array.shape[-1]} for keys"
            cure = " or ".join(map(str, sorted(fitting)))
            raise ShapeError(
                f"attention_paged: {problem}; it must be {cure}: a row of page_table"
                f" has room for {keys} keys",
                expected=tuple(sorted(fitting)),
                actual=array.shape[-1],
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
