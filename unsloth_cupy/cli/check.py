"""``unsloth-cupy check``: the error of every op against float64, on the machine at hand."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click
import numpy as np

from .. import machine
from ..bench.cases import Call, Scale, chosen, composed, draw
from ..core.arrays import on_host
from ..core.dtypes import FLOATS, KERNEL_DTYPES
from ..core.op import Op

SCALE = Scale(tokens=256, hidden=512, inner=768, vocab=2048)
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
DEFINITION = "NumPy definition"


class Result(NamedTuple):
    """The worst output of an op in one dtype; error and allowed are shares of max|exact|."""

    op: str
    dtype: str
    where: str
    error: float
    allowed: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Say whether the error is within the rule."""
        return not self.problem and self.error <= self.allowed


@click.command()
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.pass_context
def check(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Compare ops with their definitions in float64, on this machine.

    Without OP all are compared. Random inputs in float16, bfloat16 and float32,
    forward and backward; the exit status is 1 if an error is larger than
    2 * max|plain - exact| + 4 * eps * max|exact|.

    exact is the definition in float64. Where a kernel runs on a GPU, plain is the definition in
    the dtype of the row. Where the definition itself is judged, plain is the definition in
    float64 of inputs that are off by 4 eps of float32, which it computes in.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track
    from rich.table import Table

    ops = chosen(*names)
    gpus, reason = machine.gpus()
    console = machine.console()
    if gpus:
        line = f"Kernels run on {gpus[0].name}; ops without one run their NumPy definition."
    else:
        line = f"No GPU was found ({reason}): the NumPy definitions are checked instead."
    for text in (line, *composed(names)):
        console.print(escape(text))
    gpu = gpus[0].name if gpus else None
    results = [
        result
        for each in track(ops, "checking", console=Console(stderr=True), transient=True)
        for result in judged(each, gpu)
    ]
    table = Table()
    for title in ("op", "dtype", "ran as", "max error", "allowed", "ok"):
        table.add_column(title, justify="right" if title in ("max error", "allowed") else "left")
    for before, result in zip([None, *results], results, strict=False):
        if before is not None and before.op != result.op:
            table.add_section()
        table.add_row(
            escape(result.op if before is None or before.op != result.op else ""),
            result.dtype,
            escape(result.where),
            "-" if result.problem else f"{result.error:.1e}",
            "-" if result.problem else f"{result.allowed:.1e}",
            "[green]yes[/]" if result.ok else "[bold red]NO[/]",
        )
    console.print(table)
    console.print("Errors are relative to the largest exact value of their array.")
    failed = [result for result in results if not result.ok]
    for result in failed:
        problem = result.problem or f"error {result.error:.1e}, allowed {result.allowed:.1e}"
        line = f"{result.op} in {result.dtype}, {result.where}: {problem}"
        console.print(f"[bold red]{escape(line)}[/]")
    console.print(f"{len(results) - len(failed)} of {len(results)} within the rule")
    if failed:
        ctx.exit(1)


def judged(op: Op[..., Any], gpu: str | None) -> Iterator[Result]:
    """Judge an op and its backward op, each in every dtype.

    The worst of two calls counts: with no optional array, and with all of them.
    """
    drawn = [draw(op, SCALE)]
    if any(operand.optional for operand in op.contract.inputs):
        drawn.append(draw(op, SCALE, optional=True))
    for backward in (False, True) if op.backward is not None else (False,):
        for dtype in KERNEL_DTYPES:
            calls = [call.cast(dtype) for call in drawn]
            if backward:
                calls = [turned(call) for call in calls]
            found = [_judge(call, dtype, gpu) for call in calls]
            yield max(found, key=_severity)


def _severity(result: Result) -> tuple[bool, float]:
    return not result.ok, result.error / result.allowed if result.allowed else result.error


def turned(call: Call) -> Call:
    """Return the call of the backward op, with what the forward definition returns."""
    outputs = call.mapped(np.copy).run()
    return call.backward(outputs, call.seeds(outputs, every=True))


def _judge(call: Call, dtype: Any, gpu: str | None) -> Result:
    """Run a call of NumPy arrays on a GPU, if there is one and a kernel, and compare."""
    there = gpu is not None and call.op.launch is not None
    name, where = call.op.__name__, f"kernel on {gpu}" if there else DEFINITION
    exact = call.cast(np.float64).mapped(np.copy).run()
    plain = (call if there else _nudged(call)).mapped(np.copy).run()
    place: Callable[[Any], Any] = np.copy
    if there:
        import cupy

        place = cupy.asarray
    try:
        if there and not call.mapped(place).launches():
            where = f"definition on {gpu}"
        found = {key: on_host(array) for key, array in call.mapped(place).run().items()}
    except RuntimeError as error:  # KernelError, and what CUDA reports
        return Result(name, dtype.name, where, np.inf, 0.0, str(error).strip() or repr(error))
    if found.keys() != exact.keys():
        return Result(name, dtype.name, where, np.inf, 0.0, f"returns {[*found]}, not {[*exact]}")
    results = []
    for key, array in found.items():
        largest = float(np.abs(_finite(exact[key])).max(initial=0)) or 1.0
        slack = 2 * _error(plain[key], exact[key]) / largest
        allowed = slack + 4 * EPS[array.dtype.name]
        off = _error(array, exact[key]) / largest
        results.append(Result(name, dtype.name, where, off, allowed))
    return max(results, key=_severity)


def _nudged(call: Call) -> Call:
    """Return the call in float64, its float inputs off by 4 eps of float32."""
    rng = np.random.default_rng(2)

    def nudge(array: Any) -> Any:
        if array.dtype != FLOATS[3]:
            return array
        return array * (1 + 4 * EPS["float32"] * rng.choice((-1, 1), array.shape))

    return call.cast(np.float64).mapped(nudge)


def _finite(array: Any) -> Any:
    return np.where(np.isfinite(array), array, 0)


def _error(found: Any, exact: Any) -> float:
    """Return the largest difference; inf where shapes, infinities or NaN differ."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    if found.shape != exact.shape:
        return np.inf
    infinite = ~np.isfinite(exact)
    if not np.isfinite(found[~infinite]).all() or (found[infinite] != exact[infinite]).any():
        return np.inf
    return float(np.abs(_finite(found) - _finite(exact)).max(initial=0))
