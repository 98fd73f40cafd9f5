"""Launch of attention for few queries: the keys, paged or contiguous, are split over blocks.

bytes = max(16 * row(dim) + warps * 2 * keys * (row(dim) + row(value_dim)), results of the warps)
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.replay import is_fixed
from ...core.source import Constants
from ...core.target import Limits, limits
from ..common.counters import counters
from ..common.no_kernel import no_kernel
from ..common.strides import in_chunks, key_strides
from ._forward import launch_forward
from ._options import FARTHEST, Options, kernel_options, refused, row_bytes
from ._tiles import Table, rows_of

FEW = 16  # up to this many queries, a call is bound by reading the keys
ROWS = 16  # rows of a product (query heads of a group, times queries): the height of an mma
KEYS = 256  # usual keys of a chunk: see ``chunks_of``
STATIC = 128  # bytes of static shared memory of a block, besides the dynamic part
MERGED = 512  # the most rows that the last block of a sequence merges: 270 KB for 128 columns


class Tiles(NamedTuple):
    """Shape of a block's work: its warps, and the keys that each warp processes at a time."""

    warps: int
    keys: int

    def resident(self, size: int, shared: int, eight: bool = False) -> int:
        """Return how many blocks of this size an SM should hold: 8 warps, or 12 in blocks of 4.

        The number is what shared memory allows at most, so that the compiler may use all registers.
        With ``eight`` it never exceeds 8 warps: with 12, the addresses of a page and of a mask
        would spill, as would the addresses of codes and of their scales.
        """
        most = 3 if self.warps == 4 and not eight else 8 // self.warps
        return max(1, min(shared // (size + STATIC), most))

    def bytes(self, itemsize: int, dim: int, value_dim: int) -> int:
        """Return the bytes of shared memory of a block: queries and rings, later warp results.

        The results of a warp are float32 rows of sums, each with 4 more numbers.
        """
        row, value_row = (row_bytes(columns, itemsize) for columns in (dim, value_dim))
        ring = ROWS * row + self.warps * 2 * self.keys * (row + value_row)
        return max(ring, self.warps * ROWS * (value_dim + 4) * 4)


# Reads bound this kernel.  Each SM must always have in flight the bytes that it reads in 800 ns,
# the latency of memory: 28 KB on an H200, 42 KB on a B200, 15 KB on an A100, 6 to 9 KB on GPUs with
# 99 KB of shared memory.  A warp has one tile in flight while it processes another: 8 KB, or 16 KB
# for rows of 256 columns.  An SM runs two blocks, so that one reads while the other starts or ends,
# and a third if there is memory for it.  Comments: shared memory of a block, bytes in flight.
DECODE: Table[Tiles] = {
    (80, 2, 64): (Tiles(4, 32), Tiles(4, 16)),  # 66 KB: 64 KB in flight, 96 in 3 blocks; 34 KB: 32
    (80, 2, 128): (Tiles(4, 16), Tiles(2, 16)),  # 68 KB: 64 or 96; 36 KB: 32
    (80, 2, 256): (Tiles(2, 16), Tiles(1, 16)),  # 72 KB: 64 or 96; 40 KB: 32
    # float32: FMAs take longer than tensor cores, so as many warps as possible, with few keys each
    (80, 4, 64): (Tiles(4, 16), Tiles(4, 8)),  # 68 KB: 64 or 96; 36 KB: 32
    (80, 4, 128): (Tiles(4, 8), Tiles(2, 8)),  # 72 KB: 64 or 96; 40 KB: 32
    (80, 4, 256): (Tiles(2, 8), Tiles(1, 8)),  # 80 KB: 64; 48 KB: 32
}


@cache
def resolve(itemsize: int, dim: int, value_dim: int, limits: Limits) -> Tiles | None:
    """Return the best tiles of which two blocks, or else one, fit into an SM; None if none do."""
    if dim % 8 or value_dim % 8:
        return None
    sizes = {
        tiles: tiles.bytes(itemsize, dim, value_dim)
        for tiles in rows_of(DECODE, limits.architecture, itemsize, dim, value_dim)
    }
    fitting = [tiles for tiles, size in sizes.items() if size + STATIC <= limits.shared]
    # an SM has 1 KB more than a block may request, and each block takes 1 KB for the system
    twice = [tiles for tiles in fitting if 2 * (sizes[tiles] + STATIC) + 1024 <= limits.shared]
    return next(iter(twice + fitting), None)


@cache
def constants(tiles: Tiles, **named: Any) -> Constants:
    """Return the constants of attention_decode.cu."""
    return Constants(WARPS=tiles.warps, TILE_KEYS=tiles.keys, KEYS=KEYS, **named)


@cache
def chunks_of(sequences: int, rows: int, processors: int) -> tuple[int, int]:
    """Return the chunks of a sequence with few keys, and the most chunks of any sequence.

    ``sequences`` counts the sequences of one batch element, with ``rows`` rows each: a result must
    not depend on the number of batch elements.  A chunk has KEYS keys; fewer, if an SM would else
    have no block; more, if each SM has two blocks already: two of the blocks that an SM can hold
    read at full speed.
    """
    most = max(1, min(2 * processors // sequences, MERGED // rows))
    return max(1, min(processors // sequences, most)), most


def blocks_of(keys: int, block_keys: int, fewest: int, most: int) -> int:
    """Return the most chunks of a sequence with up to ``keys`` keys: blocks of the grid."""
    # a chunk has two turns of the ring at least
    return max(1, min(most, max(fewest, -(-keys // KEYS)), -(-keys // (2 * block_keys))))


def launch_decode(
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    page_table: Array | None = None,
    scales: Array | None = None,
) -> Any:
    """Launch attention_decode.cu; return NotImplemented for head dims without tiles.

    With page_table, k and v are pages, and options has key_lengths.  Without it, k and v may be the
    first tokens of longer arrays.  With scales (one for each token and head of k, then of v), k and
    v are int8 codes.
    """
    batch, queries, heads, dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    pages, page = v.shape[:2]
    keys = page if page_table is None else page_table.shape[1] * page
    device = limits(q)
    call, sinks = kernel_options(q, v, options, keys), options.sinks
    tiles = call and resolve(q.dtype.itemsize, dim, value_dim, device)
    tokens = keys if page_table is None else pages * page  # numbered in 32 bits by the kernel
    if call is None or tiles is None or queries * heads >= FARTHEST or tokens >= 2**32 - 1:
        return refused(q, v)
    by_pair = any(call.constants[n] for n in ("MASK", "BIAS", "BLOCK_MASK", "DROPOUT"))
    # with codes, float32 heads this wide take all registers, and options by pair would spill
    spills = by_pair and q.dtype.itemsize == 4 and max(dim, value_dim) > 128
    if scales is not None and (dim % 16 or value_dim % 16 or spills):
        if spills:
            return no_kernel(f"head dim {max(dim, value_dim)} in float32 with masks or dropout")
        return no_kernel(f"head dims {dim}, {value_dim} are not multiples of 16, required for int8")
    k, v, batch_tokens, _ = key_strides(k, v, dense=True)
    (q,) = in_chunks(q)
    size = tiles.bytes(q.dtype.itemsize, dim, value_dim)
    eight = (by_pair and page_table is not None) or scales is not None
    named = constants(
        tiles,
        RESIDENT=tiles.resident(size, device.shared, eight),
        S=q.dtype if sinks is None else sinks.dtype,
        G=np.dtype("int32") if page_table is None else page_table.dtype,
        PAGED=page_table is not None,
        PAGE=1 if page_table is None else page,
        C=q.dtype if scales is None else k.dtype,
        O=np.dtype(bool) if scales is None else scales.dtype,
        **call.constants,
    )
    block_keys, row_blocks = tiles.warps * tiles.keys, -(-(heads // kv_heads) * queries // ROWS)
    rows = min(ROWS, heads // kv_heads * queries)
    fewest, most = chunks_of(kv_heads * row_blocks, rows, device.processors)
    left, right = options.reach
    # in a fixed order, the length of chunks depends on no other number of the call
    fixed, length = is_fixed(), max(-(-KEYS // block_keys), 2) * block_keys
    window = keys if left is None or right is None else left + right + queries
    # a window may begin inside of a chunk, or inside of the keys that a block processes at a time
    span = min(keys, window + (length if fixed else block_keys))
    if fixed:
        fewest, chunks = 0, max(1, -(-span // length))  # 0 selects a fixed order in the kernel
    else:
        chunks = blocks_of(span, block_keys, fewest, most)
    sequences = batch * kv_heads * row_blocks
    out = empty((batch, queries, heads, value_dim), q.dtype, like=q)
    lse = empty((batch, heads, queries), np.float32, like=q)
    parts, arrived = None, None
    if chunks > 1:
        parts = empty((sequences, chunks, rows, value_dim + 4), np.float32, like=q)
        arrived = counters(sequences, like=q)
    kernel = load("attention_decode.cu", "attention_decode", q, named)
    numbers = {"options": call.numbers, "chunks": chunks, "fewest": fewest, "most": most}
    numbers |= {"batch_tokens": batch_tokens, "row_pages": keys // page, "pages": pages}
    numbers["values"] = 0 if scales is None else scales.size // 2
    operands = call.operands if scales is None else (*call.operands[:-1], scales)
    kernel[sequences * chunks, 32 * tiles.warps, size](
        *(q, k, v, page_table, sinks, out, lse, parts, arrived, *operands, numbers)
    )
    return out, lse


def launch_attention(q: Array, k: Array, v: Array, **optional: Any) -> Any:
    """Launch the kernel for few queries if it supports the call, else the general one."""
    options = Options(**optional)
    few = q.shape[1] <= FEW and options.block_mask is None and not options.dropout
    # only the kernel for few queries has a fixed order, so it then runs all calls
    if few or is_fixed():
        results = launch_decode(q, k, v, options)
        if results is not NotImplemented:
            return results
    return launch_forward(q, k, v, options)
