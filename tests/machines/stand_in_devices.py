"""The GPUs of the stand-in: the current device, its streams, and the order of their work.

Work on an array raises

    WrongDeviceError    if the array, or the kernel, is on another GPU than the current one
    UnorderedError      if another stream wrote the array, and nothing waits for that stream

because a real GPU would read other memory, or memory that is not written yet.

A stream that waits for an event of a capture joins it, and must be waited for before the capture
ends.  A launch of the graph does the work of such streams as late as their events allow.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class WrongDeviceError(AssertionError):
    """Work on one GPU uses an array or a kernel of another one."""


class UnorderedError(AssertionError):
    """An array is used without waiting for the stream that writes it."""


class OutOfMemoryError(MemoryError):
    """CuPy's error for more bytes than the GPU has: more than ``machine.room`` here."""


Clock = dict[tuple[int, int], int]  # the number of finished tasks of each stream, by its key


class Gpus:
    """The GPUs: each thread has a current GPU, and a current stream for each GPU."""

    def __init__(self, numbers: list[int], capability: str) -> None:
        self.numbers, self.capability = numbers, capability
        self.thread = threading.local()
        self.host: Clock = {}  # the work that the host has waited for
        self.addresses = iter(range(1 << 12, 1 << 40, 16))
        self.by_address: dict[int, Stream] = {}
        self.hooks: list[Any] = []  # those of memory that are entered
        self.pool = Pool(self)
        self.null = {number: Stream(self, number, 0) for number in numbers}

    @property
    def current(self) -> int:
        """The number of the current GPU."""
        return getattr(self.thread, "device", self.numbers[0])

    @current.setter
    def current(self, number: int) -> None:
        if number not in self.numbers:
            raise ValueError(f"there is no GPU {number}")
        self.thread.device = number

    @property
    def streams(self) -> dict[int, "Stream"]:
        """The current streams of this thread, by device."""
        if not hasattr(self.thread, "streams"):
            self.thread.streams = dict(self.null)
        return self.thread.streams

    @property
    def stream(self) -> "Stream":
        """The current stream of the current GPU."""
        return self.streams[self.current]

    @property
    def capturing(self) -> bool:
        """Whether the current stream is captured."""
        return self.stream.capturing

    def does(self, task: Callable[[], Any]) -> None:
        """Do a task, or let the graph that is captured do it."""
        if self.stream.capturing:
            self.stream.tasks.append(task)
        else:
            task()

    def copy(
        self, target: int, source: int, size: int, kind: int, stream: int, real: bool = False
    ) -> None:
        """Stand for ``runtime.memcpyAsync``, which copies only if arrays have ``real`` values."""
        own = self.by_address[stream] if stream else self.null[self.current]
        if own.device_id != self.current:
            raise WrongDeviceError("a copy on a stream of another GPU")

        def task() -> None:
            if real:
                ctypes.memmove(target, source, size)

        own.tasks.append(task) if own.capturing else task()

    def known_to_host(self, memory: Any) -> None:
        """Raise unless the host has waited for what writes a memory."""
        if memory.written is not None and self.host.get(memory.written[0], 0) < memory.written[1]:
            raise UnorderedError("a GPU reads what another one still writes")

    def captures(self, stream: int) -> bool:
        """Stand for ``runtime.streamIsCapturing``."""
        return self.by_address[stream].capturing

    def work(self, what: str, memories: Any) -> "tuple[tuple[int, int], int]":
        """Add work on memories to the current stream; return the stream's key and its new time."""
        stream = self.stream
        for memory in memories:
            if memory.device != self.current:
                where = f"work on GPU {self.current} uses an array on GPU {memory.device}"
                raise WrongDeviceError(f"{what}: {where}")
            if memory.written is not None:
                writer, time = memory.written
                known = max(stream.after.get(writer, 0), self.host.get(writer, 0))
                if writer != stream.key and known < time:
                    raise UnorderedError(f"{what}: a stream reads what another one still writes")
        stream.time += 1
        return stream.key, stream.time


class Pool:
    """A stand-in for CuPy's memory pool, with its limits and sums only."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus, self.limits = gpus, dict.fromkeys(gpus.numbers, 0)

    def get_limit(self) -> int:
        return self.limits[self.gpus.current]

    def set_limit(self, *, size: int) -> None:
        self.limits[self.gpus.current] = size

    def free_all_blocks(self) -> None: ...

    def used_bytes(self) -> int:
        return 0

    total_bytes = used_bytes


class Stream:
    """A stream: a count of the work on it, and a clock of the events that it has waited for."""

    def __init__(self, gpus: Gpus, device: int, address: int) -> None:
        self.gpus, self.device_id, self.ptr = gpus, device, address
        self.key, self.time, self.after = (device, address), 0, Clock()
        self.capture: Capture | None = None
        self.tasks: list[Any] = []  # of a capture: functions, and events that it waits for

    @property
    def capturing(self) -> bool:
        """Whether work on the stream is captured."""
        return self.capture is not None

    def __enter__(self) -> "Stream":
        if self.device_id != self.gpus.current:
            raise RuntimeError("The device that the stream is created on does not match")
        self.before = self.gpus.stream
        self.gpus.streams[self.device_id] = self
        return self

    def __exit__(self, *_: object) -> None:
        self.gpus.streams[self.device_id] = self.before

    def record(self) -> "Event":
        return Event({**self.after, self.key: self.time}, self)

    def wait_event(self, event: "Event") -> None:
        if self.capture is not event.capture:
            if self.capture is not None or event.capture.ended:
                raise RuntimeError("cudaErrorStreamCaptureIsolation")
            event.capture.streams.append(self)
            self.capture, self.tasks = event.capture, []
        if self.capture is not None:
            self.tasks.append(event)
        for key, time in event.clock.items():
            self.after[key] = max(time, self.after.get(key, 0))

    def synchronize(self) -> None:
        if self.capturing:
            raise RuntimeError("a stream that captures cannot be waited for")
        for key, time in self.record().clock.items():
            self.gpus.host[key] = max(time, self.gpus.host.get(key, 0))

    def begin_capture(self) -> None:
        self.capture, self.tasks = Capture([self]), []

    def end_capture(self) -> "Graph":
        if self.capture is None:
            raise RuntimeError("nothing was captured")
        streams, graph = self.capture.streams, Graph(self.gpus, self.device_id, self.capture)
        self.capture.ended = True
        for stream in streams:
            stream.capture = None
        if any(len(graph.tasks[each.key]) > graph.reached().get(each.key, 0) for each in streams):
            raise RuntimeError("cudaErrorStreamCaptureUnjoined")
        return graph


class Capture:
    """A capture: its streams, of which the first one began it."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams, self.ended = streams, False


class Event:
    """A point in the work of a stream; the work before it is always done."""

    def __init__(self, clock: Clock, stream: Stream) -> None:
        self.clock, self.key, self.capture = clock, stream.key, stream.capture
        self.place = len(stream.tasks)

    @property
    def done(self) -> bool:
        if self.capture is not None:
            raise RuntimeError("cudaErrorCapturedEvent")
        return True

    def synchronize(self) -> None: ...


class Graph:
    """A graph captured on a GPU: its launch repeats what was captured, with the same numbers."""

    def __init__(self, gpus: Gpus, device: int, capture: Capture) -> None:
        self.gpus, self.device, self.launched = gpus, device, 0
        self.first = capture.streams[0].key
        self.tasks = {each.key: each.tasks for each in capture.streams}

    def reached(self, do: Callable[[Any], Any] = lambda task: None) -> dict[tuple[int, int], int]:
        """Do all tasks that the first stream reaches; return their number by stream."""
        ended: dict[tuple[int, int], int] = {}

        def run(key: tuple[int, int], until: int) -> None:
            while ended.setdefault(key, 0) < until:
                task = self.tasks[key][ended[key]]
                ended[key] += 1
                run(task.key, task.place) if type(task) is Event else do(task)

        run(self.first, len(self.tasks[self.first]))
        return ended

    def launch(self) -> None:
        if self.gpus.current != self.device:
            raise WrongDeviceError("the graph belongs to another GPU")
        self.launched += 1
        self.reached(lambda task: task())


def cuda_names(gpus: Gpus) -> dict[str, Any]:
    """Return the names of ``cupy.cuda`` that concern devices, streams and memory."""

    class Device:
        def __init__(self, number: int | None = None) -> None:
            self.id = gpus.current if number is None else int(number)
            self.compute_capability = gpus.capability

        def __enter__(self) -> "Device":
            if not hasattr(gpus.thread, "entered"):
                gpus.thread.entered = []
            gpus.thread.entered.append(gpus.current)
            gpus.current = self.id
            return self

        def __exit__(self, *_: object) -> None:
            gpus.current = gpus.thread.entered.pop()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Device) and other.id == self.id

        __hash__ = None  # type: ignore[assignment]

        def __str__(self) -> str:
            return f"<CUDA Device {self.id}>"

        def synchronize(self) -> None:
            with self:
                gpus.stream.synchronize()

    def stream(non_blocking: bool = False) -> Stream:
        new = Stream(gpus, gpus.current, next(gpus.addresses))
        gpus.by_address[new.ptr] = new
        return new

    class MemoryPool:
        malloc = None

        def __init__(self, allocator: Any = None) -> None: ...

    class UsingAllocator:
        def __init__(self, allocator: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    class MemoryHook:
        def __enter__(self) -> "MemoryHook":
            gpus.hooks.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            gpus.hooks.remove(self)

        def malloc_postprocess(self, **told: Any) -> None: ...

        def free_postprocess(self, **told: Any) -> None: ...

    class Pinned(bytearray):
        """A buffer, as CuPy's, with an address."""

        @property
        def ptr(self) -> int:
            return np.frombuffer(self, np.uint8).ctypes.data

    class Allocated:
        def __init__(self, size: int) -> None:
            self.size, self.ptr = size, next(gpus.addresses) << 8

    return {
        "Device": Device,
        "alloc": Allocated,
        "Stream": stream,
        "MemoryHook": MemoryHook,
        "MemoryPool": MemoryPool,
        "using_allocator": UsingAllocator,
        "alloc_pinned_memory": Pinned,
        "get_current_stream": lambda: gpus.stream,
    }
