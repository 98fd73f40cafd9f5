"""``unsloth-cupy check``: compares ops with their float64 definitions on this machine."""

import click

from .. import machine
from ..bench.cases import chosen, composed
from ..bench.judge import judged
from .options import json_option
from .progress import progress


@click.command()
@json_option
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.pass_context
def check(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Compare ops with their float64 definitions, on this machine.

    Without OP, all ops are compared, forward and backward, on random inputs in float16, bfloat16
    and float32. The exit status is 1 if an error is larger than
    2 * max|plain - exact| + 4 * eps * max|exact|.

    Here "exact" is the result of the NumPy definition in float64. For a kernel on a GPU, "plain" is
    the result of the definition in the dtype of the row. Without a kernel, the definition itself is
    checked, computed in float32; "plain" is then the definition in float64, on inputs that are off
    by 4 eps of float32.
    """
    from rich.markup import escape
    from rich.table import Table

    ops = chosen(*names)
    gpus, reason = machine.gpus()
    console = machine.console()
    if gpus:
        line = f"Checking kernels on {gpus[0].name}; ops without a kernel run their definition."
    else:
        line = f"No GPU was found ({reason}): checking the NumPy definitions instead."
    for text in (line, *composed(names)):
        console.print(escape(text))
    gpu = gpus[0].name if gpus else None
    results = [
        result
        for each in progress(ops, len(ops), "checking", lambda op: op.__name__)
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
    console.print("Errors are relative to the largest exact value of each array.")
    failed = [result for result in results if not result.ok]
    for result in failed:
        problem = result.problem or f"error {result.error:.1e}, allowed {result.allowed:.1e}"
        line = f"{result.op} in {result.dtype}, {result.where}: {problem}"
        console.print(f"[bold red]{escape(line)}[/]")
    console.print(f"{len(results) - len(failed)} of {len(results)} within the bound")
    if failed:
        ctx.exit(1)
