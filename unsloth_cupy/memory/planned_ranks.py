"""A rank without peers, whose exchanges return planned arrays.

The real collectives of ``parallel`` run on it, so that the plan includes their buffers.
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
        Size of each group that ``split`` returns.
    ahead : bool
        Whether ranks communicate while they compute, as on GPUs.
    inbox : Inbox, optional
        Received messages of ranks on hosts, shared by all groups of this rank.
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
        """Return received rows as if all ranks sent ``counts``; a reverse call undoes it."""
        check_counts(self, x, counts)
        x = self._own("all_to_all_rows", x)
        received = Received(getattr(counts, "sent", [counts[self.rank]] * self.size))
        received.sent = counts
        out = empty((sum(received), *x.shape[1:]), x.dtype, x)
        rows = (pieces(a, np.array([*n])) for a, n in ((x, counts), (out, received)))
        self._exchange("all_to_all_rows", *rows)
        return out, received

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
    """Messages on hosts that arrive before a rank reads them, because another rank is ahead.

    Messages need memory in addition to the arrays that they are copied to.  A rank is at most one
    exchange ahead, so the messages of an exchange are held since the previous exchange.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.number = ledger, ledger.take(0)

    def empty(self, size: int) -> None:
        """Record messages of ``size`` bytes, held since the last call and freed now."""
        self.ledger.sizes[self.number] = size
        self.ledger.give_back(self.number)
        self.number = self.ledger.take(0)


class Received(list[int]):
    """The number of rows received from each rank, and the numbers ``sent``."""

    sent: Sequence[int] = ()
