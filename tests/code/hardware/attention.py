"""Measure attention on Hopper: ``python -m tests.code.hardware --attention FOLDER``.

    forward 128 causal  forward twice: equal bits, every row close to that of mma.sync
    two 128 causal      backward in two launches, judged the same way
    one 128 causal      backward in one pass, the same
    speed 128 causal    TFLOP/s from 1k to 32k tokens, alternating with torch's backends
    pipes 128           a call under Nsight Compute: the use of each pipe, compared with the model
    memcheck 128        a small call under compute-sanitizer; synccheck, initcheck and racecheck too

These steps are for head dims 64, 128 and 256, causal and full.  Their results are stored next to a
page, whose table ``python -m tests.code.hardware.attention PAGE STEP ... --json FILE`` rewrites;
FILE lists the steps that are done.  A step that detects an error ends the process, but racecheck's:
on an H200 it reported hazards between accesses that an mbarrier orders, where the emulator's race
detector finds none, and whether it follows mbarriers is not known.  Its report is kept beside those
of the other tools, to be judged by a reader.
"""

import argparse
import csv
import datetime
import io
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_cupy import AttentionConfig, attention_backward, attention_forward, machine
from unsloth_cupy.bench.attention_shapes import Shape, torch_calls
from unsloth_cupy.bench.report import CHANGED, OURS, changed
from unsloth_cupy.bench.stopwatch import DeviceClock
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.gpu import cupy
from unsloth_cupy.core.source import code_digest
from unsloth_cupy.files import atomic_path

from .fixtures import ROOT

Row = dict[str, Any]
Rows = Iterator[Row]

DIMS, MASKS = (128, 64, 256), ("causal", "full")
TOKENS = tuple(1 << power for power in range(10, 16))
WIDTH = 2048  # columns of all heads together
ALL = 16384  # the fewest tokens of a batch
WAYS = {"forward": None, "two": False, "one": True}  # steps that compare bits, by one_pass
TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")
UNJUDGED = "racecheck"
# Of a row's norm: two roundings to bfloat16, of sums in another order, make 3e-3; a lost tile of
# 128 keys makes 0.09 of a row of 16k.
NEAR = 2e-2
NEAR_LSE = 1e-3  # absolute, as it is a logarithm: a lost tile makes 8e-3
TWO = "two launches"
PEERS = {TWO: TWO, "mma.sync": "mma.sync", "torch cuDNN": "cuDNN", "torch flash": "flash"}
FILES = [f"attention_{name}.cu" for name in ("forward_sm90", "backward_sm90", "dq_sm90", "delta")]
BEGIN, END = "<!-- hopper: begin -->", "<!-- hopper: end -->"
# Metrics of Nsight Compute by the names of programs/warpgroups.py: percentage of a pipe's peak
BUSY = ".avg.pct_of_peak_sustained_active"
METRICS = {
    "products": f"sm__pipe_tensor_cycles_active{BUSY}",
    "issue": f"smsp__issue_active{BUSY}",
    "FMA": f"sm__inst_executed_pipe_fma{BUSY}",
    "ALU": f"sm__inst_executed_pipe_alu{BUSY}",
    "exp2": f"sm__inst_executed_pipe_xu{BUSY}",
    "shared": f"l1tex__data_bank_reads{BUSY}",
}


def names() -> list[str]:
    """Return the steps in order: those that detect errors before those that take long."""
    pairs = [f"{dim} {mask}" for dim, mask in itertools.product(DIMS, MASKS)]
    timed = [f"{what} {pair}" for what in (*WAYS, "speed") for pair in pairs]
    return timed + [f"{what} {dim}" for what in ("pipes", *TOOLS) for dim in DIMS]


def process_of(step: str) -> str:
    """Return the name of the process of a step: a launch that hangs takes no other kernel along."""
    what = step.split(maxsplit=1)[0]
    return what if what in (*WAYS, "speed") else step


def after(step: str) -> list[str]:
    """Return the steps that come next if one failed: tools look at a head dim with wrong bits."""
    what, dim, *_ = step.split()
    return [f"{tool} {dim}" for tool in TOOLS] if what in WAYS else []


def shape(dim: int, tokens: int) -> Shape:
    """Return the shape of a batch with as many sequences as make ALL tokens."""
    return Shape(f"{tokens}", max(1, ALL // tokens), WIDTH // dim, tokens, dim)


def on_warpgroups(wanted: bool = True, one_pass: bool | None = None) -> Any:
    """Return a context in which calls use warpgroups if possible, or do not."""
    return AttentionConfig(warpgroups=wanted, one_pass=one_pass if wanted else None).use()


class Here:
    """The GPU: it draws arrays, and measures time."""

    gpu = True
    tokens = TOKENS

    def __init__(self) -> None:
        self.clock: Any = DeviceClock()

    def draw(self, size: Shape) -> list[Any]:
        """Return random q, k, v and dout."""
        rng = (cupy() if self.gpu else np).random.default_rng(0)
        full = (size.batch, size.tokens, size.heads, size.dim)
        return [rng.standard_normal(full, np.float32).astype(BFLOAT16) for _ in range(4)]


def away(actual: Any, expected: Any) -> float:
    """Return the largest difference of a row, as a share of the norm of the expected row.

    Rows lie along the last axis.  One that is much smaller than the others, as that of the first
    query's gradient, is compared with an eighth of their median.
    """
    actual, expected = (a.reshape(-1, a.shape[-1]).astype(np.float32) for a in (actual, expected))
    norms = np.linalg.norm(expected, axis=1)
    least = max(float(np.median(norms)) / 8, float(np.finfo(np.float32).tiny))  # all may be 0
    return float((np.linalg.norm(actual - expected, axis=1) / np.maximum(norms, least)).max())


def bits(here: Here, way: str, dim: int, mask: str) -> Rows:
    """Compare two runs, and both with mma.sync, where the arrays are."""
    *qkv, dout = here.draw(shape(dim, here.tokens[-3]))
    causal, one_pass = mask == "causal", WAYS[way]
    runs = []
    for wanted in (True, True, False):
        with on_warpgroups(wanted, one_pass):
            outputs = attention_forward(*qkv, causal=causal)
            if way != "forward":
                outputs = attention_backward(dout, *qkv, *outputs, causal=causal)[:3]
        runs.append(outputs)
    names = ("out", "lse") if way == "forward" else ("dq", "dk", "dv")
    for name, one, same, other in zip(names, *runs, strict=True):
        raw = f"u{one.itemsize}"
        if differ := int((one.view(raw) != same.view(raw)).sum()):
            raise SystemExit(f"{name}: {differ} of {one.size} differ in two runs")
        most = float(abs(one - other).max()) if name == "lse" else away(one, other)
        if not most < (NEAR_LSE if name == "lse" else NEAR):
            raise SystemExit(f"{name}: a row is {most:.2e} of its norm away from mma.sync's")
        yield {"of": name, "away": most}


def speed(here: Here, dim: int, mask: str) -> Rows:
    """Time forward and backward at all sequence lengths."""
    causal = mask == "causal"
    for tokens in here.tokens:
        size = shape(dim, tokens)
        *qkv, dout = here.draw(size)
        outputs = attention_forward(*qkv, causal=causal)
        own = (
            partial(attention_forward, *qkv, causal=causal),
            partial(attention_backward, dout, *qkv, *outputs, causal=causal),
        )
        for backward, call in enumerate(own):
            peers = torch_calls(tuple(qkv), dout, causal, bool(backward), here.gpu, chain=False)
            with on_warpgroups():
                seconds, _ = here.clock([call, *peers.values()])
            before, _ = here.clock([call])
            times = dict(zip((OURS, *peers, "mma.sync"), (*seconds, *before), strict=True))
            if backward:
                with on_warpgroups(one_pass=False):
                    (times[TWO],), _ = here.clock([call])
            work = size.operations(causal, bool(backward)) / 1e12
            yield {
                "tokens": tokens,
                "direction": "backward" if backward else "forward",
                "tflop_per_s": {name: work / taken for name, taken in times.items()},
            }


def small(dim: int) -> None:
    """Make the call that the tools check: several jobs for a block, several tiles, some masked."""
    here = Here()
    *qkv, dout = here.draw(Shape("small", 1, 2 * WIDTH // dim, 512, dim))
    with on_warpgroups():
        out, lse = attention_forward(*qkv, causal=True)
        attention_backward(dout, *qkv, out, lse, causal=True)
    cupy().cuda.Device().synchronize()


def under(tool: str, *options: Any, dim: int, report: Path) -> tuple[int, str]:
    """Run the small call under a tool of NVIDIA; return its exit status and its report."""
    own = [sys.executable, "-m", "tests.code.hardware.attention", "--small", dim]
    command = [*map(str, (tool, *options, *own))]
    with report.open("w") as output:
        status = subprocess.call(command, cwd=ROOT, stdout=output, stderr=output)
    return status, report.read_text()


def sanitized(name: str, dim: int, page: Path) -> Rows:
    """Run a small call under a tool of compute-sanitizer, whose report is kept beside the page."""
    if not shutil.which("compute-sanitizer"):
        return
    options, report = ("--tool", name, "--error-exitcode", 9), page.with_name(f"{name}-{dim}.txt")
    status, text = under("compute-sanitizer", *options, dim=dim, report=report)
    output = [line for line in text.splitlines() if line.startswith("=========")]
    if status and name != UNJUDGED:
        raise SystemExit("\n".join([f"{name}: ended with {status}", *output[:12]]))
    yield {"tool": name, "said": output[-1].strip("= ") if output else "nothing"}


def pipes(dim: int, page: Path) -> Rows:
    """Measure the use of each pipe in each kernel with Nsight Compute."""
    if not shutil.which("ncu"):
        return
    chosen = ["--metrics", ",".join(METRICS.values()), "-k", "regex:attention_.*_sm90"]
    options, report = ("--csv", "--page", "raw", *chosen), page.with_name(f"pipes-{dim}.csv")
    status, text = under("ncu", *options, dim=dim, report=report)
    lines = text.splitlines()
    kernels: list[Row] = []
    starts = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if status or not starts:
        raise SystemExit("\n".join([f"ncu: ended with {status}", *lines[-8:]]))
    for row in csv.DictReader(io.StringIO("\n".join(lines[starts[0] :]))):
        if row["ID"]:  # the first row has the units
            busy = {name: float(row[metric]) for name, metric in METRICS.items() if row.get(metric)}
            kernels.append({"kernel": row["Kernel Name"], "busy": busy})
    yield from (
        {**row, "model": busy} for row, busy in zip_longest(kernels, model(dim), fillvalue={})
    )


def model(dim: int) -> list[dict[str, float]]:
    """Return the model's use of each pipe in each kernel; [] without a disassembler."""
    try:
        from ..programs import warpgroups

        tiles = [warpgroups.forward(dim)[0], *(each[1] for each in warpgroups.backward(dim))]
    except (ImportError, LookupError):
        return []
    return [warpgroups.busy(tile) for tile in tiles]


def facts() -> Row:
    """Return the device, the date, the commit, the versions of packages, and hashes of the code."""
    from unsloth_cupy.cli.bench import commit

    now = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = {name: machine.version(name) for name in ("torch", "numpy")}
    versions["cupy"] = machine.version(*machine.CUPY)
    gpus, _ = machine.gpus()
    device = gpus[0].name if gpus else machine.processor()
    code = {file: code_digest(file) for file in FILES}
    where = {"device": device, "date": now, "commit": commit() or "unknown"}
    return {**where, "versions": versions, "sources": code}


def kept_at(page: Path) -> Path:
    """Return the file next to a page that has the results of its steps."""
    return page.with_suffix(".hopper.json")


def do(step: str, page: Path, here: Here) -> None:
    """Run a step, store its results, and rewrite the table."""
    what, dim, *mask = step.split()
    if what in WAYS:
        rows = [*bits(here, what, int(dim), *mask)]
    elif what == "speed":
        rows = [*speed(here, int(dim), *mask)]
    else:
        rows = [*(pipes(int(dim), page) if what == "pipes" else sanitized(what, int(dim), page))]
    kept = json.loads(kept_at(page).read_text()) if kept_at(page).exists() else {}
    kept[step] = {"facts": facts(), "rows": rows}
    with atomic_path(kept_at(page)) as partial_file:
        partial_file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    renew(page)


def renew(page: Path) -> None:
    """Write the table of a page from its stored results."""
    text = page.read_text(encoding="utf-8")
    kept = json.loads(kept_at(page).read_text()) if kept_at(page).exists() else {}
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    with atomic_path(page) as partial_file:
        lines = "\n".join(table(kept))
        partial_file.write_text(f"{head}{BEGIN}\n{lines}\n{tail}", encoding="utf-8")


def table(kept: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table, and the results of the other steps."""
    if not kept:
        yield "No GPU has measured these kernels yet: nothing is claimed about their speed."
        return
    order = [step for step in names() if step in kept]
    speeds = [step for step in order if step.startswith("speed")]
    peers = {"forward": [OURS, *PEERS], "backward": [OURS, *PEERS]}
    peers["forward"].remove(TWO)
    columns = [f"{way} {PEERS.get(name, name)}" for way, shown in peers.items() for name in shown]
    yield f"| head dim | mask | tokens | {' | '.join(columns)} |"
    yield "|---|---|---|" + "--:|" * len(columns)
    for step in speeds:
        _, dim, mask = step.split()
        rows = kept[step]["rows"]
        for forward, backward in zip(rows[::2], rows[1::2], strict=True):
            cells = [
                f"{row['tflop_per_s'][name]:.0f}" if name in row["tflop_per_s"] else "-"
                for row, shown in zip((forward, backward), peers.values(), strict=True)
                for name in shown
            ]
            yield f"| {dim} | {mask} | {forward['tokens']} | {' | '.join(cells)} |"
    yield ""
    yield "TFLOP/s: four products of a pair forward, ten operations of a column backward."
    for step in order:
        results = [words(step.split()[0], row) for row in kept[step]["rows"]]
        if results and results[0]:
            yield f"\n{step}: {'; '.join(results)}."
    about = {json.dumps(kept[step]["facts"]): None for step in order}
    for each in map(json.loads, about):
        versions = ", ".join(f"{name} {v}" for name, v in each["versions"].items() if v)
        since = CHANGED * changed(each["sources"])
        yield f"\n{each['device']}, {each['date']}, commit {each['commit']}{since}; {versions}."


def words(what: str, row: Row) -> str:
    """Return a row of a step as text; "" for times, which are in the table."""
    if what in WAYS:
        return f"{row['of']} the same twice, {row['away']:.1e} of a row away from mma.sync's"
    if what in TOOLS:
        return f"{row['said']}{' (not judged)' * (what == UNJUDGED)}"
    if what == "pipes":
        shares = [
            f"{name} {share:.0f} % ({row['model'].get(name, float('nan')):.0f} %)"
            for name, share in row["busy"].items()
        ]
        return f"{row['kernel']}: {', '.join(shares)}"
    return ""


def main() -> None:
    """Run steps, one after another, and list those that are done in a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.code.hardware.attention")
    parser.add_argument("page", type=Path, nargs="?", help="the page with the table")
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help="such as 'speed 128 causal'; default: all"
    )
    parser.add_argument("--json", type=Path, help="the file that lists the steps that are done")
    parser.add_argument("--small", type=int, metavar="DIM", help="only make a small call")
    args = parser.parse_args()
    if args.small:
        return small(args.small)
    if args.page is None:
        parser.error("name the page that has the table")
    if unknown := set(args.steps) - {*names()}:
        parser.error(f"no step is called {sorted(unknown)}; there are: {', '.join(names())}")
    here, steps = Here(), args.steps or names()
    for count in range(len(steps) + 1):
        if args.json:
            with atomic_path(args.json) as partial_file:
                partial_file.write_text(json.dumps({"ops": steps[:count]}))
        for step in steps[count : count + 1]:
            do(step, args.page, here)
    return None


if __name__ == "__main__":
    main()
