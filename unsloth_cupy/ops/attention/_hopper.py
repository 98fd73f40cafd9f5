"""Forward pass of attention with warpgroup kernels: which calls use them, and their launch.

attention_forward_sm90.cu runs a call if all of these hold; attention_forward.cu runs the others.

    an sm_90 GPU              wgmma exists only there.  NVRTC must be 12.9 or newer to compile for
                              sm_90a, and the driver must support tensor maps; else a log record
                              has the reason
    q, k, v of 16 bits        tensor cores multiply 16-bit operands
    head dims 64 to 256       a panel of shared memory has 64 columns
    64 queries or more        a warpgroup always multiplies 64 rows
    at least one key          a tensor map cannot have an empty axis
    no dropout                its random words would make the accumulators spill
    up to 192 columns, or     above 192 columns, these would make the accumulators spill: mask,
    few options               bias; alibi or softcap together with each other, a window, lengths,
                              starts or block_mask

An ``AttentionConfig`` can turn them off.  docs/performance.md has the times of both kernels.

bytes = rows * panel(dim) + stages * keys * (panel(dim) + panel(value_dim)) + barriers
"""

import math
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.target import limits
from ..common.counters import counters
from ..common.tensor_map import mappable, warpgroups, with_maps
from ._options import TILE, KernelOptions
from ._tiles import requested_limits
from ._warpgroups import Warpgroups, constants, order_of, row_bytes

LEAST, WIDEST = 64, 256  # columns of a head: a panel of shared memory, and what registers hold
FEWEST = 64  # queries: the rows of a warpgroup
requested = True  # without an AttentionConfig: whether warpgroups run


class Forward(Warpgroups):
    """Tiles of a block of the forward kernel, which owns queries and streams keys."""

    def bytes(self, dim: int, value_dim: int) -> int:
        """Return the bytes of shared memory of a block."""
        ring = self.stages * self.tile * row_bytes(dim, value_dim)
        return self.rows * row_bytes(dim) + ring + 8 * (6 + 4 * self.stages)  # barriers of 8 bytes


# By the larger of dim and value_dim; comments have the shared memory.  Scores, probabilities and
# accumulators of 64 rows fill the registers of a warpgroup: with three computing warpgroups a
# thread has 160, with two 240.
TABLE = {
    64: Forward(3, 128, registers=160, producer=32),  # 88 KB
    128: Forward(2, 128, registers=232, producer=40),  # 160 KB
    192: Forward(2, 96),  # 192 KB
    256: Forward(2, 64, registers=232, producer=40),  # 192 KB
}
# Options that change a score between its product and exp2 take registers: smaller tiles.
CHANGED = {
    64: Forward(2, 128),  # 80 KB
    128: Forward(2, 64),  # 96 KB
    192: Forward(2, 64, registers=232, producer=40),  # 144 KB
    256: Forward(2, 64),  # 192 KB; only for calls that `only_option` accepts
}
CHANGING = "MASK", "BIAS", "ALIBI", "SOFTCAP"  # constants of the options that change a score
BESIDE = "LEFT", "BLOCK_MASK", "LENGTHS", "STARTS", "VARLEN"  # other options that take registers


def only_option(flags: dict[str, Any], *names: str, others: tuple[str, ...] = ()) -> bool:
    """Return whether exactly one of CHANGING and ``others`` is set, and it is among names."""
    chosen = [name for name in (*CHANGING, *others) if flags[name]]
    return len(chosen) == 1 and chosen[0] in names


def forward_tiles(q: Array, v: Array, call: KernelOptions) -> Forward | None:
    """Return the tiles of a call that runs on warpgroups; None for other calls."""
    narrow, wide = sorted((q.shape[-1], v.shape[-1]))
    start, flags = requested_limits(), call.constants
    fits = q.dtype.itemsize == 2 and narrow >= LEAST and wide <= WIDEST
    fits = fits and q.shape[-3] >= FEWEST and min(q.size, v.size) > 0
    choice = requested if start is None else start.warpgroups
    if not fits or not choice or flags["DROPOUT"] or limits(q).architecture != 90:
        return None
    width = next(width for width in TABLE if wide <= width)
    plain = flags["FOLD"] and not flags["MASK"]
    tiles: Forward | None = (TABLE if plain else CHANGED)[width]
    if not plain and width == WIDEST and not only_option(flags, "ALIBI", "SOFTCAP", others=BESIDE):
        return None
    if flags["BLOCK_MASK"] and tiles and (TILE % tiles.rows or TILE % tiles.tile):
        tiles = CHANGED[width]  # its tiles divide a tile of block_mask
    room = tiles and tiles.bytes(q.shape[-1], v.shape[-1]) <= limits(q).shared
    return tiles if room and warpgroups(q) else None


def empty_results(q: Array, value_dim: int) -> tuple[Array, Array]:
    """Return new arrays for out and lse."""
    *batch, queries, heads, _ = q.shape
    lse = empty((*batch, heads, queries), np.float32, like=q)
    return empty((*batch, queries, heads, value_dim), q.dtype, like=q), lse


def launch_on_warpgroups(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    call: KernelOptions,
    own: Forward,
    results: tuple[Array, Array] | None,
) -> Any:
    """Launch attention_forward_sm90.cu."""
    *batch, queries, heads, dim = q.shape
    keys, kv_heads, value_dim = v.shape[-3:]
    q, k, v = map(mappable, (q, k, v))
    out, lse = results or empty_results(q, value_dim)
    chosen = constants(own, **call.constants, S=q.dtype if sinks is None else sinks.dtype)
    blocks, total = -(-queries // own.rows) + call.numbers["sequences"], math.prod(batch) * heads
    streamed = keys * (dim + value_dim) * q.dtype.itemsize
    order, shape = order_of(own, q, blocks, total, streamed, heads // kv_heads)
    kernel = load("attention_forward_sm90.cu", "attention_forward_sm90", q, chosen)
    with_maps(kernel, q, own.boxes(1, 2))[*shape, own.bytes(dim, value_dim)](
        *(q, k, v, sinks, out, lse, *call.operands, counters(1, like=q), call.numbers, order)
    )
    return out, lse
