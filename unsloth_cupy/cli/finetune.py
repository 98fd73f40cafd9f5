"""``unsloth-cupy finetune``: trains a model on a text."""

import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import click

from ..finetune.run.interrupt import Interrupted, Stop, stop_request
from ..finetune.run.run_folder import RunFolder
from ..finetune.run.settings import Settings
from ..finetune.run.trainer import Trainer
from ..machine import echo
from .options import (
    FILE,
    ConfigFile,
    Option,
    WithData,
    data_of,
    ignore_option,
    option,
    options_of,
)
from .profiled import CommandPrinter


@click.command(cls=WithData)
@click.argument("model", metavar="[MODEL_FOLDER]", required=False, type=FILE)
@click.option(
    "--data", "--text", "data", multiple=True, metavar="PATH...", cls=Option, group="data",
    help="Files, folders, or - for standard input; FILE:2 counts twice.  [default: Python's docs]",
)  # fmt: skip
@ignore_option
@options_of(Settings)
@option(
    "--config", ConfigFile(), "TrainingConfig as JSON or TOML; options override it.",
    group="training",
)  # fmt: skip
@option(
    "--profile", click.IntRange(1), "Number of steps to time op by op; they are slower.",
    group="output",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="Print errors alone.", cls=Option, group="output")
@click.option(
    "--json", "as_json", is_flag=True, cls=Option, group="output",
    help="Print the results as JSON, and no sample.",
)  # fmt: skip
def finetune(
    model: Path | None,
    data: tuple[str, ...],
    ignore: tuple[str, ...],
    config: dict[str, Any] | None,
    profile: int | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train the model in MODEL_FOLDER, or a new small Llama, on a text.

    The data are chats, instructions or texts: JSON lines, JSON, CSV, Parquet or running text. The
    model is not trained on the questions in them; unsloth-cupy data PATH shows what is learned.
    The run is saved in the folder --out: the same command resumes a run that was stopped. If
    mpiexec, torchrun or srun starts the command, ranks share the work; a different grid of ranks
    may resume a run.
    """
    settings = Settings(**(config or {}) | options)
    printer = CommandPrinter(profile, quiet=quiet, as_json=as_json)
    trainer = Trainer(model, data_of(data), settings, ignore=ignore, listener=printer)
    with stop_request(printer.announce) as stop:
        try:
            with closing(printer):
                trainer.train(stop)
        except Interrupted:
            exit_stopped(trainer, stop)


def exit_stopped(trainer: Trainer, stop: Stop) -> NoReturn:
    """Print which step of a stopped run is saved and how to resume it, then exit."""
    run: RunFolder | None = trainer.files
    newest = None if run is None else run.newest_checkpoint()
    if not trainer.ranks.first:
        pass
    elif run is None or newest is None:
        echo("stopped before the first evaluation: nothing is kept", err=True)
    elif not run.finished:
        command = shlex.join(["unsloth-cupy", *sys.argv[1:]])
        step = int(newest.name.rpartition("-")[2])
        echo(
            f"stopped after step {step}, saved in {run.folder}; go on with the same command:\n"
            f"  {command}",
            err=True,
        )
    raise SystemExit(128 + (stop.signal or 0))  # the exit status of shells for a signal
