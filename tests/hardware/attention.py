"""Attention on Hopper, measured: ``python -m tests.hardware --attention FOLDER``.

    bits 128 causal     forward and backward twice: equal bits, and near what mma.sync gives
    speed 128 causal    TFLOP/s from 1k to 32k tokens, beside torch's backends, in turns
    races 128           a small call under compute-sanitizer: memcheck, racecheck, synccheck
    pipes 128           a call under Nsight Compute: how busy each pipe is, beside the model

of head dims 64, 128 and 256, causal and full.  What steps found is kept beside a page, whose table
is renewed: ``python -m tests.hardware.attention PAGE STEP ... --json FILE``, where FILE says which
steps are done.  A step that finds something wrong ends the process.
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
from unsloth_cupy.bench.report import OURS
from unsloth_cupy.bench.stopwatch import DeviceClock
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.gpu import cupy
from unsloth_cupy.files import written_beside

from .fixtures import ROOT

Row = dict[str, Any]

DIMS, MASKS = (128, 64, 256), ("causal", "full")
TOKENS = tuple(1 << power for power in range(10, 16))
WIDTH = 2048  # columns of all heads
ALL = 16384  # tokens of a batch, at least
TOOLS = ("memcheck", "racecheck", "synccheck")
LOOK = 120  # seconds for one of them
NEAR = 2e-2  # of the largest value: two roundings to bfloat16 of sums in another order
TWO = "two launches"
PEERS = {TWO: TWO, "mma.sync": "mma.sync", "torch cuDNN": "cuDNN", "torch flash": "flash"}
BEGIN, END = "<!-- hopper: begin -->", "<!-- hopper: end -->"
# of Nsight Compute, by the names of tests/warpgroups.py: per cent of what a pipe could do
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
    """Return the steps, in order: what is wrong shows before what is slow."""
    pairs = [f"{dim} {mask}" for dim, mask in itertools.product(DIMS, MASKS)]
    timed = [f"{what} {pair}" for what in ("bits", "speed") for pair in pairs]
    return timed + [f"{what} {dim}" for what in ("pipes", "races") for dim in DIMS]


def shape(dim: int, tokens: int) -> Shape:
    """Return as many sequences of heads as bring ALL tokens together."""
    return Shape(f"{tokens}", max(1, ALL // tokens), WIDTH // dim, tokens, dim)


def on_warpgroups(wanted: bool = True, one_pass: bool | None = None) -> Any:
    """Return the context in which calls go to warpgroups, where they can; or do not."""
    return AttentionConfig(warpgroups=wanted, one_pass=one_pass if wanted else None).use()


class Here:
    """The GPU: where arrays go, and who takes the time."""

    gpu = True
    tokens = TOKENS

    def __init__(self) -> None:
        self.clock: Any = DeviceClock()

    def place(self, array: np.ndarray) -> Any:
        """Return an array on the GPU."""
        return cupy().asarray(array)

    def take(self, array: Any) -> np.ndarray:
        """Return an array of the GPU in float32, on the host."""
        return np.asarray(array.get() if self.gpu else array).astype(np.float32)

    def draw(self, size: Shape) -> list[Any]:
        """Return q, k, v and dout."""
        rng = np.random.default_rng(0)
        full = (4, size.batch, size.tokens, size.heads, size.dim)
        return [self.place(a) for a in rng.standard_normal(full, np.float32).astype(BFLOAT16)]


def bits(here: Here, dim: int, mask: str) -> Iterator[Row]:
    """Compare two runs, in one pass and in two launches, and them with the kernels of mma.sync."""
    for one_pass in (True, False):
        for row in _bits(here, dim, mask, one_pass):
            yield row if one_pass else row | {"of": f"{row['of']} of two launches"}


def _bits(here: Here, dim: int, mask: str, one_pass: bool) -> Iterator[Row]:
    *qkv, dout = here.draw(shape(dim, here.tokens[-3]))
    causal = mask == "causal"
    found = []
    for wanted in (True, True, False):
        with on_warpgroups(wanted, one_pass):
            out, lse = attention_forward(*qkv, causal=causal)
            gradients = attention_backward(dout, *qkv, out, lse, causal=causal)[:3]
        found.append([here.take(a) for a in (out, lse, *gradients)])
    for name, one, same, other in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        if one.tobytes() != same.tobytes():
            raise SystemExit(f"{name}: {np.sum(one != same)} of {one.size} differ in two runs")
        away = float(np.abs(one - other).max() / np.abs(other).max())
        if not away < NEAR:
            raise SystemExit(f"{name} is {away:.2e} of its largest away from that of mma.sync")
        yield {"of": name, "away": away}


def speed(here: Here, dim: int, mask: str) -> Iterator[Row]:
    """Time all lengths, forward and backward."""
    causal = mask == "causal"
    for tokens in here.tokens:
        size = shape(dim, tokens)
        *qkv, dout = here.draw(size)
        made = attention_forward(*qkv, causal=causal)
        own = (
            partial(attention_forward, *qkv, causal=causal),
            partial(attention_backward, dout, *qkv, *made, causal=causal),
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
    """Launch what the tools look at: several jobs a block, of several tiles, and some hidden."""
    here = Here()
    *qkv, dout = here.draw(Shape("small", 1, 2 * WIDTH // dim, 512, dim))
    with on_warpgroups():
        out, lse = attention_forward(*qkv, causal=True)
        attention_backward(dout, *qkv, out, lse, causal=True)
    cupy().cuda.Device().synchronize()


def under(tool: str, *options: str, dim: int) -> subprocess.CompletedProcess[str]:
    """Run the small call under a tool of NVIDIA."""
    own = [sys.executable, "-m", "tests.hardware.attention", "--small", str(dim)]
    return subprocess.run(
        [tool, *options, *own], cwd=ROOT, capture_output=True, text=True, check=False, timeout=LOOK
    )


def races(here: Here, dim: int) -> Iterator[Row]:
    """Let compute-sanitizer look at a small call."""
    for tool in TOOLS if shutil.which("compute-sanitizer") else ():
        done = under("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", dim=dim)
        told = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        if done.returncode:
            raise SystemExit("\n".join([f"{tool}: ended with {done.returncode}", *told[:12]]))
        yield {"tool": tool, "said": told[-1].strip("= ") if told else "nothing"}


def pipes(here: Here, dim: int) -> Iterator[Row]:
    """Let Nsight Compute count what the pipes do in each kernel."""
    if not shutil.which("ncu"):
        return
    chosen = ["--metrics", ",".join(METRICS.values()), "-k", "regex:attention_.*_sm90"]
    done = under("ncu", "--csv", "--page", "raw", *chosen, dim=dim)
    lines = done.stdout.splitlines()
    found: list[Row] = []
    starts = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if done.returncode or not starts:
        raise SystemExit("\n".join([f"ncu: ended with {done.returncode}", *lines[-8:]]))
    for row in csv.DictReader(io.StringIO("\n".join(lines[starts[0] :]))):
        if row["ID"]:  # the first row has the units
            busy = {name: float(row[metric]) for name, metric in METRICS.items() if row.get(metric)}
            found.append({"kernel": row["Kernel Name"], "busy": busy})
    yield from (
        {**row, "model": told} for row, told in zip_longest(found, model(dim), fillvalue={})
    )


def model(dim: int) -> list[dict[str, float]]:
    """Return what the model says of the launches of a call; nothing where it cannot disassemble."""
    try:
        from .. import warpgroups

        tiles = [warpgroups.forward(dim)[0], *(each[1] for each in warpgroups.backward(dim))]
    except (ImportError, LookupError):
        return []
    return [warpgroups.busy(tile) for tile in tiles]


STEPS: dict[str, Any] = {"bits": bits, "speed": speed, "races": races, "pipes": pipes}


def facts() -> Row:
    """Return where and when, of which commit, with which versions."""
    from unsloth_cupy.cli.bench import commit

    now = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = {name: machine.version(name) for name in ("torch", "numpy")}
    versions["cupy"] = machine.version(*machine.CUPY)
    gpus, _ = machine.gpus()
    device = gpus[0].name if gpus else machine.processor()
    return {"device": device, "date": now, "commit": commit() or "unknown", "versions": versions}


def kept_at(page: Path) -> Path:
    """Return the file beside a page that has what steps found."""
    return page.with_suffix(".hopper.json")


def do(step: str, page: Path, here: Here) -> None:
    """Do a step, keep what it found, and renew the table."""
    what, dim, *mask = step.split()
    found = [*STEPS[what](here, int(dim), *mask)]
    kept = json.loads(kept_at(page).read_text()) if kept_at(page).exists() else {}
    kept[step] = {"facts": facts(), "rows": found}
    with written_beside(kept_at(page)) as partial_file:
        partial_file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    renew(page)


def renew(page: Path) -> None:
    """Write the table of a page from what is kept beside it."""
    text = page.read_text(encoding="utf-8")
    kept = json.loads(kept_at(page).read_text()) if kept_at(page).exists() else {}
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    with written_beside(page) as partial_file:
        lines = "\n".join(table(kept))
        partial_file.write_text(f"{head}{BEGIN}\n{lines}\n{tail}", encoding="utf-8")


def table(kept: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table, and what the other steps said."""
    if not kept:
        yield "No GPU has measured these kernels yet: nothing is claimed about their speed."
        return
    order = [step for step in names() if step in kept]
    speeds = [step for step in order if step.startswith("speed")]
    ways = {"forward": [OURS, *PEERS], "backward": [OURS, *PEERS]}
    ways["forward"].remove(TWO)
    columns = [f"{way} {PEERS.get(name, name)}" for way, shown in ways.items() for name in shown]
    yield f"| head dim | mask | tokens | {' | '.join(columns)} |"
    yield "|---|---|---|" + "--:|" * len(columns)
    for step in speeds:
        _, dim, mask = step.split()
        rows = kept[step]["rows"]
        for forward, backward in zip(rows[::2], rows[1::2], strict=True):
            cells = [
                f"{row['tflop_per_s'][name]:.0f}" if name in row["tflop_per_s"] else "-"
                for row, shown in zip((forward, backward), ways.values(), strict=True)
                for name in shown
            ]
            yield f"| {dim} | {mask} | {forward['tokens']} | {' | '.join(cells)} |"
    yield ""
    yield "TFLOP/s: four products of a pair forward, ten operations of a column backward."
    for step in order:
        said = [words(step.split()[0], row) for row in kept[step]["rows"]]
        if said and said[0]:
            yield f"\n{step}: {'; '.join(said)}."
    about = {json.dumps(kept[step]["facts"]): None for step in order}
    for each in map(json.loads, about):
        versions = ", ".join(f"{name} {v}" for name, v in each["versions"].items() if v)
        yield f"\n{each['device']}, {each['date']}, commit {each['commit']}; {versions}."


def words(what: str, row: Row) -> str:
    """Return a row of a step as words; none of times, which are the table."""
    if what == "bits":
        return f"{row['of']} the same twice, {row['away']:.1e} of its largest away from mma.sync's"
    if what == "races":
        return f"{row['tool']}: {row['said']}"
    if what == "pipes":
        shares = [
            f"{name} {share:.0f} % ({row['model'].get(name, float('nan')):.0f} %)"
            for name, share in row["busy"].items()
        ]
        return f"{row['kernel']}: {', '.join(shares)}"
    return ""


def main() -> None:
    """Do steps, one after another, and say in a file which are done."""
    parser = argparse.ArgumentParser(prog="python -m tests.hardware.attention")
    parser.add_argument("page", type=Path, nargs="?", help="that has the table")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="as 'speed 128 causal'; none: all")
    parser.add_argument("--json", type=Path, help="the file that says which steps are done")
    parser.add_argument("--small", type=int, metavar="DIM", help="only launch a small call")
    given = parser.parse_args()
    if given.small:
        return small(given.small)
    if given.page is None:
        parser.error("name the page that has the table")
    if unknown := set(given.steps) - {*names()}:
        parser.error(f"no step is called {sorted(unknown)}; there are: {', '.join(names())}")
    here, done = Here(), []
    for step in given.steps or names():
        do(step, given.page, here)
        done.append(step)
        if given.json:
            given.json.write_text(json.dumps({"ops": done}))
    return None


if __name__ == "__main__":
    main()
