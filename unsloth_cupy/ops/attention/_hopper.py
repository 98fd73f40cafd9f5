"""Which calls of attention's forward pass run on warpgroups, and how those are launched.

attention_forward_sm90.cu takes a call, and attention_forward.cu takes the others, where

    the GPU is of sm_90            wgmma is of no other; NVRTC and the driver know tensor maps
    q, k, v have 16 bits           tensor cores multiply no float32
    head dims are from 64 to 256   a panel of shared memory has 64 columns
    there are 64 queries or more   a warpgroup multiplies 64 rows, whether they are there or not
    there are keys                 a tensor map has no empty axis
    nothing is dropped             random words would spill the sums; so do mask, bias, alibi and
                                   softcap where a head has more than 192 columns

and an ``AttentionConfig`` asks for warpgroups: no GPU has run this kernel yet.

bytes = rows * panel(dim) + stages * keys * (panel(dim) + panel(value_dim)) + barriers
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ..common.tensor_map import available, mappable, with_maps
from . import _tiles
from ._options import TILE, KernelOptions

PANEL = 64  # columns under a swizzle of 128 bytes
LEAST, WIDEST = 64, 256  # columns of a head
FEWEST = 64  # queries
L2 = 24 << 20  # bytes of keys and values at a time: half of the L2 of an H100
asked = False  # for warpgroups, where there is no AttentionConfig


class Warpgroups(NamedTuple):
    """What a block works on: warpgroups that compute, 64 queries each; keys of a stage."""

    consumers: int
    keys: int
    registers: int  # of a thread that computes
    producer: int  # of a thread of the warpgroup that loads
    stages: int = 2

    @property
    def rows(self) -> int:
        """Return how many queries a block owns."""
        return self.consumers * 64

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.consumers * 128 + 128

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block."""
        row, value_row = (-(-columns // PANEL) * 128 for columns in (dim, value_dim))
        ring = self.stages * self.keys * (row + value_row)
        return self.rows * row + ring + 8 * (3 + 4 * self.stages)


# By the wider of dim and value_dim.  Scores, probabilities and sums of 64 rows fill the registers
# of a warpgroup: three of them have 160 a thread, two 240.
TABLE = {
    64: Warpgroups(3, 128, 160, 32),  # 88 KB
    128: Warpgroups(2, 128, 240, 24),  # 160 KB
    192: Warpgroups(2, 96, 240, 24),  # 192 KB
    256: Warpgroups(2, 64, 240, 24),  # 192 KB
}
# What comes between a product and exp2 needs registers too.
CHANGED = {
    64: Warpgroups(2, 128, 240, 24),  # 80 KB
    128: Warpgroups(2, 64, 240, 24),  # 96 KB
    192: Warpgroups(2, 64, 240, 24),  # 144 KB
}


def takes(q: Array, v: Array, call: KernelOptions) -> Warpgroups | None:
    """Return what a block works on, None for calls of the other kernel."""
    narrow, wide = sorted((q.shape[-1], v.shape[-1]))
    start, said = _tiles.start, call.constants
    fits = q.dtype.itemsize == 2 and narrow >= LEAST and wide <= WIDEST
    fits = fits and q.shape[-3] >= FEWEST and min(q.size, v.size) > 0
    wanted = asked if start is None else start.warpgroups
    if not fits or not wanted or said["DROPOUT"] or limits(q).architecture != 90:
        return None
    width = next(width for width in TABLE if wide <= width)
    plain = said["FOLD"] and not said["MASK"]
    found = TABLE[width] if plain else CHANGED.get(width)
    if said["BLOCK_MASK"] and found and (TILE % found.rows or TILE % found.keys):
        found = CHANGED[width]  # its tiles are those of block_mask
    room = found and found.bytes(q.shape[-1], v.shape[-1]) <= limits(q).shared
    return found if room and available(q) else None


@cache
def _constants(own: Warpgroups, **named: Any) -> Constants:
    """Return the constants of attention_forward_sm90.cu."""
    return Constants(
        CONSUMERS=own.consumers,
        TILE_KEYS=own.keys,
        STAGES=own.stages,
        REGISTERS=own.registers,
        PRODUCER=own.producer,
        **named,
    )


def launch_on_warpgroups(
    q: Array, k: Array, v: Array, sinks: Array | None, call: KernelOptions, own: Warpgroups
) -> Any:
    """Launch attention_forward_sm90.cu."""
    *batch, queries, heads, dim = q.shape
    keys, kv_heads, value_dim = v.shape[-3:]
    q, k, v = map(mappable, (q, k, v))
    out = empty((*batch, queries, heads, value_dim), q.dtype, like=q)
    lse = empty((*batch, heads, queries), np.float32, like=q)
    constants = _constants(own, **call.constants, S=q.dtype if sinks is None else sinks.dtype)
    blocks = -(-queries // own.rows) + call.numbers["sequences"]
    every = math.prod(batch) * heads
    of_head = max(1, keys * (dim + value_dim) * q.dtype.itemsize)  # bytes that a group shares
    together = heads // kv_heads * max(1, L2 // of_head)
    order = {"row_blocks": blocks, "heads": every, "together": min(together, every)}
    kernel = load("attention_forward_sm90.cu", "attention_forward_sm90", q, constants)
    boxes = tuple((PANEL, 1, rows, 1) for rows in (own.rows, own.keys, own.keys))
    shape = min(blocks * every, limits(q).processors), own.threads, own.bytes(dim, value_dim)
    with_maps(kernel, q, boxes)[shape](
        *(q, k, v, sinks, out, lse, *call.operands, call.numbers, order)
    )
    return out, lse
