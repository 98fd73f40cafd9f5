"""Gradients of the second product of adapters: up = scale dy b and db = scale dy^T low."""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits, target_of
from ..common.gemm import gemm
from ..common.strides import pitch_of, spanned
from ..elements.cast import in_dtype
from ._lora_expand import PARTS
from .linear import flat

# Ranks that one pass over dy supports.  For higher ranks, the float32 sums of up have more bytes
# than a second pass over dy reads.
RANKS = 16, 32, 64
SUMS = 2**25  # the most bytes of these sums, 32 MiB: beyond L2 they cost traffic, and memory
SLAB = 512  # bytes of a row of dy that a block owns: 64 registers of a thread at the highest rank
ROWS, THREADS = 32, 256  # rows of a tile; threads of a block
BLOCKS = 2  # the fewest blocks per SM, if there are enough rows
GROUPS = 32  # the most groups of rows: the partial sums of db stay a fraction of dy
SHARED_PITCH = 8  # floats of padding in a row of sums: no two rows of a warp share a bank


class Part(NamedTuple):
    """The two products of one layer."""

    dy: Any  # (*rows, outputs)
    b: Any  # (outputs, rank)
    low: Any  # (*rows, rank)
    scale: float
    needs_db: bool
    up: Any  # (*rows, rank), which is written

    @property
    def slabs(self) -> int:
        """The number of slabs of columns in dy."""
        return -(-int(self.b.shape[0]) * int(self.dy.itemsize) // SLAB)

    @property
    def sums(self) -> int:
        """The bytes of the sums of up: one for each slab, if there are several."""
        rows = self.dy.size // self.b.shape[0]
        slabs = self.slabs
        return slabs * rows * int(self.b.shape[1]) * FLOAT32.itemsize * (slabs > 1)

    @property
    def fits(self) -> bool:
        """Whether one launch computes both products."""
        dy, b, low = self.dy, self.b, self.low
        outputs, rank = b.shape
        if not self.needs_db or not 0 < rank <= RANKS[-1] or not dy.size or target_of(dy) is None:
            return False
        supported = {dy.dtype, b.dtype, low.dtype} <= {*KERNEL_DTYPES} and dy.dtype == low.dtype
        few = max(dy.size // outputs, outputs) * rank < 2**30  # kernels count elements in 32 bits
        return supported and few and self.sums <= SUMS


def rank_gradients(
    dys: Sequence[Array],
    bs: Sequence[Array],
    lows: Sequence[Array],
    scales: Sequence[float],
    needs_db: Sequence[bool],
) -> tuple[Array, list[Array | None]]:
    """Return ``scale * dy @ b`` of all layers side by side, and db of each layer.

    dy and low may have several leading axes, which the first result has too.  ``db = scale * dy.T @
    low`` has the dtype of b; it is None for a layer whose ``needs_db`` is False.
    """
    ranks = [b.shape[1] for b in bs]
    stops = [*itertools.accumulate(ranks)]
    whole = empty((*dys[0].shape[:-1], stops[-1]), dys[0].dtype, like=dys[0])
    ups = [whole]
    if len(bs) > 1:
        ups = [whole[..., stop - rank : stop] for rank, stop in zip(ranks, stops, strict=True)]
    parts = [*map(Part, dys, bs, lows, scales, needs_db, ups)]
    together = 1 < len(parts) <= PARTS and all(each.fits for each in parts)
    together = together and len({(each.dy.dtype, each.b.dtype) for each in parts}) == 1
    if together and sum(each.sums for each in parts) <= SUMS:
        return whole, [*_one_pass(parts, whole)]
    return whole, [
        _one_pass([each], each.up)[0] if each.fits else _products(each) for each in parts
    ]


def _products(part: Part) -> Array | None:
    """Write up by one product, and return db from another."""
    dy, b, low, scale, needs_db, up = part
    gemm(flat(dy), in_dtype(b, dy.dtype), out=flat(up), factor=scale)
    return gemm(flat(dy).T, flat(low), dtype=b.dtype, factor=scale) if needs_db else None


def _one_pass(parts: Sequence[Part], up: Any) -> Sequence[Array]:
    """Write each up and return each db: a launch reads each dy once, another adds partial sums.

    ``up`` holds the up of all parts side by side.
    """
    dys, lows = (
        [each if pitch_of(each) else contiguous(each) for each in arrays]
        for arrays in ([part.dy for part in parts], [part.low for part in parts])
    )
    bs, lead = [contiguous(part.b) for part in parts], dys[0]
    outputs, ranks = ([b.shape[axis] for b in bs] for axis in (0, 1))
    of_parts = [part.slabs for part in parts]
    slabs, rows, width = sum(of_parts), lead.size // outputs[0], sum(ranks)
    tiles = -(-rows // ROWS)
    # as many groups of rows as give each SM its blocks
    groups = min(tiles, GROUPS, -(-BLOCKS * limits(lead).processors // slabs))
    group_tiles = -(-tiles // groups)
    groups = -(-tiles // group_tiles)
    dbs = [empty(b.shape, b.dtype, like=lead) for b in bs]
    pitch, to = pitch_of(up), spanned(up)
    sizes = [o * r for o, r in zip(outputs, ranks, strict=True)]
    of_up = [s * rows * r for s, r in zip(of_parts, ranks, strict=True)]
    up_sums = None if max(of_parts) == 1 else empty((sum(of_up),), FLOAT32, like=lead)
    db_sums = None if groups == 1 else empty((groups * sum(sizes),), FLOAT32, like=lead)
    absent = PARTS - len(parts)
    added, summed = up_sums is not None, db_sums is not None
    many = {
        "up_start": _starts(of_up if added else ranks),
        "up_slab": [rows * rank for rank in ranks],
        "db_start": _starts(sizes) if summed else [0] * len(parts),
        "outputs": outputs,
        "ranks": ranks,
        "dy_pitch": [*map(pitch_of, dys)],
        "low_pitch": [*map(pitch_of, lows)],
        "up_pitch": ranks if added else [pitch] * len(parts),
        "scale": [float(part.scale) for part in parts],
    }
    struct: dict[str, Any] = {name: [*each, *[0] * absent] for name, each in many.items()}
    struct["db_start"][len(parts) :] = [sum(sizes)] * absent
    struct["first_slab"] = [*_starts(of_parts), *[slabs] * absent]
    struct["db_group"] = sum(sizes) * summed
    vectors = all(
        lanes(n, dy) * dy.itemsize == 16 and pitch_of(dy) * dy.itemsize % 16 == 0
        for n, dy in zip(outputs, dys, strict=True)
    )
    chosen, shared = _constants(lead.dtype, bs[0].dtype, added, summed, max(ranks), vectors)
    kernel = load("lora_gradients.cu", "lora_gradients", lead, chosen)
    none = [None] * absent
    kernel[slabs * groups, THREADS, shared](
        *(*map(spanned, dys), *none, *bs, *none, *map(spanned, lows), *none),
        *(up_sums if added else to, *([db_sums] * PARTS if summed else (*dbs, *none))),
        *(rows, slabs, group_tiles, struct),
    )
    if added or summed:
        kernel = load("lora_gradients.cu", "lora_gradient_sums", lead, chosen)
        count = rows * width * added + sum(sizes) * summed
        kernel[-(-count // THREADS), THREADS](
            *(up_sums, db_sums, to, *dbs, *none, rows, width, pitch, slabs, groups, struct)
        )
    return dbs


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the starts of consecutive parts of these sizes, the first one at 0."""
    return [stop - size for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True)]


@cache
def _constants(
    dtype: Any, b: Any, added: bool, summed: bool, rank: int, vectors: bool
) -> tuple[Constants, int]:
    """Return the constants, and the bytes of shared memory: b, a ring of two tiles, sums of up.

    ``added`` and ``summed``: whether up and db are sums over several blocks.  ``vectors``: whether
    rows of dy can be copied 16 bytes at a time.
    """
    padded, size = next(most for most in RANKS if rank <= most), dtype.itemsize
    pitch = padded * size  # of a row of low, in the layout of Tile of common/tile.cuh
    pitch = pitch if pitch % 128 == 0 else (pitch // 16 | 1) * 16
    stage = ROWS * (SLAB + pitch)
    # 8 warps = 2 (rows of a tile) x RANK / 16 (parts of the rank) x splits (columns of a slab)
    splits = 4 * 16 // padded
    sums = splits * ROWS * (padded + SHARED_PITCH) * 4
    shared = SLAB // size * pitch + 2 * stage + sums
    up, db = FLOAT32 if added else dtype, FLOAT32 if summed else b
    chosen = Constants(T=dtype, B=b, U=up, W=db, RANK=padded, LANES=16 // size if vectors else 1)
    return chosen, shared
