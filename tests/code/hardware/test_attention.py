"""The measuring of attention on Hopper, rehearsed without a GPU: small, by what plays the tools."""

import inspect
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import attention_backward
from unsloth_cupy.bench.attention_shapes import Shape, torch_calls
from unsloth_cupy.core.dtypes import BFLOAT16

from . import attention
from .attention import BEGIN, END, METRICS, Here, do, kept_at, names, table
from .fixtures import ROOT

NCU = """#!/bin/sh
echo ==PROF== Connected
echo '"ID","Kernel Name","{metrics}"'
echo '"","","%","%","%","%","%","%"'
echo '"0","attention_forward_sm90","70.5","40","13","30","52","88"'
"""
SANITIZER = """#!/bin/sh
echo ========= COMPUTE-SANITIZER
[ "$2" = {broken} ] && echo "========= Error: {broken}" && exit 9
echo ========= ERROR SUMMARY: 0 errors
"""


class Rehearsed(Here):
    """The host instead of a GPU, with fewer tokens, and a clock that always says 1 ms."""

    gpu = False
    tokens = (16, 24, 32)

    def __init__(self) -> None:
        self.timed: list[int] = []
        self.clock = self.take_time

    def take_time(self, calls: Any) -> tuple[list[float], int]:
        for call in calls:
            call()
        self.timed.append(len(calls))
        return [1e-3] * len(calls), 1


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ALL", 32)
    monkeypatch.setattr(attention, "WIDTH", 256)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "performance.md"
    path.write_text(f"before\n{BEGIN}\n{END}\nbehind\n")
    return path


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_steps_are_of_every_head_dim_and_mask_and_begin_with_bits() -> None:
    """Each way has a process of its own, as has each tool."""
    steps = [step.split() for step in names()]
    expected = set(itertools.product(("64", "128", "256"), ("causal", "full")))
    for what in (*attention.WAYS, "speed"):
        assert {
            (dim, mask) for name, dim, *mask in steps if name == what for mask in mask
        } == expected
    assert [name for name, *_ in steps[:18]] == [way for way in attention.WAYS for _ in range(6)]
    processes = [*dict.fromkeys(map(attention.process_of, names()))]
    assert processes[:5] == ["forward", "two", "one", "speed", "pipes 128"]
    assert processes[5:] == names()[25:]
    assert attention.TOKENS == (1024, 2048, 4096, 8192, 16384, 32768)


def test_speed_is_a_table_beside_peers(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = inspect.signature(torch_calls)

    def fused(*given: Any, **options: Any) -> dict[str, Any]:
        assert not real.bind(*given, **options).arguments["chain"]
        return {"torch cuDNN": lambda: None}

    monkeypatch.setattr(attention, "torch_calls", fused)
    here = Rehearsed()
    do("speed 64 causal", page, here)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nbehind\n")
    rows = [line for line in text.splitlines() if line.startswith("| 64 | causal |")]
    assert [row.split(" | ")[2] for row in rows] == ["16", "24", "32"]
    assert rows[0].endswith("| 16 | 0 | 0 | 0 | - | 0 | 0 | 0 | 0 | - |")
    # ours beside torch's, and ours without warpgroups; backward in two launches too
    assert here.timed == [2, 1, 2, 1, 1] * 3
    (kept,) = json.loads(kept_at(page).read_text()).values()
    size = Shape("32", 1, 4, 32, 64)
    assert kept["rows"][5] == {
        "tokens": 32,
        "direction": "backward",
        "tflop_per_s": dict.fromkeys(
            ("unsloth_cupy", "torch cuDNN", "mma.sync", "two launches"),
            size.operations(True, True) / 1e12 / 1e-3,
        ),
    }
    assert f"commit {kept['facts']['commit']}" in text
    assert kept["facts"]["date"] in text


def test_bits_that_change_end_the_step(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do("forward 64 full", page, Rehearsed())
    assert "forward 64 full: out the same twice, 0.0e+00 of a row away" in page.read_text()
    changes: list[int] = []

    def restless(*given: Any, **options: Any) -> Any:
        dq, *others = attention_backward(*given, **options)
        return [dq * np.float32(1 + changes.pop(0)), *others]

    monkeypatch.setattr(attention, "attention_backward", restless)
    for by, says in (
        ([0, 1, 0], r"dq: .* differ in two runs"),
        ([1, 1, 0], r"dq: a row is 1.00e.00"),
    ):
        for way in ("one", "two"):
            changes[:] = by
            with pytest.raises(SystemExit, match=says):
                do(f"{way} 64 full", page, Rehearsed())
    assert attention.after("two 64 full") == [
        "memcheck 64",
        "synccheck 64",
        "initcheck 64",
        "racecheck 64",
    ]
    assert attention.after("speed 64 full") == []


@pytest.mark.parametrize("lost", [128, 16])
def test_a_lost_tile_is_seen_in_each_row(lost: int) -> None:
    """Beside the largest value of a long sequence it is small, beside the row it is not."""
    rng = np.random.default_rng(0)
    tokens, dim, queries = 8192, 128, 256
    q, k, v = (rng.standard_normal((n, dim), np.float32) for n in (queries, tokens, tokens))
    q[: queries // 2] *= 0
    scores = np.exp(q @ k.T / np.sqrt(dim))
    scores[: queries // 2, 1:] = 0  # the first rows of a causal call have the largest values
    expected = scores @ v / scores.sum(1, keepdims=True)
    assert attention.away(expected.astype(BFLOAT16), expected) < attention.NEAR / 4
    scores[queries // 2 :, 1024 : 1024 + lost] = 0
    actual = scores @ v / scores.sum(1, keepdims=True)
    assert abs(actual - expected).max() / abs(expected).max() < attention.NEAR
    assert attention.away(actual, expected) > attention.NEAR
    assert np.isnan(attention.away(actual * np.nan, expected))


def test_pipes_stand_beside_the_model(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "model", lambda dim: [{"products": 76.0, "exp2": 40.0}])
    tool(tmp_path, monkeypatch, "ncu", NCU.format(metrics='","'.join(METRICS.values())))
    do("pipes 128", page, Rehearsed())
    text = page.read_text()
    assert "attention_forward_sm90: products 70 % (76 %), issue 40 % (nan %)" in text
    assert "exp2 52 % (40 %), shared 88 %" in text
    tool(tmp_path, monkeypatch, "ncu", "#!/bin/sh\necho '==ERROR== no permission'\nexit 1\n")
    with pytest.raises(SystemExit, match="no permission"):
        do("pipes 128", page, Rehearsed())


def test_tools_end_their_step_but_for_races(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broken in attention.TOOLS:
        tool(tmp_path, monkeypatch, "compute-sanitizer", SANITIZER.format(broken=broken))
        if broken == "racecheck":
            do(f"{broken} 256", page, Rehearsed())
        else:
            with pytest.raises(SystemExit, match=rf"{broken}: ended with 9\n.*\n.*Error: {broken}"):
                do(f"{broken} 256", page, Rehearsed())
        assert f"Error: {broken}" in (page.parent / f"{broken}-256.txt").read_text()
    do("memcheck 256", page, Rehearsed())
    text = page.read_text()
    assert "racecheck 256: Error: racecheck (not judged)." in text
    assert "memcheck 256: ERROR SUMMARY: 0 errors." in text


def test_the_page_says_what_was_measured() -> None:
    page = ROOT / "docs" / "performance.md"
    kept = json.loads(kept_at(page).read_text()) if kept_at(page).exists() else {}
    text = page.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) :].startswith("\n".join([BEGIN, *table(kept), END]))


def test_a_step_must_be_known(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["attention", str(page), "speed 65 causal"])
    with pytest.raises(SystemExit):
        attention.main()
    said = "no step is called ['speed 65 causal']; there are: forward 128 causal"
    assert said in capsys.readouterr().err


def test_steps_that_are_done_are_told(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(attention, "Here", Rehearsed)
    monkeypatch.setattr(attention, "do", lambda step, page, here: done.append(step))
    listed = tmp_path / "attention.json"
    monkeypatch.setattr(sys, "argv", ["attention", str(page), "pipes 64", "--json", str(listed)])
    attention.main()
    assert json.loads(listed.read_text())["ops"] == done == ["pipes 64"]
