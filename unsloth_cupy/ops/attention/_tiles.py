"""Which tiles the kernels of attention work on, by the device and the head dim; those of forward.

bytes = rows * row(dim) + stages * keys * (row(dim) + row(slice of value_dim))
"""

from functools import cache
from typing import NamedTuple, TypeVar

from ...core.target import Limits
from ._options import ANY, CAUSAL, HIDING, row_bytes

WIDEST = 256  # columns of a sum that fit into the registers of a warp: a block owns no more

# A launch table has rows by architecture, size of a value and the wider of dim and value_dim, the
# best first.  Those of sm_80 run on all that follow it; others are taken before them here.
OWN = {86: (86,), 89: (86,), 120: (86,)}
Row = TypeVar("Row")
Table = dict[tuple[int, int, int], tuple[Row, ...]]


def rows_of(
    table: Table[Row], architecture: int, itemsize: int, dim: int, value_dim: int
) -> tuple[Row, ...]:
    """Return the rows of a launch table that an architecture may take, the best first."""
    width = next((w for w in (64, 128, 256, 512) if max(dim, value_dim) <= w), 0)
    keys = [(own, itemsize, width) for own in (*OWN.get(architecture, ()), 80)]
    return tuple(row for key in keys for row in table.get(key, ()))


class Tiles(NamedTuple):
    """What a block works on: warps, tiles of 16 queries a warp, keys a stage of the ring."""

    warps: int
    warp_tiles: int
    keys: int
    kept: bool  # the queries stay in registers
    blocks: int = 1  # that an SM holds: taken where so many fit into the memory of one
    stages: int = 2  # of the ring: with 1, keys are loaded while values are multiplied, and back
    options: int = ANY  # the most for which registers are left

    @property
    def rows(self) -> int:
        """Return how many queries a block owns."""
        return self.warps * self.warp_tiles * 16

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.warps * 32

    def bytes(self, itemsize: int, dim: int, value_dim: int) -> int:
        """Return the shared memory of a block."""
        row, value_row = row_bytes(dim, itemsize), row_bytes(slice_of(value_dim), itemsize)
        return self.rows * row + self.stages * self.keys * (row + value_row)


class Start(NamedTuple):
    """Where a choice begins: queries and threads of a block, at most."""

    tile: int
    block: int
    warpgroups: bool = False  # the kernels of sm_90 are taken where they can be
    one_pass: bool | None = None  # of them, the backward pass that is one launch; None: a table


FORWARD: Table[Tiles] = {
    # Products of sm_80 and sm_90 wait for what they read from shared memory.  Two tiles of queries
    # a warp halve that and take up to 255 registers: two blocks of 4 warps then fill an SM.
    (80, 2, 64): (
        Tiles(4, 2, 64, True, blocks=2, options=CAUSAL),  # 48 KB: twice in 99
        Tiles(8, 1, 64, True),  # the same queries and keys: anywhere
        Tiles(8, 2, 64, True, options=CAUSAL),  # 64 KB; where 256 queries are asked for
    ),
    (80, 2, 128): (
        Tiles(4, 2, 32, False, blocks=2, options=CAUSAL),  # 64 KB: twice in 163
        Tiles(8, 1, 64, True, options=HIDING),  # 96 KB: 8 warps hide each other's latency
        Tiles(8, 1, 32, False),  # 64 KB; what changes a score needs its registers
        Tiles(4, 1, 32, True),  # 48 KB
        Tiles(8, 2, 16, False, options=CAUSAL),  # 80 KB; where 256 queries are asked for
    ),
    (80, 2, 256): (
        Tiles(8, 1, 32, False, options=CAUSAL),  # 128 KB; 128 registers of output
        Tiles(8, 1, 16, False),  # 96 KB
        Tiles(2, 1, 16, False),  # 48 KB
    ),
    # Queries take most of the memory; 4 warps are the least that keeps an SM's four parts busy,
    # and come before a second stage.
    (80, 2, 512): (
        Tiles(8, 1, 32, False, options=CAUSAL),  # 224 KB
        Tiles(8, 1, 16, False),  # 176 KB
        Tiles(4, 1, 32, False, options=CAUSAL),  # 160 KB
        Tiles(4, 1, 16, False),  # 112 KB
        Tiles(4, 1, 16, False, stages=1),  # 88 KB
        Tiles(2, 1, 16, False, stages=1),  # 56 KB
    ),
    (80, 4, 64): (Tiles(4, 1, 32, False),),  # 48 KB; FMAs bound it, and two rows a thread feed them
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
    # Products with float32 sums take four times as long here as on sm_80 beside what they read: a
    # tile a warp feeds them, and fewer registers let 16 warps overlap each other's exp.
    (86, 2, 64): (Tiles(8, 1, 32, True, blocks=2, options=CAUSAL),),  # 32 KB, 128 registers
}
start: Start | None = None  # where choices begin; the best row of the table where it is None


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
    """Return the best tiles that fit; None where none do.

    With a start, those that come nearest to it from below, in queries and then in threads.
    """
    found = fitting(itemsize, dim, value_dim, options, limits)
    if start is None or not found:
        return found[0] if found else None

    def distance(tiles: Tiles) -> tuple[int, int]:
        away = start.tile - tiles.rows, start.block - tiles.threads
        return tuple(far if far >= 0 else 2**20 - far for far in away)  # type: ignore[return-value]

    return min(found, key=distance)
