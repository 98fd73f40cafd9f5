"""``unsloth-cupy data``: shows training data: counts, lengths, target tokens, examples."""

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
@option("--model", FILE, "Folder of the model whose tokenizer and chat template are used.")
@ignore_option
@option(
    "--method",
    click.Choice([*METHODS]),
    "Training method that the data are for; for example, dpo reads pairs.",
    "sft",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def data(
    data: tuple[str, ...],
    model: Path | None,
    ignore: tuple[str, ...],
    method: str,
    as_json: bool,
) -> None:
    """Show counts, lengths, target tokens and examples of data.

    PATH is a file, a folder, or - for standard input, as finetune --data accepts them.
    """
    with hearing(Printer()):
        report = inspect_data(data_of(data), model, ignore=ignore, method=method)
    if as_json:
        echo(json.dumps(_plain(report)))
        return
    echo(report.note)
    rows = METHODS[method].unit.replace("tokens", "texts")
    counts = f"{report.train:,} {rows} for training"
    echo(counts + f", {report.held_out:,} for evaluation" * bool(report.held_out))
    unit, lengths = report.unit, report.lengths
    if report.counted < report.train:
        echo(f"counted in {report.counted:,} of them, sampled evenly:")
    echo(f"{unit} per text: {lengths['least']:,} to {lengths['most']:,}, median"
         f" {lengths['median']:,}, 99th percentile {lengths['99 %']:,}")  # fmt: skip
    largest, width = max(count for *_, count in report.histogram), len(f"{lengths['most']:,}") + 1
    for first, last, count in report.histogram:
        bar = "#" * max(round(BAR * count / largest), int(count > 0))
        echo(f"  {first:>{width},} - {last:>{width},}  {count:>9,}  {bar}".rstrip())
    if not METHODS[method].is_on_policy:
        share = report.learned / max(1, report.total)
        without = f"; {report.unlearned:,} texts have none" * bool(report.unlearned)
        echo(f"target {unit}: {report.learned:,} of {report.total:,} ({share:.0%}){without}")
    for each in report.left_out:
        echo(each)
    for example in report.examples:
        echo(f"\n--- {example.where}" + f", {example.side}" * bool(example.side))
        echo_marked(example.pieces)


def _plain(report: DataReport) -> dict[str, Any]:
    """Return a report as JSON values."""
    examples = [
        {"where": each.where, "pieces": [piece._asdict() for piece in each.pieces]}
        | ({"side": each.side} if each.side else {})
        for each in report.examples
    ]
    return report._asdict() | {"examples": examples}
