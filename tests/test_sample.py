"""The sample of a run depends on the commit, and not on the date or the order of tests."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from . import sample
from .conftest import FEW, sampled, skip_what_needs_a_gpu
from .parity import KernelParity

TESTS = Path(__file__).parent
CLOCK = re.compile(r"\btoordinal\(|\bdate\.today\(|\bdatetime\.(now|utcnow|today)\(")
# what is written down with its date: no verdict
DATED = {"hardware/__main__.py", "hardware/attention.py", "hardware/session.py"}


def emulated(cls: type, label: str, dtype: str) -> Any:
    """Return a stand-in for pytest's item of a case in a dtype, with what ``sampled`` reads."""
    case = SimpleNamespace(label=label)
    return SimpleNamespace(
        nodeid=f"{cls.__name__}[{label}-{dtype}]",
        cls=cls,
        originalname="test_emulated_kernels",
        callspec=SimpleNamespace(params={"case": case}),
    )


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_the_order_of_tests_changes_no_sample(count: int) -> None:
    """Even if pytest-randomly shuffles tests before; of many cases a run takes every second."""
    classes = [type(name, (KernelParity,), {}) for name in ("TestA", "TestB")]
    items = [
        emulated(cls, str(label), dtype)
        for cls in classes
        for label in range(count)
        for dtype in ("float16", "bfloat16", "float32")
    ]
    for day in range(6):
        first = {item.nodeid for item in sampled(items, day)}
        assert len(first) in (
            (2 * count,) if count <= FEW else (2 * (count // 2), 2 * (count // 2 + 1))
        )
        for seed in range(3):
            shuffled = random.Random(seed).sample(items, len(items))
            assert {item.nodeid for item in sampled(shuffled, day)} == first
    days = 3 if count <= FEW else 6
    taken = [item.nodeid for day in range(days) for item in sampled(items, day)]
    assert sorted(taken) == sorted(item.nodeid for item in items)  # each takes its turn


def test_what_takes_turns_is_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample.Sample, "all", False)
    taken = []
    for day in range(40, 43):
        monkeypatch.setattr(sample.Sample, "day", day)
        taken += sample.Sample.one_in(3, "abcdefg")
    assert sorted(taken) == list("abcdefg")
    monkeypatch.setattr(sample.Sample, "all", True)
    assert sample.Sample.one_in(3, "abcdefg") == list("abcdefg")


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
    assert sample.commits() == 0


def test_where_there_is_no_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample, "__file__", str(tmp_path / "sample.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert sample.commits() == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (  # Python would take UTF-8 for an ASCII locale, were it not told otherwise
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "tests read and write UTF-8, not .*; set PYTHONUTF8=1",
        ),
        ({"HOME": os.devnull}, "^tests/test_jit.py: [0-9]+\n*$"),  # where CuPy makes a folder
    ],
    ids=["locale", "home"],
)
def test_a_run_begins_or_says_what_it_needs(given: dict[str, str], said: str) -> None:
    kept = {name: v for name, v in os.environ.items() if name not in ("CUPY_CACHE_DIR", "LANG")}
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-qq", "tests/test_jit.py"]
    done = subprocess.run(
        [sys.executable, *words], env=kept | given, cwd=Path(__file__).parent.parent,
        capture_output=True, encoding="utf-8", check=False,
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
