"""Prefetch for ZeRO-3: on a GPU, gather the next block's parameters while a block is computed.

The first step records the order in which blocks request parameters.  Later steps gather the
parameters of the next block in advance, on a separate stream.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..core.gpu import cupy, device_of, is_cupys
from ._shards import Cut, gathered
from .communicator import Communicator

Names = tuple[str, ...]


class Fetched(NamedTuple):
    """Parts, whole arrays that a stream gathers from them, and the event after the gathering."""

    parts: dict[str, Any]
    whole: dict[str, Any]
    done: Any


class Prefetch:
    """A callable that gathers parts, and on a GPU prefetches the parts of the next block.

    ``part_of`` returns this rank's current part of a parameter by name.
    """

    def __init__(self, comm: Communicator, part_of: Callable[[str], Any]) -> None:
        self.comm, self.part_of = comm, part_of
        self.previous: list[Names] = []  # requests of the last step, in order
        self.requests: list[Names] = []  # requests of this step so far
        self.fetched: Fetched | None = None
        self.side: Any = None  # the stream of the prefetch

    def begin(self) -> None:
        """Begin a step: discard prefetched arrays, because parameters may have changed."""
        self.previous, self.requests, self.fetched = self.requests, [], None

    def __call__(self, parts: Mapping[str, Any], cuts: Mapping[str, Cut]) -> dict[str, Any]:
        """Return the whole arrays of parts, and start to gather those of the next request."""
        if not parts or not (on_gpu(parts) or getattr(self.comm, "ahead", False)):
            arrays: dict[str, Any] = gathered(parts, cuts, self.comm)
            return arrays
        like = next(iter(parts.values()))
        with device_of(like):
            whole = self._prefetched(parts)
            if whole is None:
                whole = gathered(parts, cuts, self.comm)
            self.requests.append(tuple(parts))
            self._fetch_next(cuts)
        return whole

    def _prefetched(self, parts: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the prefetched arrays if they belong to these parts; the current stream waits."""
        fetched, self.fetched = self.fetched, None
        if fetched is None or fetched.parts.keys() != parts.keys():
            return None
        if any(fetched.parts[name] is not part for name, part in parts.items()):
            return None
        if fetched.done is not None:
            cupy().cuda.get_current_stream().wait_event(fetched.done)
        return fetched.whole

    def _fetch_next(self, cuts: Mapping[str, Cut]) -> None:
        """Start to gather the next request, if this step repeats the requests of the last one."""
        count = len(self.requests)
        if self.requests != self.previous[:count] or count == len(self.previous):
            return
        names = self.previous[count]
        if any(name not in cuts for name in names):  # the names are arrays of a quantized weight
            return
        parts = {name: self.part_of(name) for name in names}
        if not on_gpu(parts):  # planning with shapes, without arrays
            self.fetched = Fetched(parts, gathered(parts, cuts, self.comm), None)
            return
        self.side = self.side or cupy().cuda.Stream(non_blocking=True)
        self.side.wait_event(cupy().cuda.get_current_stream().record())
        with self.side:
            whole = gathered(parts, cuts, self.comm)
            self.fetched = Fetched(parts, whole, self.side.record())


def on_gpu(arrays: Mapping[str, Any]) -> bool:
    """Return whether arrays are CuPy's."""
    kind: Any = type(next(iter(arrays.values())))
    return bool(is_cupys(kind))
