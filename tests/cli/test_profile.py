"""What profile sees of calls, and that nothing of it stays."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    AdamW,
    attention,
    explain,
    linear,
    measure_gradients,
    models,
    nf4_quantize,
    profile,
    rms_norm,
    shape,
    softmax,
)
from unsloth_cupy.core import target
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, ShapeError
from unsloth_cupy.ops.attention import _hopper
from unsloth_cupy.profiling.profile import until_exit

from ..harness.parity import emulator
from ..machines.stand_in import Machine, gpu
from .test_explain import CONFIG

ROOT = Path(__file__).parents[2]
X = np.ones((4, 64), np.float32)


def stepped(**options: Any) -> Any:
    """Return the profile of a step of training of two layers."""
    model = models.create(CONFIG, seed=0)
    tokens = np.zeros((2, 16), np.int64)
    steps = AdamW(model.parameters)
    with profile(parameters=model.parameters, **options) as seen:
        _, gradients = model.loss_and_gradients(tokens, tokens)
        measure_gradients(gradients)
        steps.step(gradients, lr=1e-3)
    return seen


def test_every_call_is_counted_with_its_bytes_and_operations() -> None:
    softmax(X)
    with profile() as seen:
        for _ in range(3):
            linear(X, np.ones((8, 64), np.float32))
        softmax(X)
    softmax(X)
    assert [record.op for record in seen.records] == ["linear"] * 3 + ["softmax"]
    first, *_, last = seen.records
    assert first.operations == 2 * 4 * 64 * 8
    assert first.moved == 4 * (4 * 64 + 8 * 64 + 4 * 8)
    assert last.moved == 2 * X.nbytes
    assert all(0 < record.own <= record.seconds for record in seen.records)
    assert all(record.ran_as == "definition" for record in seen.records)
    assert seen.table().count("linear") == 1


def test_a_kernel_is_told_from_a_definition() -> None:
    with emulator(check=False), profile() as seen:
        for _ in range(4):  # recorded at the second call, replayed from the third
            rms_norm(X, np.ones(64, np.float32))
        rms_norm(X.astype(float), np.ones(64))
    assert [record.ran_as for record in seen.records] == ["kernel"] * 4 + ["definition"]


def test_a_step_has_phases_and_layers() -> None:
    seen = stepped()
    phases = {phase: {r.op for r in records} for (phase,), records in seen.grouped("phase").items()}
    assert "attention_forward" in phases["forward"]
    assert "attention_backward" in phases["backward"]
    assert phases["optimizer"] == {"AdamW.step", "measure_gradients", "adamw_"}
    rest = next(record for record in seen.records if record.op == "AdamW.step")
    parts = [record.seconds for record in seen.records if record.op == "adamw_"]
    assert rest.own == pytest.approx(rest.seconds - sum(parts))
    assert rest.moved == 0, "its ops count theirs"
    places = {r.layer for r in seen.records if r.op == "attention_forward"}
    assert places == {"layer 0", "layer 1"}
    table = seen.table()
    assert table.index("forward") < table.index("backward") < table.index("optimizer")
    assert "layer 1" in table


@pytest.mark.slow
def test_the_trace_holds_every_call(tmp_path: Path) -> None:
    seen = stepped()
    seen.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events] == [record.op for record in seen.records]
    assert all(e["ph"] == "X" and e["dur"] > 0 for e in events)
    seen.plot(tmp_path / "time.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["time.svg", "trace.json"]
    with pytest.raises(ConfigError, match="the suffix is not one of png"):
        seen.plot(tmp_path / "time.txt")


def test_nothing_stays_behind_a_block() -> None:
    softmax(X)
    before = {name: [*op.routes] for name, op in OPS.items()}, target.targets
    with pytest.raises(ShapeError), profile() as seen:  # noqa: PT012 -- what is there before it
        softmax(X)
        rms_norm(X, np.ones(3, np.float32))
    assert ({name: [*op.routes] for name, op in OPS.items()}, target.targets) == before
    assert [record.op for record in seen.records] == ["softmax"]


def test_calls_of_other_threads_are_seen() -> None:
    with profile() as seen:
        threads = [threading.Thread(target=softmax, args=(X,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [record.op for record in seen.records] == ["softmax"] * 4


@pytest.mark.slow
def test_a_variable_profiles_a_program() -> None:
    program = "import numpy as np, unsloth_cupy as u; u.softmax(np.ones((2, 4), np.float32))"
    for value, said in (("1", True), ("0", False)):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT,
            env=os.environ | {"UNSLOTH_CUPY_PROFILE": value},
        )  # fmt: skip
        assert ("softmax" in done.stderr) == said


@pytest.fixture
def timed() -> Iterator[Machine]:
    """A GPU on which a kernel takes 1 ms, a copy between streams none, and the host no time."""
    with gpu() as machine:
        machine.strict = False
        cuda: Any = sys.modules["cupy.cuda"]

        class Event:
            waited = False

            def record(self) -> None:
                self.at = len(machine.launches)

            def synchronize(self) -> None:
                self.waited = True

        def elapsed(begin: Event, end: Event) -> float:
            assert end.waited, "the time of an event that is not reached is an error"
            return float(end.at - begin.at)

        cuda.Event, cuda.get_elapsed_time = Event, elapsed
        yield machine


def test_times_of_a_gpu_are_those_between_its_events(timed: Machine) -> None:
    x = timed.array((4, 4096), "bfloat16")
    with profile() as seen:
        for _ in range(4):  # the third is replayed
            softmax(x)
        q = timed.array((1, 256, 8, 64), "bfloat16")
        attention(q, q, q, causal=True)
        before = len(timed.launches)
        softmax(x.astype("float64"))  # a definition
    assert [record.seconds for record in seen.records] == [1e-3] * 5 + [0.0]
    assert len(timed.launches) == before == 5
    assert sum(record.own for record in seen.records) == 5e-3


def test_a_call_leaves_out_the_kernels_of_those_inside(timed: Machine) -> None:
    x = timed.array((8, 256), "float16")
    weight = nf4_quantize(timed.array((256, 256), "float16"))
    before = len(timed.launches)
    with profile() as seen:
        linear(x, weight)
    inner, outer = seen.records
    took = (len(timed.launches) - before) * 1e-3
    assert (inner.op, outer.op) == ("nf4_product_", "linear")
    assert outer.seconds == took > 0
    assert inner.own + outer.own == pytest.approx(took)


def test_the_optimizer_of_a_gpu_is_seen(timed: Machine) -> None:
    """Its kernels belong to no op; 4 + 4 bytes of averages, 4 of a weight, both ways, and 2 + 2."""
    weights = {name: timed.array((64, 64), "float32") for name in "ab"}
    steps = AdamW(weights)
    steps.keep_copies({name: timed.array((64, 64), "bfloat16") for name in "ab"})
    gradients = {name: timed.array((64, 64), "bfloat16") for name in "ab"}
    norms = []
    with profile() as seen:
        norms.append(measure_gradients(gradients))
        steps.step(gradients, lr=1e-3, finite=norms[0].finite, factor=norms[0].factor)
    measured, step = seen.records
    assert (measured.op, step.op) == ("measure_gradients", "AdamW.step")
    assert measured.seconds == step.seconds == 1e-3
    assert {(r.phase, r.ran_as) for r in seen.records} == {("optimizer", "kernel")}
    assert measured.moved == 2 * 64 * 64 * 2
    assert step.moved == 2 * 64 * 64 * (2 * (4 + 4 + 4) + 2 + 2)


def test_a_capture_holds_no_event(timed: Machine) -> None:
    """A graph would record it at each replay, and its time would be none of this call's."""
    x = timed.array((4, 4096), "bfloat16")
    cuda: Any = sys.modules["cupy.cuda"]
    stream = cuda.Stream(non_blocking=True)
    with stream, profile() as seen:
        softmax(x)
        cuda.Event = None
        stream.begin_capture()
        softmax(x)
        stream.end_capture()
    assert [each.events is None for each in seen.ended] == [False, True]
    assert [record.seconds == 1e-3 for record in seen.records] == [True, False]


def test_ranges_of_nvtx_are_nested_as_calls_are(timed: Machine) -> None:
    said: list[str] = []
    cuda: Any = sys.modules["cupy.cuda"]
    cuda.nvtx = SimpleNamespace(RangePush=said.append, RangePop=lambda: said.append("end"))
    x = timed.array((4, 4096), "bfloat16")
    with profile() as seen:
        softmax(x)
    assert said == []
    with profile(nvtx=True) as seen:
        softmax(x)
        with pytest.raises(ShapeError):
            rms_norm(x, x)
        linear(x, x)
    assert said == ["softmax", "end", "linear", "end"]
    assert [record.op for record in seen.records] == ["softmax", "linear"]


def test_nvtx_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="NVTX comes with CuPy; install"), profile(nvtx=True):
        pass


def test_kernels_are_those_that_were_launched(
    timed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by explaining each form of call: the stand-in has written down what was launched."""
    monkeypatch.setattr(_hopper, "requested", True)
    model = models.create(CONFIG, seed=0)
    parameters = {n: timed.array(a.shape, "float32") for n, a in model.parameters.items()}
    on_gpu: Any = type(model)(model.config, parameters, {})
    tokens, x = timed.array((2, 64), "int64"), timed.array((8, 256), "float16")
    weight = nf4_quantize(timed.array((256, 256), "float16"))
    q = timed.array((1, 512, 8, 128), "bfloat16")
    timed.launches.clear()
    with profile() as seen:
        for _ in range(2):
            on_gpu.loss_and_gradients(tokens, tokens)
        linear(x, weight)
        linear(x.astype("float64"), timed.array((4, 256), "float64"))
        attention(q, q, q, causal=True)
        explain(softmax, shape((4, 8), "float32"), device="h200")  # runs nothing
    launched = {(x.kernel, x.source, x.grid, x.block, x.shared) for x in timed.launches}
    forms = seen.forms.known.values()
    actual = [launch for form in forms for launch in form.launches()]
    assert {(x.kernel, x.source, x.grid, x.block, x.shared) for x in actual} == launched
    lines = seen.kernels().splitlines()
    assert len(lines) == 1 + len(launched)
    (embedding,) = (line.split() for line in lines if line.startswith("embedding "))
    assert embedding == ["embedding", "embedding", "2", "16", "128", "0", "B", "40", "75%"]
    (hopper,) = (line.split() for line in lines if line.startswith("attention_forward_sm90 "))
    assert hopper[-3:] == ["KiB", "40", "18%"]
    assert "softmax" not in seen.kernels()


def test_kernels_need_a_gpu() -> None:
    with emulator(check=False), profile() as seen:
        rms_norm(X, np.ones(64, np.float32))
    assert seen.records[0].ran_as == "kernel"
    assert seen.kernels() == ""


def test_what_a_program_prints_as_it_ends(timed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Any] = []
    said: list[str] = []
    monkeypatch.setattr("atexit.register", lambda *call: ends.append(call))
    until_exit(said.append)
    softmax(timed.array((4, 4096), "bfloat16"))
    for function, *arguments in reversed(ends):  # as at exit
        function(*arguments)
    (text,) = said
    assert "all calls: 1.00 ms" in text
    assert "shared  registers  occupancy" in text
    assert text.endswith("%\n")
