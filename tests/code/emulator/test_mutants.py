"""Delete one statement of a kernel: a run must notice, or it proves nothing.

A file's mutants are judged by the emulated cases of the ops that launch it, a header's by those of
the files that include it.  A survivor asks for another case, or the statement is redundant and
goes.  Every run takes a sample, as ``tests/harness/sampling.py`` says; all of them:

    UNSLOTH_CUPY_ALL_MUTANTS=1 OMP_NUM_THREADS=1 pytest tests/code/emulator/test_mutants.py

(that takes long; ``-k rope`` for one file).
"""

import functools
import importlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from unsloth_cupy.core import kernel, source
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import KernelError

from ...harness.parity import Case, KernelParity
from ...harness.sampling import Sample
from ...harness.tracked import ROOT, tracked
from ...machines.cuda_on_cpu import EmulatorError
from . import KERNELS, LIMITS, flash, gemm, primitives, split_k

SAMPLE = 1  # of each kind, in one run
ALL = bool(os.environ.get("UNSLOTH_CUPY_ALL_MUTANTS"))
SYNCHRONISATION = re.compile(
    r"(?<!void )(__syncthreads|__syncwarp|__threadfence(_block)?|cp_async_(wait<\w+>|commit)"
    r"|mbarrier_(wait|arrive)(_cluster)?|cluster_(arrive|wait)|mbarrier_init_fence"
    r"|wgmma_(wait<\w+>|fence|commit)|fence_proxy_async|named_barrier_(sync|arrive)"
    r"|tma_store_(wait<\w+>|commit))\([^;]*\);"
)
# a statement of one line, with the condition or loop that governs it; without a declaration or
# the value of a function there is no kernel left to judge, and what speaks of registers alone is
# judged by tests/code/test_sass.py, or spills without it (tests/code/test_compile.py)
STATEMENT = re.compile(
    r"(?m)^ +(?! |(else )?return|const|float|int |long |using |bool |static|__shared__|(un)?signed "
    r"|[A-Z]\w*(<.*>)? [*&]?\w+(;| =|\[|\(|\{)"
    r"|setmaxnreg|wgmma_name|if constexpr \(VARLEN\) job = jobs\.again"
    r"|(if constexpr \(DX && DY( && !SUM_DQ)?\) )?wgmma_free)"
    r"(?:[^/\n]|/(?![/*]))+;$"
)

EXAMPLES: dict[str, list[tuple[Callable[..., float], dict[str, Any]]]] = {
    "flash.cu": [(flash, {"tokens": 256})],
    "gemm.cu": [(gemm, {"seed": 3})],
    "split_k.cu": [(split_k, {}), (split_k, {"last": True})],
    "cluster.cu": [(primitives, {"seed": 0}), (primitives, {"seed": 3})],
}


class Mutant(NamedTuple):
    """A file of a folder without the characters start to end."""

    folder: Path
    file: str
    start: int
    end: int

    def __str__(self) -> str:
        text = (self.folder / self.file).read_text()
        line = text[: self.start].count("\n") + 1
        return f"{Path(self.file).name}:{line} {text[self.start : self.end].strip()[:50]}"

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.folder, to)
        path = to / self.file
        text = path.read_text()
        path.write_text(text[: self.start] + ";" + text[self.end :])
        return to


def found(folder: Path, file: str, pattern: re.Pattern[str]) -> Iterator[Mutant]:
    text = (folder / file).read_text()
    for match in pattern.finditer(text):
        guarded = text[: match.start()].rpartition("#if")[2].startswith(("def BUG", "def PLAIN"))
        if not guarded or "#endif" in text[: match.start()].rpartition("#if")[2]:
            yield Mutant(folder, file, *match.span())


def sampled(mutants: list[Mutant], count: int = SAMPLE) -> list[Mutant]:
    if ALL:
        return mutants
    days = max(1, -(-len(mutants) // count))
    return mutants[Sample.day % days :: days]


SOURCES = source.source_root()
TESTS = ROOT / "tests"
# Headers that stand in for others: kernels run without those.
TWINS = TESTS / "machines/cuda_on_cpu/include"


@functools.cache
def texts(pattern: str) -> dict[Path, str]:
    return {path: path.read_text() for path in tracked(pattern)}


def mentions(text: str, pattern: str) -> list[Path]:
    return [path for path, whole in texts(pattern).items() if text in whole]


def modules(file: str) -> list[str]:
    """Return the modules that launch a file, and those that use one without tests of its own."""
    paths, names = mentions(f'"{file}"', "unsloth_cupy/**/*.py"), []
    for path in paths:
        folder, name = path.parent, path.stem.strip("_")
        names += [
            name,
            f"{folder.name}_{name}",
        ]  # attention/_backward.py has test_attention_backward
        if not (TESTS / f"ops/test_{name}.py").exists():
            users = mentions(f"{folder.name}.{path.stem} import ", "unsloth_cupy/**/*.py")
            beside = f"{folder.relative_to(ROOT).as_posix()}/**/*.py"
            users += mentions(f"from .{path.stem} import ", beside)
            paths += [user for user in users if user not in paths]
    return names


@functools.cache
def provers(file: str) -> tuple[str, ...]:
    """Return the modules of tests/ops whose kernels a file is part of, its namesake first."""
    if file.endswith(".cuh"):
        written = f'#include "{file}"', f"#include <{file}>"
        users = [path for text in written for path in mentions(text, "kernels_cu/**/*.cu*")]
        judged = {user: provers(str(user.relative_to(SOURCES))) for user in users}
        # a kernel that few modules prove is soon done: attention's cases come last
        nearest = sorted(users, key=lambda path: (path.suffix == ".cuh", len(judged[path]), path))
        listed = [prover for user in nearest for prover in judged[user]]
    else:
        names = [Path(file).stem, *modules(file)]
        listed = [name for name in names if (TESTS / f"ops/test_{name}.py").exists()]
    return tuple(dict.fromkeys(listed))


def proofs(file: str) -> Iterator[list[type[KernelParity]]]:
    """Yield the Parity classes that prove a file, module by module."""
    for name in provers(file):
        module = importlib.import_module(f"tests.ops.test_{name}")
        yield [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, KernelParity)
            and value.__module__ == module.__name__  # not imported
        ]


def judges(file: str) -> Iterator[tuple[KernelParity, Case]]:
    """Yield the cases that prove a file: of each module the first case of each class, and so on.

    The cases of a class are alike; a statement that one does not need, another class may.
    """
    for classes in proofs(file):
        each = ([(proof(), case) for case in proof.cases] for proof in classes if proof.cases)
        for turn in itertools.zip_longest(*each):
            yield from filter(None, turn)


FILES = [
    file
    for file in (str(path.relative_to(SOURCES)) for path in tracked("kernels_cu/**/*.cu*"))
    if file.endswith(".cu") or (provers(file) and not (TWINS / file).exists())
]
ORDER = [m for file in FILES for m in found(SOURCES, file, SYNCHRONISATION)]
ENDS = {(m.file, m.end) for m in ORDER}
OTHER = [
    m for file in FILES for m in found(SOURCES, file, STATEMENT) if (m.file, m.end) not in ENDS
]
EXAMPLE = [m for file in EXAMPLES for m in found(KERNELS, file, SYNCHRONISATION)]


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_file_has_a_proof(file: str) -> None:
    assert any(proofs(file)), f"no KernelParity in tests/ops has an op that runs {file}"


def _forget() -> None:
    """Make calls compile again: ops keep kernels, and replay launches of those they know."""
    kernel._kernel.cache_clear()
    for op in OPS.values():
        op.routes.clear()


# of a header that many kernels share, a statement that few need is missed by cases for minutes
SHORT = [mutant for mutant in OTHER if mutant.file.endswith(".cu")]
DRAWN = sampled(ORDER + (OTHER if ALL else SHORT))


@pytest.mark.parametrize("mutant", DRAWN, ids=str)
def test_a_kernel_without_a_statement_fails(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mutant.copy(tmp_path / "kernels_cu")
    monkeypatch.setattr(source, "source_root", lambda: folder)
    monkeypatch.setattr(source, "digest", lambda: "mutant")
    _forget()

    dtypes = (*KERNEL_DTYPES[::2], KERNEL_DTYPES[1])  # bfloat16 is seldom code of its own
    try:
        for dtype, (proof, case) in itertools.product(dtypes, judges(mutant.file)):
            proof.test_emulated_kernels(case, dtype)
    except (AssertionError, KernelError):
        return
    finally:
        _forget()
    pytest.fail("it survived: add a case that needs it, or delete it for good")


@pytest.mark.parametrize("mutant", sampled(EXAMPLE), ids=str)
def test_an_example_without_synchronisation_fails(mutant: Mutant, tmp_path: Path) -> None:
    folder = mutant.copy(tmp_path / "kernels")
    try:
        errors = [(r, r(folder=folder, **how)) for r, how in EXAMPLES[mutant.file]]
    except EmulatorError:
        return
    assert any(not error < LIMITS[r] for r, error in errors)
