"""Backward pass of attention with warpgroup kernels: which calls use them, and their launches.

attention_backward_sm90.cu runs a call if the forward pass would run on warpgroups (see ``_hopper``)
and all of these hold; attention_backward.cu runs the others.

    64 keys or more           a warpgroup always multiplies 64 rows
    head dims up to 192       rows of two warpgroups and two stages fill the shared memory; above
                              128 no bias, and at most one of mask, alibi and softcap: more of them
                              would spill

Two launches, one whose blocks own keys and one whose blocks own queries, compute seven products:
every accumulator has one owner, no block waits for another, and dq needs no float32 buffer.  A
single launch computes five products; its blocks add to dq in turn.  It runs if

    head dims up to 128       the accumulators of dk, dv and dq fill the registers
    no option changes scores  such options take registers
    no block_mask             every tile must take its turn
    one option hides pairs    at most, above 64 columns: a right bound (causal), a left bound
                              (window), or lengths and starts; two would make the loading and
                              accumulating warps spill
    it is faster              see ``pays``; an ``AttentionConfig`` can override this

bytes = (rows + stages * tile) * (panel(dim) + panel(value_dim)) + stats + barriers
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ..common.counters import counters
from ..common.tensor_map import mappable, with_maps
from ._hopper import forward_tiles, only_option
from ._options import TILE, KernelOptions
from ._tiles import requested_limits
from ._warpgroups import Warpgroups, constants, order_of, row_bytes

FEWEST = 64  # keys: the rows of a warpgroup
one_pass: bool | None = None  # without an AttentionConfig: the single launch; None: if it is faster


class Backward(Warpgroups):
    """Tiles of a block of the backward kernel, which owns keys or queries."""

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the bytes of shared memory of a block, with the stats that a key block reads."""
        tiles = (self.rows + self.stages * self.tile) * row_bytes(dim, value_dim)
        # lse and delta of each streamed row; then barriers of 8 bytes
        return tiles + self.stages * self.tile * 8 + 8 * (9 + 2 * self.stages)


class OnePass(Backward):
    """Tiles of a block of the single launch: it owns keys, and in its turn adds a tile to dq.

    Each of the two warpgroups of a block computes half the columns of that tile.
    """

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the bytes of shared memory of a block, with two buffers of ds and a tile of dq."""
        # a row of ds has 64 queries of 16 bits
        return super().bytes(dim, value_dim) + 2 * self.rows * 128 + self.sums(dim)

    def sums(self, dim: int) -> int:
        """Return the bytes of a tile of dq in float32; its columns are whole panels of 64."""
        return self.tile * max(64, -(-dim // 64) * 64) * 4

    def workspace(self, rows: int, dim: int) -> int:
        """Return the bytes of dq in float32, for the padded rows of all heads, with its counts."""
        tiles = rows // self.tile
        return tiles * (self.sums(dim) + 4)


class Chosen(NamedTuple):
    """Tiles of the launches whose blocks own keys and queries, and of the single launch, if any."""

    by_key: Backward
    by_query: Backward
    one_pass: OnePass | None = None

    def of(self, by_key: bool) -> Backward:
        """Return the tiles of the launch whose blocks own keys, or else queries."""
        return self.by_key if by_key else self.by_query

    def with_producer_registers(self) -> "Chosen":
        """Return the same tiles with registers moved from the multiplying to the loading warps."""
        moved: dict[str, Any] = {"registers": BASE.registers, "producer": BASE.producer}
        one_pass = self.one_pass and self.one_pass._replace(**moved)
        return Chosen(self.by_key._replace(**moved), self.by_query, one_pass)


# Loading threads have 40 registers wherever multiplying threads can spare them: with 24, NVRTC 13.5
# spills in packed sequences, and NVRTC 12.9 in the single launch with `causal`.
BASE = Backward(2, 64, 4, registers=232, producer=40)
# By the larger of dim and value_dim; comments have the shared memory.  At 128 the accumulators of
# dk and dv fill the registers, so by_key keeps all 240: see `with_producer_registers`.
TABLE = {
    64: Chosen(BASE, BASE._replace(tile=128)),  # 98, 164 KB
    128: Chosen(Backward(2, 64, 4), BASE._replace(tile=96, stages=3)),  # 194, 210 KB
    192: Chosen(BASE._replace(stages=2, together=False), BASE._replace(stages=2)),  # 193 KB
}
# Options that change a score between its product and exp2 take registers: smaller tiles.
CHANGED = {
    64: Chosen(BASE, BASE),  # 98 KB
    128: Chosen(BASE._replace(together=False), BASE),  # 194 KB
    192: TABLE[192],  # for one such option: see `only_option`
}
# By the model of tests/code/programs/warpgroups.py, two launches take this share more cycles than
# the single one.
SAVED = 0.33
# Of the single launch, by the larger of dim and value_dim.  A stage has 64 queries, the columns of
# a panel: they are the columns of ds in shared memory.
ONE_PASS = {
    64: OnePass(2, 64, 4, registers=232, producer=40),  # 147 KB
    128: OnePass(2, 64, 3),  # 226 KB
}


def backward_tiles(q: Array, v: Array, call: KernelOptions) -> Chosen | None:
    """Return the tiles of a call that runs on warpgroups; None for other calls."""
    wide, flags = max(q.shape[-1], v.shape[-1]), call.constants
    if v.shape[-3] < FEWEST or forward_tiles(q, v, call) is None:
        return None
    width = next((width for width in TABLE if wide <= width), 0)
    plain = flags["FOLD"] and not flags["MASK"]
    if width == 192 and not plain and not only_option(flags, "MASK", "ALIBI", "SOFTCAP"):
        return None
    tiles = (TABLE if plain else CHANGED).get(width)
    if tiles and plain and takes_one_pass(q, v, call, width):
        tiles = tiles._replace(one_pass=ONE_PASS[width])
    if flags["BLOCK_MASK"] and tiles and TILE % tiles.by_query.tile:
        tiles = CHANGED[width]  # its tile divides a tile of block_mask
    # dk and dv then have 96 + 128 columns at most, which leaves registers for the loading threads
    narrow = min(q.shape[-1], v.shape[-1]) <= 96
    return tiles.with_producer_registers() if tiles and plain and width == 128 and narrow else tiles


def takes_one_pass(q: Array, v: Array, call: KernelOptions, width: int) -> bool:
    """Return whether one launch computes dq, dk and dv.

    It does if it supports the call and either an option requests it or, by default, it is faster.
    """
    start = requested_limits()
    choice = one_pass if start is None else start.one_pass
    flags = call.constants
    if width not in ONE_PASS or flags["BLOCK_MASK"] or choice is False:
        return False
    hides = flags["LEFT"] + flags["RIGHT"] + (flags["LENGTHS"] or flags["STARTS"])
    if width > 64 and hides > 1 and not flags["VARLEN"]:  # it would spill
        return False
    # up to 64 columns two launches are faster: 1.07 to 1.13 times on an H200, 1k to 32k tokens
    return bool(choice) or (width > 64 and pays(ONE_PASS[width], q, v))


def pays(own: OnePass, q: Array, v: Array) -> bool:
    """Return whether the single launch saves more cycles than its blocks spend waiting.

    Blocks that start together stay staggered for as long as they run: the last one lags by one tile
    for every earlier block of keys of the same head.
    """
    queries, heads = q.shape[-3:-1]
    keys, kv_heads = v.shape[-3:-1]
    blocks, batch = -(-keys // own.rows), math.prod(q.shape[:-3])
    # both in tiles: the work of an SM, and how long the last block waits
    tiles = batch * heads * blocks * -(-queries // own.tile) / limits(q).processors
    lag = min(blocks, -(-limits(q).processors // (batch * kv_heads)))
    return tiles * SAVED > lag


def launch_one_pass(
    own: OnePass,
    inputs: tuple[Array, ...],
    outputs: tuple[Array, Array, Array],
    call: KernelOptions,
    numbers: dict[str, Any],
) -> None:
    """Launch the kernel that adds to dq, then attention_dq_sm90.cu, which finishes dq."""
    q, *_, stats = inputs
    dq, dk, dv = outputs
    tiles, dim = math.prod(stats.shape[1:]) // own.tile, q.shape[-1]
    # how many blocks have added to each tile of dq; the kernel reads the bits as integers
    added = empty((tiles,), np.float32, like=q)
    added.fill(0)
    sums = empty((tiles, own.sums(dim) // 4), np.float32, like=q)
    launch_on_warpgroups(own, True, inputs, (dk, dv, sums, added), call, numbers)
    offsets, sequences = call.operands[1], call.numbers["sequences"]
    flags = call.constants
    chosen = Constants(T=q.dtype, DIM=dim, VARLEN=flags["VARLEN"], P=flags["P"])
    kernel = load("attention_dq_sm90.cu", "attention_dq_sm90", q, chosen)
    queries, heads = q.shape[-3:-1]
    kernel[tiles, 256](
        *(sums, added, dq, numbers["scale"], heads, queries, stats.shape[-1]),
        *(offsets if flags["VARLEN"] else None, sequences),
    )


def launch_on_warpgroups(
    own: Backward,
    by_key: bool,
    inputs: tuple[Array, ...],
    outputs: tuple[Array | None, ...],
    call: KernelOptions,
    numbers: dict[str, Any],
) -> None:
    """Launch attention_backward_sm90.cu on q, k, v, dout and stats; write dx, dy, sums, slopes.

    In the single launch, the last two outputs are the sums of dq, and how many blocks have added to
    each tile.
    """
    *arrays, stats = inputs
    q, k, v, dout = map(mappable, arrays)
    (queries, heads, dim), (keys, kv_heads, value_dim) = q.shape[-3:], v.shape[-3:]
    named = zip(("DX", "DY", "SUM", "SLOPE"), outputs, strict=True)
    flags = {name: array is not None for name, array in named}
    if sums_dq := isinstance(own, OnePass):
        flags |= {"SUM": False, "SLOPE": False}
    flags["SUM_DQ"] = sums_dq
    chosen = constants(own, **call.constants, BY_KEYS=by_key, **flags)
    shared_by = heads // kv_heads
    rows, row_heads, streamed = keys, kv_heads, queries * shared_by  # streamed: rows for each head
    pairs: tuple[Array, ...] = (k, v, q, dout)
    if not by_key:
        rows, row_heads, streamed, pairs = queries, heads, keys, (q, dout, k, v)
    blocks, all_heads = (
        -(-rows // own.rows) + call.numbers["sequences"],
        math.prod(q.shape[:-3]) * row_heads,
    )
    streamed *= (dim + value_dim) * q.dtype.itemsize
    order, shape = order_of(own, q, blocks, all_heads, streamed, 1 if by_key else shared_by)
    kernel = load("attention_backward_sm90.cu", "attention_backward_sm90", q, chosen)
    work = {"call": numbers, "order": order}
    with_maps(kernel, q, own.boxes(2, 2))[*shape, own.bytes(dim, value_dim)](
        *(*pairs, stats, *outputs, *call.operands, counters(1, like=q), work)
    )
