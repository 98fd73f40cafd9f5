"""How the backward kernels of attention are launched.

One launch takes delta; one owns keys (two where the sums of dk and dv do not fit into registers
together), one owns queries, and one pairs of both where bias has a gradient for each.  What is
summed over batches, heads or rows ends with a launch that adds in a fixed order.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ._backward_tiles import Tiles, resolve
from ._options import ANY, in_chunks, laid_out, strides, told
from ._scores import check_options

PADDING = 128  # rows of stats come in multiples of every kernel's tiles


@cache
def constants(tiles: Tiles, **named: Any) -> Constants:
    """Return the constants of attention_backward.cu and attention_bias.cu."""
    return Constants(
        WARPS=tiles.warps,
        WARP_TILES=tiles.warp_tiles,
        TILE=tiles.tile,
        RESIDENT=tiles.blocks,
        **named,
    )


@cache
def delta_constants(
    dtype: Any,
    value_dim: int,
    fold: bool,
    result: Any = None,
    sinks: Any = None,
    offsets: Any = None,
    keep: tuple[bool, bool, bool] = (False, False, False),
) -> Constants:
    """Return the constants of attention_delta.cu: of a row, a thread takes 16 bytes at a time."""
    chunks = -(-value_dim * dtype.itemsize // 16)
    return Constants(
        T=dtype,
        G=result or dtype,
        S=sinks or dtype,
        VALUE_DIM=value_dim,
        ROW_THREADS=min(32, 1 << (chunks - 1).bit_length()),
        THREADS=256,
        FOLD=fold,
        VARLEN=offsets is not None,
        P=offsets or np.dtype("int32"),
        SINKS=sinks is not None,
        KEEP_BATCH=keep[0],
        KEEP_HEADS=keep[1],
        KEEP_ROWS=keep[2],
    )


def workspace(
    batch: int, heads: int, queries: int, keys: int, itemsize: int, *, bias: Any, alibi: Any
) -> int:
    """Return the bytes that backward takes beside its results: linear in queries and keys."""
    of_bias = {"keys": keys, "queries": queries}.get(_summed(bias), 0)
    of_query = 3 if itemsize == 4 else 2
    rows = of_query * _padded(queries) + of_bias + (0 if alibi is None else queries)
    return batch * heads * rows * 4


def _padded(rows: int) -> int:
    return -(-rows // PADDING) * PADDING


def _summed(bias: Any) -> str:
    """Return whose rows hold the sums of a bias' gradient; "" where it has one for each pair."""
    by_query, by_key = (step != 0 for step in strides(bias)[2:])
    return "" if bias is None or (by_query and by_key) else "keys" if by_key else "queries"


def launch_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    sinks: Array | None = None,
    dlse: Array | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    offsets: tuple[Array, Array] | None = None,
    **options: Any,
) -> Any:
    """Launch the backward kernels; NotImplemented for head dims that they have no tiles for.

    With offsets, of queries and of keys, sequences lie end to end: the batch of masks, bias and
    alibi is that of the sequences, and no other array has such an axis.
    """
    check_options("attention", *(options[n] for n in ("window", "softcap", "dropout", "seed")))
    (queries, heads, dim), (keys, kv_heads, value_dim) = q.shape[-3:], v.shape[-3:]
    batch = math.prod(q.shape[:-3])
    shape = q.dtype.itemsize, dim, value_dim
    call = told(q, v, bias=bias, alibi=alibi, **options)
    tiles = call and resolve(*shape, ANY if offsets else call.level, limits(q))
    if call is None or tiles is None:
        return NotImplemented
    dout, q, k, v, out = in_chunks(dout, q, k, v, out)
    dq, dk, dv = (empty(a.shape, a.dtype, like=a) for a in (q, k, v))
    named, ends = laid_out(call.constants, offsets, bias=bias, **options)
    rows_of_stats = _padded(queries) + PADDING * ends[2]
    stats, rests = _launch_delta(dout, out, lse, dlse, rows_of_stats, named["FOLD"], ends[0])
    given = (q, k, v, dout, stats, rows_of_stats, rests)

    def launch(own: Tiles, dx: Array | None, dy: Array | None, *sums: Array | None) -> None:
        by_key = dx is not dq
        made: dict[str, Any] = {"BY_KEYS": by_key, "DX": dx is not None, "DY": dy is not None}
        made |= {"SUM": sums[0] is not None, "SLOPE": sums[1] is not None}
        made |= {"STAGES": own.stages, "PART": own.part, "KEPT": own.kept}
        chosen = constants(own, **named, **made)
        kernel = load("attention_backward.cu", "attention_backward", q, chosen)
        rows, of = (keys, kv_heads) if by_key else (queries, heads)
        blocks = batch * of * (-(-rows // own.rows) + ends[2])
        kernel[blocks, 32 * own.warps, own.bytes(*shape)](
            *(*given, None if rests is None else sinks, dx, dy, *sums, call.scale, *call.arguments),
            *ends,
        )

    by = _summed(bias)
    sums = slopes = dalibi = dsinks = None
    dbias = None if bias is None else empty(bias.shape, bias.dtype, like=q)
    if by:
        sums = empty((batch, heads, keys if by == "keys" else queries), np.float32, like=q)
        sums.fill(0)  # of keys that no query sees
    if alibi is not None:
        slopes = empty((batch, heads, queries), np.float32, like=q)
    launch(tiles.by_query, dq, None, sums if by == "queries" else None, slopes)
    together = tiles.by_key.together
    if not together:
        launch(tiles.by_key, None, dv, None, None)
    launch(tiles.by_key, dk, dv if together else None, sums if by == "keys" else None, None)

    if sums is not None:
        kept = [step != 0 for step in strides(bias)]
        keep = kept[0], kept[1], kept[2] or kept[3]
        _launch_sum(sums, dbias, keep, offsets=offsets and offsets[by == "keys"])
    elif bias is not None:
        _launch_pairs(tiles.by_pair, named, (*given, dbias, batch, *call.arguments, *ends), dbias)
    if alibi is not None:
        dalibi = empty(alibi.shape, alibi.dtype, like=q)
        _launch_sum(slopes, dalibi, (alibi.ndim == 2, True, False), offsets=ends[0])
    if sinks is not None:
        dsinks = empty(sinks.shape, sinks.dtype, like=q)
        _launch_sum(stats, dsinks, (False, True, False), sinks, named["FOLD"], rests)
    return dq, dk, dv, dbias, dalibi, dsinks


def _launch_delta(
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    rows: int,
    fold: bool,
    offsets: Array | None,
) -> tuple[Array, Array | None]:
    """Return stats and, where rows of p are made to sum to 1, the array for what they sum to."""
    queries, heads, value_dim = dout.shape[-3:]
    shape = math.prod(dout.shape[:-3]), heads, rows
    stats = empty((*shape, 2), np.float32, like=dout)
    rests = empty(shape, np.float32, like=dout) if dout.dtype.itemsize == 4 else None
    of = None if offsets is None else offsets.dtype
    chosen = delta_constants(dout.dtype, value_dim, fold, offsets=of)
    count = stats.size // 2
    threads = chosen["THREADS"]
    kernel = load("attention_delta.cu", "attention_delta", dout, chosen)
    kernel[-(-count * chosen["ROW_THREADS"] // threads), threads](
        *(dout, out, lse, dlse, stats, rests, heads, queries, rows, count),
        *(offsets, 0 if offsets is None else offsets.size - 1),
    )
    return stats, rests


def _launch_pairs(
    own: Tiles, named: dict[str, Any], arguments: tuple[Any, ...], dbias: Any
) -> None:
    q, _, v = arguments[:3]
    rows, columns = dbias.shape[-2:]
    blocks = -(-rows // own.rows) * -(-columns // own.tile) * math.prod(dbias.shape[:-2])
    size = own.bytes(q.dtype.itemsize, q.shape[-1], v.shape[-1])
    kernel = load("attention_bias.cu", "attention_bias", q, constants(own, **named))
    kernel[blocks, 32 * own.warps, size](*arguments)


def _launch_sum(
    sums: Any,
    total: Any,
    keep: tuple[bool, bool, bool],
    sinks: Array | None = None,
    fold: bool = True,
    rests: Array | None = None,
    offsets: Array | None = None,
) -> None:
    """Sum (batch, heads, rows) over what is not kept; of stats, what they are to sinks.

    With offsets, the rows of all batches lie end to end: as one, where both are summed.
    """
    batch, heads, rows = sums.shape[:3]
    offsets = offsets if keep[0] or keep[2] else None
    kept_rows = rows if offsets is None else math.prod(total.shape[-2:])
    batch = batch if offsets is None else offsets.size - 1
    of = None if offsets is None else offsets.dtype
    sink = None if sinks is None else sinks.dtype
    chosen = delta_constants(np.dtype("float32"), 8, fold, total.dtype, sink, of, keep)
    kernel = load("attention_delta.cu", "attention_sum", total, chosen)
    blocks = -(-kept_rows // chosen["THREADS"]) if keep[2] else 1
    blocks *= (batch if keep[0] else 1) * (heads if keep[1] else 1)
    kernel[blocks, chosen["THREADS"]](
        *(sums, rests, sinks, total, batch, heads, rows, offsets, kept_rows)
    )
