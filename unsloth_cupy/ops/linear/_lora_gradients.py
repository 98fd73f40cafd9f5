"""The two products of dy with an adapter's low rank: up = dy b and db = dy^T low."""

from functools import cache
from typing import Any

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits, target_of
from ..common.columns import row_sum
from ..common.gemm import gemm

RANKS = 16, 32, 64  # at more, the float32 sums of up have more bytes than a second pass over dy
SUMS = 2**25  # bytes of these sums at most: what exceeds L2 costs traffic, and memory
SLAB = 512  # bytes of a row of dy that a block owns: 64 registers of a thread at the largest rank
ROWS, THREADS = 32, 256  # of a tile; of a block
BLOCKS = 2  # per SM at least, as long as there are enough rows
GROUPS = 32  # groups of rows at most, so that the sums of db stay a fraction of dy
SHARED_PITCH = 8  # floats of padding per row of sums: no two rows of a warp share a bank


def rank_gradients(dy: Array, b: Array, low: Array, dtype: Any) -> tuple[Array, Array | None]:
    """Return ``dy @ b``, and ``dy.T @ low`` in ``dtype``, or None if dtype is None."""
    rank, slabs = b.shape[1], -(-dy.shape[1] * dy.itemsize // SLAB)
    separate = dtype is None or not 0 < rank <= RANKS[-1] or not dy.size
    separate = separate or dy.dtype not in KERNEL_DTYPES or not dy.dtype == b.dtype == low.dtype
    separate = separate or max(dy.shape) * rank >= 2**30  # kernels count elements by int
    separate = separate or (slabs > 1 and slabs * len(dy) * rank * FLOAT32.itemsize > SUMS)
    if separate or target_of(dy) is None:
        return gemm(dy, b), None if dtype is None else gemm(dy.T, low, dtype=dtype)
    return _one_pass(contiguous(dy), contiguous(b), contiguous(low), slabs, dtype)


def _one_pass(dy: Array, b: Array, low: Array, slabs: int, dtype: Any) -> tuple[Array, Array]:
    """Return both products from one launch, which reads dy once; then add its blocks' sums."""
    (rows, outputs), rank = dy.shape, b.shape[1]
    tiles = -(-rows // ROWS)
    groups = min(tiles, GROUPS, -(-BLOCKS * limits(dy).processors // slabs))
    group_tiles = -(-tiles // groups)
    groups = -(-tiles // group_tiles)
    dtypes = FLOAT32 if slabs > 1 else dy.dtype, FLOAT32 if groups > 1 else dtype
    ups = empty((slabs, rows * rank), dtypes[0], like=dy)
    dbs = empty((groups, outputs * rank), dtypes[1], like=dy)
    vectors = lanes(outputs, dy) * dy.itemsize == 16
    chosen, shared = _constants(dy.dtype, *dtypes, rank, vectors)
    kernel = load("lora_gradients.cu", "lora_gradients", dy, chosen)
    kernel[slabs * groups, THREADS, shared](
        dy, b, low, ups, dbs, rows, outputs, rank, slabs, group_tiles
    )
    up = row_sum(ups, dy.dtype) if slabs > 1 else ups
    db = row_sum(dbs, dtype) if groups > 1 else dbs
    return up.reshape(rows, rank), db.reshape(outputs, rank)


@cache
def _constants(dtype: Any, up: Any, db: Any, rank: int, vectors: bool) -> tuple[Constants, int]:
    """Return the constants, and the bytes of shared memory: b, a ring of two tiles, sums of up.

    ``vectors``: rows of dy can be copied 16 bytes at a time.
    """
    padded, size = next(most for most in RANKS if rank <= most), dtype.itemsize
    pitch = padded * size  # of a row of low, in the layout of Tile of common/tile.cuh
    pitch = pitch if pitch % 128 == 0 else (pitch // 16 | 1) * 16
    stage = ROWS * (SLAB + pitch)
    splits = 4 * 16 // padded
    sums = splits * ROWS * (padded + SHARED_PITCH) * 4
    shared = SLAB // size * pitch + 2 * stage + sums
    return Constants(T=dtype, U=up, W=db, RANK=padded, LANES=16 // size if vectors else 1), shared
