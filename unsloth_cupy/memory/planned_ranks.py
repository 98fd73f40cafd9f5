"""A rank among others that are not there: its exchanges give planned arrays, and bytes count.

What a rank takes for an exchange is what the collectives of ``parallel`` take, since they run.
"""

from collections import Counter
from typing import Any

import numpy as np

from ..core.arrays import packed
from ..parallel.exchanges import Exchanges


class PlannedRanks(Exchanges):
    """One rank of a group, of arrays that are shapes alone.

    Parameters
    ----------
    rank, size : int
    groups : int
        Ranks in each group that ``split`` makes.

    Attributes
    ----------
    sent : Counter
        Bytes that this rank has sent, by the call.
    """

    def __init__(self, rank: int, size: int, groups: int = 1) -> None:
        super().__init__(timeout=1.0, checked=False)
        self.rank, self.size, self.groups = rank, size, groups
        self.sent: Counter[str] = Counter()

    def split(self, color: int) -> "PlannedRanks":
        """Return this rank's place in a group, whose bytes count with those of this one."""
        made = PlannedRanks(self.rank % self.groups, self.groups)
        made.sent = self.sent
        return made

    def _swap(self, call: str, given: list[Any], taken: list[Any]) -> None:
        for rank, array in enumerate(given):
            if array is not None and rank != self.rank:
                self.sent[call] += array.nbytes

    def _told(self, call: str, row: Any) -> Any:
        return np.array([row] * self.size)

    def _post(self, x: Any, to: int) -> None:
        self.sent["send"] += x.nbytes

    def _own(self, call: str, x: Any) -> Any:
        return packed(x)
