"""``unsloth-cupy evaluate``: loss, perplexity, accuracy and entropy of a model on texts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from ..finetune.listener import Listener, hearing
from ..finetune.methods.registry import METHODS
from ..finetune.run.evaluation import Evaluation
from ..finetune.run.evaluation import evaluate as evaluated
from ..finetune.run.printer import Printer
from ..finetune.run.settings import DEVICES
from ..machine import console, echo, tables_as_json
from .options import BASE, FILE, QUANTIZE, Device, WithData, json_option, option


@click.command(cls=WithData)
@click.argument("folder", metavar="MODEL_FOLDER", type=FILE)
@click.option(
    "--data", multiple=True, required=True, metavar="PATH...",
    help="All that finetune --data takes; each is measured alone.",
)  # fmt: skip
@option("--tokens", click.IntRange(2), "Tokens in a row.  [default: 2048, or all positions]")
@option("--batch", click.IntRange(1), "Rows computed at a time.", 4)
@option("--method", click.Choice([*METHODS]), "For which rows are.  [default: by the head]")
@option("--base", FILE, BASE)
@option("--quantize", QUANTIZE, "Store the model in fewer bits, as nf4.")
@option("--device", Device(), DEVICES, "auto")
@click.option("--quiet", is_flag=True, help="Print the results alone.")
@json_option
def evaluate(folder: Path, data: tuple[str, ...], quiet: bool, **options: Any) -> None:
    """Measure how well the model in MODEL_FOLDER predicts texts that it has not learned.

    Of rows only what would be learned counts: the answers of chats, not their questions.
    """
    with hearing(Listener() if quiet else Printer()):
        results = evaluated(folder, data, **options)
    print_table(results)


def print_table(results: list[Evaluation]) -> None:
    """Print a row for each source; as JSON, with all digits."""
    if tables_as_json.get():
        echo(json.dumps([*map(_plain, results)]))
        return
    from rich.table import Table

    table = Table()
    table.add_column("source", overflow="fold")
    if results[0].measures:
        _add_measures(table, results)
        console(markup=False).print(table)
        return
    for name in ("tokens", "loss", "perplexity", "accuracy", "entropy"):
        table.add_column(name, justify="right")
    for each in results:
        table.add_row(
            each.source, f"{each.tokens:,}", f"{each.loss:.4f}", f"{each.perplexity:.3f}",
            f"{each.token_accuracy:.2%}", f"{each.entropy:.4f}",
        )  # fmt: skip
    console(markup=False).print(table)


def _plain(result: Evaluation) -> dict[str, Any]:
    """Return an evaluation as JSON has it: without what its method does not measure."""
    values = dataclasses.asdict(result)
    measures = values.pop("measures")
    return {name: value for name, value in values.items() if value is not None} | measures


def _add_measures(table: Any, results: list[Evaluation]) -> None:
    """Add a column for each measure of a method, and a row for each source."""
    unit, *names = results[0].measures
    for name in (unit, "loss", *names):
        table.add_column(name.replace("_", " "), justify="right")
    for each in results:
        numbers = (each.loss, *(each.measures[name] for name in names))
        cells = ("" if number is None else f"{number:.4f}" for number in numbers)
        table.add_row(each.source, f"{each.measures[unit]:,}", *cells)
