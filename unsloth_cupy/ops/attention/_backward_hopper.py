"""Which calls of attention's backward pass run on warpgroups, and how those are launched.

attention_backward_sm90.cu takes a call, and attention_backward.cu takes the others, where the
forward pass would run on warpgroups (see ``_hopper``) and, besides,

    there are 64 keys or more      a warpgroup multiplies 64 rows, whether they are there or not
    head dims are at most 192      rows of two warpgroups, and stages, fill the memory; above 128
                                   without mask, bias, alibi and softcap, for registers

One launch owns keys and one owns queries, seven products where one launch would need five: each sum
has one owner, so that nobody waits for a turn to add, and no float32 sum of dq lies in memory.

bytes = (rows + stages * tile) * (panel(dim) + panel(value_dim)) + stats + barriers
"""

import math
from functools import cache
from typing import Any, NamedTuple

from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ..common.tensor_map import mappable, with_maps
from ._hopper import L2, PANEL, takes
from ._options import TILE, KernelOptions

FEWEST = 64  # keys


class Warpgroups(NamedTuple):
    """What a block works on: own rows, 64 a warpgroup, and a tile of those that pass by."""

    consumers: int
    tile: int
    stages: int = 2
    together: bool = True  # dk and dv in one launch
    registers: int = 240  # of a thread that computes
    producer: int = 24  # of a thread of the warpgroup that loads

    @property
    def rows(self) -> int:
        """Return how many rows a block owns."""
        return self.consumers * 64

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.consumers * 128 + 128

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block, with the stats that a block of keys reads."""
        pair = sum(-(-columns // PANEL) * 128 for columns in (dim, value_dim))
        tiles = (self.rows + self.stages * self.tile) * pair
        return tiles + self.stages * self.tile * 8 + 8 * (3 + 2 * self.stages)


class Chosen(NamedTuple):
    """Tiles of the kernels that own keys and queries."""

    by_key: Warpgroups
    by_query: Warpgroups

    def of(self, by_key: bool) -> Warpgroups:
        """Return the tiles of the kernel that owns keys, or queries."""
        return self.by_key if by_key else self.by_query


# By the wider of dim and value_dim.
TABLE = {
    64: Chosen(Warpgroups(2, 64, 4), Warpgroups(2, 128, 4)),  # 98 KB, 164 KB
    128: Chosen(Warpgroups(2, 64, 4), Warpgroups(2, 96, 3)),  # 194 KB, 210 KB
    192: Chosen(Warpgroups(2, 64, 2, together=False), Warpgroups(2, 64, 2)),  # 193 KB
}
# What comes between a product and exp2 needs registers too.
CHANGED = {
    64: Chosen(Warpgroups(2, 64, 4), Warpgroups(2, 64, 4)),  # 98 KB
    128: Chosen(Warpgroups(2, 64, 4, together=False), Warpgroups(2, 64, 4)),  # 194 KB
}


def takes_backward(q: Array, v: Array, call: KernelOptions) -> Chosen | None:
    """Return what blocks work on, None for calls of the other kernel."""
    wide, said = max(q.shape[-1], v.shape[-1]), call.constants
    if v.shape[-3] < FEWEST or takes(q, v, call) is None:
        return None
    width = next((width for width in TABLE if wide <= width), 0)
    found = (TABLE if said["FOLD"] and not said["MASK"] else CHANGED).get(width)
    if said["BLOCK_MASK"] and found and TILE % found.by_query.tile:
        found = CHANGED[width]  # its tiles are those of block_mask
    return found


@cache
def _constants(own: Warpgroups, **named: Any) -> Constants:
    """Return the constants of attention_backward_sm90.cu."""
    return Constants(
        CONSUMERS=own.consumers,
        TILE=own.tile,
        STAGES=own.stages,
        REGISTERS=own.registers,
        PRODUCER=own.producer,
        **named,
    )


def launch_on_warpgroups(
    own: Warpgroups,
    by_key: bool,
    given: tuple[Array, ...],
    made: tuple[Array | None, ...],
    call: KernelOptions,
    numbers: dict[str, Any],
) -> None:
    """Launch attention_backward_sm90.cu: of q, k, v, dout and stats, for dx, dy, sums, slopes."""
    *arrays, stats = given
    q, k, v, dout = map(mappable, arrays)
    (queries, heads, dim), (keys, kv_heads, value_dim) = q.shape[-3:], v.shape[-3:]
    named = zip(("DX", "DY", "SUM", "SLOPE"), made, strict=True)
    flags = {name: array is not None for name, array in named}
    constants = _constants(own, **call.constants, BY_KEYS=by_key, **flags)
    shared_by = heads // kv_heads
    rows, of, passing = keys, kv_heads, queries * shared_by  # rows that pass by a head's
    pairs: tuple[Array, ...] = (k, v, q, dout)
    if not by_key:
        rows, of, passing, pairs = queries, heads, keys, (q, dout, k, v)
    blocks, every = -(-rows // own.rows) + call.numbers["sequences"], math.prod(q.shape[:-3]) * of
    together = max(1, L2 // max(1, passing * (dim + value_dim) * q.dtype.itemsize))
    together *= 1 if by_key else shared_by
    order = {"row_blocks": blocks, "heads": every, "together": min(together, every)}
    boxes = tuple((PANEL, 1, count, 1) for count in (own.rows, own.rows, own.tile, own.tile))
    kernel = load("attention_backward_sm90.cu", "attention_backward_sm90", q, constants)
    shape = min(blocks * every, limits(q).processors), own.threads, own.bytes(dim, value_dim)
    work = {"call": numbers, "order": order}
    with_maps(kernel, q, boxes)[shape](*(*pairs, stats, *made, *call.operands, work))
