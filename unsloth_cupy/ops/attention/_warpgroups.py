"""Tiles of the warpgroup kernels of attention, and the order in which blocks process rows."""

from functools import cache
from typing import Any, NamedTuple

from ...core.dtypes import Array
from ...core.source import Constants
from ...core.target import limits

PANEL = 64  # columns of 16 bits in a row of 128 bytes, which TMA swizzles
L2 = 24 << 20  # bytes that blocks stream at a time: about half of the L2 cache of an H100 (50 MB)


class Warpgroups(NamedTuple):
    """Shape of a block's work: warpgroups that own rows and compute, and one that loads."""

    consumers: int  # warpgroups that compute, each of which owns 64 rows
    tile: int  # streamed rows of a stage of the ring
    stages: int = 2
    together: bool = True  # whether one launch computes dk and dv
    registers: int = 240  # of a thread that computes
    producer: int = 24  # registers of a thread that loads

    @property
    def rows(self) -> int:
        """Return how many rows a block owns."""
        return self.consumers * 64

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.consumers * 128 + 128

    def boxes(self, own: int, streamed: int) -> tuple[tuple[int, ...], ...]:
        """Return the boxes of ``own`` maps of own rows, then of ``streamed`` maps of other rows."""
        counts = [self.rows] * own + [self.tile] * streamed
        return tuple((PANEL, 1, rows, 1) for rows in counts)  # (columns, heads, rows, batches)


def row_bytes(*columns: int) -> int:
    """Return the bytes of a row of several tiles side by side, each with whole panels."""
    return sum(-(-count // PANEL) * 128 for count in columns)  # a panel has 128 bytes of a row


@cache
def constants(own: Warpgroups, **named: Any) -> Constants:
    """Return the constants of a kernel: the numbers of its tiles, and the named ones."""
    return Constants(
        CONSUMERS=own.consumers,
        TILE=own.tile,
        STAGES=own.stages,
        REGISTERS=own.registers,
        PRODUCER=own.producer,
        **named,
    )


def order_of(
    own: Warpgroups, q: Array, blocks: int, heads: int, streamed: int, shared_by: int
) -> tuple[dict[str, int], tuple[int, int]]:
    """Return the order of jobs (Order of jobs.cuh), and the blocks and threads of a launch.

    Each head has ``blocks`` blocks of own rows and streams ``streamed`` bytes, which ``shared_by``
    heads share.
    """
    # heads whose jobs run at the same time: what they stream stays in L2
    heads_in_l2 = min(shared_by * max(1, L2 // max(1, streamed)), heads)
    order = {"row_blocks": blocks, "heads": heads, "heads_in_l2": heads_in_l2}
    # persistent blocks, one per SM, take jobs from a counter
    return order, (min(blocks * heads, limits(q).processors), own.threads)
