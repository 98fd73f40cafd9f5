"""How the kernels of attention are launched: which tiles, by the shared memory that a block has.

bytes = rows * row(dim) + 2 * keys * (row(dim) + row(value_dim))        a ring of two stages
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .._arrays import empty, lanes
from .._jit import Constants, load
from .._typing import Array
from ._blocks import Window
from ._device import shared_memory
from ._scores import check_options

LOG2E = 1 / math.log(2)
CAUSAL, HIDING, ANY = range(3)  # options of a call: causal; what hides scores; what changes them
FARTHEST = 2**29  # positions are 32-bit integers in the kernel; sums of two of them fit


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
        row, value_row = (_row_bytes(columns, itemsize) for columns in (dim, value_dim))
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


def _row_bytes(columns: int, itemsize: int) -> int:
    """Return what a row takes in shared memory, as Tile of attention_forward.cu lays it out."""
    chunks = -(-columns // 16) * itemsize
    return 16 * (chunks if chunks % 8 == 0 else chunks | 1)


@cache
def resolve(itemsize: int, dim: int, value_dim: int, options: int, shared: int) -> Tiles | None:
    """Return the best tiles that fit into the shared memory of a block; None where none do."""
    if dim % 8 or value_dim % 8:
        return None
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
    mask: Array | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    key_lengths: Array | None = None,
    query_start: Array | int | None = None,
    block_mask: Array | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Any:
    """Launch attention_forward.cu; NotImplemented for head dims that it has no tiles for."""
    check_options(window, softcap, dropout, seed)
    batch, queries, heads, dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    left, right = window or (None, None)
    right = 0 if causal else right
    scale = 1 / math.sqrt(dim) if scale is None else scale
    # scores that are hidden stay -inf: the factor may not become 0, nor turn their sign
    fold = softcap is None and bias is None and alibi is None and scale > 1e-30
    hiding = left is not None or mask is not None or block_mask is not None or dropout > 0
    options = ANY if not fold else HIDING if hiding else CAUSAL
    tiles = resolve(q.dtype.itemsize, dim, value_dim, options, shared_memory(q))
    dropped = round(dropout * 2**32)
    if tiles is None or max(queries, keys) >= FARTHEST or dropped == 2**32:
        return NotImplemented
    # rows are copied 16 bytes at a time
    q, k, v = (a if lanes(8, a) * a.dtype.itemsize == 16 else a.copy() for a in (q, k, v))
    out = empty((batch, queries, heads, value_dim), q.dtype, like=q)
    lse = empty((batch, heads, queries), np.float32, like=q)

    constants = _constants(
        tiles,
        T=q.dtype,
        B=q.dtype if bias is None else bias.dtype,
        A=q.dtype if alibi is None else alibi.dtype,
        S=q.dtype if sinks is None else sinks.dtype,
        L=np.dtype("int32") if key_lengths is None else key_lengths.dtype,
        P=getattr(query_start, "dtype", np.dtype("int32")),
        DIM=dim,
        VALUE_DIM=value_dim,
        LENGTHS=key_lengths is not None,
        STARTS=type(query_start) is not int and query_start is not None,
        LEFT=left is not None,
        RIGHT=right is not None,
        BLOCK_MASK=block_mask is not None,
        MASK=mask is not None,
        BIAS=bias is not None,
        ALIBI=alibi is not None,
        SOFTCAP=softcap is not None,
        DROPOUT=dropout > 0,
        FOLD=fold,
    )
    rows = tiles.warps * tiles.warp_tiles * 16
    starts, first = (None, query_start) if type(query_start) is int else (query_start, None)
    mask_strides, bias_strides = _strides(mask), _strides(bias)
    blocks = batch * heads * -(-queries // rows)
    shared = tiles.bytes(q.dtype.itemsize, dim, value_dim)
    kernel = load("attention_forward.cu", "attention_forward", q, constants)
    kernel[blocks, 32 * tiles.warps, shared](
        *(q, k, v, out, lse, heads, kv_heads, queries, keys),
        scale * LOG2E if softcap is None else scale / softcap,
        (softcap or 0) * LOG2E,
        *(_near(left), _near(right), key_lengths),
        *(starts, _strides(starts, 1)[0], first is not None, _near(first)),
        *(mask, *mask_strides, bias, *bias_strides),
        *(alibi, _strides(alibi, 2)[0], sinks),
        *(block_mask, *_strides(block_mask)[:2]),
        *((seed or 0) & 0xFFFFFFFF, (seed or 0) >> 32, dropped, 1 / (1 - dropout)),
    )
    return out, lse


def _near(offset: Any) -> int:
    """Return a number of positions, 0 for None; sums of three stay below 2**63."""
    return max(-(2**61), min(2**61, int(offset or 0)))


def _strides(array: Any, axes: int = 4) -> tuple[int, ...]:
    """Return the elements between neighbours on each of the last axes; 0 where it is broadcast."""
    shape = () if array is None else array.shape
    shape = (1,) * (axes - len(shape)) + shape
    return tuple(0 if size == 1 else math.prod(shape[i + 1 :]) for i, size in enumerate(shape))
