"""The cases of tests/ops, run as PTX: see ``python -m tests.ptx_on_cpu --help``.

A sample holds a case of each op in each file, others after each commit: nearly every kernel. A
class of ``tests/ops`` judges its kernels as it does those of the source, by the rule of parity,
twice, on two schedules. Some cases are compiled once more without contraction, as source and as
PTX: their bits must agree, but for functions of the mathematics library that NVRTC writes out.
"""

import argparse
import itertools
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import using

from .. import parity
from ..budget import compiler_version
from ..compilers import run_with_nvrtc, supported
from ..cuda_on_cpu import Emulator
from ..sample import commits
from ..variants import declared, proofs
from . import ARCHITECTURES, on

SLOW = 3  # cases whose seconds are told
TRIES, STEP = 4, 37  # jobs of a sample, if calls are empty; how far apart: other sizes
BITS = 8  # every so many cases of a sample show their bits
# Functions of the mathematics library that NVRTC writes out as it likes, and the ops, by how their
# names begin, whose kernels call them: there bits may differ, and the rule of parity alone holds.
LIBRARY = {
    "attention": ("log2f", "tanhf"),  # of sums of a row, of scores with a cap
    "cross_entropy": ("logf", "tanhf"),
    "linear_cross_entropy": ("logf", "tanhf"),
    "geglu": ("erfcf", "expf"),
    "swiglu": ("expf",),
    "apply_rotary_embedding": ("sincospif",),
}
CHOSEN: list[list["Job"]] = []  # what the processes of a run share


class Job(NamedTuple):
    """A case of a class, in a dtype, on an architecture."""

    proof: type[Any]
    case: parity.Case
    dtype: Any
    architecture: int
    bits: bool = False

    def __str__(self) -> str:
        name = f"{self.proof.__module__.rpartition('.')[2]}.{self.proof.__name__}"
        return f"sm_{self.architecture} {name} [{self.case.label}] {self.dtype}"


class Outcome(NamedTuple):
    """What became of a job: what it says of itself where it fails, its kernels, seconds."""

    job: str
    error: str
    kernels: frozenset[str]
    seconds: float


def jobs(architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[list[Job]]:
    """Yield the jobs of every class that proves kernels."""
    for proof in proofs():
        if issubclass(proof, parity.KernelParity) and proof.cases:
            only = (90,) if proof.__module__.endswith("_hopper") else architectures
            own = [architecture for architecture in architectures if architecture in only]
            every = itertools.product(proof.cases, dtypes(proof), own)
            yield [Job(proof, *each) for each in every]


def dtypes(proof: type[Any]) -> tuple[Any, ...]:
    """Return those that a class asks for its kernels in."""
    marks = {mark.args[0]: mark.args[1] for mark in proof.test_emulated_kernels.pytestmark}
    return tuple(marks["dtype"])


def sample(day: int, architectures: tuple[int, ...] = ARCHITECTURES) -> list[list[Job]]:
    """Return jobs of each op in each file of tests, of which the first with a kernel is taken.

    Architectures take turns, then dtypes, classes and cases.
    """
    groups: dict[tuple[str, str], list[list[Job]]] = {}
    for several in filter(None, jobs(architectures)):
        groups.setdefault((several[0].proof.__module__, several[0].proof.op), []).append(several)
    found = []
    for number, classes in enumerate(groups.values()):
        every = [job for turn in itertools.zip_longest(*classes) for job in turn if job]
        first = day + number * 5
        mine = [every[(first + t * STEP) % len(every)] for t in range(TRIES)]
        found.append([job._replace(bits=(number + day) % BITS == 0) for job in mine])
    return found


def run(job: Job) -> Outcome:
    """Run a job."""
    start, said = time.monotonic(), ""
    seen: set[str] = set()
    try:
        with mock.patch.object(parity, "other_target", on(job.architecture)), watched(seen):
            prove(job)
        if job.bits and not issubclass(job.proof, parity.KernelAlone):
            said = differences(job)
    except BaseException:  # of whatever kind, it is this job's
        said = traceback.format_exc(limit=-3)
    return Outcome(str(job), said, frozenset(seen), time.monotonic() - start)


def run_number(number: int) -> Outcome:
    """Run jobs of CHOSEN, until one has a kernel: a case may hold functions, no pipe carries it."""
    outcomes = list[Outcome]()
    for job in CHOSEN[number]:
        outcomes.append(run(job))
        if outcomes[-1].kernels or outcomes[-1].error:
            break
    return outcomes[-1]._replace(seconds=sum(outcome.seconds for outcome in outcomes))


def watched(seen: set[str]) -> Any:
    """Return a patch that notes the kernels that are compiled."""
    from .. import ptx_on_cpu

    compile_as_ever = ptx_on_cpu.PtxEmulator.compile

    def compiled(self: Any, name: str, source: str) -> Any:
        seen.add(name)
        return compile_as_ever(self, name, source)

    return mock.patch.object(ptx_on_cpu.PtxEmulator, "compile", compiled)


def prove(job: Job) -> None:
    """Judge a case as its class does, on two schedules."""
    proof = job.proof()
    if isinstance(proof, parity.KernelAlone):
        return proof.prove(job.case, job.dtype)
    seeds = itertools.cycle((0, 17))

    def emulated(function: Any) -> Any:
        with proof.context(), parity.emulator(**proof.machine, seed=next(seeds)):
            return function()

    op = OPS[proof.op]
    return parity._compare_kernels(op, job.case, job.dtype, emulated, np.asarray, proof.sides)


def differences(job: Job) -> str:
    """Say in which results PTX and source have other bits, without contraction on both sides."""
    op, found = OPS[job.proof.op], []
    call = job.case.draw(op, job.dtype)
    if "forward" not in job.proof.sides:
        return ""
    for kind in (on(job.architecture, fuse=False), on(job.architecture, Emulator, fuse=False)):
        with job.proof.context(), using(kind(**job.proof.machine, check=False)):
            found.append(parity.outputs_of(call))
    ptx, source = found
    told = [f"{n}: {count}" for n in ptx if (count := unequal(ptx[n], source[n]))]
    allowed = job.proof.op.startswith((*LIBRARY,))
    return "" if allowed or not told else f"bits differ: {', '.join(told)}"


def unequal(a: Any, b: Any) -> str:
    """Say how many values of two arrays differ in their bits; every NaN is the same."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    nan = [x.astype(np.float64) != x.astype(np.float64) for x in (a, b)]
    raw = [np.where(n, 1, x.view(f"u{x.itemsize}")) for n, x in zip(nan, (a, b), strict=True)]
    count = int((raw[0] != raw[1]).sum())
    return f"{count} of {a.size}" if count else ""


def main() -> None:
    """Run a sample, or all; exit with what failed."""
    words = argparse.ArgumentParser(prog="python -m tests.ptx_on_cpu", description=__doc__)
    words.add_argument(
        "--all", action="store_true", help="all cases; else one of each op in each file"
    )
    words.add_argument("--arch", action="append", help="sm_80, sm_90, sm_100, sm_120; all four")
    words.add_argument("--day", type=int, help="number of the sample; that of commits by default")
    words.add_argument("--bits", action="store_true", help="compare the bits of every case")
    words.add_argument("--every", type=int, default=1, help="of what is chosen, one of so many")
    words.add_argument("--nvrtc", help="12.0, 13.5, ...: of another version, which is installed")
    words.add_argument("only", nargs="*", help="words of a case")
    given = words.parse_args()
    if given.nvrtc and given.nvrtc != compiler_version():
        sys.exit(run_with_nvrtc(given.nvrtc, "tests.ptx_on_cpu"))
    known = [arch for arch in ARCHITECTURES if str(arch) in supported()]
    archs = tuple(int(arch.removeprefix("sm_")) for arch in given.arch or map(str, known))
    day = commits() if given.day is None else given.day
    turn = day // given.every  # of a class: it runs once in so many days
    every = [[job] for several in jobs(archs) for job in several]
    chosen = every if given.all or given.only else sample(turn, archs)
    chosen = [mine for mine in chosen if all(word in str(mine[0]) for word in given.only)]
    if given.bits:
        chosen = [[job._replace(bits=True) for job in mine] for mine in chosen]
    CHOSEN[:] = chosen[day % given.every :: given.every]
    start, outcomes = time.monotonic(), []
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        for outcome in pool.map(run_number, range(len(CHOSEN))):
            outcomes.append(outcome)
            if outcome.error:
                print(f"{outcome.job}\n{outcome.error}\n", flush=True)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    kernels = frozenset().union(*(outcome.kernels for outcome in outcomes))
    seconds = time.monotonic() - start
    what = f"{'all' if given.all else f'sample --day {day}'}, NVRTC {compiler_version()}"
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.seconds)[:SLOW]:
        print(f"{outcome.seconds:5.1f} s {outcome.job}")
    print(f"{len(outcomes) - failed} of {len(outcomes)} cases pass ({what}) in {seconds:.0f} s")
    print(f"{sum(not outcome.kernels for outcome in outcomes)} of them without a kernel")
    left = sorted({*declared()} - kernels)
    print(
        f"kernels: {len(kernels)} of {len(declared())}" + f", without {left}" * (0 < len(left) < 9)
    )
    sys.exit(failed > 0)
