"""Launches of the backward kernels of attention.

attention_delta       delta = rowsum(dout * out) - dlse
attention_backward    dk and dv: each block owns keys.  Two launches, if the accumulators of dk and
                      dv do not fit into registers together
attention_backward    dq: each block owns queries
attention_bias        dbias, if bias has an element for each pair: each block owns pairs
attention_sum         gradients that are summed over batches, heads or rows, in a fixed order
"""

import math
from functools import cache
from typing import Any

import numpy as np
from ml_dtypes import finfo

from ...core.arrays import contiguous, empty
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ..common.strides import broadcast_strides, in_chunks, key_strides
from ..common.tensor_map import mappable
from ._backward_hopper import OnePass, backward_tiles, launch_on_warpgroups, launch_one_pass
from ._backward_tiles import Tiles, resolve
from ._options import ANY, ROUNDED, Options, kernel_options, refused

OUTPUTS = ("DX", "DY", "SUM", "SLOPE")  # constants: which outputs attention_backward.cu writes
PADDING = 128  # rows of stats are rounded up to a multiple of it: whole tiles for every kernel


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
    """Return the constants of attention_delta.cu; a thread reads 16 bytes of a row at a time."""
    chunks = -(-value_dim * dtype.itemsize // 16)  # accesses of 16 bytes of a row
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
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    itemsize: int,
    *,
    bias: Any,
    alibi: Any,
    one_pass: OnePass | None = None,
    dim: int = 0,
) -> int:
    """Return the bytes that backward allocates besides its results: linear in queries and keys.

    The single warpgroup launch (``one_pass``) also needs dq in float32, for heads of dim columns.
    """
    of_bias = {"keys": keys, "queries": queries}.get(_summed(bias), 0)
    of_query = 3 if itemsize == 4 else 2  # floats of stats for each query: see _launch_delta
    rows = of_query * _padded(queries) + of_bias + (0 if alibi is None else queries)
    sums = 0 if one_pass is None else one_pass.workspace(batch * heads * _padded(queries), dim)
    return batch * heads * rows * 4 + sums


def _padded(rows: int) -> int:
    """Return rows rounded up to a multiple of PADDING."""
    return -(-rows // PADDING) * PADDING


def _summed(bias: Any) -> str:
    """Return the axis of the sums of dbias, "keys" or "queries"; "" if each pair has an element."""
    by_query, by_key = (step != 0 for step in broadcast_strides(bias)[2:])
    return "" if bias is None or (by_query and by_key) else "keys" if by_key else "queries"


def launch_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    **optional: Any,
) -> Any:
    """Launch the backward kernels; return NotImplemented for head dims without tiles.

    With offsets, mask, bias, block_mask and alibi have an axis of sequences in place of the batch,
    and no other array has a batch axis.
    """
    options = Options(**optional)
    bias, alibi, sinks, offsets = options.bias, options.alibi, options.sinks, options.offsets
    q_offsets, k_offsets = offsets or (None, None)
    (queries, heads, dim), (keys, kv_heads, value_dim) = q.shape[-3:], v.shape[-3:]
    batch, shape = math.prod(q.shape[:-3]), (q.dtype.itemsize, dim, value_dim)
    call = kernel_options(q, v, options)
    # packed sequences take tiles that leave registers, as options that change scores do
    tiles = call and resolve(*shape, ANY if offsets else call.level, limits(q))
    if call is None or tiles is None:
        return refused(q, v)
    dout, q, out = in_chunks(dout, q, out)
    dq, dk, dv = (empty(a.shape, a.dtype, like=a) for a in (q, k, v))
    stats = _launch_delta(dout, out, lse, dlse, sinks, call.constants["FOLD"], q_offsets)
    warpgroups, by = backward_tiles(q, v, call), _summed(bias)
    read, strides = _as_read(k, v, bool(warpgroups), bias is not None and not by)
    inputs, sums, slopes = (q, *read, dout, stats), None, None
    numbers = {
        "options": call.numbers,
        "scale": call.scale,
        "stat_rows": stats.shape[-1],
        "rests_start": _rests_start(stats),
        "key_stride": strides[0],
        "value_stride": strides[1],
    }

    def launch(own: Tiles, dx: Array | None, dy: Array | None, *sums: Array | None) -> None:
        by_key = dx is not dq  # whether blocks own keys; else they own queries
        if warpgroups:
            launch_on_warpgroups(
                warpgroups.of(by_key), by_key, inputs, (dx, dy, *sums), call, numbers
            )
            return
        chosen = constants(
            own,
            **call.constants,
            BY_KEYS=by_key,
            **{
                name: array is not None
                for name, array in zip(OUTPUTS, (dx, dy, *sums), strict=True)
            },
            STAGES=own.stages,
            PART=own.part,
            KEPT=own.kept,
        )
        kernel = load("attention_backward.cu", "attention_backward", q, chosen)
        rows, row_heads = (keys, kv_heads) if by_key else (queries, heads)
        blocks = batch * row_heads * (-(-rows // own.rows) + call.numbers["sequences"])
        kernel[blocks, 32 * own.warps, own.bytes(*shape)](
            *(*inputs, dx, dy, *sums, *call.operands, numbers)
        )

    dbias, dalibi, dsinks = (
        None if a is None else empty(a.shape, a.dtype, like=q) for a in (bias, alibi, sinks)
    )
    if by:
        sums = empty((batch, heads, keys if by == "keys" else queries), np.float32, like=q)
        sums.fill(0)  # no block writes the sums of keys that no query sees
    if alibi is not None:
        slopes = empty((batch, heads, queries), np.float32, like=q)
    if warpgroups and warpgroups.one_pass:
        launch_one_pass(warpgroups.one_pass, inputs, (dq, dk, dv), call, numbers)
    else:
        launch(tiles.by_query, dq, None, sums if by == "queries" else None, slopes)
        together = (warpgroups or tiles).by_key.together
        for dx, dy in ((dk, dv),) if together else ((None, dv), (dk, None)):
            launch(tiles.by_key, dx, dy, sums if by == "keys" and dx is dk else None, None)

    if sums is not None:
        of_batch, of_heads, *of_rows = (step != 0 for step in broadcast_strides(bias))
        keep = of_batch, of_heads, any(of_rows)
        _launch_sum(sums, dbias, keep, offsets=k_offsets if by == "keys" else q_offsets)
    elif bias is not None:
        own, arguments = tiles.by_pair, (*inputs, dbias, *call.operands, numbers, batch)
        _launch_pairs(own, constants(own, **call.constants), arguments, own.bytes(*shape))
    if alibi is not None:
        _launch_sum(slopes, dalibi, (alibi.ndim == 2, True, False), offsets=q_offsets)
    if sinks is not None:
        _launch_sum(stats, dsinks, (False, True, False), sinks, call.constants["FOLD"])
    if keys == 1 and all(array is None for array in (offsets, sinks, dlse)):
        _clear_alone(out, v, options.dropout, dq, dk, dbias, dalibi)
    return dq, dk, dv, dbias, dalibi, dsinks


def _as_read(
    k: Any, v: Any, warpgroups: bool, pairs: bool
) -> tuple[tuple[Any, Any], tuple[int, int]]:
    """Return k and v as the kernels read them, and the strides of their tokens, in elements.

    Warpgroup kernels read by tensor maps, which hold all strides.  With ``pairs``,
    attention_bias.cu runs too, which needs contiguous arrays.
    """
    if not warpgroups:
        k, v, _, strides = key_strides(k, v, packed=True)
        return (k, v), strides
    k, v = in_chunks(contiguous(k), contiguous(v)) if pairs else map(mappable, (k, v))
    return (k, v), (math.prod(k.shape[-2:]), math.prod(v.shape[-2:]))


def _clear_alone(out: Array, v: Array, dropout: float, *gradients: Array | None) -> None:
    """Set gradients of scores to 0 if each query has one key: p is 1, whatever its score.

    Rounding has left small numbers in them.  If a row of out is neither the value of the key nor 0,
    out and lse also cover keys of other calls (ring attention), and all gradients stay.
    """
    # a head for each query head
    values = v.repeat(out.shape[2] // v.shape[2], axis=2).astype(np.float32)
    difference = np.abs(out.astype(np.float32) * (1 - dropout) - values)
    near = ROUNDED * float(finfo(v.dtype).eps)  # type: ignore[no-untyped-call]
    is_value = difference <= near * np.abs(values)
    mixed = ~(is_value.all(axis=-1) | (out == 0).all(axis=-1)).all()
    for gradient in gradients:
        if gradient is not None:
            np.multiply(gradient, mixed.astype(gradient.dtype), out=gradient)


def _launch_delta(
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    sinks: Array | None,
    fold: bool,
    offsets: Array | None,
) -> Array:
    """Return stats (2, batch, heads, rows): lse and delta, interleaved.

    For float32 it is (3, ...), with corrections of lse, the rests: see attention_delta.cu.
    """
    queries, heads, value_dim = dout.shape[-3:]
    sequences = 0 if offsets is None else offsets.size - 1
    shape = math.prod(dout.shape[:-3]), heads, _padded(queries) + PADDING * sequences
    single = dout.dtype.itemsize == 4
    stats = empty((3 if single else 2, *shape), np.float32, like=dout)
    offset_dtype = None if offsets is None else offsets.dtype
    chosen = delta_constants(dout.dtype, value_dim, fold, offsets=offset_dtype)
    count, threads = math.prod(shape), chosen["THREADS"]
    kernel = load("attention_delta.cu", "attention_delta", dout, chosen)
    kernel[-(-count * chosen["ROW_THREADS"] // threads), threads](
        *(dout, out, lse, dlse, sinks if single else None, stats, heads, queries),
        *(shape[-1], count, offsets, sequences),
    )
    return stats


def _rests_start(stats: Array) -> int:
    """Return the index in stats of the first rest (attention_gradient.cuh); 0 if it has none."""
    return 2 * math.prod(stats.shape[1:]) if stats.shape[0] == 3 else 0


def _launch_pairs(own: Tiles, chosen: Constants, arguments: tuple[Any, ...], size: int) -> None:
    """Launch attention_bias.cu, which writes dbias if bias has an element for each pair."""
    q, _, _, _, _, dbias, *_ = arguments
    rows, columns = dbias.shape[-2:]
    blocks = -(-rows // own.rows) * -(-columns // own.tile) * math.prod(dbias.shape[:-2])
    kernel = load("attention_bias.cu", "attention_bias", q, chosen)
    kernel[blocks, 32 * own.warps, size](*arguments)


def _launch_sum(
    sums: Any,
    total: Any,
    keep: tuple[bool, bool, bool],
    sinks: Array | None = None,
    fold: bool = True,
    offsets: Array | None = None,
) -> None:
    """Sum (batch, heads, rows) over the axes whose ``keep`` is False, and write it to total.

    With sinks, ``sums`` are the stats with their rests.  With offsets, the rows of all sequences
    lie end to end; if total has neither an axis of batches nor of rows, they count as one batch.
    """
    batch, heads, rows = sums.shape[-3:]
    offsets = offsets if keep[0] or keep[2] else None
    kept_rows = rows if offsets is None else math.prod(total.shape[-2:])
    batch = batch if offsets is None else offsets.size - 1
    offset_dtype = None if offsets is None else offsets.dtype
    sink_dtype = None if sinks is None else sinks.dtype
    chosen = delta_constants(  # attention_sum reads no values: a VALUE_DIM of 8 is as good as any
        np.dtype("float32"), 8, fold, total.dtype, sink_dtype, offset_dtype, keep
    )
    kernel = load("attention_delta.cu", "attention_sum", total, chosen)
    blocks = -(-kept_rows // chosen["THREADS"]) if keep[2] else 1
    blocks *= (batch if keep[0] else 1) * (heads if keep[1] else 1)
    kernel[blocks, chosen["THREADS"]](
        *(sums, sinks, total, 0 if sinks is None else _rests_start(sums)),
        *(batch, heads, rows, offsets, kept_rows),
    )
