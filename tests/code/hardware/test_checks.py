"""The checks of all ops, rehearsed without a GPU; and the cases that are kept."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.bench.cases import Call
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.op import OPS

from ...harness.parity import Case, judge_kernels
from ...machines.stand_in import gpu
from ..programs.variants import declared
from . import checks, kept_cases
from .primitives import PRIMITIVES
from .test_session import tool


def broken(part: Any, by: float) -> Any:
    """Return a context in which the first op changes a part of its result in 16 bits."""
    real = checks.parity.outputs_of

    def outputs(call: Call) -> Any:
        results = real(call)
        for array in results.values():
            if array.dtype == BFLOAT16:
                array[part] *= by
        return results

    patch = pytest.MonkeyPatch()
    patch.setattr(checks.parity, "outputs_of", outputs)
    return contextlib.closing(SimpleNamespace(close=patch.undo))


@pytest.mark.parametrize("name", checks.kernels())
def test_an_op_agrees_with_itself_in_float32(name: str) -> None:
    said = checks.large(name, checks.SMALL, np.copy, None)
    assert said.endswith("of a row away from float32")


def test_one_row_that_is_wrong_is_seen() -> None:
    says = r"swiglu: a row of y is \d.\de-02 of its norm away"
    with broken(np.s_[5:6], 1.05), pytest.raises(SystemExit, match=says):
        checks.large("swiglu", checks.SMALL, np.copy, None)


def test_kernels_whose_blocks_wait_are_repeated() -> None:
    kinds = {kind.partition(".")[0].removeprefix("test_") for kind in checks.classes()}
    assert kinds == {
        *("attention_backward_hopper", "attention_decode", "attention_gathered"),
        *("attention_hopper", "attention_paged_int8", "bit_linear", "int8_quantize"),
        *("gated_rms_norm", "layer_norm", "rms_norm", "softmax"),
    }


@pytest.mark.parametrize("changes", [False, True])
def test_bits_that_change_in_one_of_many_launches(
    changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "test_softmax.TestSoftmaxLongRows"
    real, turns = checks.parity.outputs_of, iter(range(100))

    def outputs(call: Call) -> Any:
        results = real(call)
        if next(turns) == 7 and changes:
            results = {name: array + 1 for name, array in results.items()}
        return results

    with gpu("90", devices=1) as machine:
        machine.strict = False
        checks.tested()
        monkeypatch.setattr(checks.parity, "outputs_of", outputs)
        if changes:
            with pytest.raises(SystemExit, match="1 of 9 results differ in their bits"):
                checks.repeat(kind, 9)
        else:
            assert checks.repeat(kind, 3).endswith("each 3 times with the same bits")


def test_tools_get_every_kernel_once() -> None:
    with gpu("90", devices=1) as machine:
        machine.strict = False
        checks.cupy().cuda.set_allocator = lambda allocator: None
        checks.small()
        ops = {launch.kernel for launch in machine.launches}
    assert ops == {*declared()}


def test_steps_are_told_with_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = '[ "$2" = memcheck ] && echo "========= Invalid read" && exit 9\necho "== done"'
    tool(tmp_path, monkeypatch, "compute-sanitizer", said)
    listed = tmp_path / "check.json"
    monkeypatch.setattr(
        sys, "argv", ["checks", str(tmp_path), "initcheck ops", "--json", str(listed)]
    )
    checks.main()
    assert json.loads(listed.read_text()) == {
        "ops": ["initcheck ops"],
        "said": {"initcheck ops": "done"},
    }
    with pytest.raises(SystemExit, match="memcheck: ended with 9\n========= Invalid read"):
        checks.do("memcheck ops", tmp_path)
    assert checks.process_of("large rope") == "large"


def test_hazards_of_primitives_are_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'echo "========= Race"\necho "========= RACECHECK SUMMARY: $# words"\nexit 1'
    tool(tmp_path, monkeypatch, "compute-sanitizer", said)
    answer = checks.do("racecheck primitives", tmp_path)
    assert answer.count("RACECHECK SUMMARY: 7 words") == len(checks.ORDERED)
    assert (tmp_path / "racecheck.txt").read_text().count("Race\n") == len(checks.ORDERED)
    assert {*checks.ORDERED} <= {*PRIMITIVES}


def test_runs_that_differ_are_kept_too(tmp_path: Path) -> None:
    call, turns = Case("odd", axes=[6, 8]).draw(OPS["swiglu"], BFLOAT16), iter("ab")

    def restless(function: Any) -> Any:
        outputs = function()
        outputs["y"][2, 5] *= 1 + 2**-7 * (next(turns) == "b")
        return outputs

    with pytest.raises(AssertionError, match="differs between two runs") as caught:
        judge_kernels(call, restless, lambda array: array, ("forward",))
    kept_cases.keep(tmp_path, "t", caught.value)
    with np.load(tmp_path / "t.npz") as kept:
        assert kept["actual"].dtype == np.float32
        assert [*kept["map"]] == ["........"] * 2 + [".....#.."] + ["........"] * 3


@pytest.fixture
def failure() -> BaseException:
    """Return the error of a kernel that leaves out two columns of a row."""
    call = Case("odd", axes=[70, 40]).draw(OPS["swiglu"], np.float32)

    def wrong(function: Any) -> Any:
        outputs = function()
        outputs["y"][3, 30:32] = 9
        return outputs

    with pytest.raises(AssertionError) as caught:
        judge_kernels(call, wrong, lambda array: array, ("forward",))
    return caught.value


def test_the_first_failing_case_of_a_kind_is_kept(tmp_path: Path, failure: BaseException) -> None:
    for case in ("first", "second"):
        kept_cases.keep(tmp_path, f"tests/ops/test_swiglu.py::Test::test[{case}]", failure)
    (file,) = tmp_path.iterdir()
    with np.load(file) as opened:
        kept = dict(opened)
    assert str(kept["test"]).endswith("[first]")
    assert "2 of 2800 are off by more than" in str(kept["said"])
    assert {"input gate", "input up"} <= {*kept}
    assert (kept["actual"] != kept["exact"])[3, 30:32].all()
    rows = [*kept["map"]]
    assert [number for number, row in enumerate(rows) if row.strip(".")] == [1]
    assert rows[1].strip(".") == "##" or set(rows[1]) == {".", "5"}, rows[1]


def test_a_file_is_of_16_mb_at_most(tmp_path: Path, failure: BaseException) -> None:
    kept_cases.MOST, most = 1 << 20, kept_cases.MOST
    try:
        kept_cases.keep(tmp_path, "large", failure)
    finally:
        kept_cases.MOST = most
    with np.load(tmp_path / "large.npz") as opened:
        assert not {"input gate", "exact"} & {*opened}


def test_an_error_without_arrays_is_not_kept(tmp_path: Path) -> None:
    kept_cases.keep(tmp_path, "other", ValueError("of another kind"))
    assert not [*tmp_path.iterdir()]
