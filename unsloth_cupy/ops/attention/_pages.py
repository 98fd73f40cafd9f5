"""What both ops of attention over a paged cache share: the op of floats, and of int8 codes."""

import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.replay import is_fixed
from ...core.source import Constants
from ...core.target import limits
from ...errors import RangeError, ShapeError
from ..common.no_kernel import no_kernel
from ..common.strides import broadcast_strides
from ._blocks import four_axes
from ._decode import launch_decode
from ._forward import launch_forward
from ._hopper import empty_results
from ._options import TILE, Options, near
from ._scores import Scores
from .attention import attend

# From MANY queries on, at least four blocks of the kernel for few queries read each key.  If pages
# are gathered, a key is read, written, and read again in order: three times.
MANY = 64
WORKSPACE = 512 << 20  # most bytes of gathered pages: 128k tokens of 8 heads of 128, in 16 bits
THREADS = 256

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
        if exist is None:
            k, v = k[:, : int(lengths[batch.start])], v[:, : int(lengths[batch.start])]
        own = _of_rows(options, batch)._replace(key_lengths=exist)
        own = own if own.bias is None else own._replace(bias=own.bias.astype(wide))
        return attend(Scores(q[batch], k, v, own, batch.start or 0))

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
    q, page_table = contiguous(q), contiguous(page_table)
    if _gathers(q, k_pages, v_pages, page_table, options):
        results = _launch_gathered(q, k_pages, v_pages, options, page_table, scales)
        if results is not NotImplemented:
            return results
    return launch_decode(q, k_pages, v_pages, options, page_table, scales)


def _gathers(q: Array, k_pages: Array, v_pages: Array, page_table: Array, options: Options) -> bool:
    """Return whether to gather pages for the kernels for many queries.

    The choice depends on neither the number of sequences nor their lengths.  Only the kernel for
    few queries has a fixed order, and dropout numbers all sequences of a call.
    """
    queries, heads = q.shape[1:3]
    # A block owns up to TILE queries of a head.  Measured with enough blocks, kernels for many
    # queries are nine times as fast on warpgroups, and four times without: with a block for half
    # of the SMs from each sequence, they are at least twice as fast.
    busy = 2 * heads * queries >= TILE * limits(q).processors
    fits = 0 < _row_bytes(q, k_pages, v_pages, page_table) <= WORKSPACE
    return not is_fixed() and not options.dropout and queries >= MANY and busy and fits


def _row_bytes(q: Array, k_pages: Array, v_pages: Array, page_table: Array) -> int:
    """Return the bytes of keys and values that a row of page_table has room for."""
    page, kv_heads, dim = k_pages.shape[1:]
    columns: int = kv_heads * (dim + v_pages.shape[3])
    return page_table.shape[1] * page * columns * q.dtype.itemsize


def _launch_gathered(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    options: Options,
    page_table: Array,
    scales: Array | None,
) -> Any:
    """Copy pages to contiguous keys and values, and launch the kernel for many queries.

    The copies hold as many sequences at a time as WORKSPACE bytes allow.
    """
    (batch, row_pages), (pages, page, kv_heads, dim) = page_table.shape, k_pages.shape
    value_dim, room = v_pages.shape[3], row_pages * page
    starts: Any = options.query_start
    lengths: Any = options.key_lengths
    step = min(batch, WORKSPACE // _row_bytes(q, k_pages, v_pages, page_table))
    keys = empty((step, room, kv_heads, dim), q.dtype, like=q)
    values = empty((step, room, kv_heads, value_dim), q.dtype, like=q)
    results = empty_results(q, value_dim)
    left, on_device = options.reach[0], hasattr(starts, "dtype")
    wide = lanes(math.gcd(kv_heads * dim, kv_heads * value_dim), keys, values, k_pages, v_pages)
    constants = _constants(
        (dim, value_dim),
        kv_heads,
        wide,
        PAGE=page,
        LEFT=left is not None,
        T=q.dtype,
        C=k_pages.dtype,
        G=page_table.dtype,
        L=lengths.dtype,
        P=starts.dtype if on_device else np.dtype("int32"),
    )
    kernel = load("gather_pages.cu", "gather_pages", q, constants)
    numbers = {"row_pages": row_pages, "pages": pages, "left": near(left), "room": room}
    numbers |= {"queries": q.shape[1], "kv_heads": kv_heads, "has_start": starts is not None}
    numbers |= {"start": 0 if on_device else near(starts)}
    numbers |= {"starts_batch": broadcast_strides(starts, 1)[0] if on_device else 0}
    for first in range(0, batch, step):
        rows = slice(first, min(first + step, batch))
        own = options if step == batch else _of_rows(options, rows)
        tokens = (rows.stop - first) * room
        kernel[-(-tokens * constants["VECTORS"] // THREADS), THREADS](
            *(k_pages, v_pages, scales, page_table[rows], own.key_lengths),
            *(own.query_start if on_device else None, keys, values, numbers | {"tokens": tokens}),
        )
        k, v = (workspace[: rows.stop - first] for workspace in (keys, values))
        into = results[0][rows], results[1][rows]
        part = launch_forward(q[rows], k, v, own, into)
        if part is NotImplemented:  # with its reason
            return part
    return results


@cache
def _constants(columns: tuple[int, int], kv_heads: int, lanes: int, **named: Any) -> Constants:
    """Return the constants of gather_pages.cu; ``columns`` are the sizes of k and v heads."""
    key, value = (kv_heads * each for each in columns)
    sizes = {"DIM": columns[0], "VALUE_DIM": columns[1], "KEY": key, "VALUE": value}
    sizes |= {"VECTORS": (key + value) // lanes, "LANES": lanes, "TILE": TILE, "THREADS": THREADS}
    return Constants(**sizes, **named)


def _of_rows(options: Options, rows: slice) -> Options:
    """Return the options of some sequences of a batch."""
    names = ("mask", "bias", "block_mask")
    own = {name: _part_of(rows, four_axes(getattr(options, name))) for name in names}
    for name, axes in (("alibi", 2), ("query_start", 1), ("key_lengths", 1)):
        array: Any = getattr(options, name)
        own[name] = array[rows] if getattr(array, "ndim", 0) == axes else array
    return options._replace(**own)


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
