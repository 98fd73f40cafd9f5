"""The sample of a run depends on the commit, and not on the date or the order of tests."""

import ast
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..conftest import SLOW, TURNS, features_of, left_out, sampled, skip_what_needs_a_gpu
from ..harness import sampling
from ..harness.parity import Case, KernelParity

TESTS = Path(__file__).parents[1]
CLOCK = re.compile(r"\btoordinal\(|\bdate\.today\(|\bdatetime\.(now|utcnow|today)\(")
# what is written down with its date: no verdict
DATED = {f"code/hardware/{name}.py" for name in ("__main__", "attention", "session")}


class Item(SimpleNamespace):
    """A stand-in for pytest's item, with what is read of it."""

    __hash__ = object.__hash__

    def get_closest_marker(self, name: str) -> bool:
        return name in vars(self).get("markers", ())


def emulated(cls: type, case: Case, dtype: str) -> Any:
    """Return a stand-in for pytest's item of a case in a dtype."""
    return Item(
        nodeid=f"{cls.__name__}[{case.label}-{dtype}]",
        cls=cls,
        originalname="test_emulated_kernels",
        callspec=SimpleNamespace(params={"case": case, "dtype": dtype}),
    )


def items_of(*ops: str) -> list[Any]:
    """Return stand-ins for two classes of each op, with 19 cases, of which two launch nothing."""
    cases = [Case(f"{rows} rows", rows=[rows], columns=5) for rows in range(1, 15)]
    cases += [Case("no columns", rows=[1], columns=0), Case("no rows", rows=[0], columns=5)]
    cases += [Case("gaps", gaps=True, rows=[2]), Case("eps", rows=[2], eps=0.5)]
    cases += [Case("weight", given=("weight",), rows=[2])]
    return [
        emulated(cls, case, dtype)
        for op in ops
        for cls in (type(name, (KernelParity,), {"op": op}) for name in (f"A{op}", f"B{op}"))
        for case in cases
        for dtype in ("float16", "bfloat16", "float32")
    ]


def test_the_order_of_tests_changes_no_sample() -> None:
    """Even if pytest-randomly shuffles tests before."""
    items = items_of("rms_norm_forward", "add")
    for day in range(6):
        first = {item.nodeid for item in sampled(items, day)}
        for seed in range(3):
            shuffled = random.Random(seed).sample(items, len(items))
            assert {item.nodeid for item in sampled(shuffled, day)} == first


def test_a_sample_has_every_class_dtype_operand_and_option() -> None:
    items = items_of("rms_norm_forward")
    features = set().union(*map(features_of, items))
    assert {"bfloat16", "weight", True, "empty", "('eps', 0.5)"} < features
    assert not any("columns" in str(feature) for feature in features)
    for day in range(TURNS):
        chosen = sampled(items, day)
        assert set().union(*map(features_of, chosen)) == features
        assert len(chosen) < len(items) / 6


def test_a_case_that_launches_nothing_stands_for_no_dtype() -> None:
    items = items_of("rms_norm_forward")
    empty = [item for item in items if "[no " in item.nodeid]
    assert len(empty) == len(items) * 2 / 19
    assert all(features_of(item) == {item.cls, "empty"} for item in empty)


def test_each_test_has_its_turn() -> None:
    items = items_of("rms_norm_forward", "add")
    taken = {item.nodeid for day in range(100, 100 + TURNS) for item in sampled(items, day)}
    assert taken == {item.nodeid for item in items}


def test_slow_tests_take_turns_and_others_are_always_there() -> None:
    slow: list[Any] = [Item(nodeid=f"slow[{n}]", markers=("slow",)) for n in range(23)]
    quick: list[Any] = [Item(nodeid=f"quick[{n}]", markers=("gpu",)) for n in range(23)]
    kernels = items_of("add")
    items = random.Random(1).sample(both := slow + quick + kernels, len(both))
    found = []
    for day in range(100, 100 + SLOW):
        left = left_out(items, day)
        assert left == left_out(both, day)
        assert not left.intersection(quick)
        assert left.issuperset({*kernels}.difference(sampled(kernels, day)))
        assert not left.intersection(sampled(kernels, day))
        taken = {*slow} - left
        assert len(taken) in (23 // SLOW, 23 // SLOW + 1)
        found += [item.nodeid for item in taken]
    assert sorted(found) == sorted(item.nodeid for item in slow)


def test_no_test_takes_turns_in_two_ways() -> None:
    """Where one way takes every third case and another every third test, some are never met."""
    several = 0
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        texts = {node.name: ast.unparse(node.body) for node in functions}
        ways = [rf"\b{name}\(" for name, text in texts.items() if "Sample." in text]
        for node in functions:
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if "pytest.mark.slow" in decorators:
                several += 1
                again = re.compile("|".join([r"\bSample\.", *ways]))
                assert not any(map(again.search, decorators)), f"{path.name}: {node.name}"
    assert several > 100


def test_what_takes_turns_is_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.Sample, "all", False)
    taken = []
    for day in range(40, 43):
        monkeypatch.setattr(sampling.Sample, "day", day)
        taken += sampling.Sample.one_in(3, "abcdefg")
    assert sorted(taken) == list("abcdefg")
    monkeypatch.setattr(sampling.Sample, "all", True)
    assert sampling.Sample.one_in(3, "abcdefg") == list("abcdefg")


def test_no_test_reads_the_calendar() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{number}"
        for path in sorted(TESTS.rglob("*.py"))
        if str(path.relative_to(TESTS)) not in DATED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if CLOCK.search(line)
    ]
    assert not found, "draw from Sample.day, or write down why a verdict may change with the date"


def test_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sampling.commits() == 0


def test_where_there_is_no_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sampling, "__file__", str(tmp_path / "sampling.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert sampling.commits() == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (  # Python would take UTF-8 for an ASCII locale, were it not told otherwise
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "tests read and write UTF-8, not .*; set PYTHONUTF8=1",
        ),
        ({"HOME": os.devnull}, "^tests/core/test_jit.py: [0-9]+\n*$"),  # where CuPy makes a folder
    ],
    ids=["locale", "home"],
)
def test_a_run_begins_or_says_what_it_needs(given: dict[str, str], said: str) -> None:
    kept = {name: v for name, v in os.environ.items() if name not in ("CUPY_CACHE_DIR", "LANG")}
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-qq"]
    done = subprocess.run(
        [sys.executable, *words, "tests/core/test_jit.py"], env=kept | given,
        cwd=Path(__file__).parents[2], capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    found = done.stdout + done.stderr
    assert re.search(said, found), found


@pytest.mark.parametrize("marked", [False, True])
def test_the_marker_alone_says_what_needs_a_gpu(marked: bool) -> None:
    """The keywords of a test include the ids of cases and the names of folders."""
    markers: list[Any] = []
    item: Any = SimpleNamespace(
        keywords={"gpu": True},
        get_closest_marker={"gpu": pytest.mark.gpu if marked else None}.get,
        add_marker=markers.append,
    )
    skip_what_needs_a_gpu([item])
    assert [marker.name for marker in markers] == ["skip"] * marked
