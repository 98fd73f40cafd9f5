"""Many threads call the library at once, each with its own arrays."""

import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AdamW, LossScaler, clip_gradients, measure_gradients
from unsloth_cupy.bench.cases import Scale, draw
from unsloth_cupy.core import op, replay
from unsloth_cupy.core.gpu import CupyTarget
from unsloth_cupy.core.op import OPS
from unsloth_cupy.ops.optimizers import gradients, launch

from ..harness.parity import emulator
from ..machines.stand_in import Function, gpu

CALLERS = 8
NAMES = ("add", "softmax", "swiglu", "rms_norm_forward", "rope_qk", "cross_entropy_forward")


@pytest.fixture(autouse=True)
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make threads switch between any two lines, and caches evict entries all the time."""
    for module, name in (
        (op, "KEPT_ROUTES"),
        (replay, "KEPT"),
        (gradients, "KEPT_TABLES"),
        (launch, "KEPT_TABLES"),
    ):
        monkeypatch.setattr(module, name, 2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """Return the results of concurrent calls of work, one in each thread."""
    with ThreadPoolExecutor(CALLERS) as threads:
        return [*threads.map(work, range(CALLERS))]


def bits(results: Any) -> list[bytes]:
    """Return the bytes of results."""
    return [np.asarray(array).tobytes() for array in results]


@pytest.mark.slow
@pytest.mark.parametrize("emulated", [False, True], ids=["definitions", "kernels"])
def test_ops_of_any_shapes(emulated: bool) -> None:
    """Each result is bitwise equal to that of a single thread, whichever thread plans a call."""
    rng = random.Random(0)
    scales = [
        Scale(tokens=rng.choice((1, 3, 5)), hidden=rng.choice((8, 24)), heads=2, kv_heads=1, dim=8)
        for _ in range(3)
    ]
    drawn = [draw(OPS[name], scale).cast(np.float32) for name in NAMES for scale in scales]
    with emulator(check=False) if emulated else nullcontext():
        expected = [bits(call.run().values()) for call in drawn]
        for name in NAMES:
            OPS[name].routes.clear()

        def calls(number: int) -> bool:
            mine = random.Random(number)
            chosen = [mine.randrange(len(drawn)) for _ in range(40)]
            return all(bits(drawn[i].run().values()) == expected[i] for i in chosen)

        assert all(at_once(calls))


class Slow(dict[Any, Any]):
    """A dict that lets other threads use it before its caller continues."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        time.sleep(1e-4)


@pytest.mark.slow
def test_optimizers_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of addresses are shared, and any thread may evict one to make room for another."""
    monkeypatch.setattr(gradients, "tables", Slow())

    def trains(number: int) -> list[bytes]:
        values = np.random.default_rng(number).standard_normal((4, 300)).astype(np.float32)
        parameters = {"a": values.copy(), "b": values[0].copy()}
        optimizer, scaler = AdamW(parameters), LossScaler(2.0)
        for step in range(6):
            ours = {n: np.full_like(p, step - 2.5) * p for n, p in parameters.items()}
            measured = measure_gradients(ours, 1.0, scaler=scaler)
            clip_gradients(ours, 0.5)
            optimizer.step(ours, finite=measured.finite, factor=measured.factor)
            scaler.update(measured.finite)
        return bits((*parameters.values(), measured.norm))

    with emulator(check=False):
        expected = [trains(number) for number in range(CALLERS)]
        assert at_once(trains) == expected


def test_leave_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that needs less shared memory does not lower the limit that another one set."""
    leave: Any = Function.max_dynamic_shared_size_bytes

    def slowly(function: Any, size: int) -> None:
        leave.fset(function, size)
        time.sleep(1e-4)  # other threads run before its caller continues

    monkeypatch.setattr(Function, "max_dynamic_shared_size_bytes", property(leave.fget, slowly))
    with gpu("90"):
        for _ in range(5):
            launch = CupyTarget().compile("softmax", "")

            def starts(number: int, launch: Any = launch) -> None:
                for shared in random.Random(number).sample(range(40 << 10, 200 << 10), 20):
                    launch((1,), (32,), (), shared)

            at_once(starts)
