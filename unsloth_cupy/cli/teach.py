"""``unsloth-cupy teach``: stores a teacher's predictions to train a student on."""

from pathlib import Path
from typing import Any

import click

from ..finetune.listener import Listener, hearing
from ..finetune.run.printer import Printer
from ..finetune.run.settings import DEVICES
from ..finetune.run.teaching import teach as store_predictions
from ..machine import echo, echo_next
from .options import FILE, Device, Integer, Number, WithData, data_of, ignore_option, option


@click.command(cls=WithData)
@click.argument("model", metavar="MODEL_FOLDER", type=FILE)
@click.option(
    "--data", multiple=True, required=True, metavar="PATH...",
    help="Training data, as finetune --data accepts it; its evaluation part is included.",
)  # fmt: skip
@ignore_option
@option("--out", FILE, "Output folder.  [default: MODEL_FOLDER-taught]")
@option("--top-k", Integer(1), "Number of tokens to store per prediction.", 64)
@option("--tokens", Integer(2), "Maximum length of a row in tokens.  [default: as in finetune]")
@option(
    "--temperature", Number(0, min_open=True), "Softmax temperature, which divides the logits.", 1.0
)
@option("--batch", Integer(1), "Batch size in rows.", 4)
@option("--device", Device(), DEVICES, "auto")
@click.option("--quiet", is_flag=True, help="Print only the results.")
def teach(
    model: Path, data: tuple[str, ...], out: Path | None, quiet: bool, **options: Any
) -> None:
    """Store the predictions of a teacher model for distillation.

    At each position of the texts, the command stores the most likely next tokens according to the
    model in MODEL_FOLDER. Then finetune --method distill --teacher FOLDER runs without the teacher
    model in memory.
    """
    folder = model.parent / f"{model.name}-taught" if out is None else out
    with hearing(Listener() if quiet else Printer()):
        report = store_predictions(model, data_of(data), folder, **options)
    echo(
        f"{report.folder}: {report.rows:,} predictions for {report.texts:,} texts; the stored"
        f" tokens cover {report.mean_mass:.2%} of the probability on average, and at least"
        f" {report.least_mass:.2%}"
    )
    echo(
        "the loss of distill counts all other tokens as one token, so it is a lower bound of the"
        " divergence over the whole vocabulary"
    )
    words = ["finetune", "STUDENT", "--data", *data, "--method", "distill", "--teacher", folder]
    echo_next(["unsloth-cupy", *words])
