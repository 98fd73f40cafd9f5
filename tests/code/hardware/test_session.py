"""A session, rehearsed without a GPU: tests that pass, fail, hang, crash and lose the device."""

import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from unsloth_cupy.bench.report import changed, check_markers, confirmed

from ...core import test_launches
from ..programs import performance
from . import fixtures, processes, session
from .fixtures import read
from .session import HERE, Results, Session, in_order, keep_fixtures

CUPY = """
lost = False

class cuda:
    is_available = staticmethod(lambda: True)

    class runtime:
        @staticmethod
        def deviceSynchronize():
            if lost:
                raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access")
"""
TESTS = """
import os, time, warnings
import cupy
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", "abc")
def test_passes(case, dtype, record_property):
    record_property("took", "3 us")
    assert not cupy.lost, "the process should not be used again"
    warnings.warn("an old name")

def test_fails():
    assert 1 + 1 == 3, "sums"

def test_hangs():
    time.sleep(60)

@pytest.mark.parametrize("times", range(3))
def test_crashes(times):
    os.abort()

def test_loses_the_device():
    cupy.lost = True

def test_skips():
    pytest.skip("needs another GPU")

def test_ends():
    assert not cupy.lost
"""
SETTINGS = """
[pytest]
markers = gpu
filterwarnings = error
addopts = -n auto
"""
BENCH = """
import json, os, subprocess, sys, time
at = sys.argv.index("--json")
ops, done = sys.argv[1:at], []

def tell():
    with open(sys.argv[at + 1] + ".partial", "w") as file:
        json.dump({"ops": done, "said": {"two": "twice"}}, file)
    os.replace(file.name, sys.argv[at + 1])

tell()
with open("processes", "a") as file:
    print(*ops, file=file)
for op in ops:
    if op.startswith("breaks"):
        sys.exit("it broke")
    if op == "waits":
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
    done.append(op)
    tell()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with tests of its own, and a CuPy of its own."""
    for name, text in (("cupy", CUPY), ("test_one", TESTS), ("bench", BENCH)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_two.py").write_text("import no_such_package\n")
    monkeypatch.setattr(session, "BENCH", (sys.executable, str(tmp_path / "bench.py")))
    return tmp_path


def outcomes(results: Results) -> dict[str, str]:
    return {name.partition("::")[2]: line["outcome"] for name, line in results.lines.items()}


@pytest.mark.slow
def test_every_end_is_told_and_the_rest_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "SECONDS", 2)
    monkeypatch.setattr(session, "BREAKS", 1)
    results = Results(root / "found", "now")
    Session(results, 300, 2, root).tests(".")
    actual = outcomes(results)
    assert actual.pop("test_crashes[1]") in ("crashed", "left out"), "it may have begun before"
    assert actual == {
        **{f"test_passes[{c}-{d}]": "passed" for c in "abc" for d in ("float16", "float32")},
        **{"test_crashes[0]": "crashed", "test_crashes[2]": "left out"},
        **{"test_fails": "failed", "test_hangs": "hung"},
        **{"test_loses_the_device": "failed", "test_skips": "skipped", "test_ends": "passed"},
        "": "failed",  # test_two.py
    }
    results.show()
    text = (root / "found" / "report.md").read_text()
    assert "| test_one.py | 7 | 2 | 1 | " in text
    for said in (
        "AssertionError: sums",
        "no end in 2 s\nStack (most recent call first)",
        "in test_hangs",
        "ended with -6",
        "Fatal Python error: Aborted",
        "cudaErrorIllegalAddress: an illegal memory access",
        "not collected: ModuleNotFoundError: No module named 'no_such_package'",
        "6 x UserWarning: an old name",
        "test_passes[a-float16]: took 3 us",
    ):
        assert said in text, text
    assert "test_one.py::test_fails: failed: AssertionError: sums" in capsys.readouterr().out

    again = Results(root / "found", "now")  # only what did not pass
    (root / "test_one.py").write_text(TESTS.replace("1 + 1", "1 + 2").replace("(60)", "(0)"))
    Session(again, 300, 1, root).tests(".")
    lines = (root / "found" / "results.jsonl").read_text().split()
    assert sum("test_passes" in line for line in lines) == 6
    assert outcomes(again)["test_hangs"] == outcomes(again)["test_fails"] == "passed"


def test_a_session_that_is_cut_off_goes_on_where_it_stopped(root: Path) -> None:
    results = Results(root, "now")
    Session(results, 0, 2, root).tests(".")
    assert outcomes(results) == {}, "there was no time to collect"
    with (root / "results.jsonl").open("a") as file:
        file.write('{"name": "test_one.py::te')  # as a process that is killed leaves it
    done = Results(root, "now")
    done.add("test_one.py::test_ends", "passed")
    assert Results(root, "now").waiting(["test_one.py::test_ends", "x"]) == ["x"]
    assert Results(root, "later").waiting(["test_one.py::test_ends"]) != [], "things changed"


def test_an_error_of_pytest_itself_is_told(root: Path) -> None:
    hook = "def pytest_collection_modifyitems(): raise ValueError('of a hook')"
    (root / "conftest.py").write_text(hook)
    results = Results(root, "now")
    Session(results, 300, 1, root).tests(".")
    assert results.lines["collecting"]["outcome"] == "crashed"
    assert "ValueError: of a hook" in results.lines["collecting"]["said"]


def test_what_passed_runs_again_if_asked(root: Path) -> None:
    results = Results(root, "now")
    results.add("test_one.py::test_skips", "passed")
    Session(results, 300, 1, root).tests(".", chosen=lambda name: "skips" in name, again=True)
    assert outcomes(results)["test_skips"] == "skipped"


def test_what_is_cut_off_by_the_end_is_no_failure(root: Path) -> None:
    (root / "test_one.py").write_text(
        "import pytest, time\n@pytest.mark.gpu\ndef test_long():\n    time.sleep(60)\n"
    )
    results = Results(root, "now")
    begun = Session(results, 2, 1, root)
    begun.tests("test_one.py")
    assert begun.left() == 0
    assert "test_long" not in outcomes(results)


def test_the_most_telling_come_first() -> None:
    names = ["t.py::a[x-float16]", "t.py::a[y-float16]", "t.py::a[x-float32]", "t.py::b"]
    names += [f"{HERE}[dp4a]", "t.py::c[1]", "t.py::c[2]", "t.py::d"]
    assert in_order(names, {"t.py::b"}, {"t.py::d"}) == [
        *(f"{HERE}[dp4a]", "t.py::d", "t.py::a[x-float16]", "t.py::a[x-float32]", "t.py::c[1]"),
        *("t.py::a[y-float16]", "t.py::c[2]", "t.py::b"),
    ]


def test_what_failed_before_a_change_is_told_from_what_fails_now(tmp_path: Path) -> None:
    results = Results(tmp_path, "before")
    results.add("a", "failed", 1, "wrong")
    results.add("b", "passed")
    changed = Results(tmp_path, "after")
    assert changed.failed_before == {"a"}
    assert changed.lines == {}


def running(group: int) -> bool:
    """Return whether a group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_times_go_on_after_an_op_that_breaks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hung step started is killed with it, as its pipes and the GPU would be kept busy."""
    ended: list[int] = []
    original = os.killpg
    monkeypatch.setattr(os, "killpg", lambda *of: (of[1] and ended.append(of[0]), original(*of)))
    results = Results(root, "now")
    results.add("time known", "passed")
    ops = ["one", "breaks", "two", "known", "waits", "three"]
    Session(results, 300, 1, root).times(ops, quiet=8, process_of=lambda op: "same")
    assert len(ended) == 3
    until = time.monotonic() + 30
    while any(map(running, ended)):  # a killed process takes a moment
        assert time.monotonic() < until
        time.sleep(0.1)
    assert results.lines["time two"]["said"] == "twice"
    actual = {name.partition(" ")[2]: line["outcome"] for name, line in results.lines.items()}
    assert actual == {
        **dict.fromkeys(("known", "one", "two", "three"), "passed"),
        **{"breaks": "failed", "waits": "hung"},
    }
    assert results.lines["time breaks"]["said"] == "it broke"


def test_steps_that_belong_together_share_a_process(root: Path) -> None:
    """Where one failed, the rest goes on in another."""
    results, command = Results(root, "now"), (sys.executable, str(root / "bench.py"))
    steps = ["a b", "breaks 1", "breaks 2", "a d"]
    own: Any = {"what": "check", "process_of": lambda step: step.split()[0]}
    Session(results, 300, 1, root).times(steps, command=command, **own)
    assert {name: line["outcome"] for name, line in results.lines.items()} == {
        f"check {step}": "failed" if "breaks" in step else "passed" for step in steps
    }
    processes = (root / "processes").read_text().splitlines()
    assert processes == ["a b", "breaks 1 breaks 2", "breaks 2", "a d"]


def test_times_end_where_nothing_can_be_timed(root: Path) -> None:
    results = Results(root, "now")
    (root / "bench.py").write_text("raise SystemExit('no GPU')")
    Session(results, 300, 1, root).times(["one", "two", "three"])
    assert [*results.lines] == ["time one", "time two"]


def test_a_session_that_is_stopped_leaves_no_process_and_no_failure(root: Path) -> None:
    results = Results(root, "now")
    begun = Session(results, 300, 1, root)

    def stop_after_the_first() -> None:
        while not results.lines:
            time.sleep(0.1)
        begun.stop()

    threading.Thread(target=stop_after_the_first).start()
    begun.times(["one", "waits"], process_of=lambda op: "same")
    assert [*results.lines] == ["time one"]
    assert not processes.RUNNING


@pytest.mark.parametrize("others", ["", "12, python"])
def test_others_on_the_gpu_are_told_before_times(
    others: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CALM", 0)
    tool(root, monkeypatch, "nvidia-smi", f"echo '{others}'")
    results = Results(root, "now")
    begun = Session(results, 300, 1, root)
    begun.quiet()
    begun.rates()
    assert results.lines["quiet"]["outcome"] == ("failed" if others else "passed")
    assert others in results.lines["quiet"]["said"]
    assert results.lines["rates"]["outcome"] == "failed", "there is no GPU"
    assert not begun.left(), "nothing else would run"


def test_steps_of_some_tests_know_their_names() -> None:
    assert hasattr(test_launches, session.ALONE)
    assert hasattr(test_launches, session.COMPILED)


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_primitives_that_passed_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixtures, "FILE", tmp_path / "fixtures.json")
    lines: dict[str, Any] = {f"{HERE}[dp4a]": {"outcome": "passed"}}
    lines[f"{HERE}[mma s8]"] = {"outcome": "failed"}
    keep_fixtures(lines, "a GPU")
    assert {name: kept.device for name, kept in read().items()} == {"dp4a": "a GPU"}
    assert json.loads((tmp_path / "fixtures.json").read_text())["dp4a"]["digest"]


@pytest.mark.parametrize("lacks", [(), ("torch",), ("click",), ("pytest", "rich")])
def test_what_a_machine_lacks_is_said_first_and_left_out(
    lacks: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cupy = pytest.importorskip("cupy", reason="what it can be asked is not an invention")
    about = {"name": b"GPU", "totalGlobalMem": 80 << 30, "major": 9, "minor": 0}
    done: list[Any] = []

    def noted(name: str) -> Any:
        return lambda self, *given, what="", **more: done.append((what or name, *given))

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda number: about)
    monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: 13000)
    monkeypatch.setattr(session, "FILE", tmp_path / "fixtures.json")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in lacks else importlib.util
    )
    for step in ("rates", "tests", "quiet", "times", "beside"):
        monkeypatch.setattr(Session, step, noted(step))
    folder = tmp_path / "found"
    session.everything(folder, 1)
    steps = [name for name, *_ in done]
    printed = capsys.readouterr().out
    assert ("no tests without pytest" in printed) == ("tests" not in steps) == ("pytest" in lacks)
    untimed = bool({"click", "rich"} & {*lacks})
    assert ("no times without" in printed) == ("times" not in steps) == untimed
    assert "GPU; driver 13000; CuPy 1" in (folder / "report.md").read_text()
    assert ("check" in steps) == ("tests" in steps)
    if not lacks:
        timed = ["tests", "quiet", "times"] * 2
        assert steps[:4] == ["rates", "tests", "tests", "beside"]
        assert steps[4:] == [*timed, "quiet", "tests", "check", "beside"]
        (whole, *only), (rest,) = (given for what, *given in done if what == "beside")
        assert (whole, *only) == ("peers", "--only", "lora", "full", "packed")
        assert rest == "ops"
    if "times" in steps:
        (first, *_), (rest, *options) = (given for what, *given in done if what == "times")
        known = confirmed(folder / "performance.md")
        assert first[0] == "cross_entropy_forward"
        assert rest[-1] == session.LAST
        assert len({*first, *rest}) == len(first) + len(rest) > 50
        assert {*first} | {session.LAST} >= performance.untimed(known).ops()
        stale = [n for n, each in known.items() if any(changed(r["sources"]) for r in each["rows"])]
        assert {performance.owner(name) for name in stale}.isdisjoint(rest[:-1])
        assert options[:2] == ["--write", str(folder / "performance.md")]
        assert options[2:] == ([] if lacks else ["--peers"])
        assert check_markers(folder / "performance.md") is None
    if not lacks:
        about["major"] = 7
        with pytest.raises(SystemExit, match="kernels need a GPU of sm_80 or newer"):
            session.everything(folder, 1)
