"""``check`` and ``bench``: on the CPU, and on a made-up GPU whose kernels are Python functions."""

import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from unsloth_cupy import machine
from unsloth_cupy.bench import attention_shapes, cases, judge, report, stopwatch, timing
from unsloth_cupy.bench.cases import Call, Scale, chosen, draw, forward_ops
from unsloth_cupy.cli import bench, progress
from unsloth_cupy.cli.commands import group
from unsloth_cupy.core import target as core_target
from unsloth_cupy.core.call import bind
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import KernelError
from unsloth_cupy.profiling.cards import CARDS

from ..machines import stand_in

SMALL = Scale(tokens=32, hidden=64, inner=16, vocab=40, heads=4, kv_heads=2, dim=8)
FULL = judge.SCALE  # what a user gets


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(
        group, [str(a) for a in arguments], env={"COLUMNS": "160"}
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays; one run is one call."""
    monkeypatch.setattr(judge, "SCALE", SMALL)
    monkeypatch.setattr(timing, "HOST_SCALES", (SMALL, SMALL._replace(tokens=64)))
    monkeypatch.setattr(timing, "DEVICE_SCALES", (SMALL,))
    monkeypatch.setattr(stopwatch, "HOST_SECONDS", 0.0)
    monkeypatch.setattr(stopwatch, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(stopwatch, "FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(stopwatch, "PRODUCT_ROWS", 16)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ([], "CUDA sees no device"))


class FakeArray(np.ndarray[Any, Any]):
    """What stands for an array of CuPy."""

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(id=0)

    def get(self) -> Any:
        return np.array(self)


FakeArray.__module__ = "cupy"


class FakeEvent:
    """An event that happens 1 ms after the one before."""

    now = 0.0

    def record(self) -> None:
        FakeEvent.now += 1.0
        self.time = FakeEvent.now

    def synchronize(self) -> None:
        pass


class FakeGpu:
    """A target that owns FakeArrays and knows the kernel of ``scale``."""

    factor = 1.0  # what a broken kernel multiplies by beside

    def owns(self, array: Any) -> bool:
        return isinstance(array, FakeArray)

    def compile(self, name: str, source: str) -> Any:
        def launch(grid: Any, block: Any, arguments: tuple[Any, ...], shared: int) -> None:
            (x, y), factor = arguments[:2], arguments[-1]
            y[...] = (x.astype(np.float32) * factor * self.factor).astype(y.dtype)

        return launch

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        return np.empty(shape, dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    def made(array: Any) -> Any:
        return np.array(array).view(FakeArray)

    cuda = types.SimpleNamespace(
        Event=FakeEvent,
        is_available=lambda: True,
        get_elapsed_time=lambda start, stop: stop.time - start.time,
        Device=lambda: types.SimpleNamespace(id=0),
        runtime=types.SimpleNamespace(
            cudaDevAttrL2CacheSize=38,
            deviceGetAttribute=lambda attribute, device: 1 << 10,
            getDeviceCount=lambda: 1,
        ),
    )
    cupy = types.ModuleType("cupy")
    for name, value in {
        "cuda": cuda,
        "asarray": made,
        "empty": lambda shape, dtype: made(np.full(shape, 7, dtype)),
        "empty_like": made,
        "zeros": lambda shape, dtype: made(np.zeros(shape, dtype)),
        "copyto": np.copyto,
        "random": np.random,
    }.items():
        setattr(cupy, name, value)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(machine, "gpus", lambda: ([machine.Gpu("Fake 9", "9.0", 1 << 30)], ""))
    monkeypatch.setattr(bench, "card_here", lambda number: CARDS["h200"])
    # NumPy arrays have no .data.ptr: where a fake lies does not matter here
    monkeypatch.setattr("unsloth_cupy.ops.common.elementwise.lanes", lambda row, *arrays: 1)
    monkeypatch.setattr(timing, "_address", id)
    target = FakeGpu()
    with core_target.using(target):
        yield target


@pytest.mark.parametrize("name", ["rms_norm", "attention"])
def test_check_judges_definitions_without_a_gpu(name: str, no_gpu: None) -> None:
    result = run("check", name)
    assert result.exit_code == 0, result.output
    assert "No GPU was found (CUDA sees no device)" in result.output
    assert result.output.count("NumPy definition") == 7, "a line and 2 ops in 3 dtypes"
    assert f"{name}_backward" in result.output
    assert "6 of 6 within the bound" in result.output


@pytest.mark.parametrize("name", forward_ops())
def test_every_op_is_within_the_rule(name: str) -> None:
    results = list(judge.judged(OPS[name], None))
    assert [r for r in results if not r.ok] == []
    assert len(results) == 3 * (1 + (OPS[name].backward is not None))
    assert all(np.isfinite(r.allowed) for r in results)


@pytest.mark.parametrize("name", forward_ops())
def test_what_check_draws_overflows_no_op(name: str) -> None:
    call = draw(OPS[name], FULL).cast(np.dtype(np.float16))
    for output, array in call.run().items():
        if array.dtype.kind == "f":
            assert np.isfinite(array).all(), output


@pytest.mark.parametrize(("command", "doing"), [("check", "checking"), ("bench", "timing")])
def test_in_a_pipe_a_command_says_what_it_is_at(
    command: str, doing: str, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, before it works and from time to time."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    result = run(command, "scale", "add")
    assert result.stderr.splitlines() == [f"{doing} 1 of 2: scale", f"{doing} 2 of 2: add"]
    assert f"{doing} 1 of 2" not in result.stdout
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)
    assert len(run(command, "scale", "add").stderr.splitlines()) == 1


def inaccurate(x: Any, *, factor: float) -> Any:
    return x * x.dtype.type(factor) + (0.0 if x.dtype == np.float64 else 1e-4)


def not_a_number(x: Any, *, factor: float) -> Any:
    y = x * factor
    y[0, 0] = np.nan if x.dtype != np.float64 else 0
    return y


@pytest.mark.parametrize("broken", [inaccurate, not_a_number])
def test_check_fails_at_a_broken_definition(
    broken: Callable[..., Any],
    no_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(OPS["scale"], "compute", bind(OPS["scale"], broken))
    OPS["scale"].routes.clear()
    request.addfinalizer(OPS["scale"].routes.clear)
    result = run("check", "scale")
    assert result.exit_code == 1
    assert "scale in float32, NumPy definition: error" in result.output
    assert "scale_backward in" not in result.output, "it is whole"


def test_check_runs_kernels_where_a_gpu_is(gpu: FakeGpu) -> None:
    result = run("check", "scale")
    assert result.exit_code == 0, result.output
    assert result.output.count("kernel on Fake 9") == 6
    assert "No GPU" not in result.output
    assert "NumPy definition" not in run("check", "scale").output.split("\n", 1)[1]
    assert run("check", "linear").output.count("kernel on") == 0, "it has none"


def test_check_fails_at_a_broken_kernel(gpu: FakeGpu) -> None:
    gpu.factor = 1.1
    result = run("check", "scale")
    assert result.exit_code == 1
    assert "scale in float32, kernel on Fake 9: error" in result.output
    assert "0 of 6 within the bound" in result.output


def test_what_runs_without_a_kernel_is_called_a_definition(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launch may decline a call."""

    def declines(self: Any) -> bool:
        return False

    monkeypatch.setattr(Call, "launches", declines)
    assert run("check", "scale").output.count("definition on Fake 9") == 6
    run("bench", "scale", "--json", tmp_path / "times.json")
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    assert {row["ran_as"] for row in rows} == {"definition on Fake 9"}


def test_a_launch_that_declines_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = draw(OPS["scale"], SMALL)
    monkeypatch.setattr(OPS["scale"], "launch", lambda arrays, options: NotImplemented)
    assert not call.launches()
    monkeypatch.setattr(OPS["scale"], "launch", lambda arrays, options: arrays[0])
    assert call.launches()
    assert not draw(OPS["linear"], SMALL).launches()


def test_check_goes_on_after_a_kernel_that_does_not_compile(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, name: str, source: str) -> Any:
        raise KernelError("scale does not compile")

    monkeypatch.setattr(FakeGpu, "compile", fails)
    result = run("check", "scale")
    assert result.exit_code == 1
    assert result.output.count("scale does not compile") == 6


@pytest.mark.parametrize("command", ["check", "bench"])
def test_unknown_op_names_the_close_ones(command: str) -> None:
    result = run(command, "rms_nrm")
    assert result.exit_code == 1
    assert "there is no op 'rms_nrm'; did you mean rms_norm" in result.output
    assert "choose from accumulate_, adamw_, add, " in run(command, "zzz").output


def in_the_table() -> list[str]:
    """Return the names of the table of ops."""
    lines = (Path(__file__).parents[2] / "docs/ops.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return [name for row in rows for name in re.findall("`(.+?)`", row)]


@pytest.mark.parametrize("command", ["check", "bench"])
def test_every_name_of_the_table_is_known(command: str, no_gpu: None) -> None:
    """Several in one call, each of its ops once; what has nothing to measure says why."""
    names = in_the_table()
    assert {"attention_layer", "rope_tables", "rope_qk_", "cast"} <= {*names}
    result = run(command, "rope_tables", "scale")
    assert result.exit_code == 1
    assert "rope_tables: nothing to check or time: it has no array" in result.output
    ops = chosen(*(name for name in names if name != "rope_tables"))
    assert len({*ops}) == len(ops) > 40
    for name in names:
        if name != "rope_tables":
            expected = {*cases.COMPOSED.get(name, [name])}
            actual = {op.__name__.removesuffix("_forward") for op in chosen(name)}
            assert {re.sub("_over_$", "_", n) for n in actual} == {
                n.removesuffix("_forward") for n in expected
            }
    several = run(command, "relu2", "cast", "relu2_backward", "swiglu_backward_", "lora_linears")
    assert several.exit_code == 0, several.output
    for shown in ("relu2", "cast_to_float16", "swiglu_backward_over_", "lora_up"):
        assert len(re.findall(rf"│ {shown} ", several.output)) == 1, several.output
    assert "cast consists of cast_to_bfloat16, cast_to_float16, cast_to_float32" in several.output


def test_ops_without_a_kernel_are_named(gpu: FakeGpu) -> None:
    result = run("bench", "scale", "linear", "reshape")
    assert result.exit_code == 0, result.output
    assert "Skipped (no kernel): linear, reshape." in result.output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "add"])
def test_bench_times_definitions_without_a_gpu(name: str, no_gpu: None, tmp_path: Path) -> None:
    numbers, picture = tmp_path / "times.json", tmp_path / "times.png"
    result = run("bench", name, "--json", numbers, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "timing NumPy definitions on the CPU" in result.output
    assert "of copy" not in result.output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    actual = json.loads(numbers.read_text())
    assert actual["machine"]["gpu"] is None
    assert actual["copy_gb_per_s"] is None
    assert "wall time on the CPU" in actual["method"]
    assert actual["date"]
    assert actual["versions"]["numpy"] == np.__version__
    rows = actual["rows"]
    assert [row["op"] for row in rows] == [name] * 6 + [f"{name}_backward"] * 6
    assert {row["dtype"] for row in rows} == {"float16", "bfloat16", "float32"}
    assert {row["ran_as"] for row in rows} == {"NumPy definition on the CPU"}
    assert all(row["microseconds"] > 0 and row["of_copy"] is None for row in rows)
    size = rows[5]["size"]
    assert size == [64, 64]
    assert rows[5]["bytes"] == {"softmax": 2, "add": 3}[name] * 64 * 64 * 4
    if name == "add":
        assert rows[-1]["bytes"] == 0, "both gradients are dc itself"


def test_bench_keeps_what_it_has_after_each_op(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, numbers = tmp_path / "performance.md", tmp_path / "times.json"
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    times = bench.timed

    def dies_at_the_second(op: Any, *args: Any) -> Any:
        if op.__name__ == "add":
            raise KeyboardInterrupt
        return times(op, *args)

    monkeypatch.setattr(bench, "timed", dies_at_the_second)
    assert run("bench", "scale", "add", "--json", numbers, "--write", page).exit_code == 130
    assert json.loads(numbers.read_text())["ops"] == ["scale"]
    assert "| `scale` | 32 x 64 | float32 | " in page.read_text()


def test_a_teacher_is_timed_in_the_dtype_of_its_student(no_gpu: None) -> None:
    op, clock = OPS["linear_divergence_forward"], stopwatch.HostClock()
    rows = [
        row for row, _ in timing.timed(op, clock, None, peers=False) if row["op"] == op.__name__
    ]
    sizes = {row["dtype"]: row["bytes"] for row in rows}
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]


def test_bytes_of_what_is_not_every_array_once() -> None:
    def moved(name: str) -> tuple[dict[str, int], int]:
        call = draw(OPS[name], SMALL)
        outputs = call.mapped(np.copy).run() if name.endswith("_") else call.run()
        sizes = {n: a.nbytes for n, a in (call.arrays | outputs).items() if a is not None}
        return sizes, timing.traffic(call, outputs)

    sizes, actual = moved("rms_norm_forward")
    assert actual == sizes["x"] + sizes["weight"] + sizes["y"] + sizes["rstd"], "h is x"
    sizes, actual = moved("adamw_")
    assert actual == sizes["gradient"] + 2 * (sizes["parameter"] + sizes["mean"] + sizes["square"])
    sizes, actual = moved("embedding")
    assert actual == sizes["tokens"] + 2 * sizes["x"]
    assert moved("reshape")[1] == 0


@pytest.mark.slow
def test_bench_uses_events_where_a_gpu_is(gpu: FakeGpu, tmp_path: Path) -> None:
    numbers, picture = tmp_path / "times.json", tmp_path / "times.png"
    result = run("bench", "scale", "--json", numbers, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "Timing kernels on Fake 9 with device events" in result.output
    actual = json.loads(numbers.read_text())
    assert actual["machine"]["gpu"] == "Fake 9"
    assert "L2" in actual["method"]
    copy = 2 * stopwatch.COPY_BYTES / 1e-3 / 1e9
    assert actual["copy_gb_per_s"] == pytest.approx(copy)
    for row in actual["rows"]:
        assert row["microseconds"] == pytest.approx(1000)
        assert row["runs"] >= 20
        assert row["of_copy"] == pytest.approx(row["bytes"] / 1e-3 / 1e9 / copy)
        assert row["of_roofline"] == row["of_copy"], "it makes no products"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_products_may_bound_an_op(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call = draw(OPS["attention_forward"], SMALL)
    products = 4 * 4 * 32 * 32 * 8  # operations, heads, queries, keys, columns
    assert call.op.facts["operations"](call.arrays) == products
    clock, timed = stopwatch.DeviceClock(), {"dtype": "bfloat16", "microseconds": 2000.0}
    timed["op"] = "attention_forward"
    report: dict[str, Any] = {"copy_gb_per_s": 4.0, "product_tflop_per_s": {}}
    row = {**timed, "bytes": 4_000_000, "gb_per_s": 2.0, "operations": 16**3}
    assert timing.shares(row, report, clock) == {"of_copy": 0.5, "of_roofline": 0.5}
    rate = 2 * 16**3 / 1e-3
    assert report["product_tflop_per_s"] == {"bfloat16": pytest.approx(rate / 1e12)}
    row["operations"] = 3 * 16**3
    assert timing.shares(row, report, clock)["of_roofline"] == pytest.approx(0.75)


@pytest.mark.parametrize(("rate", "expected"), [(1979.0, 0.25), (None, None), (100.0, 1.0)])
def test_products_of_codes_have_the_rate_of_the_datasheet(
    rate: float | None, expected: float | None
) -> None:
    """No clock measures it: the call would fail."""
    row: dict[str, Any] = {"op": "int8_linear_forward", "dtype": "bfloat16", "microseconds": 2.0}
    row |= {"bytes": 2000, "gb_per_s": 1.0, "operations": 0.25 * 1979e12 * 2e-6}
    facts = {"copy_gb_per_s": 4.0, "product_tflop_per_s": {}, "int8_top_per_s": rate}
    if rate == 100.0:
        row["operations"] = rate * 1e12 * 2e-6
    assert timing.shares(row, facts, None)["of_roofline"] == (expected and pytest.approx(expected))
    assert facts["product_tflop_per_s"] == {}
    backward = row | {"op": "int8_quantize_forward", "operations": 0}
    assert timing.shares(backward, facts, None)["of_roofline"] == 0.25


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (3, None)])
def test_packed_and_paged_attention_count_the_products_of_attention(
    causal: bool, window: Any
) -> None:
    """Two sequences count as a batch of two; pages as a row of as many keys."""
    rng, options = np.random.default_rng(0), {"causal": causal, "window": window}
    q, k = rng.random((2, 8, 4, 16)), rng.random((2, 8, 2, 16))
    arrays: dict[str, Any] = {"q": q, "k": k, "v": k[..., :8]}
    expected = OPS["attention_forward"].facts["operations"](arrays | options)
    offsets = np.array([0, 8, 16])
    packed = {name: array.reshape(16, *array.shape[2:]) for name, array in arrays.items()}
    packed |= {"q_offsets": offsets, "k_offsets": offsets}
    pages = k.reshape(4, 4, 2, 16)
    paged = {"q": q, "k_pages": pages, "v_pages": pages[..., :8]}
    paged |= {"page_table": np.arange(4).reshape(2, 2)}
    for name, own in (
        ("attention_varlen_forward", packed),
        ("attention_paged_forward", paged),
        ("attention_paged_int8_forward", paged),
    ):
        assert OPS[name].facts["operations"](own | options) == expected
    backward = OPS["attention_varlen_backward"].facts["operations"]
    assert backward(packed | options) == 5 * expected // 2
    by_default = OPS["attention_forward"].facts["operations"](arrays | {"causal": True})
    assert OPS["attention_paged_forward"].facts["operations"](paged) == by_default


@pytest.mark.parametrize(
    ("name", "logits"),
    [("linear_divergence", 2), ("linear_top_k_divergence", 1), ("linear_log_probs", 1)],
)
def test_a_backward_pass_of_a_head_counts_what_it_recomputes(name: str, logits: int) -> None:
    """One product for each matrix of logits, and one for each gradient."""
    call = draw(OPS[f"{name}_forward"], SMALL._replace(inner=64))
    outputs = call.run()
    backward = call.backward(outputs, call.seeds(outputs, every=False))
    one = 2 * 32 * 64 * 40
    assert timing.operations(call, outputs) == logits * one
    assert timing.operations(backward, backward.run()) == (logits + 2) * one


def test_write_renews_the_block_between_the_markers(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"# Before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(bench, "commit", lambda: "abc123")
    assert run("bench", "scale", "--write", page).exit_code == 0
    text = page.read_text()
    assert text.startswith(f"# Before\n{report.BEGIN}\n| kernel |")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "| `scale` | 32 x 64 | float32 | 1.00 ms |" in text
    assert re.search(r"^Run 1: Fake 9, 2\S+, commit abc123: a copy moves", text, re.M)
    assert "| `swiglu` | not yet timed on a GPU |" in text
    assert text.count("a copy moves") == 1
    other = json.loads(page.with_suffix(".json").read_text())
    other["swiglu"] = {**other["scale"], "facts": {**other["scale"]["facts"], "commit": "def456"}}
    page.with_suffix(".json").write_text(json.dumps(other))
    assert run("bench", "scale", "--write", page).exit_code == 0, "other ops keep their rows"
    assert "| `swiglu` | 32 x 64 | float32 | 1.00 ms | " in page.read_text()
    assert re.search(r"^Run 2: .*commit def456: a copy moves", page.read_text(), re.M)
    kept = json.loads(page.with_suffix(".json").read_text())
    assert all({*row["sources"]} == {"arithmetic.cu"} for row in kept["scale"]["rows"])
    kept["scale"]["rows"][-1]["sources"]["arithmetic.cu"] = "of other code"
    page.with_suffix(".json").write_text(json.dumps(kept))
    report.renew(page)
    assert page.read_text().count("| 1, changed since |") == 1
    page.write_text("no markers")
    result = run("bench", "--write", page)
    assert result.exit_code == 1
    assert "must hold" in result.output


def test_nothing_is_written_without_a_gpu(no_gpu: None, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"{report.BEGIN}\nold\n{report.END}\n")
    result = run("bench", "--write", page)
    assert result.exit_code == 1
    assert "no GPU was found" in result.output
    assert page.read_text() == f"{report.BEGIN}\nold\n{report.END}\n"
    assert not page.with_suffix(".json").exists()


def test_the_page_has_the_markers() -> None:
    report.check_markers(Path(__file__).parents[2] / "docs" / "performance.md")


def test_missing_torch_says_what_to_install(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("bench", "add", "--peers")
    assert result.exit_code == 1
    assert "pip install 'unsloth_cupy[peers]'" in result.output


def test_peers_stand_beside_each_other(no_gpu: None, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
    numbers = tmp_path / "times.json"
    result = run("bench", "swiglu", "--peers", "--json", numbers)
    assert result.exit_code == 0, result.output
    assert "time of torch" in result.output
    rows = json.loads(numbers.read_text())["rows"]
    assert all(row["peers"]["torch"] > 0 for row in rows)
    assert "times as fast as torch" in " ".join(result.output.split())


def test_a_ratio_above_one_is_a_faster_one() -> None:
    """In every table, and its head says so."""
    row = {
        "op": "scale", "dtype": "float32", "size": [4], "microseconds": 2.0, "gb_per_s": 1.0,
        "of_copy": 1.0, "of_roofline": 1.0, "ran_as": "kernel on Fake 9", "peers": {"torch": 6.0},
        "percentiles": {name: {"p25": 1.5, "p75": 6.5} for name in ("unsloth_cupy", "torch")},
    }  # fmt: skip
    facts = {
        "machine": {"gpu": "Fake 9"}, "date": "2026-01-01", "commit": None, "versions": {},
        "copy_gb_per_s": 1.0, "product_tflop_per_s": {}, "method": "", "notes": [],
    }  # fmt: skip
    shape = {
        "name": "tiny", "batch": 1, "heads": 1, "tokens": 1, "dim": 1, "causal": True,
        "direction": "forward", "tflop_per_s": 1.0, "bytes": {"unsloth_cupy": 1},
        "microseconds": {"unsloth_cupy": 2.0, "torch": 6.0}, "percentiles": row["percentiles"],
    }  # fmt: skip
    tables = (
        report.table(facts | {"rows": [row]}),
        attention_shapes.shape_table([shape], on_gpu=True),
    )
    for made in tables:
        column = next(c for c in made.columns if c.header == "times as fast as torch")
        assert [*column.cells] == ["3.00x"]
        column = next(c for c in made.columns if c.header == "time (quartiles)")
        assert [*column.cells] == ["2.0 us (1.5-6.5)"]
    block = report.block({"scale": {"facts": facts, "rows": [row]}})
    assert "| times as fast as the best peer |" in block
    assert "| 3.00x (torch) |" in block


def test_peers_compute_the_same() -> None:
    """Else a ratio to them says nothing."""
    pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
    from unsloth_cupy.bench import peers

    names = [name for name in forward_ops() if "torch" in OPS[name].facts]
    for name, options in [*((n, {}) for n in names), ("attention_forward", {"causal": True})]:
        call = draw(OPS[name], SMALL, options=options)
        outputs = call.run()
        seeds = call.seeds(outputs, every=False)
        results = {}
        for gradient in (None, seeds):
            calls, notes = peers.contestants(call, gradient, gpu=False)
            assert notes == []
            results[gradient is None] = calls["torch"]()
        forward = results[True] if isinstance(results[True], tuple) else (results[True],)
        for ours, theirs in zip(outputs.values(), forward, strict=False):
            np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-5, err_msg=name)
        gradients = call.backward(outputs, seeds).run().values()
        for ours, theirs in zip(gradients, results[False], strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_peer_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
    from unsloth_cupy.bench import peers

    monkeypatch.setitem(OPS["add"].facts, "torch", lambda nn, t, o: t["b"].no_such_method())
    calls, notes = peers.contestants(draw(OPS["add"], SMALL), None, gpu=False)
    assert calls == {}
    assert notes[0].startswith("torch fails at add in float32: ")


@pytest.mark.slow
@pytest.mark.parametrize("peers", [False, True])
def test_attention_at_known_shapes(
    peers: bool, no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if peers:
        pytest.importorskip("torch", reason="torch is the peer")
    grid = tuple(attention_shapes.Shape(f"{t}", 1, 2, t, 8) for t in (16, 24))
    monkeypatch.setattr(attention_shapes, "HOST_GRID", grid)
    monkeypatch.setattr(attention_shapes, "SHAPES", attention_shapes.SHAPES[:2])
    numbers, picture = tmp_path / "times.json", tmp_path / "times.png"
    more = ["--peers"] if peers else []
    result = run("bench", "attention", "--json", numbers, "--plot", picture, *more)
    assert result.exit_code == 0, result.output
    said = re.sub(r"[\s│]+", " ", result.output)
    for text in ("tiny 2 x 4 x 8 x 64", "both passes", "512 to 32k tokens on a GPU"):
        assert text in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(numbers.read_text())["attention"]
    assert len(rows) == 4 * 2 * 2
    for row in rows:
        backward = row["direction"] == "backward"
        peer = ["torch"] if peers else []
        names = sorted([*peer, "unfused", "unsloth_cupy"])
        assert sorted(row["microseconds"]) == sorted(row["percentiles"]) == names
        for name, spread in row["percentiles"].items():
            assert [*spread] == ["p5", "p25", "p75", "p95"]
            assert spread["p25"] <= row["microseconds"][name] <= spread["p75"]
        assert row["bytes"].keys() == {"unfused", "unsloth_cupy"}
        work = 4 * row["batch"] * row["heads"] * row["tokens"] ** 2 * row["dim"]
        work *= (2.5 if backward else 1) * (0.5 if row["causal"] else 1)
        per_second = work / row["microseconds"]["unsloth_cupy"] / 1e6
        assert row["tflop_per_s"] == pytest.approx(per_second)


def test_the_unfused_chain_is_attention() -> None:
    *qkv, dout = np.random.default_rng(0).standard_normal((4, 2, 9, 2, 4))
    for causal in (False, True):
        results = []
        for forward, gradients in attention_shapes.CHAINS.values():
            outputs = forward(*qkv, causal=causal)
            results.append((outputs[0], *gradients(dout, *qkv, *outputs, causal=causal)[:3]))
        for actual, expected in zip(*results, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


def test_one_pool_counts_the_fused_and_the_unfused_call_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By sizes: the fused call has no matrix of (queries, keys); both launch kernels."""
    monkeypatch.setattr(attention_shapes, "SHAPES", (attention_shapes.Shape("one", 1, 4, 512, 64),))
    monkeypatch.setattr(attention_shapes, "DEVICE_GRID", ())
    attention_shapes._hidden.cache_clear()
    with stand_in.gpu("90", devices=1) as made:
        made.strict = False  # the mask is sent
        rng = types.SimpleNamespace(standard_normal=made.array)
        random = types.SimpleNamespace(default_rng=lambda seed: rng)
        monkeypatch.setattr(sys.modules["cupy"], "random", random, raising=False)
        clock = stopwatch.HostClock()
        rows = [*attention_shapes.shape_rows(clock, True, False)]
        ran = {launch.kernel for launch in made.launches}
    attention_shapes._hidden.cache_clear()
    assert {"attention_forward", "softmax", "softmax_backward"} <= ran
    scores = 4 * 512 * 512 * 2
    for row in rows:
        fused, unfused = (row["bytes"][name] for name in ("unsloth_cupy", "unfused"))
        assert row["microseconds"].keys() == row["bytes"].keys()
        assert unfused >= 2 * scores, "scores and weights"
        assert fused < 0.3 * unfused, row["direction"]


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any, **__: Any) -> Any:
        raise MemoryError("scores")

    ours = attention_shapes.CHAINS["unsloth_cupy"]
    monkeypatch.setitem(attention_shapes.CHAINS, "unfused", (too_large, too_large))
    arrays = tuple(np.ones((3, 1, 8, 2, 8), np.float32))
    calls, sizes = attention_shapes.own_calls(arrays, arrays[0], True, True)
    assert calls.keys() == sizes.keys() == {"unsloth_cupy"}
    monkeypatch.setitem(attention_shapes.CHAINS, "unsloth_cupy", (too_large, ours[1]))
    with pytest.raises(MemoryError, match="scores"):
        attention_shapes.own_calls(arrays, arrays[0], True, True)
