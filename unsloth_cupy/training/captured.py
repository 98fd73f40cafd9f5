"""CUDA graphs of work that a GPU repeats on the same arrays.

    captured = Captured(Place())
    result = captured(work)          first call: run; second: capture; later calls: one launch

A graph repeats the launches of its capture, with the same addresses and the same numbers.  So the
work reads everything that changes from arrays, and the next call overwrites its results.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from ..core import gpu
from .offload import GraphSide, note

# streams of deleted places, by GPU; they are reused, because cuBLAS keeps memory for each stream
spare: dict[int, list[Any]] = {}


class Place:
    """The stream on which work is captured, the memory pool of its graphs, and their copy stream.

    Graphs store addresses.  So their memory comes from a separate pool, and returns to the device
    only with the pool: when memory is short, CuPy would free blocks that a graph still writes.
    Graphs of one place run one after another, and share temporary memory: a graph may overwrite the
    results of another graph.
    """

    def __init__(self) -> None:
        self.stream: Any = None
        self.pool: Any = None
        self.side: Any = None

    def begin(self, cuda: Any) -> None:
        """Create the stream and the pool on the current GPU."""
        held: list[Any] = []

        def allocate(size: int) -> Any:
            held.append(cuda.Memory(size))
            return cuda.MemoryPointer(held[-1], 0)

        self.pool, self.streams = cuda.MemoryPool(allocate), spare.setdefault(cuda.Device().id, [])
        self.stream = self.streams.pop() if self.streams else cuda.Stream(non_blocking=True)
        self.side = GraphSide()

    def __del__(self) -> None:
        if self.stream is not None:
            self.streams.append(self.stream)


class Captured:
    """The CUDA graph of one piece of work, or the reason why it cannot be captured.

    Attributes
    ----------
    graph : cupy.cuda.Graph or None
        The graph; calls after the second launch it.
    why : str or None
        Why the work cannot be captured; each call then runs the work.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.warm = place, False
        self.graph: Any = None
        self.result: Any = None
        self.copied: dict[str, int] = {}  # bytes that a launch moves to the host and back
        self.why: str | None = None

    def __call__(self, work: Callable[[], Any]) -> Any:
        """Run the work or launch its graph; return its result, the same arrays in every call."""
        if self.graph is not None:
            self.graph.launch()
            for way, size in self.copied.items():
                note(way, size)
            return self.result
        if self.why is not None:
            return work()
        cuda, place = gpu.cupy().cuda, self.place
        current = cuda.get_current_stream()
        if place.stream is None:
            place.begin(cuda)
        try:
            with place.stream, cuda.using_allocator(place.pool.malloc):
                place.stream.wait_event(current.record())
                if not self.warm:  # compilation and one-time allocations cannot be captured
                    with place.side.copies(capturing=False):
                        result, self.warm = work(), True
                    return result
                self._capture(work)
        finally:
            current.wait_event(place.stream.record())
        return self(work)

    def _capture(self, work: Callable[[], Any]) -> None:
        """Capture the work into a graph, unless some of it cannot be captured."""
        stream = self.place.stream
        token = gpu.capturing.set(True)
        stream.begin_capture()
        try:
            with self.place.side.copies(capturing=True):
                self.result = work()
            self.graph, self.copied = stream.end_capture(), self.place.side.copied
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the stream must accept work again
                stream.end_capture()
            self.result = None
            if not isinstance(error, RuntimeError):
                raise
            self.why = str(error)
        finally:
            gpu.capturing.reset(token)
