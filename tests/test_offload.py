"""Arrays that wait in pinned memory: on streams that are played, whose copies come late."""

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Tape, _cupy, checkpoint, rms_norm


class Stream:
    """Work in order; a stream does what waits for it only when it is asked to."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.work: list[Callable[[], Any]] = []
        self.ptr = id(self)
        streams[self.ptr] = self

    def record(self) -> "Event":
        return Event(self, len(self.work))

    def wait_event(self, event: "Event") -> None:
        self.work.append(event.synchronize)

    def run(self, until: int | None = None) -> None:
        while self.ended < (len(self.work) if until is None else until):
            self.ended += 1
            self.work[self.ended - 1]()

    ended = 0


class Event:
    """A place in the work of a stream."""

    def __init__(self, stream: Stream, place: int) -> None:
        self.stream, self.place = stream, place

    def synchronize(self) -> None:
        self.stream.run(self.place)

    @property
    def done(self) -> bool:
        return self.stream.ended >= self.place


class Pinned:
    """Memory of a pool that gives it to the next who asks once it is let go."""

    free: dict[int, list[np.ndarray]] = {}  # noqa: RUF012

    def __init__(self, size: int) -> None:
        self.pool = self.free.setdefault(size, [])
        self.bytes = self.pool.pop() if self.pool else np.zeros(size, np.uint8)
        self.ptr = self.bytes.ctypes.data

    def __del__(self) -> None:
        self.pool.append(self.bytes)


class Array(np.ndarray[Any, Any]):
    """What stands for an array of CuPy."""

    data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data))  # type: ignore[assignment]
    device = property(lambda self: types.SimpleNamespace(id=7))


Array.__module__ = "cupy"
streams: dict[int, Stream] = {}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """Return the stream that is current; the copies of another come when it waits for them."""
    current = Stream()

    def copy(target: int, source: int, size: int, kind: int, stream: int) -> None:
        streams[stream].work.append(lambda: ctypes.memmove(target, source, size))

    cuda = types.SimpleNamespace(
        Stream=Stream,
        alloc_pinned_memory=Pinned,
        get_current_stream=lambda: current,
        runtime=types.SimpleNamespace(memcpyAsync=copy),
    )
    empty = lambda shape, dtype: np.zeros(shape, dtype).view(Array)  # noqa: E731
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, empty=empty))
    monkeypatch.setattr(_cupy.OnHost, "last", None)
    monkeypatch.setattr(Pinned, "free", {})
    _cupy._copying.clear()
    _cupy._side.cache_clear()
    yield current
    _cupy._copying.clear()
    _cupy._side.cache_clear()


def test_what_comes_back_is_what_went(here: Stream) -> None:
    arrays = [np.full((5, 3), number, np.float16).view(Array) for number in range(4)]
    waiting = [_cupy.on_host(array) for array in arrays]
    assert [each.array is None for each in waiting] == [True, True, True, False]
    back = [each.back() for each in waiting[::-1]]
    here.run()
    for array, expected in zip(back, arrays[::-1], strict=True):
        np.testing.assert_array_equal(array, expected)


def test_pinned_memory_waits_for_its_copy(here: Stream) -> None:
    """The pool would give it to the next who asks, while it is still read."""
    first, second = (np.full(8, number, np.float32).view(Array) for number in (1, 2))
    waiting = _cupy.on_host(first)
    _cupy.on_host(second)  # so that the first is on the host alone
    here.run()
    back = waiting.back()
    del waiting
    Pinned(first.nbytes).bytes[...] = 255
    here.run()
    np.testing.assert_array_equal(back, first)


def test_pinned_memory_is_let_go_after_its_copy(here: Stream) -> None:
    for number in range(6):
        _cupy.on_host(np.full(8, number, np.float32).view(Array))
        _cupy._side(7).run()
    assert len(_cupy._copying) <= 1
    assert len(Pinned.free[32]) <= 3


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Gradients through parts whose arguments waited on the host are the same bits."""
    import cupy

    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((256, 1024), np.float32), rng.random(1024, np.float32)

    def gradients(through: Callable[..., Any]) -> list[Any]:
        tape = Tape()
        first, scale = tape.watch(cupy.asarray(x)), tape.watch(cupy.asarray(weight))
        y = first
        for _ in range(6):
            y = through(rms_norm, y, scale)
        found = tape.gradients(y, [first, scale], cupy.asarray(x))
        return [array.get() for array in found]

    plain = gradients(lambda function, *args: function(*args))
    offloaded = gradients(lambda *call: checkpoint(*call, offload=True))
    for one, other in zip(plain, offloaded, strict=True):
        np.testing.assert_array_equal(one, other)
