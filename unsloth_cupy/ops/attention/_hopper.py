"""Which calls of attention's forward pass run on warpgroups, and how those are launched.

attention_forward_sm90.cu takes a call, and attention_forward.cu takes the others, where

    the GPU is of sm_90            wgmma is of no other; NVRTC is 12.9 or newer, which takes sm_90a,
                                   and the driver knows tensor maps: else a line of the log says so
    q, k, v have 16 bits           tensor cores multiply no float32
    head dims are from 64 to 256   a panel of shared memory has 64 columns
    there are 64 queries or more   a warpgroup multiplies 64 rows, whether they are there or not
    there are keys                 a tensor map has no empty axis
    nothing is dropped             random words would spill the sums; above 192 columns of a head so
                                   do mask and bias, and alibi or softcap beside each other, a
                                   window, lengths, starts or a block mask

and an ``AttentionConfig`` asks for warpgroups: no GPU has run this kernel yet.

bytes = rows * panel(dim) + stages * keys * (panel(dim) + panel(value_dim)) + barriers
"""

import logging
import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.target import limits
from ..common.tensor_map import NVRTC, available, mappable, with_maps
from . import _tiles
from ._options import TILE, KernelOptions
from ._warpgroups import Warpgroups, constants, order_of, row_bytes

LEAST, WIDEST = 64, 256  # columns of a head
FEWEST = 64  # queries
LOGGER = logging.getLogger(__name__)
asked = False  # for warpgroups, where there is no AttentionConfig


class Forward(Warpgroups):
    """What a block of the forward kernel works on: it owns queries, and keys pass by."""

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block."""
        ring = self.stages * self.tile * row_bytes(dim, value_dim)
        return self.rows * row_bytes(dim) + ring + 8 * (3 + 4 * self.stages)


# By the wider of dim and value_dim.  Scores, probabilities and sums of 64 rows fill the registers
# of a warpgroup: three of them have 160 a thread, two 240.
TABLE = {
    64: Forward(3, 128, registers=160, producer=32),  # 88 KB
    128: Forward(2, 128, registers=232, producer=40),  # 160 KB
    192: Forward(2, 96),  # 192 KB
    256: Forward(2, 64, registers=232, producer=40),  # 192 KB
}
# What comes between a product and exp2 needs registers too.
CHANGED = {
    64: Forward(2, 128),  # 80 KB
    128: Forward(2, 64),  # 96 KB
    192: Forward(2, 64, registers=232, producer=40),  # 144 KB
    256: Forward(2, 64),  # 192 KB; where `alone` says so
}
CHANGING = "MASK", "BIAS", "ALIBI", "SOFTCAP"  # constants of what changes a score
BESIDE = "LEFT", "BLOCK_MASK", "LENGTHS", "STARTS", "VARLEN"  # of what takes registers as well


def alone(said: dict[str, Any], *names: str, beside: tuple[str, ...] = ()) -> bool:
    """Say whether one of some options changes scores, and nothing else takes its registers."""
    given = [name for name in (*CHANGING, *beside) if said[name]]
    return len(given) == 1 and given[0] in names


def takes(q: Array, v: Array, call: KernelOptions) -> Forward | None:
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
    found: Forward | None = (TABLE if plain else CHANGED)[width]
    if not plain and width == WIDEST and not alone(said, "ALIBI", "SOFTCAP", beside=BESIDE):
        return None
    if said["BLOCK_MASK"] and found and (TILE % found.rows or TILE % found.tile):
        found = CHANGED[width]  # its tiles are those of block_mask
    room = found and found.bytes(q.shape[-1], v.shape[-1]) <= limits(q).shared
    return found if room and told_available(q) else None


def told_available(q: Array) -> bool:
    """Say whether compiler and driver know what warpgroups need, and log once that they do not."""
    known = available(q)
    if not known:
        _tell()
    return known


@cache
def _tell() -> None:
    LOGGER.warning(
        "attention runs without warpgroups: they need NVRTC %s or newer and a driver of CUDA 12; "
        "pip install -U nvidia-cuda-nvrtc-cu12",
        ".".join(map(str, NVRTC)),
    )


def launch_on_warpgroups(
    q: Array, k: Array, v: Array, sinks: Array | None, call: KernelOptions, own: Forward
) -> Any:
    """Launch attention_forward_sm90.cu."""
    *batch, queries, heads, dim = q.shape
    keys, kv_heads, value_dim = v.shape[-3:]
    q, k, v = map(mappable, (q, k, v))
    out = empty((*batch, queries, heads, value_dim), q.dtype, like=q)
    lse = empty((*batch, heads, queries), np.float32, like=q)
    given = constants(own, **call.constants, S=q.dtype if sinks is None else sinks.dtype)
    blocks, every = -(-queries // own.rows) + call.numbers["sequences"], math.prod(batch) * heads
    passing = keys * (dim + value_dim) * q.dtype.itemsize
    order, shape = order_of(own, q, blocks, every, passing, heads // kv_heads)
    kernel = load("attention_forward_sm90.cu", "attention_forward_sm90", q, given)
    with_maps(kernel, q, own.boxes(1, 2))[*shape, own.bytes(dim, value_dim)](
        *(q, k, v, sinks, out, lse, *call.operands, call.numbers, order)
    )
    return out, lse
