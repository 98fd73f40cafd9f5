"""``unsloth-cupy teach``: stores what a model predicts, for a student to learn from."""

from pathlib import Path
from typing import Any

import click

from ..finetune.listener import Listener, hearing
from ..finetune.run.printer import Printer
from ..finetune.run.settings import DEVICES
from ..finetune.run.teaching import teach as taught
from ..machine import echo, echo_next
from .options import FILE, Device, Number, WithData, data_of, ignore_option, option


@click.command(cls=WithData)
@click.argument("model", metavar="MODEL_FOLDER", type=FILE)
@click.option(
    "--data", multiple=True, required=True, metavar="PATH...",
    help="Lines to learn, and those to evaluate on: all that finetune --data takes.",
)  # fmt: skip
@ignore_option
@option("--out", FILE, "Folder to write.  [default: MODEL_FOLDER-taught]")
@option("--top-k", click.IntRange(1), "Tokens to store of each prediction.", 64)
@option("--tokens", click.IntRange(2), "Tokens in a row.  [default: as in finetune]")
@option("--temperature", Number(0, min_open=True), "Divides the logits.", 1.0)
@option("--batch", click.IntRange(1), "Rows computed at a time.", 4)
@option("--device", Device(), DEVICES, "auto")
@click.option("--quiet", is_flag=True, help="Print the results alone.")
def teach(
    model: Path, data: tuple[str, ...], out: Path | None, quiet: bool, **options: Any
) -> None:
    """Store the likeliest tokens that the model in MODEL_FOLDER predicts for texts.

    finetune --method distill --teacher FOLDER then needs no teacher in memory.
    """
    folder = model.parent / f"{model.name}-taught" if out is None else out
    with hearing(Listener() if quiet else Printer()):
        report = taught(model, data_of(data), folder, **options)
    echo(
        f"{report.folder}: {report.rows:,} predictions of {report.texts:,} texts; what is kept of"
        f" them has {report.mean_mass:.2%} of the probability, {report.least_mass:.2%} at least"
    )
    echo("all others count as one token: the divergence is a lower bound of the whole one")
    words = ["finetune", "STUDENT", "--data", *data, "--method", "distill", "--teacher", folder]
    echo_next(["unsloth-cupy", *words])
