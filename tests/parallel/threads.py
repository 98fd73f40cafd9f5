"""Ranks that are threads of one process: what they send are copies of arrays."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from unsloth_cupy.parallel.exchanges import Exchanges

from .nccl import in_threads


class Room:
    """Pending messages, by source and target, and the rooms of groups."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self.groups: dict[tuple[int, int], Room] = defaultdict(Room)
        self.lock = threading.Lock()


class Threads(Exchanges):
    """The communicator of a thread."""

    def __init__(self, rank: int, size: int, room: Room) -> None:
        super().__init__(20.0, checked=True)
        self.rank, self.size, self.room, self.splits = rank, size, room, 0

    def split(self, color: int) -> "Threads":
        colors = self._gather_rows("split", np.array([color]))[:, 0]
        members = [rank for rank in range(self.size) if colors[rank] == color]
        self.splits += 1
        with self.room.lock:
            room = self.room.groups[self.splits, color]
        return Threads(members.index(self.rank), len(members), room)

    def _box(self, source: int, to: int) -> "queue.Queue[Any]":
        with self.room.lock:
            return self.room.boxes[source, to]

    def _exchange(self, call: str, sends: list[Any], receives: list[Any]) -> None:
        for to, array in enumerate(sends):
            if array is not None and (to != self.rank or receives[to] is not None):
                self._post(array, to)
        for source, out in enumerate(receives):
            if out is not None:
                out[...] = self._box(source, self.rank).get(timeout=self.timeout)

    def _gather_rows(self, call: str, row: Any) -> Any:
        rows = np.empty((self.size, *row.shape), row.dtype)
        self._exchange(call, [row] * self.size, [*rows])
        return rows

    def _post(self, x: Any, to: int) -> None:
        self._box(self.rank, to).put(x.copy())


def by_threads(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Return ``work(comm)`` of every rank."""
    room, results = Room(), [None] * size

    def run(rank: int) -> None:
        results[rank] = work(Threads(rank, size, room))

    in_threads(size, run)
    return results
