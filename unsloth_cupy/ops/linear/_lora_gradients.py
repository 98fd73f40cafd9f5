"""The two products of dy with an adapter's low rank: up = dy b and db = dy^T low."""

from functools import cache
from typing import Any

from ...core.arrays import empty, lanes, packed
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits, target_of
from ..common.columns import row_sum
from ..common.gemm import gemm

RANKS = 16, 32, 64  # beyond, float32 sums of up are more bytes than the second pass over dy
SUMS = 2**25  # bytes of them at most: what L2 does not hold is traffic, and memory
SLAB = 512  # bytes of a row of dy that a block owns: 64 registers of a thread at the largest rank
ROWS, THREADS = 32, 256  # of a tile; of a block
BLOCKS = 2  # of an SM at least, as long as there are rows for them
GROUPS = 32  # of rows at most: sums of db are a fraction of dy
SHARED_PITCH = 8  # floats between rows of sums, for which no two rows of a warp share a bank


def rank_gradients(dy: Array, b: Array, low: Array, dtype: Any) -> tuple[Array, Array | None]:
    """Return ``dy @ b``, and ``dy.T @ low`` of a dtype; None for it where dtype is None."""
    rank, slabs = b.shape[1], -(-dy.shape[1] * dy.itemsize // SLAB)
    apart = dtype is None or not 0 < rank <= RANKS[-1] or not dy.size
    apart = apart or dy.dtype not in KERNEL_DTYPES or not dy.dtype == b.dtype == low.dtype
    apart = apart or max(dy.shape) * rank >= 2**30  # elements that kernels count by int
    apart = apart or (slabs > 1 and slabs * len(dy) * rank * FLOAT32.itemsize > SUMS)
    if apart or target_of(dy) is None:
        return gemm(dy, b), None if dtype is None else gemm(dy.T, low, dtype=dtype)
    return _one_pass(packed(dy), packed(b), packed(low), slabs, dtype)


def _one_pass(dy: Array, b: Array, low: Array, slabs: int, dtype: Any) -> tuple[Array, Array]:
    """Return both from one launch, which reads dy once, and sums of what its blocks found."""
    (rows, outputs), rank = dy.shape, b.shape[1]
    tiles = -(-rows // ROWS)
    groups = min(tiles, GROUPS, -(-BLOCKS * limits(dy).processors // slabs))
    each = -(-tiles // groups)  # tiles of a group
    groups = -(-tiles // each)
    made = FLOAT32 if slabs > 1 else dy.dtype, FLOAT32 if groups > 1 else dtype
    ups = empty((slabs, rows * rank), made[0], like=dy)
    dbs = empty((groups, outputs * rank), made[1], like=dy)
    whole = lanes(outputs, dy) * dy.itemsize == 16
    chosen, shared = _constants(dy.dtype, *made, rank, whole)
    kernel = load("lora_gradients.cu", "lora_gradients", dy, chosen)
    kernel[slabs * groups, THREADS, shared](dy, b, low, ups, dbs, rows, outputs, rank, slabs, each)
    up = row_sum(ups, dy.dtype) if slabs > 1 else ups
    db = row_sum(dbs, dtype) if groups > 1 else dbs
    return up.reshape(rows, rank), db.reshape(outputs, rank)


@cache
def _constants(dtype: Any, up: Any, db: Any, rank: int, whole: bool) -> tuple[Constants, int]:
    """Return the constants, and the bytes of shared memory: b, a ring of two tiles, sums of up."""
    padded, size = next(most for most in RANKS if rank <= most), dtype.itemsize
    pitch = padded * size  # of a row of low, as Tile of common/tile.cuh lays it out
    pitch = pitch if pitch % 128 == 0 else (pitch // 16 | 1) * 16
    stage = ROWS * (SLAB + pitch)
    splits = 4 * 16 // padded
    sums = splits * ROWS * (padded + SHARED_PITCH) * 4
    shared = SLAB // size * pitch + 2 * stage + sums
    return Constants(T=dtype, U=up, W=db, RANK=padded, LANES=16 // size if whole else 1), shared
