"""Launch of attention over latent rows, whose keys are split over blocks.

bytes = rows * row(dim) + stages * keys * row(dim) + rows * row(keys) + scores, and a little more
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import Limits, limits
from ..common.no_kernel import no_kernel
from ..common.strides import broadcast_strides, in_chunks, spanned
from ._options import FARTHEST, LOG2E, row_bytes

FAN, MERGERS = 32, 256  # partial results that are merged into one; threads of a block that merges
WIDEST = 128  # the most float32 sums of the output in the registers of a thread


class Tiles(NamedTuple):
    """Shape of a block's work."""

    rows: int  # heads times queries
    keys: int  # that a block processes at a time
    stages: int
    warps: int
    row_warps: int  # warps along the rows of scores
    key_warps: int  # warps along the keys of scores; the others divide the columns of q

    def chunk(self, rows: int) -> int:
        """Return the keys of a block if a sequence has ``rows`` rows.

        At least 4 times as many keys as rows: a block then writes fewer bytes, for others to merge,
        than it reads.  The more blocks divide the rows, the fewer divide the keys, so that the
        partial results do not take more memory.
        """
        blocks = -(-rows // self.rows)
        return min(2**20, max(128, 4 * self.rows) << (blocks - 1).bit_length())

    def bytes(self, itemsize: int, dim: int) -> int:
        """Return the bytes of shared memory of a block."""
        # a row of probabilities: an odd number of chunks of 16 bytes, without bank conflicts
        row, chunks = row_bytes(dim, itemsize), -(-self.keys * itemsize // 16) | 1
        depths = 1 if itemsize == 4 else self.warps // (self.row_warps * self.key_warps)
        pitch = self.keys + 8 if self.keys % 16 == 0 else 2 * self.keys  # without bank conflicts
        tiles = (self.rows + self.stages * self.keys) * row + self.rows * 16 * chunks
        return tiles + 4 * self.rows * (depths * pitch + 2)

    def resident(self, size: int, shared: int) -> int:
        """Return how many blocks of ``size`` bytes an SM should hold: 8 warps, if they fit."""
        return max(1, min(shared // size, 8 // self.warps))

    def fits(self, itemsize: int, dim: int, rank: int, shared: int) -> bool:
        """Return whether a GPU can launch these tiles for rows of dim and rank columns."""
        share = 1  # parts of 16 columns for each warp, a power of two: offsets are constants
        while share * self.warps < -(-rank // 16):
            share *= 2
        registers = self.rows // 16 * share * 8  # 16 x 16 sums are 8 for each of 32 threads
        return self.bytes(itemsize, dim) <= shared and registers <= WIDEST


# By itemsize; of tiles with equal rows, the best come first.  An SM of an H200 must have 28 KB in
# flight (see _decode.py): a tile of 32 rows of 576 16-bit values has 36 KB.  In float32 a call is
# bound by FMAs.  Comments: shared memory for rows of 576 values.
TILES = {
    2: (
        Tiles(64, 32, 3, 8, 4, 2),  # 197 KB for rows of 576
        Tiles(64, 32, 2, 8, 4, 2),  # 161 KB
        Tiles(32, 32, 2, 4, 2, 2),  # 117 KB
        Tiles(32, 16, 3, 4, 2, 1),  # 98 KB
        Tiles(16, 32, 2, 4, 1, 2),  # 97 KB
    ),
    4: (Tiles(16, 16, 2, 4, 1, 1), Tiles(16, 8, 2, 4, 1, 1)),  # 110 KB, 76 KB
}


@cache
def resolve(itemsize: int, dim: int, rank: int, rows: int, limits: Limits) -> Tiles | None:
    """Return the smallest tiles that hold all ``rows`` of a call, or else the largest."""
    fitting = [t for t in TILES[itemsize] if t.fits(itemsize, dim, rank, limits.shared)]
    enough = [t.rows for t in fitting if t.rows >= rows]
    chosen = min(enough) if enough else max((t.rows for t in fitting), default=0)
    return next((t for t in fitting if t.rows == chosen), None)


@cache
def constants(tiles: Tiles, **named: Any) -> Constants:
    """Return the constants of latent_attention.cu."""
    return Constants(
        ROWS=tiles.rows,
        TILE_KEYS=tiles.keys,
        STAGES=tiles.stages,
        WARPS=tiles.warps,
        ROW_WARPS=tiles.row_warps,
        KEY_WARPS=tiles.key_warps,
        FAN=FAN,
        MERGERS=MERGERS,
        **named,
    )


def launch_latent(
    q: Array,
    latents: Array,
    lengths: Array,
    page_table: Array | None,
    mask: Array | None,
    *,
    rank: int,
    scale: float,
    causal: bool,
) -> Any:
    """Launch latent_attention.cu; return NotImplemented if no tiles fit."""
    batch, queries, heads, dim = q.shape
    pages, page = latents.shape[:2]
    row_pages = 1 if page_table is None else page_table.shape[1]
    keys = row_pages * page
    size, rows, device = q.dtype.itemsize, heads * queries, limits(q)
    if dim % 8 or rank % 8:
        return no_kernel(f"rows of {dim} values and {rank} of a key are not multiples of 8")
    distance, rest = divmod(latents.strides[0], dim * size)
    dense = latents.strides[1:] == (dim * size, size) and distance >= page and not rest
    of_cache = latents.flags.c_contiguous or (page_table is None and dense)
    if not of_cache or lanes(16, latents) * size != 16:  # the kernel reads 16 bytes at a time
        return no_kernel("latents are not rows of a cache; to make them so would copy the cache")
    tiles = resolve(size, dim, rank, rows, device)
    if tiles is None or max(rows, keys) >= FARTHEST:
        return no_kernel(
            f"no tiles on this GPU for rows of {dim} values in {q.dtype}, or for so many rows"
        )
    (q,) = in_chunks(contiguous(q))
    if not latents.flags.c_contiguous:  # the first rows of a cache
        page, latents = distance, spanned(latents)
    if pages * page >= 2**32 - 1:  # the kernel numbers rows in 32 bits
        return no_kernel(f"{pages * page} rows of latents are too many")
    lengths, page_table, mask = (contiguous(a) for a in (lengths, page_table, mask))
    shared = tiles.bytes(size, dim)
    named = constants(
        tiles,
        RESIDENT=tiles.resident(shared, device.shared),
        T=q.dtype,
        L=lengths.dtype,
        G=np.dtype("int32") if page_table is None else page_table.dtype,
        DIM=dim,
        RANK=rank,
        PAGED=page_table is not None,
        MASK=mask is not None,
        CAUSAL=causal,
    )
    chunk = tiles.chunk(rows)
    chunks = -(-keys // chunk)
    sequences = batch * -(-rows // tiles.rows)
    out = empty((batch, queries, heads, rank), q.dtype, like=q)
    lse = empty((batch, heads, queries), np.float32, like=q)
    part = min(tiles.rows, rows), rank + 4
    merged = [chunks]  # a tree: FAN partial results are merged into one, again and again
    while merged[-1] > 1:
        merged.append(-(-merged[-1] // FAN))
    parts = empty((sequences, sum(merged), *part), np.float32, like=q) if chunks > 1 else None
    strides = broadcast_strides(mask)
    numbers = {"heads": heads, "queries": queries, "keys": keys, "chunk": chunk, "chunks": chunks}
    numbers |= {
        "slots": sum(merged),
        "page": page,
        "row_pages": row_pages,
        "pages": pages,
        "unit": scale * LOG2E,
    }
    names = ("mask_batch", "mask_head", "mask_query", "mask_key")
    numbers |= dict(zip(names, strides, strict=True))
    kernel = load("latent_attention.cu", "latent_attention", q, named)
    kernel[sequences * chunks, 32 * tiles.warps, shared](
        q, latents, lengths, page_table, mask, out, lse, parts, numbers
    )
    for level, results in enumerate(merged[1:]):
        kernel = load("latent_attention.cu", "latent_merge", q, named)
        slices = -(-part[0] * (rank // 4) // MERGERS)
        kernel[sequences * results * slices, MERGERS](lengths, parts, out, lse, numbers, level)
    return out, lse
