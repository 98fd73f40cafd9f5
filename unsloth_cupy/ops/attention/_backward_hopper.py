"""Which calls of attention's backward pass run on warpgroups, and how those are launched.

attention_backward_sm90.cu takes a call, and attention_backward.cu takes the others, where the
forward pass would run on warpgroups (see ``_hopper``) and, besides,

    there are 64 keys or more      a warpgroup multiplies 64 rows, whether they are there or not
    head dims are at most 192      rows of two warpgroups, and two stages, fill the memory; above
                                   128 without bias and with one of mask, alibi and softcap at
                                   most: more of them would spill

Two launches, of which one owns keys and one owns queries, make seven products: each sum has one
owner, nobody waits, and no float32 sum of dq lies in memory.  One launch makes five, and adds up dq
in turns.  That is taken where

    head dims are at most 128      sums of dk, dv and dq fill the registers
    nothing changes scores         nor hides tiles of pairs: registers, and a turn for every tile
    one thing hides pairs          above 64 columns: the future, what is further back, or lengths
                                   and starts; two would spill the warps that load and add
    it pays                        see ``pays``; an ``AttentionConfig`` may say yes or no

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
from ..common.tensor_map import mappable, with_maps
from . import _tiles
from ._hopper import alone, takes
from ._options import TILE, KernelOptions
from ._warpgroups import Warpgroups, constants, order_of, row_bytes

FEWEST = 64  # keys
one_pass: bool | None = None  # asked for, or not, where there is no AttentionConfig


class Backward(Warpgroups):
    """What a block of the backward kernel works on: it owns keys, or queries."""

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block, with the stats that a block of keys reads."""
        tiles = (self.rows + self.stages * self.tile) * row_bytes(dim, value_dim)
        return tiles + self.stages * self.tile * 8 + 8 * (9 + 2 * self.stages)


class OnePass(Backward):
    """What a block works on that owns keys and adds to dq in turns: of dq, half a tile each."""

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block, with ds twice and a tile of dq."""
        return super().bytes(dim, value_dim) + 2 * self.rows * 128 + self.sums(dim)

    def sums(self, dim: int) -> int:
        """Return the bytes of a tile of dq in float32: whole panels, of 64 columns or half one."""
        return self.tile * max(64, -(-dim // 64) * 64) * 4

    def beside(self, rows: int, dim: int) -> int:
        """Return the bytes of dq in float32, of all heads' padded rows, and of the turns."""
        tiles = rows // self.tile
        return tiles * self.sums(dim) + 4 * (1 + tiles)


class Chosen(NamedTuple):
    """Tiles of the kernels that own keys and queries; of the one that makes all in one pass."""

    by_key: Backward
    by_query: Backward
    one_pass: OnePass | None = None

    def of(self, by_key: bool) -> Backward:
        """Return the tiles of the kernel that owns keys, or queries."""
        return self.by_key if by_key else self.by_query

    def eased(self) -> "Chosen":
        """Return the same where sums of dk and dv leave registers to what loads."""
        easier: dict[str, Any] = {"registers": EASED.registers, "producer": EASED.producer}
        one_pass = self.one_pass and self.one_pass._replace(**easier)
        return Chosen(self.by_key._replace(**easier), self.by_query, one_pass)


# What loads has 40 registers where what multiplies can do without them: with 24 NVRTC 13.5 spills
# in packed sequences, and NVRTC 12.9 in one pass with `causal`.
EASED = Backward(2, 64, 4, registers=232, producer=40)
# By the wider of dim and value_dim.  At 128 sums of dk and dv fill the registers: see `eased`.
TABLE = {
    64: Chosen(EASED, EASED._replace(tile=128)),  # 98, 164 KB
    128: Chosen(Backward(2, 64, 4), EASED._replace(tile=96, stages=3)),  # 194, 210 KB
    192: Chosen(EASED._replace(stages=2, together=False), EASED._replace(stages=2)),  # 193 KB
}
# What comes between a product and exp2 needs registers too.
CHANGED = {
    64: Chosen(EASED, EASED),  # 98 KB
    128: Chosen(EASED._replace(together=False), EASED),  # 194 KB
    192: TABLE[192],  # `alone`
}
# In one pass, by the wider of them: queries of a stage are the columns of a panel.  The model of
# tests/warpgroups.py says that two launches take SAVED more cycles.
SAVED = 0.33
ONE_PASS = {
    64: OnePass(2, 64, 4, registers=232, producer=40),  # 147 KB
    128: OnePass(2, 64, 3),  # 226 KB
}


def takes_backward(q: Array, v: Array, call: KernelOptions) -> Chosen | None:
    """Return what blocks work on, None for calls of the other kernel."""
    wide, said = max(q.shape[-1], v.shape[-1]), call.constants
    if v.shape[-3] < FEWEST or takes(q, v, call) is None:
        return None
    width = next((width for width in TABLE if wide <= width), 0)
    plain = said["FOLD"] and not said["MASK"]
    if width == 192 and not plain and not alone(said, "MASK", "ALIBI", "SOFTCAP"):
        return None
    found = (TABLE if plain else CHANGED).get(width)
    if found and plain and takes_one_pass(q, v, call, width):
        found = found._replace(one_pass=ONE_PASS[width])
    if said["BLOCK_MASK"] and found and TILE % found.by_query.tile:
        found = CHANGED[width]  # its tiles are those of block_mask
    narrow = min(q.shape[-1], v.shape[-1]) <= 96  # then sums have 224 columns at most
    return found.eased() if found and plain and width == 128 and narrow else found


def takes_one_pass(q: Array, v: Array, call: KernelOptions, width: int) -> bool:
    """Say whether one launch makes dq, dk and dv: where it can and, if nobody says, should."""
    start = _tiles.start
    wanted = one_pass if start is None else start.one_pass
    said = call.constants
    if width not in ONE_PASS or said["BLOCK_MASK"] or wanted is False:
        return False
    hides = said["LEFT"] + said["RIGHT"] + (said["LENGTHS"] or said["STARTS"])
    if width > 64 and hides > 1 and not said["VARLEN"]:
        return False
    return bool(wanted) or pays(ONE_PASS[width], q, v)


def pays(own: OnePass, q: Array, v: Array) -> bool:
    """Say whether a call is long enough for turns.

    Blocks that begin together are one behind the other for as long as they run: the last of them by
    a tile for every block of keys of a head before it.
    """
    queries, heads = q.shape[-3:-1]
    keys, kv_heads = v.shape[-3:-1]
    blocks, many = -(-keys // own.rows), math.prod(q.shape[:-3])
    tiles = many * heads * blocks * -(-queries // own.tile) / limits(q).processors
    behind = min(blocks, -(-limits(q).processors // (many * kv_heads)))
    return tiles * SAVED > behind


def launch_one_pass(
    own: OnePass,
    given: tuple[Array, ...],
    made: tuple[Array, Array, Array],
    call: KernelOptions,
    numbers: dict[str, Any],
) -> None:
    """Launch attention_backward_sm90.cu, with dq in turns, and what ends dq."""
    q, *_, stats = given
    dq, dk, dv = made
    tiles, dim = math.prod(stats.shape[1:]) // own.tile, q.shape[-1]
    turns = empty((1 + tiles,), np.float32, like=q)  # whose bits are integers
    turns.fill(0)
    sums = empty((tiles, own.sums(dim) // 4), np.float32, like=q)
    launch_on_warpgroups(own, True, given, (dk, dv, sums, turns), call, numbers)
    offsets, sequences = call.operands[1], call.numbers["sequences"]
    said = call.constants
    chosen = Constants(T=q.dtype, DIM=dim, VARLEN=said["VARLEN"], P=said["P"])
    kernel = load("attention_dq_sm90.cu", "attention_dq_sm90", q, chosen)
    queries, heads = q.shape[-3:-1]
    kernel[tiles, 256](
        *(sums, turns, dq, numbers["scale"], heads, queries, stats.shape[-1]),
        *(offsets if said["VARLEN"] else None, sequences),
    )


def launch_on_warpgroups(
    own: Backward,
    by_key: bool,
    given: tuple[Array, ...],
    made: tuple[Array | None, ...],
    call: KernelOptions,
    numbers: dict[str, Any],
) -> None:
    """Launch attention_backward_sm90.cu: of q, k, v, dout and stats, for dx, dy, sums, slopes.

    In one pass the last two are sums of dq and turns.
    """
    *arrays, stats = given
    q, k, v, dout = map(mappable, arrays)
    (queries, heads, dim), (keys, kv_heads, value_dim) = q.shape[-3:], v.shape[-3:]
    named = zip(("DX", "DY", "SUM", "SLOPE"), made, strict=True)
    flags = {name: array is not None for name, array in named}
    if turns := isinstance(own, OnePass):
        flags |= {"SUM": False, "SLOPE": False}
    flags["TURNS"] = turns
    given_constants = constants(own, **call.constants, BY_KEYS=by_key, **flags)
    shared_by = heads // kv_heads
    rows, of, passing = keys, kv_heads, queries * shared_by  # rows that pass by a head's
    pairs: tuple[Array, ...] = (k, v, q, dout)
    if not by_key:
        rows, of, passing, pairs = queries, heads, keys, (q, dout, k, v)
    blocks, every = -(-rows // own.rows) + call.numbers["sequences"], math.prod(q.shape[:-3]) * of
    passing *= (dim + value_dim) * q.dtype.itemsize
    order, shape = order_of(own, q, blocks, every, passing, 1 if by_key else shared_by)
    kernel = load("attention_backward_sm90.cu", "attention_backward_sm90", q, given_constants)
    work = {"call": numbers, "order": order}
    with_maps(kernel, q, own.boxes(2, 2))[*shape, own.bytes(dim, value_dim)](
        *(*pairs, stats, *made, *call.operands, work)
    )
