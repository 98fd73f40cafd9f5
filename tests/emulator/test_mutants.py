"""Delete one statement of a kernel: a run must notice, or it proves nothing.

Synchronisation of kernels_cu is deleted on every run; other statements, and the examples', on a
sample that changes from day to day.  UNSLOTH_CUPY_ALL_MUTANTS=1 runs them all.
"""

import datetime
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from unsloth_cupy import _jit
from unsloth_cupy._op import OPS
from unsloth_cupy.errors import KernelError

from ..cuda_on_cpu import Emulator, EmulatorError
from ..parity import Case, _compare_kernels
from . import KERNELS, LIMITS, flash, gemm, split_k

SAMPLE = 5  # of each kind, a day
SYNCHRONISATION = re.compile(
    r"(__syncthreads|__syncwarp|__threadfence|cp_async_(wait<\d>|commit)|mbarrier_(wait|arrive)"
    r"|mbarrier_init_fence|wgmma_(wait<\d>|fence|commit)|fence_proxy_async|named_barrier_sync"
    r"|tma_store_wait<\d>)\([^;]*\);"
)
# a statement of one line that declares nothing; prefetches and unrolling change no result
STATEMENT = re.compile(
    r"(?m)^ +(?!const\b|float|int |long |using |bool |__shared__|static)[^/\n]+;$"
)

# Ragged at every edge: rows of a block, columns of a row, rows of a group.
CASES = {
    "rms_norm_forward": [
        (np.float16, Case("", rows=[2, 70], hidden=136, given=["residual", "bias"], offset=1.0)),
        (np.float16, Case("", rows=[20], hidden=1032, given=["residual", "bias"], offset=1.0)),
        (np.float32, Case("", rows=[6], hidden=16388, given=["residual", "bias"], offset=1.0)),
    ],
}
OWNERS = {
    "rms_norm.cu": "rms_norm_forward",
    "column_sum.cu": "rms_norm_forward",
    "common/reduce.cuh": "rms_norm_forward",
}
EXAMPLES: dict[str, list[tuple[Callable[..., float], dict[str, Any]]]] = {
    "flash.cu": [(flash, {"tokens": 256})],
    "gemm.cu": [(gemm, {"seed": 3})],
    "split_k.cu": [(split_k, {}), (split_k, {"last": True})],
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


def sampled(mutants: list[Mutant]) -> list[Mutant]:
    if os.environ.get("UNSLOTH_CUPY_ALL_MUTANTS"):
        return mutants
    days = -(-len(mutants) // SAMPLE)
    return mutants[datetime.date.today().toordinal() % days :: days]


SOURCES = _jit.source_root()
ORDER = [m for file in OWNERS for m in found(SOURCES, file, SYNCHRONISATION)]
OTHER = [m for m in found(SOURCES, "rms_norm.cu", STATEMENT) if m not in ORDER]
OTHERS = [m for m in found(KERNELS, "flash.cu", SYNCHRONISATION)]
OTHERS += [m for file in ("gemm.cu", "split_k.cu") for m in found(KERNELS, file, SYNCHRONISATION)]


@pytest.mark.parametrize("mutant", ORDER + sampled(OTHER), ids=str)
def test_a_kernel_without_a_statement_fails(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mutant.copy(tmp_path / "kernels_cu")
    monkeypatch.setattr(_jit, "source_root", lambda: folder)
    monkeypatch.setattr(_jit, "digest", lambda: "mutant")
    _jit._compiled.cache_clear()

    def run(function: Callable[[], Any]) -> Any:
        with _jit.using(Emulator()):
            return function()

    def prove(owner: str) -> None:
        for dtype, case in CASES[owner]:
            _compare_kernels(OPS[owner], case, np.dtype(dtype), run)

    try:
        with pytest.raises((AssertionError, KernelError)):
            prove(OWNERS[mutant.file])
    finally:
        _jit._compiled.cache_clear()


@pytest.mark.parametrize("mutant", sampled(OTHERS), ids=str)
def test_an_example_without_synchronisation_fails(mutant: Mutant, tmp_path: Path) -> None:
    folder = mutant.copy(tmp_path / "kernels")
    try:
        errors = [(r, r(folder=folder, **how)) for r, how in EXAMPLES[mutant.file]]
    except EmulatorError:
        return
    assert any(not error < LIMITS[r] for r, error in errors)


def test_every_kernel_file_has_an_owner() -> None:
    """A new file of kernels_cu is named here, so that its mutants run."""
    files = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu")}
    assert files <= set(OWNERS), f"name the ops that run {files - set(OWNERS)}"
