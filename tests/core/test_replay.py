"""A call of the same form as an earlier one replays its launch without planning it again."""

import contextlib
import gc
import operator
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import experts_mlp_backward, experts_mlp_forward, route
from unsloth_cupy.core import kernel as core_kernel
from unsloth_cupy.core import replay
from unsloth_cupy.core import target as core_target
from unsloth_cupy.core.arrays import contiguous, empty
from unsloth_cupy.core.gpu import CupyTarget
from unsloth_cupy.core.op import OPS, Op, op
from unsloth_cupy.core.stand_in import representative_steps
from unsloth_cupy.ops.common import counters
from unsloth_cupy.ops.common.strides import spanned
from unsloth_cupy.ops.losses.cross_entropy import cross_entropy_forward

from ..harness.parity import emulator
from ..machines.stand_in import gpu
from .test_launches import LAUNCHED, call_of

# Launches that do more than allocate and start kernels.
WORKED_OUT = {
    "bit_linear_backward": "multiplies matrices",
    "embedding_backward": "sorts tokens",
    "linear_cross_entropy_forward": "multiplies matrices",
    "linear_cross_entropy_backward": "multiplies matrices",
    "linear_divergence_backward": "multiplies matrices",
    "linear_divergence_forward": "multiplies matrices",
    "linear_log_probs_backward": "multiplies matrices",
    "linear_log_probs_forward": "multiplies matrices",
    "linear_cross_entropy_gradients": "multiplies matrices",
    "linear_top_k_divergence_backward": "multiplies matrices",
    "linear_top_k_divergence_forward": "multiplies matrices",
    "swiglu_mlp": "multiplies matrices",
    "swiglu_mlp_backward": "multiplies matrices",
}


class Halves:
    """A target with one kernel: y = x / parts + shift; it counts its launches."""

    launched = 0

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def compile(self, name: str, source: str) -> core_target.Launch:
        def launch(grid: Any, block: Any, arguments: tuple[Any, ...], shared: int) -> None:
            x, y, parts, shift = arguments
            y[...] = x.reshape(y.shape) / parts + shift
            self.launched += 1

        return launch


class Kernel(core_kernel.Kernel):
    """It has no source."""

    def __init__(self, target: Any) -> None:
        self.checked, self.casts, self.launch = True, [(2, np.int32)], target.compile("", "")
        self.arrays = operator.itemgetter(1, 1)  # y alone: it takes any x
        self.ready = lambda scalar: scalar


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an op, its target, and a list of the calls of its launch."""
    monkeypatch.setattr("unsloth_cupy.core.op.OPS", {})
    target, calls = Halves(), []

    @op("x(*axes) -> y(*axes)")
    def halved(x: Any, *, parts: int = 2, shift: Any = 0.0) -> Any:
        return x / parts + shift

    @halved.kernel(strided=("x",))
    def launch(x: Any, *, parts: int = 2, shift: Any = 0.0) -> Any:
        calls.append(parts)
        if parts == 3:
            return NotImplemented
        if parts == 5:
            x = x * 1
        if parts == 8:
            shift = float(len(x))
        if parts == 6:
            shift = np.full((), len(calls))
        y = empty(x.shape, x.dtype, like=x)
        Kernel(target)[1, 1](x if parts != 7 else spanned(x), y, parts, shift)
        return y

    with core_target.using(target):
        yield halved, target, calls


def test_the_third_call_works_nothing_out(made: Any) -> None:
    halved, target, calls = made
    for number in range(4):
        x = np.full(3, number, np.float32)
        assert halved(x, shift=1.0).tolist() == [number / 2 + 1] * 3
    assert calls == [2, 2], "once to run, once to be recorded"
    assert target.launched == 4
    first, second = halved(x), halved(x)
    assert first is not second, "each call has arrays of its own"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[::-1],
        lambda x: x.astype(np.float64).astype(np.float32)[1:],
        lambda x: np.concatenate([x, x])[::2],
    ],
    ids=["backwards", "off alignment", "apart"],
)
def test_a_call_that_lies_otherwise_is_worked_out(made: Any, change: Callable[..., Any]) -> None:
    halved, _, calls = made
    x = np.arange(4, dtype=np.float32)
    for _ in range(3):
        halved(x[: len(change(x))])
    calls.clear()
    assert halved(change(x)).tolist() == (change(x) / 2).tolist()
    assert calls == [2]


def test_other_options_are_worked_out(made: Any) -> None:
    halved, _, calls = made
    x = np.ones(2, np.float32)
    assert [halved(x, parts=parts)[0] for parts in (2, 4, 2, 4, 2, 4)] == [0.5, 0.25] * 3
    assert calls == [2, 4, 2, 4]
    for shift in range(2 * replay.KEPT):
        assert halved(x, shift=float(shift))[0] == shift + 0.5
    assert halved(x, shift=[1, 2]).tolist() == [1.5, 2.5], "what cannot be looked up"


def test_what_launches_choose_by_is_in_the_key(made: Any) -> None:
    halved, _, calls = made
    x = np.ones(2, np.float32)
    for _ in range(3):
        halved(x)
    calls.clear()
    with replay.fixed_order():
        halved(x)
    assert calls == [2]


def test_a_loss_in_a_fixed_order_after_one_in_another() -> None:
    """Rows of 50,257 begin between accesses of 16 bytes, which only a free order may make."""
    with gpu("90", devices=1) as machine:
        arrays = machine.array((4, 50257), "bfloat16"), machine.array((4,), "int64")
        for fixed, lanes in ((False, 8), (True, 1), (False, 8)):
            for _ in range(3):
                with replay.fixed_order(fixed):
                    cross_entropy_forward(*arrays)
                assert f"LANES = {lanes};" in machine.launches[-1].source


def test_that_there_is_no_kernel_is_remembered(made: Any) -> None:
    halved, target, calls = made
    x = np.full(2, 3, np.float32)
    for _ in range(4):
        assert halved(x, parts=3).tolist() == [1, 1]
    assert calls == [3]
    assert target.launched == 0
    for _ in range(2):
        assert halved(x, parts=3, shift=[1, 2]).tolist() == [2, 3], "what cannot be looked up"


def test_a_launch_that_computes_is_not_recorded(made: Any) -> None:
    halved, _, calls = made
    for number in range(4):
        assert halved(np.full(2, number, np.float32), parts=5)[0] == np.float32(number / 5)
    assert len(calls) == 5, "the second call tries"


def test_a_launch_that_makes_an_array_is_not_recorded(made: Any) -> None:
    """Not even if it has one value, and looks like a number."""
    halved, _, calls = made
    for _ in range(4):
        assert halved(np.zeros(2, np.float32), parts=6).tolist() == [len(calls)] * 2
    assert len(calls) == 5, "the second call tries"


def test_a_kernel_that_walks_gaps_is_recorded(made: Any) -> None:
    halved, _, calls = made
    x = np.ones((2, 1), np.float32)[:, :1]
    for _ in range(3):
        halved(x, parts=7)
    assert calls == [7, 7]


def test_a_launch_may_ask_for_a_length(made: Any) -> None:
    halved, _, calls = made
    for length in (2, 3, 2, 3, 2, 3, 2):
        assert halved(np.zeros(length, np.float32), parts=8).tolist() == [length] * length
    assert calls == [8] * 4, "once to run, once to be recorded, for each length"


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.sum(),
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: np.add(x, x),
        np.asarray,
        np.sort,
        lambda x: x[0],
        lambda x: x.__setitem__(0, 1),
        lambda x: [*x],
        bool,
        lambda x: x == x,  # noqa: PLR0124
        float,
        lambda x: getattr(x, "get", None),
        lambda x: contiguous(x[::2]),
        lambda x: representative_steps(x, range(4)),
    ],
)
def test_a_recorded_array_says_how_it_lies_and_no_more(asks: Callable[[Any], Any]) -> None:
    x = np.zeros(4, np.float32)
    recorded = replay.Recording().enter(x)
    assert isinstance(recorded, np.ndarray)
    assert (recorded.shape, recorded.strides, recorded.dtype) == (x.shape, x.strides, x.dtype)
    with pytest.raises((replay.UnknownError, TypeError, AttributeError)):
        asks(recorded)


def recorded(name: str) -> bool:
    """Return whether every recorded plan of an op can be replayed."""
    cells = [
        dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
        for run in OPS[name].routes.values()
    ]
    known = [value for cell in cells for value in cell["known"].cell_contents.values()]
    return all(value.__name__ == "replay" for value in known)


def of_many_keys(rng: np.random.Generator, keys: int = 1100, batch: int = 2) -> list[Any]:
    """Return arrays of a decode whose keys are several chunks, merged by the last block."""
    shapes = ((batch, 1, 2, 8), (batch, keys, 1, 8), (batch, keys, 1, 8))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def test_a_decode_of_several_chunks_is_recorded() -> None:
    with gpu() as machine:
        arrays = [machine.place(array) for array in of_many_keys(np.random.default_rng(0))]
        for _ in range(3):
            machine.launches.clear()
            OPS["attention_forward"](*arrays)
            assert [launch.kernel for launch in machine.launches] == ["attention_decode"]
            assert not machine.functions
        assert recorded("attention_forward")


def test_counters_are_those_of_the_stream_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two concurrent streams or devices has its own, whichever one was recorded."""
    counted, of_stream = list[Any](), counters._of_stream
    monkeypatch.setattr(
        counters, "_of_stream", lambda *form: counted.append(of_stream(*form)) or counted[-1]
    )
    with gpu(devices=2) as machine:
        cuda, arrays = sys.modules["cupy"].cuda, of_many_keys(np.random.default_rng(0))
        more = [machine.place(array) for array in of_many_keys(np.random.default_rng(0), batch=3)]
        there = [machine.array(array.shape, array.dtype, device=1) for array in arrays]
        arrays = [machine.place(array) for array in arrays]

        def called(stream: Any = None, given: Any = arrays) -> Any:
            machine.functions.clear()
            with stream or contextlib.nullcontext():
                OPS["attention_forward"](*given)
            assert not machine.functions
            return counted[-1]

        first = [called() for _ in range(4)]
        assert all(each is first[0] for each in first)
        side, graph = cuda.Stream(), cuda.Stream()
        second = [called(side), called(side)]
        assert second[0] is second[1], "replayed, it takes those of the stream that it is called on"
        assert second[0] is not first[0], "two streams run at once"
        assert called() is first[0]
        graph.begin_capture()
        assert called(graph) is not called(graph), "it may run anywhere"
        graph.end_capture()
        assert called(given=there) is not first[0], "another GPU"
        assert called(given=there) is called(given=there)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(called).result() is first[0], "the same stream"
            side.ptr = counters.PER_THREAD
            machine.gpus.by_address[side.ptr] = side
            assert thread.submit(called, side).result() is not called(side)
        grown = called(given=more)
        assert grown.size > first[0].size
        assert called() is grown
        for _ in range(2 * counters.KEPT):
            called(cuda.Stream())
        assert len(counters._kept) == counters.KEPT


def test_counters_come_from_the_pool_where_it_holds_all_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA has no free memory then, but the pool may have some, or reports how much it frees."""
    with gpu():
        cupy, allocator = sys.modules["cupy"], ["pool"]

        @contextlib.contextmanager
        def using_allocator(other: Any) -> Iterator[None]:
            allocator.append(other)
            try:
                yield
            finally:
                allocator.pop()

        zeros = cupy.zeros

        def from_pool(*form: Any) -> Any:
            if allocator[-1] is None:
                raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
            return zeros(*form)

        monkeypatch.setattr(cupy.cuda, "using_allocator", using_allocator)
        monkeypatch.setattr(cupy, "zeros", from_pool)
        assert counters._of_stream((4,), counters.UINT32).size == 4


@pytest.mark.slow
@pytest.mark.parametrize("keys", [600, 9000])  # 3 chunks, and 36
def test_counters_wrap(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch starts with the counters as the last one left them, also for other lengths."""
    rng = np.random.default_rng(keys)
    calls = [(of_many_keys(rng, n), np.array([n, n // 3], np.int32)) for n in (keys, keys, 1100)]
    kept, used = np.zeros(256, np.uint32), list[Any]()

    def outcome() -> list[Any]:
        OPS["attention_forward"].routes.clear()
        results = []
        for arrays, lengths in calls:
            results.append(OPS["attention_forward"](*arrays, key_lengths=lengths)[0].tobytes())
            assert not kept.any()
        return results

    with emulator(check=False, processors=132):
        fresh = outcome()
        monkeypatch.setattr(counters, "_on_host", lambda *form: used.append(form) or kept)
        assert outcome() == fresh
    assert len(used) >= len(calls)


@pytest.mark.parametrize("freed", [replay.FREED, 0])
@pytest.mark.parametrize("name", LAUNCHED)
def test_every_launch_is_recorded_and_starts_the_same(
    name: str, freed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the replay frees each array after its last start."""
    monkeypatch.setattr(replay, "FREED", freed)
    with gpu() as machine:
        for dtype in (np.dtype("float16"), np.dtype("float32")):
            call = call_of(name, machine.place, dtype)
            notes = []
            for _ in range(3):
                machine.launches.clear()
                call()
                notes.append([*machine.launches])
            assert notes[0] == notes[1] == notes[2]
        assert recorded(name) == (name not in WORKED_OUT)


def test_scalars_are_handed_over_as_cupy_does() -> None:
    cupy = pytest.importorskip("cupy", reason="it is what takes them")
    for scalar in (np.float32(0.1), np.int64(-(2**40)), np.float64(0.1), np.uintp(0)):
        ready = CupyTarget().ready(scalar)
        assert isinstance(ready, cupy.cuda.function.CPointer)
        assert ready.value == scalar
        assert ready.descr == scalar.dtype


@pytest.mark.parametrize("name", LAUNCHED)
def test_no_call_keeps_memory(name: str) -> None:
    """Memory must be freed without the cyclic garbage collector, too."""
    gc.disable()
    try:
        with gpu() as machine:
            call = call_of(name, machine.place, np.dtype("float16"))
            call()  # what is allocated once for a device
            held, calls = machine.held, []
            for _ in range(3):
                machine.peak = machine.held
                call()
                calls.append(machine.peak - held)
                assert machine.held == held
            assert calls[0] == calls[1] == calls[2]
    finally:
        gc.enable()


def test_a_replay_holds_no_more_than_the_launch() -> None:
    """The launches of experts free their inner arrays between products."""
    draw = np.random.default_rng(0).standard_normal
    with gpu("90", devices=1) as machine:
        shapes = (4096, 128), (4, 1024, 128), (4, 128, 512), (4096, 4)
        x, gate_up, down, logits = (machine.place(draw(each).astype("float16")) for each in shapes)
        routes, peaks = route(logits, k=2), list[tuple[int, int]]()
        for _ in range(4):
            before = machine.peak = machine.held
            y, *stored = experts_mlp_forward(x, gate_up, down, *routes)
            forward = machine.peak - before
            before = machine.peak = machine.held
            experts_mlp_backward(y, x, gate_up, down, *routes, None, None, *stored)
            peaks.append((forward, machine.peak - before))
            del y, stored
    assert peaks[2] == peaks[3]
    for replayed, launched in zip(peaks[2], peaks[0], strict=True):
        assert replayed <= launched


@pytest.mark.slow
def test_threads_call_an_op_at_once() -> None:
    """Each thread gets its own results, whichever records the call; the emulator takes turns."""
    softmax = OPS["softmax"]

    def is_right(number: int) -> bool:
        x = np.full((3, 8), number, np.float32)
        x[number % 3] = -np.inf
        alike = [softmax(x, scale=1.0 + turn % 2) for turn in range(30)]
        return all((y.sum(axis=1) == (np.arange(3) != number % 3)).all() for y in alike)

    with emulator(check=False), ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(8)))


def test_a_plan_keeps_no_array(made: Any) -> None:
    halved: Op[..., Any] = made[0]
    x = np.ones(1000, np.float32)
    for _ in range(3):
        halved(x)
    reached, seen = [*halved.routes.values()], set()
    while reached:
        value = reached.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        assert not isinstance(value, np.ndarray)
        if isinstance(value, dict | list | tuple):
            reached += [*value.values()] if isinstance(value, dict) else [*value]
        reached += [
            cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell != 0
        ]
