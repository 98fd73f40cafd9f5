"""Checks of all ops on a GPU: ``python -m tests.code.hardware.checks FOLDER STEP ... --json FILE``.

    large OP      the op and its backward op in bfloat16 at bench's large scale, each row beside the
                  same values in float32, without clusters and warpgroups: other kernels
    repeat CLASS  a class of tests/ops whose kernels have counters, clusters or turns: a thousand
                  launches of each case while another stream is busy, all with the same bits
    memcheck ops  a small call of each op under compute-sanitizer, all in one process; initcheck too
    racecheck primitives
                  racecheck's summary of two kernels in which an mbarrier orders all accesses

FILE lists the steps that are done, and what they say.  A step that detects an error ends the
process.
"""

import argparse
import functools
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from unsloth_cupy import AttentionConfig
from unsloth_cupy.bench.cases import Call, Scale, draw, forward_ops
from unsloth_cupy.bench.stopwatch import DeviceClock
from unsloth_cupy.bench.timing import DEVICE_SCALES, launches
from unsloth_cupy.core import gpu
from unsloth_cupy.core.dtypes import BFLOAT16, FLOAT32
from unsloth_cupy.core.gpu import cupy
from unsloth_cupy.core.op import OPS
from unsloth_cupy.files import atomic_path
from unsloth_cupy.ops.common import counters

from ...harness import parity
from ...machines import stand_in
from ..programs import variants
from .__main__ import run
from .fixtures import ROOT
from .primitives import launch

SMALL = Scale(tokens=64, hidden=64, inner=96, vocab=80, heads=4, kv_heads=2, dim=32)
LARGE = DEVICE_SCALES[-1]
NEAR = 2e-2  # of a row's norm: the result's rounding to bfloat16, and those inside
TIMES = 1000
# Primitives whose warps use one box in turns, in an order that mbarriers alone define: filled by
# stores, and by a bulk copy.
ORDERED = ("mbarrier phases", "mbarrier phases of bulk copies")


def kernels() -> list[str]:
    """Return the ops that have a kernel, or whose backward op has one."""
    return [name for name in forward_ops() if launches(OPS[name])]


def calls(name: str, scale: Scale, dtype: Any, place: Any, rng: Any = None) -> Iterator[Call]:
    """Yield the call of an op that has a kernel, and that of its backward op."""
    forward = draw(OPS[name], scale, numbers=rng).cast(dtype).mapped(place)
    if forward.op.launch is not None:
        yield forward
    if forward.op.backward is not None and forward.op.backward.launch is not None:
        outputs = forward.run()
        seeds = forward.seeds(outputs, every=False, rng=rng)
        yield forward.backward(outputs, {key: place(seed) for key, seed in seeds.items()})


def large(name: str, scale: Scale, place: Any, rng: Any) -> str:
    """Compare an op with itself in float32, row by row; return the worst row."""
    limits, worst = gpu.limits_of, 0.0
    alone = functools.cache(lambda device: limits(device)._replace(clusters=False))
    for call in calls(name, scale, BFLOAT16, place, rng):
        actual = parity.outputs_of(call)
        with mock.patch.object(gpu, "limits_of", alone), AttentionConfig(warpgroups=False).use():
            call.op.routes.clear()  # with what the other limits choose
            expected = parity.outputs_of(call.cast(np.float32))
            call.op.routes.clear()
        for key, array in actual.items():
            share = away(rows(array), rows(expected[key]))
            if not share < NEAR:
                raise SystemExit(
                    f"{call.op.__name__}: a row of {key} is {share:.1e} of its norm away"
                )
            worst = max(worst, share)
    return f"{worst:.1e} of a row away from float32"


def of_case(proof: type[Any], case: parity.Case, dtype: Any = BFLOAT16) -> list[Call]:
    """Return the calls of the sides that a Parity class tests, with arrays of NumPy."""
    dtypes = parity.dtypes(proof)
    forward = case.draw(OPS[proof.op], dtype if dtype in dtypes else dtypes[-1])
    if "backward" not in proof.sides or forward.op.backward is None:
        return [forward]
    outputs = parity.outputs_of(forward)
    seeds = parity._seeds(forward.op, outputs, np.random.default_rng(1))
    return [*[forward] * ("forward" in proof.sides), forward.backward(outputs, seeds)]


def away(actual: Any, expected: Any) -> float:
    """Return the largest difference of a row, as a share of the norm of the expected row.

    Rows lie along the last axis.  One that is much smaller than the others, as that of the first
    query's gradient, is compared with an eighth of their median.
    """
    actual, expected = (a.reshape(-1, a.shape[-1]).astype(np.float32) for a in (actual, expected))
    norms = np.linalg.norm(expected, axis=1)
    least = max(float(np.median(norms)) / 8, float(np.finfo(np.float32).tiny))  # all may be 0
    return float((np.linalg.norm(actual - expected, axis=1) / np.maximum(norms, least)).max())


def rows(array: Any) -> Any:
    """Return an array with rows along its last axis: each value of a vector is one."""
    return array.reshape(-1, 1) if array.ndim < 2 else array


class Tested(NamedTuple):
    """A call of a Parity class, its kernels, and whether their blocks wait for others."""

    proof: type[Any]
    call: Call
    kernels: frozenset[str]
    ordered: bool


@functools.cache
def tested() -> list[Tested]:
    """Return the calls of all Parity classes, as a GPU of sm_90 launches them.

    They are in bfloat16; one in float32 follows for each kernel that only that dtype has.
    """
    made, several = mock.Mock(wraps=counters._of_stream), []
    with mock.patch.object(counters, "_of_stream", made), stand_in.gpu("90") as machine:
        machine.strict = False
        for proof in parity.proofs():
            if issubclass(proof, parity.KernelAlone) or not issubclass(proof, parity.KernelParity):
                continue
            calls = [call for case in proof.cases for call in of_case(proof, case)]
            one = proof.cases[:1] if len(parity.dtypes(proof)) > 1 else ()
            wide = [call for case in one for call in of_case(proof, case, FLOAT32)]
            for call in (*calls, *wide):
                made.reset_mock()
                machine.launches.clear()
                with proof.context():
                    parity.outputs_of(call.mapped(machine.place))
                sizes = [variants.constants(each.source) for each in machine.launches]
                waits = made.called or any(int(each.get("CLUSTER", 1)) > 1 for each in sizes)
                names = frozenset(launch.kernel for launch in machine.launches)
                known = frozenset().union(*(each.kernels for each in several))
                if any(call is each for each in wide) and names <= known:
                    continue
                several.append(Tested(proof, call, names, waits))
    return several


def classes() -> dict[str, list[Tested]]:
    """Return the calls whose blocks wait for others, by class."""
    by_kernel: dict[str, list[Tested]] = {}
    for each in tested():
        if each.ordered:
            name = f"{each.proof.__module__.rpartition('.')[2]}.{each.proof.__name__}"
            by_kernel.setdefault(name, []).append(each)
    return by_kernel


def repeat(kind: str, times: int = TIMES) -> str:
    """Launch each case many times beside a busy stream; compare the bits on the device."""
    cp = cupy()
    with cp.cuda.Stream(non_blocking=True) as other:
        busy = cp.zeros(1 << 26, np.float32)
    for proof, drawn, *_ in classes()[kind]:
        call, differ = drawn.mapped(parity.on_gpu), cp.zeros((), np.int64)
        with proof.context():
            first = raw(parity.outputs_of(call))
            for turn in range(times):
                if turn % 8 == 0:
                    with other:
                        busy += 1
                for one, same in zip(first, raw(parity.outputs_of(call)), strict=True):
                    differ += (one != same).any()
        if count := int(differ):
            raise SystemExit(f"{call.op.__name__}: {count} of {times} results differ in their bits")
    return f"{len(classes()[kind])} calls, each {times} times with the same bits"


def raw(outputs: dict[str, Any]) -> list[Any]:
    """Return the bytes of arrays, where they are."""
    return [a.ravel().view(np.uint8) for a in outputs.values() if a is not None]


def small() -> None:
    """Launch every kernel by a small call, with each array in an allocation of its own."""
    cp, seen = cupy(), set[str]()
    cp.cuda.set_allocator(None)
    for proof, call, names, _ in tested():
        if names - seen:
            seen |= names
            with proof.context():
                parity.outputs_of(call.mapped(parity.on_gpu))
    room = types.SimpleNamespace(array=lambda shape, dtype, shift=0: cp.zeros(shape, dtype))
    programs = {(name, words.split()[0]): one for name, words, one in variants.programs()}
    for program in programs.values():  # one of each dtype; they launch kernels without an op
        program(room)
    cp.cuda.Device().synchronize()


def sanitized(tool: str, report: Path) -> str:
    """Make the small calls under a tool of compute-sanitizer; return its report's last line."""
    if not shutil.which("compute-sanitizer"):
        return "no compute-sanitizer here"
    own = [sys.executable, "-m", "tests.code.hardware.checks", "--small"]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *own]
    with report.open("w") as output:
        status = subprocess.call(command, cwd=ROOT, stdout=output, stderr=output)
    lines = [line for line in report.read_text().splitlines() if line.startswith("==")]
    if status:
        raise SystemExit("\n".join([f"{tool}: ended with {status}", *lines[:12]]))
    return lines[-1].strip("= ") if lines else "nothing"


def raced(report: Path) -> str:
    """Return racecheck's summary of each primitive of ORDERED, and write its whole reports."""
    if not shutil.which("compute-sanitizer"):
        return "no compute-sanitizer here"
    summaries = []
    with report.open("w") as output:
        for name in ORDERED:
            own = [sys.executable, "-m", "tests.code.hardware.checks", "--primitive", name]
            command = ["compute-sanitizer", "--tool", "racecheck", *own]
            process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            output.write(f"{name}\n{process.stdout}{process.stderr}\n")
            lines = [line for line in process.stdout.splitlines() if "SUMMARY" in line]
            summaries.append(f"{name}: {lines[-1].strip('= ') if lines else 'no summary'}")
    return "; ".join(summaries)


def names() -> list[str]:
    """Return the steps: first the tools that have not run, then the fastest to find a fault."""
    tools = ["racecheck primitives", "memcheck ops", "initcheck ops"]
    return [*tools, *(f"large {name}" for name in kernels()), *(f"repeat {k}" for k in classes())]


def process_of(step: str) -> str:
    """Return the name of the process of a step."""
    return step.partition(" ")[0]


def do(step: str, folder: Path) -> str:
    """Run a step; return what it says."""
    what, _, of = step.partition(" ")
    if what == "large":
        return large(of, LARGE, cupy().asarray, cupy().random.default_rng(0))
    if what == "repeat":
        return repeat(of)
    report = folder / f"{what}.txt"
    return raced(report) if what == "racecheck" else sanitized(what, report)


def rates() -> str:
    """Return the rates of a copy and of a product of 8192 x 8192 matrices in bfloat16."""
    clock = DeviceClock()
    copy, product = clock.copy_rate() / 1e9, clock.product_rate("bfloat16") / 1e12
    return f"copy {copy:.0f} GB/s; 8192^3 product {product:.0f} TFLOP/s"


def main() -> None:
    """Run steps, one after another, and list those that are done in a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.code.hardware.checks")
    parser.add_argument("folder", type=Path, nargs="?", help="the folder for reports of tools")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="such as 'large rope'")
    parser.add_argument("--json", type=Path, help="the file that lists the steps that are done")
    parser.add_argument("--primitive", help="only launch this primitive")
    for name in ("small", "rates"):
        parser.add_argument(f"--{name}", action="store_true", help="only make these calls")
    args = parser.parse_args()
    if args.small:
        return small()
    if args.rates:
        return print(rates())
    if args.primitive:
        return print(*run(launch(args.primitive)).values())
    said: dict[str, str] = {}
    for step in ("", *args.steps):
        if step:
            said[step] = do(step, args.folder)
        if args.json:
            with atomic_path(args.json) as partial_file:
                partial_file.write_text(json.dumps({"ops": [*said], "said": said}))
    return None


if __name__ == "__main__":
    main()
