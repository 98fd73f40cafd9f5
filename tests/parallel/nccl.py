"""A stand-in for CuPy and its NCCL: ranks are threads, arrays are NumPy's, messages are copies.

Messages are sent at ``groupEnd``, where a receive also waits, as a stream would.
"""

import ctypes
import queue
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from unsloth_cupy.parallel import exchanges

WAIT = 20  # seconds until a missing message is an error


class Array(np.ndarray):
    """An array of the stand-in."""

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    @property
    def device(self) -> Any:
        return nullcontext()

    def get(self) -> np.ndarray:
        waited()
        return np.array(self)

    def __getitem__(self, key: Any) -> Any:
        asks_how_many(key)
        return np.asarray(super().__getitem__(key)).view(Array)  # a number too is on the GPU

    def __setitem__(self, key: Any, value: Any) -> None:
        asks_how_many(key)
        super().__setitem__(key, value)

    def __bool__(self) -> bool:
        waited()
        return super().__bool__()

    def __int__(self) -> int:
        waited()
        return super().__int__()

    def __float__(self) -> float:
        waited()
        return super().__float__()

    def __index__(self) -> int:
        waited()
        return super().__index__()

    def item(self, *key: Any) -> Any:
        waited()
        return super().item(*key)

    def tolist(self) -> Any:
        waited()
        return super().tolist()


class Capture(threading.local):
    """Whether a graph captures the work of this thread."""

    on = False


CAPTURE = Capture()


def waited() -> None:
    """Raise if the host reads a result while a graph captures, as CUDA does."""
    assert not CAPTURE.on, "the host waits for the GPU"


def asks_how_many(key: Any) -> None:
    """Raise for a mask as a key, as CuPy reads the number of selected elements from the GPU."""
    parts = key if isinstance(key, tuple) else (key,)
    if any(getattr(part, "dtype", None) in (bool,) for part in parts):
        waited()


Array.__module__ = "cupy"


class NcclError(RuntimeError):
    """NCCL's error."""


class Wires:
    """Pending messages, by communicator, source and target; and the calls of a thread's group."""

    def __init__(self) -> None:
        self.under_way: Any = defaultdict(queue.Queue)
        self.groups = threading.local()
        self.ids = iter(range(1, 256))

    def unique(self) -> bytes:
        return bytes([next(self.ids)]) * 128

    def start(self) -> None:
        assert not hasattr(self.groups, "calls"), "groups do not stand inside each other"
        self.groups.calls = []

    def end(self) -> None:
        calls = self.groups.calls
        del self.groups.calls
        for key, data in calls:
            if isinstance(data, bytes):
                self.under_way[key].put(data)
        for key, data in calls:
            if not isinstance(data, bytes):
                pointer, count = data
                came = self.under_way[key].get(timeout=WAIT)
                if len(came) != count:
                    raise NcclError(f"{len(came)} bytes for {count}")
                ctypes.memmove(pointer, came, count)


def communicators(wires: Wires) -> type:
    """Return the class of communicators; its methods have the parameters of CuPy's."""

    class NcclCommunicator:
        def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803
            assert type(commId) is bytes
            assert len(commId) == 128
            assert 0 <= rank < ndev
            self.id, self.rank, self.ended = commId, rank, False

        def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
            assert (datatype, stream) == (1, 7)
            assert count > 0
            assert peer != self.rank
            key, data = (self.id, self.rank, peer), ctypes.string_at(sendbuf, count)
            wires.groups.calls.append((key, data))

        def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
            assert (datatype, stream) == (1, 7)
            assert count > 0
            assert peer != self.rank
            wires.groups.calls.append(((self.id, peer, self.rank), (recvbuf, count)))

        def abort(self) -> None:
            self.ended = True

    return NcclCommunicator


class Event:
    """An event, which is complete or not."""

    done = True

    def __init__(self, *, disable_timing: bool) -> None: ...

    def record(self, stream: Any) -> None: ...


class Stream:
    """A stream other than the null stream; its work is done immediately."""

    ptr = 7

    def __init__(self, *, non_blocking: bool = False) -> None: ...

    def record(self) -> Event:
        return Event(disable_timing=True)

    def wait_event(self, event: Event) -> None:
        assert type(event) is Event

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def array(values: Any) -> Array:
    return np.array(values).view(Array)


@contextmanager
def stand_in() -> Iterator[types.ModuleType]:
    """Replace CuPy by the stand-in inside a ``with`` block."""
    wires = Wires()
    nccl = types.ModuleType("cupy.cuda.nccl")
    vars(nccl).update(
        available=True,
        NCCL_UINT8=1,
        NcclError=NcclError,
        NcclCommunicator=communicators(wires),
        get_unique_id=wires.unique,
        groupStart=wires.start,
        groupEnd=wires.end,
    )
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 1, getDevice=lambda: 0, streamIsCapturing=lambda stream: CAPTURE.on
    )
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        nccl=nccl,
        runtime=runtime,
        Event=Event,
        Device=lambda number: nullcontext(),
        Stream=Stream,
        get_current_stream=Stream,
    )
    cupy = types.ModuleType("cupy")
    vars(cupy).update(
        cuda=cuda,
        asarray=array,
        ndarray=Array,
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
    )
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = cupy
    owner, exchanges.target_of = exchanges.target_of, lambda array: None  # it runs no kernels
    try:
        yield cupy
    finally:
        exchanges.target_of = owner
        del sys.modules["cupy"]
        if before is not None:
            sys.modules["cupy"] = before


def in_threads(size: int, work: Callable[[int], None]) -> None:
    """Call ``work(rank)`` in a thread for each rank, and raise the first error."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
