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

from ..conftest import skip_what_needs_a_gpu
from ..harness import sampling
from ..harness.parity import Case, KernelParity
from ..harness.sampling import (
    SLOW,
    TURNS,
    Emulated,
    chosen,
    emulated_cases,
    features_of,
    in_sample,
    sampled,
)
from ..harness.tracked import ROOT, tracked

TESTS = ROOT / "tests"
CLOCK = re.compile(r"\btoordinal\(|\bdate\.today\(|\bdatetime\.(now|utcnow|today)\(")
# what is written down with its date: no verdict
DATED = {"code/hardware/session.py"}


def emulated_of(op: str) -> list[Emulated]:
    """Return those of two classes with 19 cases, of which two launch nothing."""
    cases = [Case(f"{rows} rows", rows=[rows], columns=5) for rows in range(1, 15)]
    cases += [Case("no columns", rows=[1], columns=0), Case("no rows", rows=[0], columns=5)]
    cases += [Case("gaps", gaps=True, rows=[2]), Case("eps", rows=[2], eps=0.5)]
    cases += [Case("weight", given=("weight",), rows=[2])]
    return [
        Emulated(proof, case, dtype)
        for proof in (type(name, (KernelParity,), {"op": op}) for name in ("TestA", "TestB"))
        for case in cases
        for dtype in ("float16", "bfloat16", "float32")
    ]


def test_the_order_of_tests_changes_no_sample() -> None:
    """Even if pytest-randomly shuffles tests before."""
    tests = emulated_of("rms_norm_forward")
    for day in range(6):
        expected = {*map(str, sampled(tests, day))}
        for seed in range(3):
            shuffled = random.Random(seed).sample(tests, len(tests))
            assert {*map(str, sampled(shuffled, day))} == expected


def test_a_sample_has_every_class_dtype_operand_and_option() -> None:
    tests = emulated_of("rms_norm_forward")
    features = set().union(*map(features_of, tests))
    assert {"bfloat16", "weight", True, "empty", "('eps', 0.5)"} < features
    assert not any("columns" in str(feature) for feature in features)
    for day in range(TURNS):
        taken = sampled(tests, day)
        assert set().union(*map(features_of, taken)) == features
        assert len(taken) < len(tests) / 6


def test_a_case_that_launches_nothing_stands_for_no_dtype() -> None:
    tests = emulated_of("rms_norm_forward")
    empty = [test for test in tests if test.case.label.startswith("no ")]
    assert len(empty) == len(tests) * 2 / 19
    assert all(features_of(test) == {test.proof, "empty"} for test in empty)


def test_each_emulated_case_has_its_turn() -> None:
    tests = emulated_of("rms_norm_forward")
    taken = {str(test) for day in range(100, 100 + TURNS) for test in sampled(tests, day)}
    assert taken == {*map(str, tests)}


def test_each_slow_test_has_its_turn_and_others_are_always_there() -> None:
    names = [f"tests/x.py::test[{n}]" for n in range(700)]
    taken = [name for day in range(100, 100 + SLOW) for name in names if is_in(name, day)]
    assert sorted(taken) == sorted(names)
    counts = [sum(is_in(name, day) for name in names) for day in range(SLOW)]
    assert 80 < min(counts) <= max(counts) < 120
    assert all(in_sample(name, None, slow=False, day=day) for name in names for day in range(SLOW))


def is_in(name: str, day: int) -> bool:
    return in_sample(name, None, slow=True, day=day)


def test_cases_of_an_op_stand_in_all_its_files() -> None:
    """So a run of one file takes what a run of all takes of it."""
    every = emulated_cases("attention_forward")
    assert len({test.proof.__module__ for test in every}) > 2
    assert len({*map(str, every)}) == len(every)
    taken = [test for test in every if in_sample("", test, slow=False, day=3)]
    assert {*map(str, taken)} == chosen("attention_forward", 3)
    assert set().union(*map(features_of, taken)) == set().union(*map(features_of, every))


@pytest.mark.slow
def test_pytest_collects_the_sample_that_it_names() -> None:
    """The same cases of a file alone, beside another file of its op, and by their names."""
    other, file = (f"tests/ops/test_attention_{name}.py" for name in ("decode", "forward"))
    sample, every = collected("--day", "5", file), collected("--sample", "all", file)
    assert {*sample} < {*every}
    assert sample == [case for case in collected("--day", "5", other, file) if file in case]
    assert sample == collected("--day", "5", *every)


def collected(*arguments: str) -> list[str]:
    """Return the names of the emulated cases that pytest collects."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if "::test_emulated_kernels[" in line]


def test_no_test_takes_turns_in_two_ways() -> None:
    """Where one way takes every third case and another every third test, some are never met."""
    several = 0
    for path in tracked("tests/**/test_*.py"):
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
    actual = [
        f"{path.relative_to(TESTS)}:{number}"
        for path in tracked("tests/**/*.py")
        if str(path.relative_to(TESTS)) not in DATED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if CLOCK.search(line)
    ]
    assert not actual, "draw from Sample.day, or write down why a verdict may change with the date"


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
        cwd=ROOT, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    actual = done.stdout + done.stderr
    assert re.search(said, actual), actual


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
