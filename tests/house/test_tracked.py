"""Tests read the files that git tracks, and no others."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..harness import tracked as listing
from ..harness.tracked import ROOT, names, tracked

FOLDERS = (
    "docs/*.md",
    "docs/guide/a.md",
    "kernels_cu/common/a.cuh",
    "kernels_cu/a.cu",
    "tests/a.py",
)


def written(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", root, *words], check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with some tracked files, and stray ones beside them."""
    (root := tmp_path / "here").mkdir()
    git(root, "init", "-q")
    written(root, "a.py", "kernels_cu/a.cu", "kernels_cu/common/a.cuh", "tests/a.py", "gone.py")
    git(root, "add", ".")
    (root / "gone.py").unlink()
    written(root, "stray.py", "stray.md", "kernels_cu/stray.cu", "tests/test_stray.py")
    written(root, ".venv/lib/a.py", "tests/__pycache__/a.py")
    monkeypatch.delenv("UNSLOTH_CUPY_GIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(listing, "ROOT", root)
    names.cache_clear()
    yield root
    names.cache_clear()


def listed(root: Path, pattern: str = "**/*") -> list[str]:
    return [path.relative_to(root).as_posix() for path in tracked(pattern)]


def test_stray_files_are_not_listed(root: Path) -> None:
    assert listed(root) == ["a.py", "kernels_cu/a.cu", "kernels_cu/common/a.cuh", "tests/a.py"]


def test_patterns_are_those_of_glob(root: Path) -> None:
    assert listed(root, "*.py") == ["a.py"]
    assert listed(root, "**/*.py") == ["a.py", "tests/a.py"]
    assert listed(root, "kernels_cu/*") == ["kernels_cu/a.cu"]
    assert listed(root, "kernels_cu/**/*.cu*") == ["kernels_cu/a.cu", "kernels_cu/common/a.cuh"]
    assert listed(root, "*/*/a.*") == ["kernels_cu/common/a.cuh"]


def test_a_copy_asks_the_repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CI tests a copy without .git, in which it installs an environment."""
    expected = listed(root)
    monkeypatch.setenv("UNSLOTH_CUPY_GIT", str(root.rename(root.with_name("repository"))))
    written(root, *expected, "stray.py", ".venv/lib/a.py")
    names.cache_clear()
    assert listed(root) == expected


@pytest.mark.parametrize("lost", ["git", "repository"])
def test_where_no_git_answers_all_but_hidden_files_count(
    root: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    if lost == "git":
        monkeypatch.setenv("PATH", os.devnull)
    else:
        (root / ".git").rename(root.parent / "elsewhere")
    names.cache_clear()
    strays = {"stray.py", "stray.md", "kernels_cu/stray.cu", "tests/test_stray.py"}
    files = {"a.py", "kernels_cu/a.cu", "kernels_cu/common/a.cuh", "tests/a.py"}
    assert {*listed(root)} == files | strays


ALL_FILES = (  # they hash what kernels are compiled from, which is all that lies there, or list it
    "tests/code/hardware/session.py",
    "tests/code/programs/variants.py",
    "tests/harness/tracked.py",
)


def test_no_test_lists_the_folders_of_the_project() -> None:
    """``tracked`` does; a stray file of a user's must fail no test."""
    calls = ("glob", "rglob", "iterdir", "listdir", "walk")
    folder = re.compile(r"\b[A-Z]{2,}\b|\b__file__\b|\bsource_root\b")
    listings = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in tracked("tests/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in calls
        if folder.search(ast.unparse(node))
    ]
    assert [line for line in listings if line.partition(":")[0] not in ALL_FILES] == []


def test_commits_that_pages_name_exist() -> None:
    """A commit that was rebased has another hash."""

    def output(*words: str) -> str:
        command = ["git", "-C", ROOT, *words]
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout

    if output("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("needs a repository with its whole history")
    history = output("rev-list", "HEAD")
    pages = "\n".join(path.read_text() for path in tracked("docs/**/*.md"))
    named = {*re.findall(r"\bcommit ([0-9a-f]{7,40})\b", pages)}
    assert len(named) > 20
    assert not [each for each in named if f"\n{each}" not in f"\n{history}"]
