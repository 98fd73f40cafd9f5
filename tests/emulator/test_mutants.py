"""Delete one statement of a kernel: a run must notice, or it proves nothing.

A kernel's mutants are judged by the emulated cases of its op: a survivor asks for another case,
or the statement is redundant and goes.  Every run takes a sample that changes from day to day; all:

    UNSLOTH_CUPY_ALL_MUTANTS=1 OMP_NUM_THREADS=1 python -m pytest tests/emulator/test_mutants.py

(15 minutes on one core; ``-k rope`` for one file).
"""

import datetime
import importlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from unsloth_cupy import _jit
from unsloth_cupy._jit import KERNEL_DTYPES
from unsloth_cupy.errors import KernelError

from ..cuda_on_cpu import EmulatorError
from ..parity import KernelParity
from . import KERNELS, LIMITS, flash, gemm, primitives, split_k

SAMPLE = 5  # of each kind, a day
SYNCHRONISATION = re.compile(
    r"(__syncthreads|__syncwarp|__threadfence|cp_async_(wait<\d>|commit)"
    r"|mbarrier_(wait|arrive)(_cluster)?|cluster_(arrive|wait)|mbarrier_init_fence|wgmma_(wait<\d>|fence|commit)|fence_proxy_async|named_barrier_sync"
    r"|tma_store_wait<\d>)\([^;]*\);"
)
# a statement of one line, with the condition or loop that governs it; without a declaration or
# the value of a function there is no kernel left to judge
STATEMENT = re.compile(
    r"(?m)^ +(?! |return|const|float|int |long |using |bool |static|__shared__|T |Sums )[^/\n]+;$"
)

# Files that no op bears the name of are proved by the cases of another's.
SHARED = {
    "column_sum.cu": ["rms_norm"],
    "common/reduce.cuh": ["rms_norm", "softmax"],
    "common/philox.cuh": ["attention_forward"],
}
# Some deletions here are not seen yet by the cases there are: only a run of all judges them.
UNSETTLED = {"attention_forward.cu", "common/philox.cuh"}
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
        guarded = text[: match.start()].rpartition("#if")[2].startswith("def BUG")
        if not guarded or "#endif" in text[: match.start()].rpartition("#if")[2]:
            yield Mutant(folder, file, *match.span())


def sampled(mutants: list[Mutant], count: int = SAMPLE) -> list[Mutant]:
    if os.environ.get("UNSLOTH_CUPY_ALL_MUTANTS"):
        return mutants
    mutants = [mutant for mutant in mutants if mutant.file not in UNSETTLED]
    days = max(1, -(-len(mutants) // count))
    return mutants[datetime.date.today().toordinal() % days :: days]


SOURCES = _jit.source_root()
FILES = sorted({str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu")} | set(SHARED))
ORDER = [m for file in FILES for m in found(SOURCES, file, SYNCHRONISATION)]
OTHER = [m for file in FILES for m in found(SOURCES, file, STATEMENT) if m not in ORDER]
EXAMPLE = [m for file in EXAMPLES for m in found(KERNELS, file, SYNCHRONISATION)]


def proofs(file: str) -> dict[str, list[type[KernelParity]]]:
    """Return the Parity classes of the ops that prove a file, by op."""
    return {
        name: [
            value
            for value in vars(importlib.import_module(f"tests.ops.test_{name}")).values()
            if isinstance(value, type)
            and issubclass(value, KernelParity)
            and value is not KernelParity
        ]
        for name in SHARED.get(file, [Path(file).stem])
    }


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_file_has_a_proof(file: str) -> None:
    assert any(proofs(file).values()), f"no KernelParity in tests/ops is named after {file}"


@pytest.mark.parametrize("mutant", sampled(ORDER, 4 * SAMPLE) + sampled(OTHER), ids=str)
def test_a_kernel_without_a_statement_fails(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mutant.copy(tmp_path / "kernels_cu")
    monkeypatch.setattr(_jit, "source_root", lambda: folder)
    monkeypatch.setattr(_jit, "digest", lambda: "mutant")
    _jit._compiled.cache_clear()

    judges = proofs(mutant.file)
    cases = [
        (proof(), case) for found in judges.values() for proof in found for case in proof.cases
    ]
    try:
        dtypes = (*KERNEL_DTYPES[::2], KERNEL_DTYPES[1])  # bfloat16 is seldom code of its own
        for dtype, (proof, case) in itertools.product(dtypes, cases):
            proof.test_emulated_kernels(case, dtype)
    except (AssertionError, KernelError):
        return
    finally:
        _jit._compiled.cache_clear()
    if waiting := [name for name, found in judges.items() if not found]:
        pytest.skip(f"{waiting} have no kernel yet")
    pytest.fail("it survived: add a case that needs it, or delete it for good")


@pytest.mark.parametrize("mutant", sampled(EXAMPLE), ids=str)
def test_an_example_without_synchronisation_fails(mutant: Mutant, tmp_path: Path) -> None:
    folder = mutant.copy(tmp_path / "kernels")
    try:
        errors = [(r, r(folder=folder, **how)) for r, how in EXAMPLES[mutant.file]]
    except EmulatorError:
        return
    assert any(not error < LIMITS[r] for r, error in errors)
