"""Offloading of checkpoints: arrays are stored in pinned memory of the host until backward.

Several threads, streams and GPUs may offload at the same time.  The newest array that a thread
offloads from a stream keeps its GPU memory while its copy is running.  When the thread offloads the
next array, the stream waits for that copy, and the GPU memory is released.  ``fetch`` starts the
copy back while other work is computed, and ``back`` waits for its end.
"""

import functools
import threading
import weakref
from collections import deque
from typing import Any

from ..core import arrays, gpu
from ..core.gpu import is_cupys
from ..core.stand_in import is_planned
from ..placement import stream

TO_HOST, TO_DEVICE = 2, 1  # cudaMemcpyKind
moved = {"to_host": 0, "to_device": 0}  # bytes, of all threads
_moving = threading.Lock()
_thread = threading.local()  # ``last``: the newest array of each of its streams


class Offloaded:
    """An array in pinned memory of the host, to which a separate stream copies it."""

    def __init__(self, array: Any) -> None:
        with gpu.device_of(array):
            cuda = gpu.cupy().cuda
            array = arrays.contiguous(array)
            self.shape, self.dtype, self.device = array.shape, array.dtype, array.device
            self.memory, self.side = cuda.alloc_pinned_memory(array.nbytes), _side(self.device.id)
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
    """The copy stream of one GPU, shared by all threads."""

    def __init__(self) -> None:
        self.stream = gpu.cupy().cuda.Stream(non_blocking=True)
        self.lock = threading.Lock()
        # event at the end of a copy, pinned memory, and the array that is written
        self.copying: deque[list[Any]] = deque()

    def copy(
        self, target: int, source: int, size: int, kind: int, memory: Any, array: Any = None
    ) -> list[Any]:
        """Copy after all work queued on the current stream; return its entry in ``copying``."""
        cuda = gpu.cupy().cuda
        before = cuda.get_current_stream().record()
        with self.lock:
            self.stream.wait_event(before)
            cuda.runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)
            entry = [self.stream.record(), memory, array]
            self.copying.append(entry)  # else pools could reuse the memory
            while self.copying and self.copying[0][0].done:
                self.copying.popleft()
        note("to_host" if kind == TO_HOST else "to_device", size)
        return entry


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
