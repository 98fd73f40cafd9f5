"""Run the cases of tests/ops as PTX: see ``python -m tests.machines.ptx_on_cpu --help``.

A sample has one case of each op in each file, and others after each commit: nearly every kernel. A
class of ``tests/ops`` tests the PTX of its kernels as it tests the source, by the rule of parity,
on two schedules. Some cases are also compiled without contraction to fma, as source and as PTX:
their bits must be equal, except where a kernel calls functions of the mathematics library, which
NVRTC expands inline.
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

from ...harness import parity
from ...harness.sampling import commits
from ...machines import ptx_on_cpu
from ...machines.cuda_on_cpu import Emulator
from ..programs.budget import compiler_version
from ..programs.compilers import run_with_nvrtc, supported
from ..programs.variants import declared
from . import ARCHITECTURES, on

SLOW = 3  # the slowest cases, whose times are printed
# Jobs to try in a sample until one launches a kernel, as calls may be empty; and the distance
# between them in the list of jobs, so that they have different sizes.
TRIES, STEP = 4, 37
BITS = 8  # one case of a sample in this many compares bits
# Functions of the mathematics library, which NVRTC may expand in any way, by the prefix of the ops
# whose kernels call them: for those ops bits may differ, and only the rule of parity holds.
LIBRARY = {
    "attention": ("log2f", "tanhf"),  # of a row's sums, of capped scores
    "latent_attention": ("log2f",),
    "cross_entropy": ("logf", "tanhf"),
    "linear_cross_entropy": ("logf", "tanhf"),
    "linear_log_probs": ("logf", "tanhf"),
    "divergence": ("logf", "tanhf"),
    "linear_divergence": ("logf", "tanhf"),
    "linear_top_k_divergence": ("expf", "logf", "tanhf"),
    "geglu": ("erfcf", "expf"),
    "swiglu": ("expf",),
    "causal_conv": ("expf",),
    "gated_delta_rule": ("expf",),
    "gated_rms_norm": ("expf",),
    "selective_scan": ("expf", "expm1f", "log1pf"),
    "ssd": ("expf", "log1pf"),
    "route": ("expf", "log1pf", "logf"),  # router_z_loss, too
    "experts_mlp": ("erfcf", "expf"),
    "xielu": ("expf", "expm1f", "log1pf"),
    "apply_rotary_embedding": ("sincospif",),
}
CHOSEN: list[list["Job"]] = []  # shared by the forked processes of a run


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
    """The outcome of a job: its name, its error or "", its kernels, its seconds."""

    job: str
    error: str
    kernels: frozenset[str]
    seconds: float


def jobs(architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[list[Job]]:
    """Yield the jobs of each KernelParity class, as a list for each class."""
    for proof in parity.proofs():
        if issubclass(proof, parity.KernelParity) and proof.cases:
            only = (90,) if proof.__module__.endswith("_hopper") else architectures
            own = [architecture for architecture in architectures if architecture in only]
            every = itertools.product(proof.cases, parity.dtypes(proof), own)
            yield [Job(proof, *each) for each in every]


def sample(day: int, architectures: tuple[int, ...] = ARCHITECTURES) -> list[list[Job]]:
    """Return TRIES jobs for each op in each test file; a run ends with the first that has a kernel.

    Consecutive days differ in architecture first, then in dtype, class and case.
    """
    groups: dict[tuple[str, str], list[list[Job]]] = {}
    for of_class in filter(None, jobs(architectures)):
        groups.setdefault((of_class[0].proof.__module__, of_class[0].proof.op), []).append(of_class)
    chosen = []
    for number, classes in enumerate(groups.values()):
        every = [job for turn in itertools.zip_longest(*classes) for job in turn if job]
        first = day + number * 5
        tries = [every[(first + t * STEP) % len(every)] for t in range(TRIES)]
        chosen.append([job._replace(bits=(number + day) % BITS == 0) for job in tries])
    return chosen


def run(job: Job) -> Outcome:
    """Run a job."""
    start, error = time.monotonic(), ""
    seen: set[str] = set()
    try:
        with mock.patch.object(parity, "other_target", on(job.architecture)), watched(seen):
            prove(job)
        if job.bits and not issubclass(job.proof, parity.KernelAlone):
            error = differences(job)
    except BaseException:  # of any kind, such as pytest's Failed: it belongs to this job
        error = traceback.format_exc(limit=-3)
    return Outcome(str(job), error, frozenset(seen), time.monotonic() - start)


def run_number(number: int) -> Outcome:
    """Run the jobs of CHOSEN[number] until one launches a kernel.

    A number is passed because a case may contain functions, which cannot be pickled.
    """
    outcomes = list[Outcome]()
    for job in CHOSEN[number]:
        outcomes.append(run(job))
        if outcomes[-1].kernels or outcomes[-1].error:
            break
    return outcomes[-1]._replace(seconds=sum(outcome.seconds for outcome in outcomes))


def watched(seen: set[str]) -> Any:
    """Return a patch that adds the names of the kernels that are compiled to a set."""
    original = ptx_on_cpu.PtxEmulator.compile

    def compiled(self: Any, name: str, source: str) -> Any:
        seen.add(name)
        return original(self, name, source)

    return mock.patch.object(ptx_on_cpu.PtxEmulator, "compile", compiled)


def prove(job: Job) -> None:
    """Test a case as its class does, on two schedules."""
    proof = job.proof()
    if isinstance(proof, parity.KernelAlone):
        return proof.prove(job.case, job.dtype)
    run = parity.on_schedules(0, 17, **proof.machine)
    with proof.context():
        op, sides = OPS[proof.op], proof.sides
        return parity._compare_kernels(op, job.case, job.dtype, run, np.asarray, sides)


def differences(job: Job) -> str:
    """Return a message on results whose bits differ between PTX and source without contraction."""
    op, results = OPS[job.proof.op], []
    call = job.case.draw(op, job.dtype)
    if "forward" not in job.proof.sides:
        return ""
    for kind in (on(job.architecture, fuse=False), on(job.architecture, Emulator, fuse=False)):
        with job.proof.context(), using(kind(**job.proof.machine, check=False)):
            results.append(parity.outputs_of(call))
    ptx, source = results
    counts = [f"{n}: {count}" for n in ptx if (count := unequal(ptx[n], source[n]))]
    allowed = job.proof.op.startswith((*LIBRARY,))
    return "" if allowed or not counts else f"bits differ: {', '.join(counts)}"


def unequal(a: Any, b: Any) -> str:
    """Return how many values of two arrays differ in their bits, or ""; all NaN are equal."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    nan = [x.astype(np.float64) != x.astype(np.float64) for x in (a, b)]
    raw = [np.where(n, 1, x.view(f"u{x.itemsize}")) for n, x in zip(nan, (a, b), strict=True)]
    count = int((raw[0] != raw[1]).sum())
    return f"{count} of {a.size}" if count else ""


def main() -> None:
    """Run a sample, or all cases; print the failures, and exit with 1 if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.machines.ptx_on_cpu", description=__doc__
    )
    parser.add_argument(
        "--all", action="store_true", help="all cases; default: one of each op in each file"
    )
    parser.add_argument("--arch", action="append", help="sm_80, sm_90, sm_100, sm_120; all four")
    parser.add_argument("--day", type=int, help="number of the sample; default: number of commits")
    parser.add_argument("--bits", action="store_true", help="compare the bits of every case")
    text = "approximate instructions are off by so many times what PTX documents; default: 1"
    parser.add_argument("--jitter", type=float, nargs="?", const=1.0, default=0.0, help=text)
    parser.add_argument("--every", type=int, default=1, help="run one in this many chosen cases")
    parser.add_argument("--nvrtc", help="12.0, 13.5, ...: the version to use")
    parser.add_argument("only", nargs="*", help="run cases whose names contain these words")
    args = parser.parse_args()
    if args.nvrtc and args.nvrtc != compiler_version():
        sys.exit(run_with_nvrtc(args.nvrtc, "tests.machines.ptx_on_cpu"))
    known = [arch for arch in ARCHITECTURES if str(arch) in supported()]
    archs = tuple(int(arch.removeprefix("sm_")) for arch in args.arch or map(str, known))
    day = commits() if args.day is None else args.day
    turn = day // args.every  # a class runs once in this many days
    every = [[job] for of_class in jobs(archs) for job in of_class]
    chosen = every if args.all or args.only else sample(turn, archs)
    chosen = [tries for tries in chosen if all(word in str(tries[0]) for word in args.only)]
    if not chosen:
        parser.error(f"no case has {' and '.join(args.only)} in its name")
    if args.bits or args.jitter:  # which the source has not
        bits = args.bits and not args.jitter
        chosen = [[job._replace(bits=bits) for job in tries] for tries in chosen]
    ptx_on_cpu.jitter(args.jitter)
    CHOSEN[:] = chosen[day % args.every :: args.every]
    start, outcomes = time.monotonic(), []
    forked = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
    with parity.general_attention(), forked as pool:
        for outcome in pool.map(run_number, range(len(CHOSEN))):
            outcomes.append(outcome)
            if outcome.error:
                print(f"{outcome.job}\n{outcome.error}\n", flush=True)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    kernels = frozenset().union(*(outcome.kernels for outcome in outcomes))
    seconds = time.monotonic() - start
    what = f"{'all' if args.all else f'sample --day {day}'}, NVRTC {compiler_version()}"
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.seconds)[:SLOW]:
        print(f"{outcome.seconds:5.1f} s {outcome.job}")
    print(f"{len(outcomes) - failed} of {len(outcomes)} cases pass ({what}) in {seconds:.0f} s")
    print(f"{sum(not outcome.kernels for outcome in outcomes)} of them without a kernel")
    left = sorted({*declared()} - kernels)
    print(
        f"kernels: {len(kernels)} of {len(declared())}" + f", without {left}" * (0 < len(left) < 9)
    )
    sys.exit(failed > 0)
