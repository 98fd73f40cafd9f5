"""``unsloth-cupy data``: what training data hold, and what of them is learned."""

import json
from pathlib import Path
from typing import Any

import click

from ..finetune.listener import hearing
from ..finetune.methods.registry import METHODS
from ..finetune.run.data_report import DataReport, inspect_data
from ..finetune.run.printer import Printer
from ..machine import echo
from .echo import echo_marked
from .options import FILE, Grouped, data_of, ignore_option, option

BAR = 40  # characters of the longest bar


@click.command(cls=Grouped)
@click.argument("data", metavar="PATH...", nargs=-1, required=True)
@option("--model", FILE, "Folder of a model: count its tokens, use its chat template.")
@ignore_option
@option("--method", click.Choice([*METHODS]), "For which rows are: of dpo pairs, ...", "sft")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def data(
    data: tuple[str, ...],
    model: Path | None,
    ignore: tuple[str, ...],
    method: str,
    as_json: bool,
) -> None:
    """Show what training data hold, and what of them is learned.

    PATH is a file, a folder, or - for standard input: all that finetune --data takes.
    """
    with hearing(Printer()):
        report = inspect_data(data_of(data), model, ignore=ignore, method=method)
    if as_json:
        echo(json.dumps(_plain(report)))
        return
    echo(report.note)
    rows = METHODS[method].unit.replace("tokens", "texts")
    counts = f"{report.train:,} {rows} to train on"
    echo(counts + f", {report.held_out:,} held out" * bool(report.held_out))
    unit, lengths = report.unit, report.lengths
    if report.counted < report.train:
        echo(f"of {report.counted:,} of them, evenly drawn:")
    echo(f"{unit} of a text: {lengths['least']:,} to {lengths['most']:,}, median"
         f" {lengths['median']:,}, 99 % have at most {lengths['99 %']:,}")  # fmt: skip
    largest, width = max(count for *_, count in report.histogram), len(f"{lengths['most']:,}") + 1
    for first, last, count in report.histogram:
        bar = "#" * max(round(BAR * count / largest), int(count > 0))
        echo(f"  {first:>{width},} - {last:>{width},}  {count:>9,}  {bar}".rstrip())
    if not METHODS[method].is_on_policy:
        share = report.learned / max(1, report.total)
        without = f"; of {report.unlearned:,} texts nothing" * bool(report.unlearned)
        echo(f"learned: {report.learned:,} of {report.total:,} {unit} ({share:.0%}){without}")
    for each in report.left_out:
        echo(each)
    for example in report.examples:
        echo(f"\n--- {example.where}")
        echo_marked(example.pieces)


def _plain(report: DataReport) -> dict[str, Any]:
    """Return a report as JSON has it."""
    examples = [
        {"where": each.where, "pieces": [piece._asdict() for piece in each.pieces]}
        for each in report.examples
    ]
    return report._asdict() | {"examples": examples}
