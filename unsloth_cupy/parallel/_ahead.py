"""Parameters of the block that comes next are gathered while one is computed, on a GPU.

The first step shows in which order blocks ask; steps after it ask for the next one beforehand, by a
stream of their own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..core.gpu import at, cupy, is_cupys
from ._shards import Cut, gathered
from .communicator import Communicator

Names = tuple[str, ...]


class Fetched(NamedTuple):
    """Whole arrays that a stream is about to make, the parts they come of, and when they are."""

    parts: dict[str, Any]
    whole: dict[str, Any]
    made: Any


class Ahead:
    """Gathers parts, on a GPU those of the next block too.

    ``part_of`` returns this rank's part of a parameter by its name, as it is now.
    """

    def __init__(self, comm: Communicator, part_of: Callable[[str], Any]) -> None:
        self.comm, self.part_of = comm, part_of
        self.known: list[Names] = []  # what the last step asked for, in order
        self.asked: list[Names] = []  # what this one asked for so far
        self.fetched: Fetched | None = None
        self.side: Any = None

    def begin(self) -> None:
        """Begin a step: parameters may have changed."""
        self.known, self.asked, self.fetched = self.asked, [], None

    def __call__(self, parts: Mapping[str, Any], cuts: Mapping[str, Cut]) -> dict[str, Any]:
        """Return whole arrays of parts."""
        if not parts or not (on_gpu(parts) or getattr(self.comm, "ahead", False)):
            found: dict[str, Any] = gathered(parts, cuts, self.comm)
            return found
        like = next(iter(parts.values()))
        with at(like):
            whole = self._taken(parts)
            if whole is None:
                whole = gathered(parts, cuts, self.comm)
            self.asked.append(tuple(parts))
            self._fetch_next(cuts)
        return whole

    def _taken(self, parts: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what was gathered beforehand, if it is this; later work may use it."""
        fetched, self.fetched = self.fetched, None
        if fetched is None or fetched.parts.keys() != parts.keys():
            return None
        if any(fetched.parts[name] is not part for name, part in parts.items()):
            return None
        if fetched.made is not None:
            cupy().cuda.get_current_stream().wait_event(fetched.made)
        return fetched.whole

    def _fetch_next(self, cuts: Mapping[str, Cut]) -> None:
        """Begin to gather what the last step asked for behind what this one has asked for."""
        place = len(self.asked)
        if self.asked != self.known[:place] or place == len(self.known):
            return
        names = self.known[place]
        if any(name not in cuts for name in names):  # of a quantized weight, by its own names
            return
        parts = {name: self.part_of(name) for name in names}
        if not on_gpu(parts):  # shapes alone
            self.fetched = Fetched(parts, gathered(parts, cuts, self.comm), None)
            return
        self.side = self.side or cupy().cuda.Stream(non_blocking=True)
        self.side.wait_event(cupy().cuda.get_current_stream().record())
        with self.side:
            whole = gathered(parts, cuts, self.comm)
            self.fetched = Fetched(parts, whole, self.side.record())


def on_gpu(arrays: Mapping[str, Any]) -> bool:
    """Say whether arrays are CuPy's."""
    kind: Any = type(next(iter(arrays.values())))
    return bool(is_cupys(kind))
