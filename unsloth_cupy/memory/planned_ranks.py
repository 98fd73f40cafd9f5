"""A rank without peers: its exchanges return planned arrays.

The collectives of ``parallel`` themselves run, so that their buffers are planned too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.arrays import contiguous, empty
from ..parallel.communicator import check_counts
from ..parallel.exchanges import Exchanges, pieces
from .ledger import Ledger


class PlannedRanks(Exchanges):
    """One rank of a group, for planned arrays.

    Parameters
    ----------
    rank, size : int
    groups : int
        Ranks in each group that ``split`` makes.
    ahead : bool
        Whether ranks communicate while they compute, as on GPUs.
    inbox : Inbox, optional
        Where messages of ranks of hosts wait, for all groups of this rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        groups: int = 1,
        *,
        ahead: bool = False,
        inbox: "Inbox | None" = None,
    ) -> None:
        super().__init__(timeout=1.0, checked=False)
        self.inbox = inbox
        self.rank, self.size, self.groups, self.ahead = rank, size, groups, ahead

    def split(self, color: int) -> "PlannedRanks":
        """Return this rank as a member of a group."""
        return PlannedRanks(self.rank % self.groups, self.groups, inbox=self.inbox)

    def all_to_all_rows(self, x: Any, counts: Sequence[int]) -> tuple[Any, list[int]]:
        """Return as many rows as ranks send that all do as this one; back, as many as it sent."""
        check_counts(self, x, counts)
        x = self._own("all_to_all_rows", x)
        came = Came(getattr(counts, "sent", [counts[self.rank]] * self.size))
        came.sent = counts
        out = empty((sum(came), *x.shape[1:]), x.dtype, x)
        rows = (pieces(a, np.array([*n])) for a, n in ((x, counts), (out, came)))
        self._exchange("all_to_all_rows", *rows)
        return out, came

    def _exchange(self, call: str, sends: list[Any], receives: list[Any]) -> None:
        if self.inbox is not None:
            others = [array for rank, array in enumerate(receives) if rank != self.rank]
            self.inbox.empty(sum(array.nbytes for array in others if array is not None))

    def _gather_rows(self, call: str, row: Any) -> Any:
        return np.array([row] * self.size)

    def _post(self, x: Any, to: int) -> None:
        pass

    def _own(self, call: str, x: Any) -> Any:
        return contiguous(x)


class Inbox:
    """Messages on hosts, which arrive before a rank asks for them if another one is ahead of it.

    They are held in addition to the arrays that they are copied to.  Another rank is ahead by one
    exchange at most: what one receives is held since the one before.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.number = ledger, ledger.take(0)

    def empty(self, size: int) -> None:
        """Record that messages of ``size`` bytes have waited since the last call, and are freed."""
        self.ledger.sizes[self.number] = size
        self.ledger.give_back(self.number)
        self.number = self.ledger.take(0)


class Came(list[int]):
    """How many rows came from each rank, and how many were ``sent``."""

    sent: Sequence[int] = ()
