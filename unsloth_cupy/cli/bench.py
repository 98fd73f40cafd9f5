"""``unsloth-cupy bench``: times ops, and compares them with copy bandwidth and other libraries."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .. import machine
from .._version import __version__
from ..bench.attention_shapes import draw_shapes, shape_rows, shape_table
from ..bench.cases import chosen, composed
from ..bench.report import check_markers, draw_times, table, write_block
from ..bench.stopwatch import DeviceClock, HostClock
from ..bench.timing import launches, shares, timed
from ..core.op import Op
from ..errors import ConfigError
from ..files import atomic_path
from ..profiling.cards import card_here
from .options import FILE, NewFile, NewPicture
from .progress import progress

LIBRARIES = {
    "cupy": machine.CUPY,
    **{name: (name,) for name in ("numpy", "torch", "triton", "liger-kernel")},
}

# names that are also timed at five fixed shapes and at a grid of lengths
SHAPED = {"attention", "attention_forward", "attention_backward"}


@click.command()
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option(
    "--peers", is_flag=True, help="Also time torch, and on a GPU torch.compile and Liger."
)
@click.option(
    "--plot", type=NewPicture(), metavar="PATH", help="Draw the times to a PNG, PDF or SVG file."
)
@click.option(
    "--json", "numbers", type=NewFile(), metavar="PATH", help="Write the results to a JSON file."
)
@click.option("--write", type=FILE, metavar="PATH", help="Update the table of docs/performance.md.")
def bench(
    names: tuple[str, ...],
    peers: bool,
    plot: Path | None,
    numbers: Path | None,
    write: Path | None,
) -> None:
    """Time ops on this machine, forward and backward.

    Without OP, all ops are timed, in every dtype. On a GPU, device events time the kernels of the
    ops that have one. Without a GPU, the wall time of the NumPy definitions on the CPU is measured.
    The op attention is also timed at the shapes of known models and at a grid of lengths. Output
    files are rewritten after each op.
    """
    from rich.markup import escape

    ops = chosen(*names)
    gpus, reason = machine.gpus()
    gpu = gpus[0].name if gpus else None
    if write is not None:
        _check_page(write, gpu, reason)
    if peers:
        _check_torch(gpu is not None)
    console = machine.console()
    if gpu is None:
        line = f"No GPU was found ({reason}): timing NumPy definitions on the CPU."
    else:
        ops, gpu, line = _kernels(ops, gpu, names)
    for text in (line, *composed(names)):
        console.print(escape(text))
    clock = HostClock() if gpu is None else DeviceClock()
    report: dict[str, Any] = {
        "machine": _machine(gpu),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {"unsloth_cupy": __version__, "python": platform.python_version()}
        | {name: machine.version(*names) for name, names in LIBRARIES.items()},
        "method": clock.method,
        "copy_gb_per_s": clock.copy_rate() / 1e9 if isinstance(clock, DeviceClock) else None,
        "product_tflop_per_s": {},
        "int8_top_per_s": None if gpu is None else card_here(0).rate("int8", "quantized"),
        "ops": [],
        "rows": [],
        "notes": [],
    }
    _write_report(report, numbers, None)
    for each in progress(ops, len(ops), "timing", lambda op: op.__name__):
        rows = []
        for row, notes in timed(each, clock, gpu, peers):
            rows.append(row | shares(row, report, clock))
            report["notes"] += [note for note in notes if note not in report["notes"]]
        report["rows"] += sorted(rows, key=lambda row: row["op"] != each.__name__)
        if each.__name__ == "attention_forward" and {*names} & SHAPED:
            report["attention"] = [*shape_rows(clock, gpu is not None, peers)]
        report["ops"].append(each.__name__)
        _write_report(report, numbers, write)
    console.print(table(report))
    if "attention" in report:
        console.print(shape_table(report["attention"], gpu is not None))
    for text in (*report["notes"], f"Method: {report['method']}."):
        console.print(escape(text))
    if plot is not None:
        (draw_shapes if "attention" in report else draw_times)(plot, report)


def _kernels(
    ops: list[Op[..., Any]], gpu: str, names: Sequence[str]
) -> tuple[list[Op[..., Any]], str | None, str]:
    """Return the ops to time, the GPU (None: time on the CPU), and a line that announces them.

    If some ops have kernels, the ops without kernels are skipped.
    """
    kernels = [each for each in ops if launches(each)]
    skipped = ", ".join(each.__name__ for each in ops if each not in kernels)
    if not kernels:
        line = f"No kernel for {', '.join(names)}: timing NumPy definitions on the CPU."
        return ops, None, line
    line = f"Timing kernels on {gpu} with device events."
    return (
        kernels,
        gpu,
        f"{line} Skipped (no kernel): {skipped}." if names and skipped else line,
    )


def _write_report(report: dict[str, Any], numbers: Path | None, page: Path | None) -> None:
    """Write the times measured so far to the JSON file and to the page."""
    if numbers is not None:
        with atomic_path(numbers) as partial:
            partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if page is not None:
        write_block(page, report)


def _check_page(page: Path, gpu: str | None, reason: str) -> None:
    """Raise unless there is a GPU to measure and the page has the markers of a table."""
    if gpu is None:
        raise ConfigError(f"no GPU was found ({reason}): nothing is written to {page}")
    check_markers(page)


def _check_torch(gpu: bool) -> None:
    """Raise unless torch is installed and, where there is a GPU, can use it."""
    try:
        import torch
    except ImportError as error:
        cure = "pip install 'unsloth_cupy[peers]'"
        raise ConfigError(f"--peers needs torch ({error}); install it with {cure}") from error
    if gpu and not torch.cuda.is_available():
        raise ConfigError(
            f"--peers: torch {torch.__version__} sees no GPU; install a build of torch with CUDA"
        )


def _machine(gpu: str | None) -> dict[str, Any]:
    """Return the hardware and system of a report."""
    return {
        "gpu": gpu,
        "system": platform.platform(),
        "processor": machine.processor(),
        "cores": machine.cores(),
        "blas": machine.blas(),
    }


def commit() -> str | None:
    """Return the commit of the checkout, with "-dirty" if files differ from it; else None.

    The environment variable ``UNSLOTH_CUPY_COMMIT`` overrides it, for a copy without history.
    """
    if commit_name := os.environ.get("UNSLOTH_CUPY_COMMIT"):
        return commit_name
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude", "*"]
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        process = subprocess.run(
            command, cwd=root, capture_output=True, encoding="utf-8", check=False
        )
    except FileNotFoundError:  # git is not installed
        return None
    return process.stdout.strip() or None
