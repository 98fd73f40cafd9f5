"""Costs of a call of each op that can be counted instead of timed: ``[calls]`` of ``costs.toml``.

    python -m tests.code.programs.costs --write "why it changed" [OP ...]    rewrites all, or some
    python -m tests.code.programs.costs --new    adds lines of new ops and new kernels

There is one line for each op that launches a kernel, called with bfloat16 arrays of hundreds of
rows:

    80, 90    launches, allocations and bytes allocated, by architecture
    opcodes   Python bytecode instructions that the library runs in a replayed call
    moved     of smaller arrays, on the emulator: sectors of global memory read and written, passes
              over shared memory for reads and for writes
    loops     SASS instructions of each kernel's hot loop, by architecture

All are upper bounds: a smaller number needs no entry, and one may be exceeded by a share SLACK.
Where two branches changed a line, a merge takes the smaller of each number.

``[kernels]`` of the same file has the resources of each kernel: see budget.py.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unsloth_cupy
from unsloth_cupy import explain
from unsloth_cupy.bench.cases import Call, Scale, draw
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.gpu import compiler_options
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import using
from unsloth_cupy.profiling.explanation import Step
from unsloth_cupy.profiling.shapes import DTYPES

from ...harness.parity import general_attention
from ...machines.cuda_on_cpu import Emulator
from ...machines.cuda_on_cpu.traffic import counted
from ...machines.stand_in import gpu
from . import budget, costs_file, sass
from .budget import compiler_version
from .variants import declared

ARCHITECTURES = ("80", "90")
PYTHON = "{}.{}".format(*sys.version_info)  # opcodes differ between versions
LIBRARY = str(Path(unsloth_cupy.__file__).parent)
SCALE = Scale(tokens=256, hidden=512, inner=1024, vocab=2048, heads=8, kv_heads=2, dim=64)
TINY = Scale(tokens=32, hidden=128, inner=256, vocab=512, heads=4, kv_heads=2, dim=64)
SLACK = 0.02
REPLAYED = 5  # the fifth call is counted; the second is recorded, later ones are replayed
# Gradients of outputs, each optional, without which a backward op has nothing to read.
NEEDED = {
    "linear_log_probs_backward": ("dlog_probs",),
    "lora_down_backward": ("dlow",),
    "lora_group_backward": ("dy", "dy2"),
}
HEAD = """\
# The costs of a call of every op: launches, allocations and bytes, by architecture; Python opcodes;
# sectors and passes; instructions of hot loops.  python -m tests.code.programs.costs --write WHY
# writes them.
"""
Lines = dict[str, dict[str, Any]]  # op, name of the cost: numbers


def with_kernels() -> list[str]:
    """Return the ops that launch a kernel: their own, or those of LoRA beside products."""
    return sorted(
        name
        for name, op in OPS.items()
        if op.launch is not None or (op.facts.get("products") and planned(name, "90")[0])
    )


def drawn(name: str, scale: Scale = SCALE) -> Call:
    """Return a random call of an op in bfloat16; a cast's dy has the dtype that the op casts to."""
    call = draw(OPS[name], scale)
    if name in NEEDED:
        whole = draw(OPS[name], scale, optional=True).arrays
        call = call._replace(arrays=call.arrays | {n: whole[n] for n in NEEDED[name]})
    if not name.startswith("cast_"):
        return call.cast(BFLOAT16)
    kind = DTYPES[name.removeprefix("cast_to_").removesuffix("_backward")]
    arrays: dict[str, Any] = call.arrays
    return call._replace(arrays={n: a.astype(kind) if n == "dy" else a for n, a in arrays.items()})


def steps_of(name: str, arch: str) -> Sequence[Step]:
    """Return the steps of a call on an architecture, as ``explain`` lists them."""
    call = drawn(name)
    op: Any = OPS[name]
    return explain(op, **call.arrays, **call.options, device=f"sm_{arch}").steps


def planned(name: str, arch: str) -> list[int]:
    """Return the numbers of launches, allocations and allocated bytes of a call."""
    steps = steps_of(name, arch)
    launches = sum(len(step.launches) for step in steps)
    return [launches, sum(s.arrays for s in steps), sum(s.allocated_bytes for s in steps)]


def opcodes(name: str) -> int:
    """Return the Python opcodes that a replayed call runs, without those of CuPy."""
    with gpu("90") as machine:
        machine.strict = False
        call = drawn(name)
        call = call.mapped(lambda array: machine.array(array.shape, array.dtype))
        op, options = OPS[name], call.options
        for _ in range(REPLAYED - 1):
            op(**call.arrays, **options)
        return traced(lambda: op(**call.arrays, **options))


def traced(function: Callable[[], Any]) -> int:
    """Return the number of the library's Python opcodes that a function runs."""
    count = 0

    def instruction(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return instruction

    def begin(frame: Any, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith((LIBRARY, "<")):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return instruction

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def moved(name: str) -> list[int]:
    """Return sectors read and written, and passes for reads and writes, counted on the emulator."""
    call = drawn(name, TINY).mapped(np.array)
    with counted() as traffic, using(Emulator()):
        call.run()
    return [
        traffic.of(space, write=write).moved
        for space in ("global", "shared")
        for write in (False, True)
    ]


def loops(name: str, arch: str) -> list[int]:
    """Return the instructions of the hot loop of each kernel that a call launches."""
    launches = (launch for step in steps_of(name, arch) for launch in step.launches)
    units = ((each.kernel, each.source, compiler_options(each.source)) for each in launches)
    return [sass.hot_loop(sass.text_of(*unit, arch)) for unit in units]


def measured(name: str) -> dict[str, Any]:
    """Return the line of an op."""
    line: dict[str, Any] = {arch: planned(name, arch) for arch in ARCHITECTURES}
    line["opcodes"] = opcodes(name)
    line["moved"] = moved(name)
    line |= {f"loops {arch}": loops(name, arch) for arch in ARCHITECTURES}
    return line


def rises(now: Any, before: Any) -> bool:
    """Return whether a number is above that of the table, or their count is another one."""
    numbers, bounds = np.atleast_1d(now), np.atleast_1d(before)
    return numbers.shape != bounds.shape or bool((numbers > (1 + SLACK) * bounds).any())


def read() -> tuple[dict[str, Any], Lines]:
    """Return the header of ``[calls]``, and its lines by op."""
    head = costs_file.read("calls")
    lines = {
        name: {
            key: value
            for keys, value in line.items()
            for key in (keys.split() if keys[0].isdigit() else [keys])
        }
        for name, line in head.pop("ops").items()
    }
    return head, lines


def text(head: dict[str, Any], lines: Lines) -> Iterator[str]:
    """Yield the lines of ``[calls]``."""
    yield HEAD + f'python = "{head["python"]}"\ncompiler = "{head["compiler"]}"'
    yield "\n[calls.reasons]  # why a line last changed"
    yield from costs_file.reason_lines(head["reasons"])
    yield "\n[calls.ops]"
    for name, line in sorted(lines.items(), key=costs_file.order):
        cells = costs_file.by_architecture({arch: line[arch] for arch in ARCHITECTURES})
        cells += [f"{json.dumps(k)} = {v}" for k, v in line.items() if k not in ARCHITECTURES]
        yield f"{name} = {{ {', '.join(cells)} }}"


def write(why: str, names: Iterable[str] = ()) -> None:
    """Rewrite the lines of these ops, or all; store the reason for each line that changed."""
    head, lines = read()
    known = with_kernels()
    if unknown := set(names) - {*known}:
        sys.exit(f"there is no op {unknown} with a kernel; choose from {known}")
    for name in list(names) or known:
        line = measured(name)
        if name in lines and lines[name] != line:
            head["reasons"] = {**head["reasons"], name: why}
        lines[name] = line
    head |= {"python": PYTHON, "compiler": compiler_version()}
    head["reasons"] = {name: reason for name, reason in head["reasons"].items() if name in known}
    lines = {name: line for name, line in lines.items() if name in known}
    costs_file.replace("calls", text(head, lines))


def add() -> None:
    """Add lines for the kernels and ops that have none yet."""
    sass.nvdisasm()  # if it is missing, nothing is written
    if kernels := {*declared()} - budget.read()[1].keys():
        budget.write(kernels)
    if ops := {*with_kernels()} - read()[1].keys():
        write("", ops)


if __name__ == "__main__":
    if sys.argv[1:] == ["--new"]:
        with general_attention():
            sys.exit(add())
    if sys.argv[1:2] != ["--write"] or len(sys.argv) < 3 or sys.argv[2] in OPS:
        sys.exit(__doc__)
    with general_attention():
        write(sys.argv[2], sys.argv[3:])
