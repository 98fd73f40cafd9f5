"""What both ops of attention over a paged cache share: the op of floats, and of int8 codes."""

import math
from typing import Any

import numpy as np

from ...core.arrays import contiguous
from ...core.dtypes import Array
from ...errors import RangeError, ShapeError
from ..common.no_kernel import no_kernel
from ._blocks import four_axes
from ._decode import launch_decode
from ._options import TILE, Options
from ._scores import Scores
from .attention import attend

OPERANDS = (
    "page_table(batch, max_pages): int,"
    " lengths(batch): int, alibi?(batch?, heads): param, sinks?(heads): param,"
    " mask?(batch|1, heads|1, queries|1, keys|1): bool,"
    " bias?(batch|1, heads|1, queries|1, keys|1): param, query_start?(batch?): int"
)


def attend_pages(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    lengths: Array,
    options: Options,
    scales: Array | None = None,
) -> tuple[Array, Array]:
    """Return out and lse over pages; scales, if any, are factors of each token and head."""
    page = k_pages.shape[1]
    wide = np.promote_types(q.dtype, np.float32) if q.dtype.kind == "f" else np.dtype(np.float32)
    q = q.astype(wide)
    start_per_batch = getattr(options.query_start, "ndim", 0) == 1

    def gathered(which: int, pages: Array, table: Array) -> Array:
        """Return keys (which = 0) or values (1) in the order of a table of pages.

        They are (batch, pages of a row * page, kv_heads, dim).
        """
        values = pages[table].astype(wide)
        if scales is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # slots past lengths are undefined
                values *= scales[which][table][..., None].astype(wide)
        # (batch, keys, kv_heads, dim)
        return values.reshape(len(table), table.shape[1] * page, *pages.shape[2:])

    def part(batch: slice, table: Array, exist: Array | None) -> tuple[Array, Array]:
        """Return out and lse of some batches, over keys up to the lengths ``exist``.

        If exist is None, the batch is one sequence, which is cut to its length.
        """
        k, v = (gathered(i, pages, table) for i, pages in enumerate((k_pages, v_pages)))
        start: Any = options.query_start
        if exist is None:
            k, v = k[:, : int(lengths[batch.start])], v[:, : int(lengths[batch.start])]
            start = start[batch.start] if start_per_batch else start
        shared = {name: getattr(options, name) for name in ("mask", "bias", "block_mask")}
        own = {name: _part_of(batch, four_axes(array)) for name, array in shared.items()}
        own["bias"] = None if options.bias is None else own["bias"].astype(wide)
        alibi = options.alibi
        own["alibi"] = alibi if alibi is None or alibi.ndim == 1 else alibi[batch]
        own |= {"key_lengths": exist, "query_start": start}
        return attend(Scores(q[batch], k, v, options._replace(**own), batch.start or 0))

    if type(q) is not np.ndarray:  # the host does not wait for lengths: gather every page
        used = np.arange(page_table.shape[1], like=q) * page < lengths[:, None]
        return part(slice(None), np.where(used, page_table, 0), lengths)
    _check(page_table, lengths, k_pages.shape)
    out = np.empty((*q.shape[:3], v_pages.shape[3]), wide)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), wide)
    for b, length in enumerate(lengths.tolist()):
        one = slice(b, b + 1)
        out[one], lse[one] = part(one, page_table[one, : math.ceil(length / max(page, 1))], None)
    return out, lse


def launch_pages(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    lengths: Array,
    scales: Array | None,
    **optional: Any,
) -> Any:
    """Launch the kernel over pages, which hold int8 codes if there are scales."""
    options = Options(
        **{n: contiguous(a) if hasattr(a, "dtype") else a for n, a in optional.items()}
    )
    cache = (k_pages, v_pages) if scales is None else (k_pages, v_pages, scales)
    if not all(array.flags.c_contiguous for array in cache):
        return no_kernel("k_pages or v_pages is not contiguous; to make it so would copy the cache")
    options = options._replace(key_lengths=contiguous(lengths))
    return launch_decode(contiguous(q), k_pages, v_pages, options, contiguous(page_table), scales)


def _part_of(batch: slice, array: Any) -> Any:
    """Return the batch's part of an array, or the whole array if all batches share it."""
    return array if array is None or len(array) == 1 else array[batch]


def check_keys(k_pages: Array, page_table: Array, mask: Any, bias: Any, block_mask: Any) -> None:
    """Raise ShapeError if an array has another number of keys than page_table.

    A signature cannot state the number: it is the product of two axes.
    """
    keys = page_table.shape[1] * k_pages.shape[1]
    sizes_of = ("mask", mask, {1, keys}), ("bias", bias, {1, keys})
    for name, array, sizes in (*sizes_of, ("block_mask", block_mask, {-(-keys // TILE)})):
        if array is not None and array.ndim and array.shape[-1] not in sizes:
            problem = f"{name} of shape {array.shape} has {array.shape[-1]} for keys"
            cure = " or ".join(map(str, sorted(sizes)))
            raise ShapeError(
                f"attention_paged: {problem}; it must be {cure}: a row of page_table"
                f" has room for {keys} keys",
                expected=tuple(sorted(sizes)),
                actual=array.shape[-1],
            )


def _check(page_table: Array, lengths: Array, shape: tuple[int, ...]) -> None:
    """Raise RangeError if lengths, or page numbers within them, are outside the cache."""
    pages, page = shape[:2]
    room = page_table.shape[1] * page
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= room:
        problem = f"lengths holds {lengths.min()} .. {lengths.max()}"
        raise RangeError(
            f"attention_paged: {problem}; it must be in 0 .. {room}, the tokens that a row of"
            " page_table has room for"
        )
    used = np.arange(page_table.shape[1]) * page < lengths[:, None]
    outside = used & ((page_table < 0) | (page_table >= pages))
    if outside.any():
        bad = page_table[outside][0]
        raise RangeError(
            f"attention_paged: page_table holds {bad}; it must be in 0 .. {pages - 1}, the pages"
        )
