"""Mutation tests of the inline assembly: a run must detect each change, or it must be harmless.

    python -m tests.code.compiled.mutants [--arch 100] [--nvrtc 13.5] [WORDS]

runs all mutants, or those whose names contain the words.

A mutant is a copy of ``common/ptx.cuh`` or ``common/hopper.cuh`` in which one asm statement lacks
``volatile`` or ``memory``, has two operands swapped, another constraint, size, modifier or count,
or is removed.  Its judges are those primitives, and loops of ``kernels/order.cu``, whose PTX it
changes.  A mutant that changes no PTX of theirs is reported as ``same``; one that changes it and
that no judge detects must be listed in ``harmless.toml``, with a reason.
"""

import argparse
import faulthandler
import functools
import itertools
import multiprocessing
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unsloth_cupy.core.source import source_root
from unsloth_cupy.errors import KernelError

from ...machines.cuda_on_cpu import EmulatorError
from ...machines.ptx_on_cpu import PtxEmulator
from ..emulator import KERNELS, kernel, primitive
from ..hardware.primitives import PRIMITIVES, launch, runs_on
from ..programs.budget import compiler_version
from ..programs.compilers import run_with_nvrtc, supported
from ..programs.ptx import Compiled, UnknownError, ptx, several_ptx
from . import on

HARMLESS = tomllib.loads((Path(__file__).with_name("harmless.toml")).read_text())
OWN = Path(__file__).with_name("kernels")
FILES = ("common/ptx.cuh", "common/hopper.cuh")
JUDGES = 4  # the most judges of a mutant
ROUNDS = 3
ASM = re.compile(r"\basm( volatile)?\s*\(")
FUNCTION = re.compile(r"DEVICE [\w *]*?\b(\w+(?:##\w+)*)\s*\(")
# Edits of an asm template: pattern and replacement.
EDITS = {
    r"\.trans\b": "",
    r"\.x4\.shared": ".x4.trans.shared",
    r", 16, %2": ", 8, %2",
    r", 4;": ", 8;",
    r"wait_group %0": "wait_group 7",
    r"row\.col": "row.row",
    r"\.bf16\.bf16": ".f16.f16",
    r"\.e4m3x2|e4m3\.e4m3": lambda m: m[0].replace("e4m3", "e5m2"),
    r"\.e5m2x2|e5m2\.e5m2": lambda m: m[0].replace("e5m2", "e4m3"),
    r"p, 1, 1": "p, -1, 1",
    r"\.satfinite": "",
    r"\.add\.tile": ".and.tile",
    r"setp\.ne": "setp.eq",
    r"expect_tx": "arrive_expect",
    r"\.relaxed": "",
    r"ctarank": "nctarank",
    r"cluster_nctarank": "cluster_ctarank",
    r"bar\.sync": "bar.arrive",
    r"bar\.arrive": "bar.sync",
    r"cvt\.rna": "cvt.rz",
}


class Mutant(NamedTuple):
    """A change of one asm statement: file, function, description, new text of the file."""

    file: str
    function: str
    number: int  # of the statement in its file
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.function}: {self.what}"


def statements(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the asm statements: function, start, and end (after the closing bracket)."""
    for statement in ASM.finditer(text):
        depth, quoted, end = 0, False, statement.end() - 1
        while True:
            c = text[end]
            quoted ^= c == '"' and text[end - 1] != "\\"
            depth += 0 if quoted else (c == "(") - (c == ")")
            end += 1
            if not depth:
                break
        names = FUNCTION.findall(text[: statement.start()])
        named = "#define WGMMA_NAME" in text[statement.start() - 100 : statement.start()]
        yield "WGMMA_NAME" if named else names[-1], statement.start(), end


def parts(asm: str) -> list[str]:
    """Split an asm statement at colons: begin and template, outputs, inputs, clobbers."""
    split, quoted, last = [], False, 0
    for i, c in enumerate(asm):
        quoted ^= c == '"' and asm[i - 1] != "\\"
        if c == ":" and not quoted:
            split.append(asm[last:i])
            last = i + 1
    return [*split, asm[last:]]


def changes(asm: str) -> Iterator[tuple[str, str]]:
    """Yield every change of a statement: its description, and the changed statement."""
    if " volatile" in asm:
        yield "no volatile", asm.replace(" volatile", "", 1)
    if '"memory"' in asm:
        yield "no memory", re.sub(r'\s*:+\s*"memory"', "", asm)
    template, *operands = parts(asm)
    rest = "".join(f":{part}" for part in operands)
    numbers = re.findall(r'%\d+|%" #I\d "', template)
    for a, b in itertools.pairwise(numbers):
        if a != b:
            swapped = re.sub(
                rf"({re.escape(a)}|{re.escape(b)})(?!\d)",
                lambda m, a=a, b=b: b if m[0] == a else a,
                template,
            )
            yield f"{a} and {b} swapped".replace('"', ""), swapped + rest
    for pattern, by in EDITS.items():
        edited, count = re.subn(pattern, by, template)
        if count and edited != template:
            yield f"{pattern} edited".replace("\\", ""), edited + rest
    if '"+f"' in rest:
        yield "+f is =f", template + rest.replace('"+f"', '"=f"')
    if not operands or '"=' not in operands[0]:
        yield "gone", 'asm("")'


def mutants() -> list[Mutant]:
    """Return every mutant of both files."""
    every = []
    for file in FILES:
        text = (source_root() / file).read_text()
        for number, (function, start, end) in enumerate(statements(text)):
            for what, asm in changes(text[start:end]):
                edited = text[:start] + asm + text[end:]
                every.append(Mutant(file, function, number, what, edited))
    return every


def target(arch: int) -> str:
    """Return the name of an architecture with its instructions for warpgroups."""
    return f"{arch}{'a' * (arch == 90)}"


def body(compiled: Compiled) -> str:
    """Return the text of a kernel alone."""
    text = compiled.text[compiled.text.index(f".entry {compiled.entry}(") :]
    return text[: text.index("\n}")]


# ---- judges -------------------------------------------------------------------------------------
class Judge(NamedTuple):
    """A kernel that detects mutants: ``wrong`` runs it, and is 0 if the result is correct."""

    file: str
    kernel: str
    name: str

    def source(self) -> str:
        return f'#include "common/device.cuh"\n#include "{self.file}"\n'

    def ptx(self, folders: tuple[Path, ...], arch: int) -> str:
        """Return the PTX of the kernel, without comments and line numbers."""
        text = body(ptx(self.source(), self.kernel, target(arch), folders))
        text = re.sub(r"(?m)^\s*\.loc.*$|//.*$", "", text)
        return re.sub(r"\n\s*\n+", "\n", text)

    def wrong(self, folders: tuple[Path, ...], arch: int, seed: int) -> int:
        """Return the number of wrong words in the result."""

        def kind(**options: Any) -> PtxEmulator:
            return on(arch)(**{**options, "folders": (*folders, *options["folders"])})

        if self.file != "order.cu":
            return primitive(self.name, kind=kind, seed=seed)
        run = kernel(self.file, self.kernel, folder=OWN, kind=kind, seed=seed)
        blocks, threads = ORDER[self.kernel]
        x, out = np.arange(128, dtype=np.float32), np.zeros(32, np.float32)
        run((blocks,), (threads,), (x, out, np.int32(ROUNDS)), 0)
        return int((out != expected(self.kernel)).sum())


ORDER = {  # blocks, threads
    "own_copy": (1, 32),
    "copy_own": (1, 32),
    "by_named_barriers": (1, 64),
    "rows_that_change": (1, 32),
    "by_mbarriers": (1, 64),
    "by_clusters": (2, 32),
    "by_bulk": (1, 32),
}


@functools.cache
def expected(name: str) -> np.ndarray:
    """Return the correct output of a loop of order.cu."""
    t, rounds = np.arange(32), np.arange(ROUNDS)
    if name == "own_copy":
        return (ROUNDS * 4 * t).astype(np.float32)
    if name == "copy_own":
        return (rounds[:, None] + t).sum(0).astype(np.float32)
    if name != "rows_that_change":
        return (rounds[:, None] + 31 - t).sum(0).astype(np.float32)
    total = np.zeros(32, np.uint32)
    for i in range(ROUNDS):
        words = (i * 128 + np.arange(128)).astype(np.uint32)
        tiles = words.view(np.uint16).reshape(4, 8, 8)
        row, column = t // 4, t % 4 * 2
        pair = lambda a, b: a.astype(np.uint32) | b.astype(np.uint32) << 16  # noqa: E731
        plain = [pair(m[row, column], m[row, column + 1]) for m in tiles]
        transposed = [pair(m[column, row], m[column + 1, row]) for m in tiles]
        total += plain[0] + 2 * plain[3] + 3 * transposed[1] + 4 * transposed[2]
        total += 5 * plain[0] + 6 * plain[1]
    return (total & 0x3FFFFFFF).view(np.float32)


@functools.cache
def judges(arch: int) -> list[Judge]:
    """Return the distinct kernels that are judges on an architecture."""
    names = [name for name in [*PRIMITIVES][::-1] if runs_on(name, arch)]
    labels = {(launch(name).file, launch(name).kernel): name for name in names}
    own = [Judge("order.cu", name, name) for name in ORDER]
    return [*own, *(Judge(file, name, label) for (file, name), label in labels.items())]


@functools.cache
def plain_ptx(judge: Judge, arch: int) -> str:
    return judge.ptx((OWN, KERNELS), arch)


@functools.cache
def marked(arch: int) -> list[tuple[Judge, str]]:
    """Return each judge with its PTX, in which a comment names each asm statement.

    The kernels of a file are compiled at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in FILES:
            text = (source_root() / file).read_text()
            for number, (_, start, end) in [*enumerate(statements(text))][::-1]:
                asm = re.sub(r'\(\s*"', f'("{mark(file, number)}', text[start:end], count=1)
                text = text[:start] + asm + text[end:]
            place(Path(folder), file, text)
        folders = Path(folder), OWN, KERNELS
        every = []
        for _, group in itertools.groupby(judges(arch), lambda judge: judge.file):
            of_file = [*group]
            names = tuple(judge.kernel for judge in of_file)
            compiled = several_ptx(of_file[0].source(), names, target(arch), folders)
            every += zip(of_file, map(body, compiled), strict=True)
        return every


def mark(file: str, number: int) -> str:
    return f"/*{file}:{number}*/"


def place(folder: Path, file: str, text: str) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)


def shown(mutant: Mutant, arch: int) -> list[Judge]:
    """Return the judges of a mutant: JUDGES of those whose PTX contains its statement."""
    own = mark(mutant.file, mutant.number)
    return [judge for judge, text in marked(arch) if own in text][:JUDGES]


def verdict(mutant: Mutant, arch: int) -> str:
    """Return the outcome of a mutant: unused, same, survived, or caught and by what."""
    own_judges = shown(mutant, arch)
    if not own_judges:
        return "unused"
    changed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place(folder, mutant.file, mutant.text)
        folders = (folder, OWN, KERNELS)
        for judge in own_judges:
            try:
                if judge.ptx(folders, arch) == plain_ptx(judge, arch):
                    continue
                changed += 1
                wrong = [judge.wrong((folder,), arch, seed) for seed in (0, 3)]
            except (EmulatorError, KernelError, UnknownError) as error:
                return f"caught: {str(error).splitlines()[0][:100]}"
            except Exception as error:  # CuPy's CompileException
                if "Compile" not in type(error).__name__:
                    raise
                return "caught: does not compile"
            if any(wrong):
                return f"caught: {max(wrong)} words are wrong in {judge.name}"
    return "survived" if changed else "same"


def judged(mutant: Mutant, arch: int) -> str:
    """Return the verdict, computed in a child process, which a mutant may crash."""
    for judge in shown(mutant, arch):
        plain_ptx(judge, arch)  # cached in this process for all mutants; a child's cache is lost
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def send() -> None:
        faulthandler.disable()  # a crash is expected
        writer.send(verdict(mutant, arch))

    child = context.Process(target=send)
    child.start()
    writer.close()
    try:
        outcome = str(reader.recv())
    except EOFError:
        outcome = "caught: the process ends"
    child.join()
    if child.exitcode:
        assert child.exitcode < 0, f"{mutant}: no signal ends its judge, but the error above"
    return outcome


def accepted(mutant: Mutant, outcome: str) -> bool:
    """Return whether a mutant was caught, changes nothing, or is listed as harmless."""
    return outcome.startswith(("caught", "same", "unused")) or reason(mutant) is not None


def reason(mutant: Mutant) -> str | None:
    """Return why a mutant is harmless by harmless.toml, or None."""
    lines = (why for pattern, why in HARMLESS.items() if re.fullmatch(pattern, str(mutant)))
    return next(lines, None)


def architecture(mutant: Mutant) -> int:
    """Return the architecture of a mutant's judges: 100, or 90 for instructions of sm_90a only."""
    return 100 if "100" in supported() and shown(mutant, 100) else 90


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.code.compiled.mutants", description=__doc__
    )
    parser.add_argument(
        "--arch", type=int, help="90 or 100; default: 100, or 90 for instructions of sm_90a only"
    )
    parser.add_argument("--nvrtc", help="12.0, 13.5, ...: the version to use")
    parser.add_argument("only", nargs="*", help="run mutants whose names contain these words")
    args = parser.parse_args()
    if args.nvrtc and args.nvrtc != compiler_version():
        sys.exit(run_with_nvrtc(args.nvrtc, "tests.code.compiled.mutants"))
    bad = 0
    for mutant in mutants():
        if not all(word in str(mutant) for word in args.only):
            continue
        arch = args.arch or architecture(mutant)
        outcome = judged(mutant, arch)
        fine = accepted(mutant, outcome)
        bad += not fine
        print(f"sm_{arch} {mutant}: {outcome}{'' if fine else '  <---'}", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
