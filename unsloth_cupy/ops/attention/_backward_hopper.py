"""Which calls of attention's backward pass run on warpgroups, and how those are launched.

attention_backward_sm90.cu takes a call, and attention_backward.cu takes the others, where the
forward pass would run on warpgroups (see ``_hopper``) and, besides,

    there are 64 keys or more      a warpgroup multiplies 64 rows, whether they are there or not
    head dims are at most 192      rows of two warpgroups, and two stages, fill the memory; above
                                   128 without bias and with one of mask, alibi and softcap at
                                   most: more of them would spill

One launch owns keys and one owns queries, seven products where one launch would need five: each sum
has one owner, so that nobody waits for a turn to add, and no float32 sum of dq lies in memory.

bytes = (rows + stages * tile) * (panel(dim) + panel(value_dim)) + stats + barriers
"""

import math
from typing import Any, NamedTuple

from ...core.dtypes import Array
from ...core.kernel import load
from ..common.tensor_map import mappable, with_maps
from ._hopper import alone, takes
from ._options import TILE, KernelOptions
from ._warpgroups import Warpgroups, constants, order_of, row_bytes

FEWEST = 64  # keys


class Backward(Warpgroups):
    """What a block of the backward kernel works on: it owns keys, or queries."""

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block, with the stats that a block of keys reads."""
        tiles = (self.rows + self.stages * self.tile) * row_bytes(dim, value_dim)
        return tiles + self.stages * self.tile * 8 + 8 * (3 + 2 * self.stages)


class Chosen(NamedTuple):
    """Tiles of the kernels that own keys and queries."""

    by_key: Backward
    by_query: Backward

    def of(self, by_key: bool) -> Backward:
        """Return the tiles of the kernel that owns keys, or queries."""
        return self.by_key if by_key else self.by_query


# By the wider of dim and value_dim.
TABLE = {
    64: Chosen(Backward(2, 64, 4), Backward(2, 128, 4)),  # 98 KB, 164 KB
    128: Chosen(Backward(2, 64, 4), Backward(2, 96, 3)),  # 194 KB, 210 KB
    192: Chosen(Backward(2, 64, 2, together=False), Backward(2, 64, 2)),  # 193 KB
}
# What comes between a product and exp2 needs registers too.
CHANGED = {
    64: Chosen(Backward(2, 64, 4), Backward(2, 64, 4)),  # 98 KB
    128: Chosen(Backward(2, 64, 4, together=False), Backward(2, 64, 4)),  # 194 KB
    192: Chosen(Backward(2, 64, 2, together=False), Backward(2, 64, 2)),  # 193 KB; `alone`
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
    if said["BLOCK_MASK"] and found and TILE % found.by_query.tile:
        found = CHANGED[width]  # its tiles are those of block_mask
    return found


def launch_on_warpgroups(
    own: Backward,
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
