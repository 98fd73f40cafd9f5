"""Offloading arrays to pinned memory, on stand-ins for streams whose copies run late."""

import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Tape, checkpoint, rms_norm
from unsloth_cupy.training import checkpoint as checkpoints
from unsloth_cupy.training import offload as training_offload

turn = threading.RLock()  # streams do their work one after another


class Stream:
    """A stream with its work in order, which runs only when something waits for it."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.work: list[Callable[[], Any]] = []
        self.ptr, self.device, self.ended = id(self), now.device, 0
        streams[self.ptr] = self

    def record(self) -> "Event":
        return Event(self, len(self.work))

    def wait_event(self, event: "Event") -> None:
        self.work.append(event.synchronize)

    def run(self, until: int | None = None) -> None:
        with turn:
            while self.ended < (len(self.work) if until is None else until):
                self.ended += 1
                self.work[self.ended - 1]()

    def __enter__(self) -> None:
        self.before = now.streams[self.device]
        now.streams[self.device] = self

    def __exit__(self, *_: object) -> None:
        now.streams[self.device] = self.before


class Event:
    """A point in the work of a stream."""

    def __init__(self, stream: Stream, place: int) -> None:
        self.stream, self.place = stream, place

    def synchronize(self) -> None:
        self.stream.run(self.place)

    @property
    def done(self) -> bool:
        return self.stream.ended >= self.place


class Now(threading.local):
    """The current GPU of a thread, and its current stream on each GPU."""

    device = 0

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}


class Device:
    """A GPU, which is current inside a ``with`` block."""

    def __init__(self, number: int | None = None) -> None:
        self.id = now.device if number is None else number

    def __enter__(self) -> None:
        self.before, now.device = now.device, self.id

    def __exit__(self, *_: object) -> None:
        now.device = self.before


class Pinned:
    """Memory of a pool that reuses it for the next allocation once it is freed."""

    free: dict[int, list[np.ndarray]] = {}  # noqa: RUF012

    def __init__(self, size: int) -> None:
        self.pool = self.free.setdefault(size, [])
        try:
            self.bytes = self.pool.pop()
        except IndexError:
            self.bytes = np.zeros(size, np.uint8)
        self.ptr = self.bytes.ctypes.data

    def __del__(self) -> None:
        self.pool.append(self.bytes)


class Room:
    """Memory of an array; when it is freed, later work of its stream overwrites it."""

    def __init__(self, array: Any) -> None:
        self.array, self.stream, self.device = array, now.streams[now.device], now.device

    def __del__(self) -> None:
        array = self.array
        self.stream.work.append(lambda: array.fill(99))


class Array(np.ndarray[Any, Any]):
    """A stand-in for an array of CuPy."""

    room: Room
    data = property(  # type: ignore[assignment]
        lambda self: types.SimpleNamespace(ptr=self.ctypes.data, device_id=self.room.device)
    )
    device = property(lambda self: Device(self.room.device))


Array.__module__ = "cupy"
streams: dict[int, Stream] = {}
now = Now()


def filled(value: Any, shape: Any = (8,), dtype: Any = np.float32) -> Any:
    """Return an array of the current GPU, created on its current stream."""
    memory = np.full(shape, value, dtype)
    made = memory.view(Array)
    made.room = Room(memory)
    return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """Return the current stream; copies of another stream run when this one waits for them."""
    for number in range(2):
        with Device(number):
            now.streams[number] = Stream()

    def copy(target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert streams[stream].device == now.device
        streams[stream].work.append(lambda: ctypes.memmove(target, source, size))

    cuda = types.SimpleNamespace(
        Stream=Stream,
        Device=Device,
        alloc_pinned_memory=Pinned,
        get_current_stream=lambda: now.streams[now.device],
        is_available=lambda: True,
        runtime=types.SimpleNamespace(memcpyAsync=copy, getDeviceCount=lambda: 2),
    )
    empty = lambda shape, dtype: filled(0, shape, dtype)  # noqa: E731
    cupy = types.SimpleNamespace(cuda=cuda, empty=empty, ndarray=Array)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(Pinned, "free", {})
    training_offload._side.cache_clear()
    training_offload._refusals.cache_clear()
    yield now.streams[0]
    training_offload._side.cache_clear()
    training_offload._refusals.cache_clear()


def test_what_comes_back_is_what_went(here: Stream) -> None:
    arrays = [filled(number, (5, 3), np.float16) for number in range(4)]
    expected = [np.array(array) for array in arrays]
    waiting = [training_offload.to_host(array) for array in arrays]
    del arrays
    assert [each.array is None for each in waiting] == [True, True, True, False]
    back = [each.back() for each in waiting[::-1]]
    here.run()
    for array, wanted in zip(back, expected[::-1], strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_pinned_memory_waits_for_its_copy(here: Stream) -> None:
    """Otherwise the pool would reuse the memory while it is still read."""
    first, second = filled(1), filled(2)
    expected, size = np.array(first), first.nbytes
    waiting = training_offload.to_host(first)
    kept = training_offload.to_host(second)  # so that the first is on the host alone
    del first
    here.run()
    back = waiting.back()
    del waiting
    Pinned(size).bytes[...] = 255
    here.run()
    np.testing.assert_array_equal(back, expected)
    assert kept.array is second


def test_pinned_memory_is_let_go_after_its_copy(here: Stream) -> None:
    for number in range(6):
        training_offload.to_host(filled(number))
        training_offload._side(0).stream.run()
    assert len(training_offload._side(0).copying) <= 1
    assert len(Pinned.free[32]) <= 3


def test_nothing_is_kept_of_what_nobody_needs(here: Stream) -> None:
    waiting = training_offload.to_host(filled(1))
    waiting = training_offload.to_host(filled(2))
    del waiting
    training_offload._side(0).stream.run()
    training_offload._side(0).copying.clear()
    assert len(Pinned.free[32]) == 2


def test_streams_take_turns(here: Stream) -> None:
    """The stream of a freed array must not overwrite its memory before it is copied."""
    other, waiting = Stream(), []
    for number in range(8):
        with other if number % 2 else contextlib.nullcontext():
            waiting.append(training_offload.to_host(filled(number)))
    here.run()
    other.run()
    for number, each in reversed([*enumerate(waiting)]):
        back = each.back()
        here.run()
        np.testing.assert_array_equal(back, np.full(8, number))


def test_gpus_take_turns(here: Stream) -> None:
    """Whichever GPU is current, an array waits for its own GPU and returns to it."""
    waiting = []
    for number in range(8):
        with Device(number % 2):
            array = filled(number)
        waiting.append(training_offload.to_host(array))
        del array
    for stream in now.streams.values():
        stream.run()
    for number, each in reversed([*enumerate(waiting)]):
        back = each.back()
        assert back.device.id == number % 2
        now.streams[number % 2].run()
        np.testing.assert_array_equal(back, np.full(8, number))


def test_an_array_is_fetched_while_others_are_computed(here: Stream) -> None:
    """The copy back runs before ``back``, and its memory is not reused until it has ended."""
    waiting = [training_offload.to_host(filled(number)) for number in range(3)]
    waiting[1].fetch()
    moved = dict(training_offload.moved)
    training_offload._side(0).stream.run()
    array = waiting[1].back()
    assert training_offload.moved == moved, "it was copied before"
    here.run()
    np.testing.assert_array_equal(array, np.full(8, 1))
    assert waiting[1].array is None
    again = waiting[1].back()
    here.run()
    np.testing.assert_array_equal(again, np.full(8, 1))
    waiting[0].fetch()
    dropped = training_offload._side(0).copying[-1]
    del waiting[0]  # nobody needs it: its memory is written until the copy ends
    assert dropped[2] is not None
    here.run()
    training_offload._side(0).stream.run()


def test_backward_fetches_the_inputs_of_the_checkpoint_before(here: Stream) -> None:
    """Its copy starts before the part after it is computed again."""
    order: list[str] = []
    tape = Tape()
    x = tape.watch(filled(1.0, (2, 8)))

    def part(x: Any) -> Any:
        order.append("part")
        return x

    for _ in range(3):
        x = checkpoint(part, x, offload=True)
    entries = [each for each in tape.entries if hasattr(each, "ahead")]
    assert [len(each.ahead) for each in entries] == [0, 1, 1]
    (before,) = entries[2].ahead
    assert before is next(iter(entries[1].values.values()))
    assert before.fetched is None
    order.clear()
    entries[2]._recorded(checkpoints.SecondCall(entries[2].first))
    assert before.fetched is not None


@pytest.mark.parametrize("error", [RuntimeError("out of memory\nstack"), MemoryError("no room")])
def test_refused_pinned_memory_is_pageable_and_said_once(here: Stream, error: Exception) -> None:
    """A container may limit pinned memory; graphs, which need it, say so."""
    refusals = list[int]()

    def refuse(size: int) -> Any:
        refusals.append(size)
        raise error

    sys.modules["cupy"].cuda.alloc_pinned_memory = refuse  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="32 bytes of pinned memory are refused") as heard:
        waiting = [training_offload.to_host(filled(number)) for number in range(3)]
    (line,) = (str(each.message) for each in heard)
    assert "\n" not in line
    assert "pageable memory is used, and copies do not overlap with computation; raise" in line
    assert refusals == [32]
    for number, each in reversed([*enumerate(waiting)]):
        array = each.back()
        here.run()
        np.testing.assert_array_equal(array, np.full(8, number))
    with pytest.raises(RuntimeError, match="graphs cannot copy to other memory"):
        training_offload.GraphSide().memory(8)


@pytest.mark.parametrize("call", ["wait_event", "record"])
def test_ctrl_c_during_a_copy_keeps_the_memory_until_it_has_ended(
    call: str, here: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may run although nobody got its event; a later copy ends after it."""
    side, array = training_offload._side(0), filled(1)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(side.stream, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            training_offload.to_host(array)
    assert not Pinned.free[32]
    assert not side.lock.locked()
    back = training_offload.to_host(filled(2)).back()
    here.run()
    np.testing.assert_array_equal(back, np.full(8, 2))
    side.stream.run()
    training_offload.to_host(filled(3))
    assert all(entry[0] is not None for entry in side.copying)


@pytest.mark.slow
def test_threads_offload_at_once(here: Stream) -> None:
    """Each thread has its own stream; all share the copy stream and the pinned memory."""
    before = dict(training_offload.moved)

    def train(number: int) -> bool:
        now.streams[0] = Stream()
        rng, right = np.random.default_rng(number), True
        for turn_ in range(20):
            values = rng.integers(0, 90, int(rng.integers(2, 9))).tolist()
            waiting = [training_offload.to_host(filled(value)) for value in values]
            if turn_ % 3 == 0:
                now.streams[0].run()
            back = [each.back() for each in waiting[::-1]]
            now.streams[0].run()
            right &= all((b == v).all() for b, v in zip(back, values[::-1], strict=True))
            counts.append(len(values))
        return right

    counts: list[int] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(train, range(16)))
    finally:
        sys.setswitchinterval(interval)
    assert training_offload.moved["to_host"] - before["to_host"] == 32 * sum(counts)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Gradients are bitwise equal if the arguments of checkpointed parts waited on the host."""
    import cupy

    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((256, 1024), np.float32), rng.random(1024, np.float32)

    def gradients(through: Callable[..., Any]) -> list[Any]:
        tape = Tape()
        first, scale = tape.watch(cupy.asarray(x)), tape.watch(cupy.asarray(weight))
        y = first
        for _ in range(6):
            y = through(rms_norm, y, scale)
        actual = tape.gradients(y, [first, scale], cupy.asarray(x))
        return [array.get() for array in actual]

    plain = gradients(lambda function, *args: function(*args))
    offloaded = gradients(lambda *call: checkpoint(*call, offload=True))
    for one, other in zip(plain, offloaded, strict=True):
        np.testing.assert_array_equal(one, other)
