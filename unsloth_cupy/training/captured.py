"""Work that a GPU repeats on the same arrays: run once, then captured into a CUDA graph.

    captured = Captured(Place())
    result = captured(work)          one run, one capture; from then on one launch

A graph repeats the launches of its capture, with the same addresses and the same numbers.  So work
reads all that changes from arrays, and its results are arrays that the next call overwrites.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from ..core import gpu

spare: dict[int, list[Any]] = {}  # streams of places that are gone, by GPU: cuBLAS keeps memory
# for each stream that it has run on


class Place:
    """The stream on which work is captured, and the memory that its graphs use.

    Graphs store addresses.  So their memory comes from a pool of their own, and goes back to the
    device only with the pool: CuPy would give back what is free if memory is short, though a graph
    writes there.  Graphs of one place run one after another.  What a later one of them needs in no
    result may lie where an earlier one has its results, and the other way round.
    """

    def __init__(self) -> None:
        self.stream: Any = None
        self.pool: Any = None

    def begin(self, cuda: Any) -> None:
        """Take a stream and make a pool on the current GPU."""
        held: list[Any] = []

        def allocate(size: int) -> Any:
            held.append(cuda.Memory(size))
            return cuda.MemoryPointer(held[-1], 0)

        self.pool, self.streams = cuda.MemoryPool(allocate), spare.setdefault(cuda.Device().id, [])
        self.stream = self.streams.pop() if self.streams else cuda.Stream(non_blocking=True)

    def __del__(self) -> None:
        if self.stream is not None:
            self.streams.append(self.stream)


class Captured:
    """A graph of one piece of work, or why it has none.

    Attributes
    ----------
    graph : cupy.cuda.Graph or None
        Launched from the third call on.
    why : str or None
        Why the work cannot be captured: then each call runs it.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.warm = place, False
        self.graph: Any = None
        self.result: Any = None
        self.why: str | None = None

    def __call__(self, work: Callable[[], Any]) -> Any:
        """Return the result of the work, which is the same in every call."""
        if self.graph is not None:
            self.graph.launch()
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
            self.result = work()
            self.graph = stream.end_capture()
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the stream must accept work again
                stream.end_capture()
            self.result = None
            if not isinstance(error, RuntimeError):
                raise
            self.why = str(error)
        finally:
            gpu.capturing.reset(token)
