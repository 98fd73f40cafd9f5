"""``unsloth-cupy finetune``: trains a model."""

import shlex
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from ..finetune.data.sources import DataFiles
from ..finetune.planning.choices import fit_run, with_choice
from ..finetune.run.interrupt import Interrupted, Stop, stop_request
from ..finetune.run.run_folder import RunFolder
from ..finetune.run.settings import Settings
from ..finetune.run.trainer import Trainer
from ..machine import console, echo
from .options import (
    FILE,
    ConfigFile,
    Integer,
    Option,
    WithData,
    data_of,
    ignore_option,
    option,
    options_of,
)
from .plan_tables import show_fits
from .profiled import CommandPrinter


@click.command(cls=WithData)
@click.argument("model", metavar="[MODEL_FOLDER]", required=False, type=FILE)
@click.option(
    "--data", "--text", "data", multiple=True, metavar="PATH...", cls=Option, group="data",
    help="Files, folders, or - for standard input.  FILE:2 uses each example of FILE twice per"
    " epoch.  [default: Python's documentation]",
)  # fmt: skip
@partial(ignore_option, group="data")
@options_of(Settings)
@option(
    "--config", ConfigFile(), "JSON or TOML file with a TrainingConfig; options override it.",
    group="training",
)  # fmt: skip
@click.option(
    "--fit", "fitting", is_flag=True, cls=Option, group="memory",
    help="Train LoRA adapters, with the rank and the memory-saving options that are predicted to be"
    " fastest on this GPU.  Options that you set to other values than their defaults are kept.",
)  # fmt: skip
@option(
    "--profile", Integer(1), "Number of steps to profile op by op; these steps are slower.",
    group="output",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="Print only errors.", cls=Option, group="output")
@click.option(
    "--json", "as_json", is_flag=True, cls=Option, group="output",
    help="Print the results as JSON, and generate no sample answer.",
)  # fmt: skip
def finetune(
    model: Path | None,
    data: tuple[str, ...],
    ignore: tuple[str, ...],
    config: dict[str, Any] | None,
    fitting: bool,
    profile: int | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train the model in MODEL_FOLDER, or a new small Llama.

    The training data are chats, instructions or texts, in files of JSON lines, JSON, CSV, Parquet
    or plain text. In chats and instructions, the loss is computed on answers only; unsloth-cupy
    data PATH marks these target tokens. The run is saved in the folder --out. To resume a stopped
    run, repeat its command. To train on several ranks, start the command with mpiexec, torchrun or
    srun; a run can be resumed with another number or grid of ranks.
    """
    settings = Settings(**(config or {}) | options)
    printer = CommandPrinter(profile, quiet=quiet, as_json=as_json)
    trainer = Trainer(model, data_of(data), settings, ignore=ignore, listener=printer)
    if fitting:
        use_fastest(trainer, shows=not (quiet or as_json))
    with stop_request(printer.announce) as stop:
        try:
            with closing(printer):
                trainer.train(stop)
        except Interrupted:
            exit_stopped(trainer, stop)


def use_fastest(trainer: Trainer, *, shows: bool) -> None:
    """Choose the settings of a new run that is fastest on its GPU, and print all choices."""
    text = trainer.text.read() if isinstance(trainer.text, DataFiles) else trainer.text
    if RunFolder(trainer.folder_of(text)).known():
        return  # a resumed run has its own settings
    fits = fit_run(trainer.settings, text, trainer.source, trainer.ranks)
    if shows:
        show_fits(console(), fits, str(trainer.source))
    trainer.settings = with_choice(trainer.settings, fits.fastest)


def exit_stopped(trainer: Trainer, stop: Stop) -> NoReturn:
    """Print the saved step of a stopped run and the command that resumes it, then exit."""
    run: RunFolder | None = trainer.files
    newest = None if run is None else run.newest_checkpoint()
    if not trainer.ranks.first:
        pass
    elif run is None or newest is None:
        echo("stopped before the first evaluation; nothing was saved", err=True)
    elif not run.finished:
        command = shlex.join(["unsloth-cupy", *sys.argv[1:]])
        step = int(newest.name.rpartition("-")[2])
        echo(
            f"stopped after step {step}, which is saved in {run.folder} ({stop.saving:.1f} s);"
            f" resume with the same command:\n  {command}",
            err=True,
        )
    raise SystemExit(128 + (stop.signal or 0))  # the exit status of shells for a signal
