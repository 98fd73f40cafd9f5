"""The products of dy with an adapter's low rank: up = scale dy b and db = scale dy^T low."""

from functools import cache
from typing import Any

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits, target_of
from ..common.columns import column_sums
from ..common.gemm import gemm
from ..common.strides import spanned
from ..elements.cast import in_dtype
from ._lora_expand import pitch_of
from .linear import flat

RANKS = 16, 32, 64  # at more, the float32 sums of up have more bytes than a second pass over dy
SUMS = 2**25  # bytes of these sums at most: what exceeds L2 costs traffic, and memory
SLAB = 512  # bytes of a row of dy that a block owns: 64 registers of a thread at the largest rank
ROWS, THREADS = 32, 256  # of a tile; of a block
BLOCKS = 2  # per SM at least, as long as there are enough rows
GROUPS = 32  # groups of rows at most, so that the sums of db stay a fraction of dy
SHARED_PITCH = 8  # floats of padding per row of sums: no two rows of a warp share a bank


def rank_gradients(
    dy: Array, b: Array, low: Array, dtype: Any, scale: float
) -> tuple[Array, Array | None]:
    """Return ``scale * dy @ b``, and ``scale * dy.T @ low`` in ``dtype``, or None for None.

    dy and low may have several leading axes, and up has those of dy.
    """
    outputs, rank = b.shape
    rows = dy.size // outputs if outputs else 0
    slabs = -(-outputs * dy.itemsize // SLAB)
    separate = dtype is None or not 0 < rank <= RANKS[-1] or not dy.size
    separate = separate or not {dy.dtype, b.dtype, low.dtype} <= {*KERNEL_DTYPES}
    separate = separate or dy.dtype != low.dtype
    separate = separate or max(rows, outputs) * rank >= 2**30  # kernels count elements by int
    separate = separate or (slabs > 1 and slabs * rows * rank * FLOAT32.itemsize > SUMS)
    if separate or target_of(dy) is None:
        up = empty((*dy.shape[:-1], rank), dy.dtype, like=dy)
        gemm(flat(dy), in_dtype(b, dy.dtype), out=flat(up), factor=scale)
        if dtype is None:
            return up, None
        return up, gemm(flat(dy).T, flat(low), dtype=dtype, factor=scale)
    dy, low = (each if pitch_of(each) else contiguous(each) for each in (dy, low))
    return _one_pass(dy, contiguous(b), low, slabs, dtype, scale)


def _one_pass(
    dy: Array, b: Array, low: Array, slabs: int, dtype: Any, scale: float
) -> tuple[Array, Array]:
    """Return both products from one launch, which reads dy once; then add its blocks' sums."""
    outputs, rank = b.shape
    rows = dy.size // outputs
    tiles = -(-rows // ROWS)
    groups = min(tiles, GROUPS, -(-BLOCKS * limits(dy).processors // slabs))
    group_tiles = -(-tiles // groups)
    groups = -(-tiles // group_tiles)
    up = empty((*dy.shape[:-1], rank), dy.dtype, like=dy)
    db = empty((outputs, rank), dtype, like=dy)
    ups = up if slabs == 1 else empty((1, slabs, rows * rank), FLOAT32, like=dy)
    dbs = db if groups == 1 else empty((1, groups, outputs * rank), FLOAT32, like=dy)
    vectors = lanes(outputs, dy) * dy.itemsize == 16 and pitch_of(dy) * dy.itemsize % 16 == 0
    chosen, shared = _constants(dy.dtype, b.dtype, ups.dtype, dbs.dtype, rank, vectors)
    kernel = load("lora_gradients.cu", "lora_gradients", dy, chosen)
    kernel[slabs * groups, THREADS, shared](
        *(spanned(dy), b, spanned(low), ups, dbs),
        *(rows, outputs, rank, pitch_of(dy), pitch_of(low), slabs, group_tiles, scale),
    )
    for sums, total in ((ups, up), (dbs, db)):
        if sums is not total:
            column_sums(sums, total, None)
    return up, db


@cache
def _constants(
    dtype: Any, b: Any, up: Any, db: Any, rank: int, vectors: bool
) -> tuple[Constants, int]:
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
    chosen = Constants(T=dtype, B=b, U=up, W=db, RANK=padded, LANES=16 // size if vectors else 1)
    return chosen, shared
