"""Tiles of the forward kernel of attention, and the look-up in all launch tables of attention.

bytes = rows * row(dim) + stages * keys * (row(dim) + row(slice of value_dim))
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, TypeVar

from ...core.replay import FIXED, choices
from ...core.target import Limits
from ._options import ANY, CAUSAL, HIDING, row_bytes

MOST = 256  # the most queries of a block in this table
WIDEST = 256  # the most columns of v that a block owns: their sums fill a warp's registers

# The keys of a launch table are (architecture, itemsize, the larger of dim and value_dim); the best
# tiles come first.  Tiles of sm_80 run on all later architectures.  The architectures in OWN try
# tiles of other architectures before: GPUs whose blocks have 99 KB of shared memory try sm_86.
OWN = {86: (86,), 89: (86,), 120: (86,), 121: (86,)}
Row = TypeVar("Row")
Table = dict[tuple[int, int, int], tuple[Row, ...]]


def rows_of(
    table: Table[Row], architecture: int, itemsize: int, dim: int, value_dim: int
) -> tuple[Row, ...]:
    """Return the tiles of a launch table that an architecture can run, best first."""
    width = next((w for w in (64, 128, 256, 512) if max(dim, value_dim) <= w), 0)
    keys = [(own, itemsize, width) for own in (*OWN.get(architecture, ()), 80)]
    return tuple(row for key in keys for row in table.get(key, ()))


class Tiles(NamedTuple):
    """Shape of a block's work."""

    warps: int
    warp_tiles: int  # tiles of 16 queries per warp
    keys: int  # in a stage of the ring
    kept: bool  # whether the queries stay in registers
    blocks: int = 1  # per SM, whose shared memory must have room for all of them
    stages: int = 2  # of the ring; with 1, keys load while values are multiplied, and vice versa
    options: int = ANY  # the highest level of options for which the registers suffice

    @property
    def rows(self) -> int:
        """Return how many queries a block owns."""
        return self.warps * self.warp_tiles * 16

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.warps * 32

    def bytes(self, itemsize: int, dim: int, value_dim: int) -> int:
        """Return the bytes of shared memory of a block."""
        row, value_row = row_bytes(dim, itemsize), row_bytes(slice_of(value_dim), itemsize)
        return self.rows * row + self.stages * self.keys * (row + value_row)

    def within(self, start: "Start") -> Iterator["Tiles"]:
        """Yield variants of these tiles within the limits, those with the same warps first.

        Variants have fewer warps, tiles per warp and keys.  If a block has the registers of an SM
        for itself, variants also have more warps, up to 8.
        """
        keys = next(keys for keys in (self.keys, 32, 16, 8) if keys <= min(self.keys, start.tile))
        for warps in sorted((8, 4, 2, 1), key=lambda warps: (warps != self.warps, -warps)):
            for warp_tiles in range(self.warp_tiles, 0, -1):
                tiles = self._replace(warps=warps, warp_tiles=warp_tiles, keys=keys)
                grown = warps > self.warps and self.blocks > 1
                if tiles.rows <= start.tile and tiles.threads <= start.block and not grown:
                    yield tiles


class Start(NamedTuple):
    """The numbers of an AttentionConfig: upper limits of tiles, and switches."""

    tile: int  # the most queries, and the most keys
    block: int  # the most threads of a block
    warpgroups: bool = True  # whether the warpgroup kernels of sm_90 run where possible
    one_pass: bool | None = None  # whether backward runs in one launch; None: if it is faster


FORWARD: Table[Tiles] = {
    # Products on sm_80 and sm_90 wait for what they read from shared memory.  Two tiles of queries
    # per warp halve those reads and take up to 255 registers: two blocks of 4 warps fill an SM.
    (80, 2, 64): (
        Tiles(4, 2, 64, True, blocks=2, options=CAUSAL),  # 48 KB: two fit into 99
        Tiles(8, 1, 64, True),  # the same queries and keys: fits every GPU
        Tiles(8, 2, 64, True, options=CAUSAL),  # 64 KB; for an AttentionConfig of 256
    ),
    (80, 2, 128): (
        Tiles(4, 2, 32, False, blocks=2, options=CAUSAL),  # 64 KB: two fit into 163
        Tiles(8, 1, 64, True, options=HIDING),  # 96 KB: 8 warps hide each other's latency
        Tiles(8, 1, 32, False),  # 64 KB; options that change a score need its registers
        Tiles(4, 1, 32, True),  # 48 KB
    ),
    (80, 2, 256): (
        Tiles(8, 1, 32, False, options=CAUSAL),  # 128 KB; 128 registers of output
        Tiles(8, 1, 16, False),  # 96 KB
        Tiles(2, 1, 16, False),  # 48 KB
    ),
    # Queries take most of the memory.  An SM needs at least 4 warps to keep its four partitions
    # busy; they matter more than a second stage.
    (80, 2, 512): (
        Tiles(8, 1, 32, False, options=CAUSAL),  # 224 KB
        Tiles(8, 1, 16, False),  # 176 KB
        Tiles(4, 1, 32, False, options=CAUSAL),  # 160 KB
        Tiles(4, 1, 16, False),  # 112 KB
        Tiles(4, 1, 16, False, stages=1),  # 88 KB
        Tiles(2, 1, 16, False, stages=1),  # 56 KB
    ),
    (80, 4, 64): (Tiles(4, 1, 32, False),),  # 48 KB; bound by FMAs: two rows per thread suffice
    (80, 4, 128): (
        Tiles(4, 1, 32, False),  # 96 KB
        Tiles(2, 1, 16, False),  # 48 KB
    ),
    (80, 4, 256): (
        Tiles(4, 1, 8, False),  # 96 KB; 16 keys would spill
        Tiles(1, 1, 8, False),  # 48 KB
    ),
    (80, 4, 512): (
        Tiles(4, 1, 8, False),  # 176 KB
        Tiles(4, 1, 8, False, stages=1),  # 152 KB: 4 warps, as above
        Tiles(2, 1, 8, False, stages=1),  # 88 KB
        Tiles(1, 1, 8, False, stages=1),  # 56 KB
    ),
    # Products with float32 sums take four times as long here as on sm_80, relative to their reads:
    # one tile per warp keeps up, and fewer registers let 16 warps overlap each other's exp.
    (86, 2, 64): (Tiles(8, 1, 32, True, blocks=2, options=CAUSAL),),  # 32 KB, 128 registers
}


def requested_limits() -> Start | None:
    """Return the limits of the AttentionConfig in use; None without one: the best tiles run."""
    starts = [each for each in choices.get() if each is not FIXED]
    return starts[-1] if starts else None


def slice_of(value_dim: int) -> int:
    """Return how many columns of v a block owns: all, or half of them, rounded up to 8."""
    return value_dim if value_dim <= WIDEST else -(-value_dim // 16) * 8


def fitting(
    itemsize: int, dim: int, value_dim: int, options: int, limits: Limits
) -> tuple[Tiles, ...]:
    """Return the tiles that fit into the shared memory and the registers of a block, best first."""
    return tuple(
        tiles
        for tiles in rows_of(FORWARD, limits.architecture, itemsize, dim, value_dim)
        if tiles.blocks * tiles.bytes(itemsize, dim, value_dim) <= limits.shared
        and options <= tiles.options
    )


@cache
def resolve(
    itemsize: int,
    dim: int,
    value_dim: int,
    options: int,
    limits: Limits,
    start: Start | None = None,
) -> Tiles | None:
    """Return the best tiles that fit; None if none do.

    With a start, return the tiles within its limits that have the most queries.  They take less
    memory than the tiles for a start of twice the size, unless both are the same.
    """
    candidates = fitting(itemsize, dim, value_dim, options, limits)
    if start is None or not candidates:
        return candidates[0] if candidates else None

    def size(tiles: Tiles) -> int:
        return tiles.bytes(itemsize, dim, value_dim)

    most = limits.shared
    if start.tile < MOST:
        double = start._replace(tile=2 * start.tile)
        larger: Tiles = resolve(itemsize, dim, value_dim, options, limits, double)  # type: ignore[assignment]
        if max(larger.rows, larger.keys) <= start.tile:
            return larger
        most = size(larger) - 1
    cut = [each for tiles in candidates for each in tiles.within(start) if size(each) <= most]
    fits = (each for each in cut if each.blocks * size(each) <= limits.shared)
    return max(fits, key=lambda tiles: tiles.rows)
