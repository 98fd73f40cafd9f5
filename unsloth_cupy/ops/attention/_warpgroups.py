"""What a block of attention's kernels on warpgroups works on, and which block takes which rows."""

from functools import cache
from typing import Any, NamedTuple

from ...core.dtypes import Array
from ...core.source import Constants
from ...core.target import limits

PANEL = 64  # columns under a swizzle of 128 bytes
L2 = 24 << 20  # bytes that pass by at a time: half of the L2 of an H100


class Warpgroups(NamedTuple):
    """Warpgroups that compute, 64 own rows each; rows of a stage of the ring."""

    consumers: int
    tile: int
    stages: int = 2
    together: bool = True  # dk and dv in one launch
    registers: int = 240  # of a thread that computes
    producer: int = 24  # of a thread of the warpgroup that loads

    @property
    def rows(self) -> int:
        """Return how many rows a block owns."""
        return self.consumers * 64

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.consumers * 128 + 128

    def boxes(self, own: int, passing: int) -> tuple[tuple[int, ...], ...]:
        """Return the boxes of so many maps of own rows and of rows that pass by."""
        counts = [self.rows] * own + [self.tile] * passing
        return tuple((PANEL, 1, rows, 1) for rows in counts)


def row_bytes(*columns: int) -> int:
    """Return the bytes of a row of each of several tiles."""
    return sum(-(-count // PANEL) * 128 for count in columns)


@cache
def constants(own: Warpgroups, **named: Any) -> Constants:
    """Return the constants of a kernel, with those of its blocks."""
    return Constants(
        CONSUMERS=own.consumers,
        TILE=own.tile,
        STAGES=own.stages,
        REGISTERS=own.registers,
        PRODUCER=own.producer,
        **named,
    )


def order_of(
    own: Warpgroups, q: Array, blocks: int, heads: int, passing: int, shared_by: int
) -> tuple[dict[str, int], tuple[int, int]]:
    """Return the order of jobs, and the blocks and threads of a launch.

    blocks of rows a head, of so many heads; bytes that pass by a head, which shared_by heads share.
    """
    together = min(shared_by * max(1, L2 // max(1, passing)), heads)
    order = {"row_blocks": blocks, "heads": heads, "together": together}
    return order, (min(blocks * heads, limits(q).processors), own.threads)
