"""Which tiles the backward kernels of attention work on, by the shared memory that a block has.

bytes = (rows + stages * tile) * (row(dim) + row(value_dim))
"""

from functools import cache
from typing import NamedTuple

from ._attention_options import ANY, CAUSAL, HIDING, row_bytes


class Tiles(NamedTuple):
    """What a block works on: its own rows, and a tile of the others that pass by."""

    warps: int
    warp_tiles: int
    tile: int
    stages: int = 2
    together: bool = True  # dk and dv in one launch
    blocks: int = 1  # of an SM
    options: int = ANY  # the most for which registers are left

    @property
    def rows(self) -> int:
        """Return how many rows a block owns."""
        return self.warps * self.warp_tiles * 16

    def bytes(self, itemsize: int, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block."""
        pair = row_bytes(dim, itemsize) + row_bytes(value_dim, itemsize)
        return (self.rows + self.stages * self.tile) * pair


# By size of a value and by the wider of dim and value_dim, the best first.  Sums take 128 registers
# or more of a thread, so that 8 warps fill an SM; a warp of two tiles halves what its products read
# from shared memory, which is what bounds them.
KEYS = {
    (2, 64): (
        Tiles(4, 2, 32, options=CAUSAL),  # 48 KB: anywhere, and twice on an SM
        Tiles(8, 1, 32),  # options need registers
    ),
    (2, 128): (
        Tiles(8, 1, 32, options=CAUSAL),  # 96 KB
        Tiles(8, 1, 16),  # 80 KB
        Tiles(4, 1, 16),  # 48 KB
    ),
    (2, 256): (
        Tiles(8, 1, 16, together=False),  # 160 KB; dk or dv alone takes 128 registers
        Tiles(4, 1, 16, together=False),  # 96 KB
        Tiles(2, 1, 16, 1, together=False),  # 48 KB
    ),
    (4, 64): (
        Tiles(4, 1, 32, blocks=2),  # 64 KB; FMAs bound float32
        Tiles(4, 1, 16),  # 48 KB
    ),
    (4, 128): (
        Tiles(4, 1, 16),  # 96 KB
        Tiles(2, 1, 16, 1),  # 48 KB
    ),
    (4, 256): (
        Tiles(4, 1, 8, together=False),  # 160 KB
        Tiles(2, 1, 8, together=False),  # 96 KB
        Tiles(1, 1, 8, 1, together=False),  # 48 KB
    ),
}
QUERIES = {
    (2, 64): (
        Tiles(4, 2, 32, options=HIDING),  # 48 KB
        Tiles(8, 1, 32),
    ),
    (2, 128): (
        Tiles(4, 2, 16, blocks=2, options=HIDING),  # 80 KB; 32 keys would spill
        Tiles(8, 1, 32),  # 96 KB
        Tiles(4, 1, 16),  # 48 KB
    ),
    (2, 256): (
        Tiles(8, 1, 16),  # 160 KB
        Tiles(4, 1, 16),  # 96 KB
        Tiles(2, 1, 16, 1),  # 48 KB
    ),
    (4, 64): (
        Tiles(4, 1, 32, blocks=2),  # 64 KB
        Tiles(4, 1, 16),  # 48 KB
    ),
    (4, 128): (
        Tiles(4, 1, 16),  # 96 KB
        Tiles(2, 1, 16, 1),  # 48 KB
    ),
    (4, 256): (
        Tiles(4, 1, 8),  # 160 KB
        Tiles(2, 1, 8),  # 96 KB
        Tiles(1, 1, 8, 1),  # 48 KB
    ),
}
# One stage: several blocks of an SM, few warps each, hide each other's loads.
PAIRS = {
    (2, 64): (Tiles(4, 1, 32, 1),),  # 24 KB
    (2, 128): (Tiles(4, 1, 32, 1),),  # 48 KB
    (2, 256): (Tiles(2, 1, 16, 1),),  # 48 KB
    (4, 64): (Tiles(4, 1, 32, 1),),  # 48 KB
    (4, 128): (Tiles(2, 1, 16, 1),),  # 48 KB
    (4, 256): (Tiles(1, 1, 8, 1),),  # 48 KB
}


class Chosen(NamedTuple):
    """Tiles of the kernels that own keys, queries, pairs of both."""

    by_key: Tiles
    by_query: Tiles
    by_pair: Tiles


@cache
def resolve(itemsize: int, dim: int, value_dim: int, options: int, shared: int) -> Chosen | None:
    """Return the best tiles that fit into the shared memory of a block; None where none do."""
    width = next((w for w in (64, 128, 256) if max(dim, value_dim) <= w), 0)
    found = [
        next(
            (
                tiles
                for tiles in table.get((itemsize, width), ())
                if tiles.blocks * tiles.bytes(itemsize, dim, value_dim) <= shared
                and options <= tiles.options
            ),
            None,
        )
        for table in (KEYS, QUERIES, PAIRS)
    ]
    return None if None in found else Chosen(*found)  # type: ignore[arg-type]
