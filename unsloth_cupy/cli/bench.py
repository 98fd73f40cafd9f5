"""``unsloth-cupy bench``: the time of every op, beside the copy bandwidth and beside peers."""

import datetime
import json
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import machine
from .._version import __version__
from ..bench.attention_shapes import draw_shapes, shape_rows, shape_table
from ..bench.cases import Call, Scale, chosen, composed, draw
from ..bench.report import check_markers, draw_times, table, write_block
from ..bench.stopwatch import DeviceClock, HostClock
from ..core.dtypes import KERNEL_DTYPES
from ..core.op import Op
from ..errors import ConfigError
from ..files import written_beside
from .options import FILE, NewFile

HOST_SCALES = (
    Scale(tokens=128, hidden=256, inner=704, vocab=1024),
    Scale(tokens=512, hidden=768, inner=2048, vocab=4096),
)
DEVICE_SCALES = (
    Scale(tokens=2048, hidden=2048, inner=5632, vocab=32768, heads=16, kv_heads=4, dim=128),
    Scale(tokens=8192, hidden=4096, inner=14336, vocab=32768, heads=32, kv_heads=8, dim=128),
)
LIBRARIES = {
    "cupy": machine.CUPY,
    **{name: (name,) for name in ("numpy", "torch", "triton", "liger-kernel")},
}

SHAPED = {"attention", "attention_forward", "attention_backward"}  # names that have known shapes

# Bytes that must move, where that is not every array of the call once.
TRAFFIC: dict[str, Callable[[dict[str, Any]], int]] = {
    "embedding": lambda a: a["tokens"].nbytes + 2 * a["x"].nbytes,  # only the rows it takes
    "embedding_backward": lambda a: a["tokens"].nbytes + a["dx"].nbytes + a["dweight"].nbytes,
    "kv_append_": lambda a: 4 * a["k"].nbytes,  # where tokens come from and where they go
    "kv_append_paged_": lambda a: 4 * a["k"].nbytes,
    "columns_backward": lambda a: a["dy"].nbytes + a["dx"].nbytes,
    "adamw_": lambda a: a["gradient"].nbytes + 2 * sum(
        a[name].nbytes for name in ("parameter", "mean", "square")
    ),
}  # fmt: skip


def _attention(a: dict[str, Any]) -> int:
    """Return the operations of q @ k.T and p @ v, where every query sees every key."""
    columns = a["q"].shape[3] + a["v"].shape[3]
    return int(2 * a["q"].size // a["q"].shape[3] * a["k"].shape[1] * columns)


# Operations of products, where they and not memory may bound an op: two of a multiplication and
# an addition.  Backward takes five products at the least, for forward's two.
OPERATIONS: dict[str, Callable[[dict[str, Any]], int]] = {
    "attention_forward": _attention,
    "attention_backward": lambda a: _attention(a) * 5 // 2,
    "linear": lambda a: 2 * a["x"].size * a["weight"].shape[0],
    "linear_backward": lambda a: 4 * a["x"].size * a["weight"].shape[0],
}


@click.command()
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option("--peers", is_flag=True, help="Time torch too; on a GPU torch.compile and Liger.")
@click.option("--plot", type=NewFile(), metavar="PATH", help="Draw the times into a PNG file.")
@click.option(
    "--json", "numbers", type=NewFile(), metavar="PATH", help="Write the numbers as JSON."
)
@click.option("--write", type=FILE, metavar="PATH", help="Renew the table of docs/performance.md.")
def bench(
    names: tuple[str, ...],
    peers: bool,
    plot: Path | None,
    numbers: Path | None,
    write: Path | None,
) -> None:
    """Time ops on this machine, forward and backward, in every dtype.

    OP is an op; attention is timed at known shapes and at a grid of lengths too.  Without OP all
    are timed: on a GPU those that have a kernel, by device events; without a GPU the NumPy
    definitions, by wall time on the CPU.  Files are renewed after each op.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track

    ops = chosen(*names)
    gpus, reason = machine.gpus()
    gpu = gpus[0].name if gpus else None
    if write is not None:
        _may_write(write, gpu, reason)
    if peers:
        _need_torch(gpu is not None)
    console = machine.console()
    if gpu is None:
        line = f"No GPU was found ({reason}): these are times of NumPy definitions on the CPU."
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
        "ops": [],
        "rows": [],
        "notes": [],
    }
    for each in track(ops, "timing", console=Console(stderr=True), transient=True):
        rows = []
        for row, notes in timed(each, clock, gpu, peers):
            rows.append(row | _shares(row, report, clock))
            report["notes"] += [note for note in notes if note not in report["notes"]]
        report["rows"] += sorted(rows, key=lambda row: row["op"] != each.__name__)
        if each.__name__ == "attention_forward" and {*names} & SHAPED:
            report["attention"] = [*shape_rows(clock, gpu is not None, peers)]
        report["ops"].append(each.__name__)
        _keep(report, numbers, write)
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
    """Return the ops that are timed, where, and a line about it: kernels, if there are some."""
    kernels = [each for each in ops if launches(each)]
    left = ", ".join(each.__name__ for each in ops if each not in kernels)
    if not kernels:
        line = f"No kernel for {', '.join(names)}: these are times of NumPy definitions on the CPU."
        return ops, None, line
    line = f"Kernels on {gpu}, by device events."
    return kernels, gpu, f"{line} Left out, without one: {left}." if names and left else line


def _keep(report: dict[str, Any], numbers: Path | None, page: Path | None) -> None:
    """Write what is known so far."""
    if numbers is not None:
        with written_beside(numbers) as partial:
            partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if page is not None:
        write_block(page, report)


def _shares(row: dict[str, Any], report: dict[str, Any], clock: Any) -> dict[str, float | None]:
    """Return how near a row comes to a copy of its bytes, and to its roofline.

    That is the longer of two times: of such a copy, and of a matrix product of as many operations.
    """
    if not (report["copy_gb_per_s"] and row["bytes"]):
        return {"of_copy": None, "of_roofline": None}
    of_copy = row["gb_per_s"] / report["copy_gb_per_s"]
    of_product, products = 0.0, report["product_tflop_per_s"]
    if row["operations"]:
        if row["dtype"] not in products:
            products[row["dtype"]] = clock.product_rate(row["dtype"]) / 1e12
        of_product = row["operations"] / row["microseconds"] / 1e6 / products[row["dtype"]]
    return {"of_copy": of_copy, "of_roofline": max(of_copy, of_product)}


def _may_write(page: Path, gpu: str | None, reason: str) -> None:
    if gpu is None:
        raise ConfigError(f"no GPU was found ({reason}): nothing is written to {page}")
    check_markers(page)


def _need_torch(gpu: bool) -> None:
    try:
        import torch
    except ImportError as error:
        cure = "pip install 'unsloth_cupy[peers]'"
        raise ConfigError(f"--peers needs torch ({error}); install it with {cure}") from error
    if gpu and not torch.cuda.is_available():
        raise ConfigError(
            f"--peers: torch {torch.__version__} sees no GPU; install a build of torch with CUDA"
        )


def launches(op: Op[..., Any]) -> bool:
    """Say whether an op or its backward op has a kernel."""
    return op.launch is not None or (op.backward is not None and op.backward.launch is not None)


def timed(
    op: Op[..., Any], clock: Any, gpu: str | None, peers: bool
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Time an op and its backward op in every size and dtype; on a GPU what has a kernel."""
    place: Callable[[Any], Any] = np.copy
    if gpu is not None:
        import cupy

        place = cupy.asarray
    for scale in HOST_SCALES if gpu is None else DEVICE_SCALES:
        drawn = draw(op, scale)
        for dtype in KERNEL_DTYPES:
            forward = drawn.cast(dtype).mapped(place)
            if gpu is None or op.launch is not None:
                yield _row(forward, forward, None, dtype, clock, gpu, peers)
            backward = op.backward
            if backward is not None and (gpu is None or backward.launch is not None):
                outputs = forward.run()
                seeds = {k: place(a) for k, a in forward.seeds(outputs, every=False).items()}
                call = forward.backward(outputs, seeds)
                yield _row(call, forward, seeds, dtype, clock, gpu, peers)


def _row(
    call: Call, forward: Call, seeds: Any, dtype: Any, clock: Any, gpu: str | None, peers: bool
) -> tuple[dict[str, Any], list[str]]:
    """Time a call, and its peers beside it."""
    others: dict[str, Callable[[], Any]] = {}
    notes: list[str] = []
    if peers:
        from ..bench.peers import contestants

        others, notes = contestants(forward, seeds, gpu is not None)
    ran_as = "NumPy definition on the CPU"
    if gpu is not None:
        kernel = call.mapped(lambda a: a.copy()).launches()
        ran_as = f"{'kernel' if kernel else 'definition'} on {gpu}"
    in_place = call.op.__name__.endswith("_")  # what it writes over is moved twice
    moved = traffic(call, (call.mapped(lambda a: a.copy()) if in_place else call).run())
    seconds, runs = clock([call, *others.values()])
    lead = next(a for a in call.arrays.values() if a is not None)
    return {
        "op": call.op.__name__,
        "dtype": dtype.name,
        "size": list(lead.shape),
        "shapes": {name: list(a.shape) for name, a in call.arrays.items() if a is not None},
        "ran_as": ran_as,
        "microseconds": seconds[0] * 1e6,
        "runs": runs,
        "bytes": moved,
        "operations": count(call.arrays) if (count := OPERATIONS.get(call.op.__name__)) else 0,
        "gb_per_s": moved / seconds[0] / 1e9 if moved else None,
        "peers": {name: s * 1e6 for name, s in zip(others, seconds[1:], strict=True)},
    }, notes


def traffic(call: Call, outputs: dict[str, Any]) -> int:
    """Return the bytes that a call must move: inputs and outputs, each once.

    0 where every output is a view of an input, and nothing has to.
    """
    special = TRAFFIC.get(call.op.__name__)
    inputs = {name: a for name, a in call.arrays.items() if a is not None}
    if special is not None:
        return special(inputs | outputs)
    read = {_address(a): a.nbytes for a in inputs.values()}
    written = {_address(a): a.nbytes for a in outputs.values()}
    written = {address: size for address, size in written.items() if address not in read}
    return sum(read.values()) + sum(written.values()) if written else 0


def _address(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _machine(gpu: str | None) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": machine.cores(),
        "blas": machine.blas(),
    }


def commit() -> str | None:
    """Return the commit of the checkout this runs from, "-dirty" where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude", "*"]
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git here
        return None
    return done.stdout.strip() or None
