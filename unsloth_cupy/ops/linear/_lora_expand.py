"""The second product of adapters, added to the outputs in place: y += scale * low b^T."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from ...core.arrays import contiguous, lanes
from ...core.dtypes import KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import target_of
from ..common.gemm import gemm
from ..common.strides import pitch_of, spanned
from ..elements.cast import in_dtype
from .linear import flat

PARTS = 3  # the most outputs of one launch: q, k and v
MOST = 192  # the highest rank: tiles of higher ranks do not fit into the shared memory of all GPUs
COLUMNS, THREADS = 128, 128  # columns of y that a block computes; its threads
LANES = 8  # neighbouring values of y in one access: 16 bytes of 16-bit values


def add_low_ranks(
    ys: Sequence[Array], lows: Sequence[Array], bs: Sequence[Array], scales: Sequence[float]
) -> None:
    """Add ``scale * low @ b.T`` to each y; y and low may have several leading axes."""
    if _fits(ys, lows, bs, [each.shape[1] for each in bs]):
        _launch(ys, lows, bs, scales, by_rank=False)
        return
    for y, low, b, scale in zip(ys, lows, bs, scales, strict=True):
        gemm(flat(low), in_dtype(b, y.dtype).T, out=flat(y), add=True, factor=scale)


def add_low_rank_rows(y: Array, low: Array, a: Array) -> None:
    """Add ``low @ a`` to y."""
    if _fits([y], [low], [a], a.shape[:1]):
        _launch([y], [low], [a], [1.0], by_rank=True)
    else:
        gemm(flat(low), in_dtype(a, y.dtype), out=flat(y), add=True)


def _fits(
    ys: Sequence[Any], lows: Sequence[Any], factors: Sequence[Any], ranks: Sequence[int]
) -> bool:
    """Return whether one launch computes all products.

    It does so only for y of 16 bits: in float32, cuBLAS adds the products without a cast.
    """
    if not (0 < len(ys) <= PARTS and all(0 < rank <= MOST for rank in ranks)):
        return False
    dtype, own = ys[0].dtype, factors[0].dtype
    if target_of(ys[0]) is None or dtype not in KERNEL_DTYPES[:2] or own not in KERNEL_DTYPES:
        return False
    same = all(y.dtype == low.dtype == dtype for y, low in zip(ys, lows, strict=True))
    return (
        same
        and all(y.size and pitch_of(y) for y in ys)
        and all(factor.dtype == own for factor in factors)
    )


def _launch(
    ys: Sequence[Any], lows: Sequence[Any], factors: Sequence[Any], scales: Sequence[float],
    by_rank: bool,
) -> None:  # fmt: skip
    """Launch the kernel, which adds the products to each y."""
    lows = [each if pitch_of(each) else contiguous(each) for each in lows]
    factors = [contiguous(each) for each in factors]
    absent = PARTS - len(ys)
    ranks = [each.shape[0 if by_rank else 1] for each in factors]
    columns, starts, tiles = [y.shape[-1] for y in ys], list[int](), 0
    for each in columns:
        starts.append(tiles)
        tiles += -(-each // COLUMNS)
    pitches = [pitch_of(y) for y in ys]
    vectors = all(
        lanes(n, y) == LANES and pitch % LANES == 0
        for n, y, pitch in zip(columns, ys, pitches, strict=True)
    )
    lead, rows = ys[0], ys[0].size // columns[0]
    rank = -(-max(ranks) // 16) * 16  # the depth of an mma
    chosen, shared = _constants(lead.dtype, factors[0].dtype, rank, by_rank, vectors)
    many = {
        "columns": columns,
        "ranks": ranks,
        "y_pitch": pitches,
        "low_pitch": [pitch_of(each) for each in lows],
        "first_tile": starts,
        "scale": [float(each) for each in scales],
    }
    parts = {name: [*each, *[0] * absent] for name, each in many.items()}
    parts["first_tile"] = [*starts, *[tiles] * absent]
    kernel = load("lora_expand.cu", "lora_expand_", lead, chosen)
    arrays = [
        array
        for each in ([*map(spanned, ys)], [*map(spanned, lows)], factors)
        for array in (*each, *[None] * absent)
    ]
    kernel[tiles * -(-rows // _rows(rank)), THREADS, shared](*arrays, rows, tiles, parts)


@cache
def _constants(
    dtype: Any, own: Any, rank: int, by_rank: bool, vectors: bool
) -> tuple[Constants, int]:
    """Return the constants, and the bytes of shared memory for tiles of low and of the factor."""

    def pitch(columns: int) -> int:  # of a row of Tile of common/tile.cuh
        chunks = columns // 8
        return 16 * (chunks if chunks % 8 == 0 else chunks | 1)

    right = rank * pitch(COLUMNS) if by_rank else COLUMNS * pitch(rank)
    chosen = Constants(T=dtype, B=own, RANK=rank, BY_RANK=by_rank, LANES=LANES if vectors else 1)
    return chosen, _rows(rank) * pitch(rank) + right


def _rows(rank: int) -> int:
    """Return how many rows of y a block computes."""
    return 128 if rank <= 64 else 64  # tiles of higher ranks fill the shared memory
