"""How the kernels of attention are launched: which tiles, by the shared memory that a block has.

bytes = rows * row(dim) + 2 * keys * (row(dim) + row(value_dim))        a ring of two stages
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .._arrays import empty
from .._jit import load
from .._source import Constants
from .._typing import Array
from ._attention_options import ANY, CAUSAL, HIDING, in_chunks, laid_out, row_bytes, told
from ._device import shared_memory


class Tiles(NamedTuple):
    """What a block works on: warps, tiles of 16 queries a warp, keys a stage of the ring."""

    warps: int
    warp_tiles: int
    keys: int
    kept: bool  # the queries stay in registers
    blocks: int = 1  # of an SM: taken where so many fit into the shared memory of one
    options: int = ANY  # the most for which registers are left

    def bytes(self, itemsize: int, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block."""
        row, value_row = (row_bytes(columns, itemsize) for columns in (dim, value_dim))
        return self.warps * self.warp_tiles * 16 * row + 2 * self.keys * (row + value_row)


# By size of a value and by the wider of dim and value_dim, the best first.  Two tiles of queries
# a warp halve what products read from shared memory, which is what bounds sm_80 and sm_90, and
# take up to 255 registers: two blocks of 4 warps then fill an SM.
FORWARD = {
    (2, 64): (
        Tiles(4, 2, 64, True, options=CAUSAL),  # 48 KB at most: anywhere
        Tiles(8, 1, 64, True),  # the same queries and keys
    ),
    (2, 128): (
        Tiles(4, 2, 32, False, blocks=2, options=CAUSAL),  # 64 KB: twice in 163
        Tiles(8, 1, 64, True, options=HIDING),  # 96 KB: 8 warps hide each other's latency
        Tiles(8, 1, 32, False),  # 64 KB; what changes a score needs its registers
        Tiles(4, 1, 32, True),  # 48 KB
    ),
    (2, 256): (
        Tiles(8, 1, 32, False, options=CAUSAL),  # 128 KB; 128 registers of output
        Tiles(8, 1, 16, False),  # 96 KB
        Tiles(2, 1, 16, False),  # 48 KB
    ),
    (4, 64): (Tiles(4, 1, 32, False),),  # 48 KB; FMAs bound it, and two rows a thread feed them
    (4, 128): (
        Tiles(4, 1, 32, False),  # 96 KB
        Tiles(2, 1, 16, False),  # 48 KB
    ),
    (4, 256): (
        Tiles(4, 1, 8, False),  # 96 KB; 16 keys would spill
        Tiles(1, 1, 8, False),  # 48 KB
    ),
}


@cache
def resolve(itemsize: int, dim: int, value_dim: int, options: int, shared: int) -> Tiles | None:
    """Return the best tiles that fit into the shared memory of a block; None where none do."""
    width = next((w for w in (64, 128, 256) if max(dim, value_dim) <= w), None)
    for tiles in FORWARD.get((itemsize, width or 0), ()):
        fits = tiles.blocks * tiles.bytes(itemsize, dim, value_dim) <= shared
        if fits and options <= tiles.options:
            return tiles
    return None


@cache
def _constants(tiles: Tiles, **named: Any) -> Constants:
    """Return the constants of attention_forward.cu."""
    return Constants(
        WARPS=tiles.warps,
        WARP_TILES=tiles.warp_tiles,
        TILE_KEYS=tiles.keys,
        KEPT=tiles.kept,
        **named,
    )


def launch_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    sinks: Array | None = None,
    offsets: tuple[Array, Array] | None = None,
    **options: Any,
) -> Any:
    """Launch attention_forward.cu; NotImplemented for head dims that it has no tiles for.

    With offsets, of queries and of keys, sequences lie end to end and q, k, v have no batch axis.
    """
    *batch, queries, heads, dim = q.shape
    size, value_dim = q.dtype.itemsize, v.shape[-1]
    call = told(q, v, **options)
    level = call and max(call.level, HIDING if offsets else CAUSAL)
    tiles = call and resolve(size, dim, value_dim, level, shared_memory(q))
    if call is None or tiles is None:
        return NotImplemented
    q, k, v = in_chunks(q, k, v)
    out = empty((*batch, queries, heads, value_dim), q.dtype, like=q)
    lse = empty((*batch, heads, queries), np.float32, like=q)
    named, ends = laid_out(call.constants, offsets)
    named["S"] = q.dtype if sinks is None else sinks.dtype
    constants = _constants(tiles, **named)
    rows = tiles.warps * tiles.warp_tiles * 16
    blocks = math.prod(batch) * heads * (-(-queries // rows) + ends[2])
    kernel = load("attention_forward.cu", "attention_forward", q, constants)
    kernel[blocks, 32 * tiles.warps, tiles.bytes(size, dim, value_dim)](
        *(q, k, v, sinks, out, lse, *call.arguments, *ends)
    )
    return out, lse
