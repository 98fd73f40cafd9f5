"""Offloading of checkpoints: arrays are stored in pinned memory of the host until backward.

Several threads, streams and GPUs may offload at the same time.  The newest array that a thread
offloads from a stream keeps its GPU memory while its copy is running.  When the thread offloads the
next array, the stream waits for that copy, and the GPU memory is released.  ``fetch`` starts the
copy back while other work is computed, and ``back`` waits for its end.

A CUDA graph repeats copies with the same addresses.  So work that is captured has its own Side, of
which the stream joins the capture, and the memory stays where it is until the graph is deleted.
"""

import contextlib
import functools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..core import arrays, gpu
from ..core.gpu import is_cupys
from ..core.stand_in import is_planned
from ..errors import DeviceError
from ..placement import stream

TO_HOST, TO_DEVICE = 2, 1  # cudaMemcpyKind
BLOCK = 2**26  # least bytes of a block of memory for graphs, from which arrays of any size are cut
GRAIN = 512  # bytes: where an array of a block begins
moved = {"to_host": 0, "to_device": 0}  # bytes, of all threads
_moving = threading.Lock()
_thread = threading.local()  # ``last``: the newest array of each of its streams
_own: ContextVar["Side | None"] = ContextVar("own", default=None)  # the Side of captured work


class Offloaded:
    """An array in memory of the host, to which a separate stream copies it."""

    def __init__(self, array: Any) -> None:
        with gpu.device_of(array):
            cuda = gpu.cupy().cuda
            array = arrays.contiguous(array)
            self.shape, self.dtype, self.device = array.shape, array.dtype, array.device
            self.side = _own.get() or _side(self.device.id)
            self.memory = self.side.memory(array.nbytes)
            here, last = cuda.get_current_stream(), _newest()
            key = stream(array)
            before = last[key]() if key in last else None
            if before is not None:  # the copy ran while a part of the model was computed
                here.wait_event(before.done)
                before.array = None
            pointers = self.memory.ptr, array.data.ptr
            self.done: Any = self.side.copy(*pointers, array.nbytes, TO_HOST, self.memory)[0]
            self.array: Any = array
            self.fetched: list[Any] | None = None  # the copy back, if it has been started
            last[key] = weakref.ref(self)

    def fetch(self) -> Any:
        """Start to copy the array back to its device, unless it is there; return the array."""
        if (array := self.array) is not None:  # another thread may release it after this line
            return array
        with self.device:
            self.array = array = gpu.cupy().empty(self.shape, self.dtype)
            pointers = array.data.ptr, self.memory.ptr
            self.fetched = self.side.copy(*pointers, array.nbytes, TO_DEVICE, self.memory, array)
        return array

    def back(self) -> Any:
        """Return the array on its device, ordered before later work of the current stream."""
        array = self.fetch()
        if (copy := self.fetched) is not None:
            with self.device:
                gpu.cupy().cuda.get_current_stream().wait_event(copy[0])
            self.array = self.fetched = copy[2] = None
        return array


class Side:
    """A copy stream: of one GPU, shared by all threads, or of the graphs of one ``Place``."""

    def __init__(self) -> None:
        self.stream = gpu.cupy().cuda.Stream(non_blocking=True)
        self.lock = threading.Lock()
        # event at the end of a copy, memory of the host, and the array that is written
        self.copying: deque[list[Any]] = deque()
        self.capturing = False

    def memory(self, size: int) -> Any:
        """Return memory of the host, with its address ``ptr``."""
        return host_memory(size)

    def copy(
        self, target: int, source: int, size: int, kind: int, memory: Any, array: Any = None
    ) -> list[Any]:
        """Copy after all work queued on the current stream; return its entry in ``copying``."""
        cuda = gpu.cupy().cuda
        before = cuda.get_current_stream().record()
        with self.lock:
            entry = [None, memory, array]
            self.copying.append(entry)  # else pools could reuse the memory: Ctrl-C may come here
            self.stream.wait_event(before)
            cuda.runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)
            entry[0] = self.stream.record()
            if not self.capturing:  # captured events have no state
                self._forget_ended()
        self.count("to_host" if kind == TO_HOST else "to_device", size)
        return entry

    def count(self, way: str, size: int) -> None:
        """Count a copy."""
        note(way, size)

    def _forget_ended(self) -> None:
        """Release the memory of copies that have ended; an interrupted one has no event."""
        ended = 0
        for number, (event, *_) in enumerate(self.copying):
            if event is not None:
                if not event.done:
                    break
                ended = number + 1
        for _ in range(ended):
            self.copying.popleft()


class GraphSide(Side):
    """The copy stream of graphs that run one after another, and the memory that they share.

    Each piece of work begins at the first block, so that all graphs together need the memory of the
    largest one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[Any, int]] = []  # memory and its size
        self.place = self.used = 0  # the current block, and its bytes in use
        self.copied = dict.fromkeys(moved, 0)  # bytes that a launch of the last capture copies

    def count(self, way: str, size: int) -> None:
        """Count a copy, which is part of a capture or runs now."""
        if self.capturing:
            self.copied[way] += size
        else:
            note(way, size)

    def memory(self, size: int) -> Any:
        """Return the next part of the blocks."""
        size = -(-size // GRAIN) * GRAIN
        while self.place < len(self.blocks) and self.used + size > self.blocks[self.place][1]:
            self.place, self.used = self.place + 1, 0
        if self.place == len(self.blocks):
            whole = max(size, BLOCK)
            self.blocks.append((host_memory(whole, pinned=True), whole))
        memory, start = self.blocks[self.place][0], self.used
        self.used += size
        return Part(memory, memory.ptr + start)

    @contextlib.contextmanager
    def copies(self, *, capturing: bool) -> Iterator[None]:
        """Copy on this stream inside a ``with`` block, whose work is captured or runs now."""
        self.place = self.used = 0
        self.copying.clear()  # this stream runs later copies after them
        self.capturing, self.copied = capturing, dict.fromkeys(moved, 0)
        _newest().clear()  # captured work cannot wait for events before the capture, or after it
        token = _own.set(self)
        try:
            yield
            if self.copying:  # a capture ends when all its streams have joined
                gpu.cupy().cuda.get_current_stream().wait_event(self.copying[-1][0])
        finally:
            _own.reset(token)
            _newest().clear()
            self.capturing = False
            if capturing:
                self.copying.clear()


class Part:
    """A part of a block of memory."""

    def __init__(self, block: Any, ptr: int) -> None:
        self.block, self.ptr = block, ptr


class Pageable:
    """Memory of the host that is not pinned."""

    def __init__(self, size: int) -> None:
        self.bytes = np.empty(size, np.uint8)
        self.ptr = self.bytes.ctypes.data


def host_memory(size: int, *, pinned: bool = False) -> Any:
    """Return pinned memory of the host; pageable memory if the system refuses, unless ``pinned``.

    Pageable memory is copied through a buffer of the driver, so that the host waits for the copy.
    """
    refused = _refusals()
    if not refused or pinned:
        try:
            return gpu.cupy().cuda.alloc_pinned_memory(size)
        except (RuntimeError, MemoryError) as error:
            refused.append(str(error).partition("\n")[0])
            if pinned:
                problem = "pinned memory is refused, and graphs cannot copy to other memory"
                raise DeviceError(problem) from error
            warnings.warn(
                f"offload: {size:,} bytes of pinned memory are refused ({refused[0]}); pageable"
                " memory is used, and copies do not overlap with computation; raise the limit, as"
                " with ulimit -l unlimited or docker run --ulimit memlock=-1",
                stacklevel=2,
            )
    return Pageable(size)


@functools.cache
def _refusals() -> list[str]:
    """Return why pinned memory was refused: a list with the first reason, empty if it was not."""
    return []


def note(way: str, size: int) -> None:
    """Add to the number of bytes moved ``to_host`` or ``to_device``."""
    with _moving:
        moved[way] += size


@functools.cache
def _side(device: int) -> Side:
    """Return the Side of a GPU by its number; that GPU must be the current one."""
    return Side()


def _newest() -> dict[Any, Any]:
    if not hasattr(_thread, "last"):
        _thread.last = {}
    last: dict[Any, Any] = _thread.last
    return last


def to_host(array: Any) -> Any:
    """Offload an array on a GPU, or a planned one; return any other array unchanged."""
    if is_planned(array):
        return array.offloaded()
    return Offloaded(array) if is_cupys(array.__class__) else array
