"""Tiles of the backward kernels of attention, by architecture, dtype size and head dim.

bytes = (rows + stages * tile) * (row(dim) + row(value_dim))
"""

from functools import cache
from typing import NamedTuple

from ...core.target import Limits
from ._options import ANY, CAUSAL, HIDING, row_bytes
from ._tiles import Table, rows_of


class Tiles(NamedTuple):
    """Shape of a block's work: the rows that it owns, and the tile of rows that it streams.

    x and y are the operands of scores and of values: k and v if the block owns keys, q and dout if
    it owns queries.
    """

    warps: int
    warp_tiles: int  # tiles of 16 own rows per warp
    tile: int  # rows of a stage
    stages: int = 2
    together: bool = True  # whether one launch computes dk and dv
    blocks: int = 1  # per SM
    options: int = ANY  # the highest level of options for which the registers suffice
    kept: int = 0  # own rows that stay in registers: 1 those of x, 2 those of x and y
    part: int = 4  # for float32, rows of a tile that are summed first: 1, 2, 4 or 8

    @property
    def rows(self) -> int:
        """Return how many rows a block owns."""
        return self.warps * self.warp_tiles * 16

    def bytes(self, itemsize: int, dim: int, value_dim: int) -> int:
        """Return the bytes of shared memory of a block."""
        pair = row_bytes(dim, itemsize) + row_bytes(value_dim, itemsize)
        return (self.rows + self.stages * self.tile) * pair


# Accumulators take 128 or more registers per thread, so 8 warps fill an SM.  Two tiles per warp
# halve what its products read from shared memory, which bounds them on sm_80 and sm_90.  Own rows
# that stay in registers are read once.
KEYS: Table[Tiles] = {
    (80, 2, 64): (
        Tiles(4, 2, 32, options=CAUSAL),  # 48 KB: fits every GPU, and twice on an SM
        Tiles(8, 1, 32),  # other options need registers
    ),
    (80, 2, 128): (
        Tiles(8, 1, 32, options=CAUSAL, kept=1),  # 96 KB; keeping rows of v too would spill
        Tiles(8, 1, 16),  # 80 KB
        Tiles(4, 1, 16),  # 48 KB
    ),
    (80, 2, 256): (
        Tiles(8, 1, 16, together=False),  # 160 KB; each of dk and dv takes 128 registers
        Tiles(4, 1, 16, together=False),  # 96 KB
        Tiles(2, 1, 16, 1, together=False),  # 48 KB
    ),
    (80, 4, 64): (
        Tiles(4, 1, 32, blocks=2, part=8),  # 64 KB; FMAs bound float32
        Tiles(4, 1, 16, part=8),  # 48 KB
    ),
    (80, 4, 128): (
        Tiles(4, 1, 16, together=False, part=8),  # 96 KB; dk and dv with partial sums would spill
        Tiles(2, 1, 16, 1, together=False, part=8),  # 48 KB
    ),
    (80, 4, 256): (
        Tiles(4, 1, 8, together=False, part=1),  # 160 KB; 128 sums and partial ones would spill
        Tiles(2, 1, 8, together=False, part=1),  # 96 KB
        Tiles(1, 1, 8, 1, together=False, part=1),  # 48 KB
    ),
    # Here products take longer than their reads, as in the forward table: one tile per warp keeps
    # up, and 168 registers let 12 warps overlap.  Two blocks of 8 warps would spill.
    (86, 2, 64): (Tiles(4, 1, 32, blocks=3, options=CAUSAL),),  # 32 KB
}
QUERIES: Table[Tiles] = {
    (80, 2, 64): (
        Tiles(4, 2, 32, options=CAUSAL, kept=2),  # 48 KB
        Tiles(4, 2, 32, options=HIDING),
        Tiles(8, 1, 32),
    ),
    (80, 2, 128): (
        Tiles(8, 1, 64, options=HIDING, kept=2),  # 128 KB
        Tiles(8, 1, 32, options=HIDING, kept=2),  # 96 KB
        Tiles(8, 1, 32),
        Tiles(4, 1, 16),  # 48 KB
    ),
    (80, 2, 256): (
        Tiles(8, 1, 16),  # 160 KB
        Tiles(4, 1, 16),  # 96 KB
        Tiles(2, 1, 16, 1),  # 48 KB
    ),
    (80, 4, 64): (
        Tiles(4, 1, 32, blocks=2, part=8),  # 64 KB
        Tiles(4, 1, 16, part=8),  # 48 KB
    ),
    (80, 4, 128): (
        Tiles(4, 1, 16),  # 96 KB
        Tiles(2, 1, 16, 1),  # 48 KB
    ),
    (80, 4, 256): (
        Tiles(4, 1, 8),  # 160 KB
        Tiles(2, 1, 8),  # 96 KB
        Tiles(1, 1, 8, 1),  # 48 KB
    ),
    # One accumulator (dq) and 127 registers: 16 warps.
    (86, 2, 64): (Tiles(8, 1, 32, blocks=2, options=CAUSAL),),  # 48 KB
}
# One stage: an SM runs several blocks of few warps, which hide each other's loads.
PAIRS: Table[Tiles] = {
    (80, 2, 64): (Tiles(4, 1, 32, 1),),  # 24 KB
    (80, 2, 128): (Tiles(4, 1, 32, 1),),  # 48 KB
    (80, 2, 256): (Tiles(2, 1, 16, 1),),  # 48 KB
    (80, 4, 64): (Tiles(4, 1, 32, 1),),  # 48 KB
    (80, 4, 128): (Tiles(2, 1, 16, 1),),  # 48 KB
    (80, 4, 256): (Tiles(1, 1, 8, 1),),  # 48 KB
}


class Chosen(NamedTuple):
    """Tiles of the three launches, whose blocks own keys, queries, or pairs of both."""

    by_key: Tiles
    by_query: Tiles
    by_pair: Tiles


@cache
def resolve(itemsize: int, dim: int, value_dim: int, options: int, limits: Limits) -> Chosen | None:
    """Return the best tiles that fit into the shared memory of a block; None if none do."""
    chosen = [
        next(
            (
                tiles
                for tiles in rows_of(table, limits.architecture, itemsize, dim, value_dim)
                if tiles.blocks * tiles.bytes(itemsize, dim, value_dim) <= limits.shared
                and options <= tiles.options
            ),
            None,
        )
        for table in (KEYS, QUERIES, PAIRS)
    ]
    return None if None in chosen else Chosen(*chosen)  # type: ignore[arg-type]
