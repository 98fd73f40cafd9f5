"""``unsloth-cupy evaluate``: loss, perplexity, accuracy and entropy of a model on texts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..finetune.listener import Listener, hearing
from ..finetune.methods.registry import METHODS
from ..finetune.run.evaluation import Evaluation
from ..finetune.run.evaluation import evaluate as evaluated
from ..finetune.run.printer import Printer
from ..finetune.run.settings import DEVICES
from ..machine import console, echo, tables_as_json
from .options import BASE, FILE, QUANTIZE, Device, Integer, WithData, Words, json_option, option


@click.command(cls=WithData)
@click.argument("folder", metavar="MODEL_FOLDER", type=FILE)
@click.option(
    "--data", multiple=True, metavar="PATH...",
    help="Evaluation data, as finetune --data accepts it; each PATH is evaluated separately.",
)  # fmt: skip
@option("--tasks", Words(nonempty=True), "Tasks of lm-eval, or their YAML files, with commas.")
@option(
    "--tokens",
    Integer(2),
    "Maximum length of a row in tokens.  [default: 2048, or all positions of the model if fewer]",
)
@option("--batch", Integer(1), "Batch size in rows.", 4)
@option(
    "--method",
    click.Choice([*METHODS]),
    "Training method that the data are for.  [default: depends on the model's head]",
)
@option("--base", FILE, BASE)
@option("--quantize", QUANTIZE, "Quantize the weights, for example to nf4.")
@option("--device", Device(), DEVICES, "auto")
@click.option("--quiet", is_flag=True, help="Print only the results.")
@json_option
def evaluate(
    folder: Path, data: tuple[str, ...], tasks: str | None, quiet: bool, **options: Any
) -> None:
    """Evaluate the model in MODEL_FOLDER on texts.

    The command prints loss, perplexity, accuracy and entropy. Only target tokens count: in chats,
    the tokens of the answers. With --tasks, it prints the results of the package lm-eval.
    """
    if bool(data) == bool(tasks):
        cure = "leave one of them out" if data else "give one of them"
        raise click.UsageError(f"--data names texts, --tasks names tasks of lm-eval; {cure}.")
    if tasks:
        print_tasks(task_results(folder, tasks.split(","), **options))
        return
    with hearing(Listener() if quiet else Printer()):
        results = evaluated(folder, data, **options)
    print_table(results)


def task_results(
    folder: Path, tasks: list[str], *, tokens: Any, method: Any, base: Any, **options: Any
) -> list[dict[str, Any]]:
    """Return the results of tasks of lm-eval: task, metric, value and standard error."""
    for name, value in (("--tokens", tokens), ("--method", method), ("--base", base)):
        if value is not None:
            raise click.UsageError(f"{name} does not go with --tasks; leave it out.")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from ..interop.lm_eval import Model
    except ModuleNotFoundError as error:
        cure = "pip install lm-eval"
        raise ConfigError(f"--tasks needs the package {error.name}; install it: {cure}") from None
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    folders = sorted({str(file.resolve().parent) for file in files})
    manager = TaskManager(include_path=folders or None)
    names = [Path(task).stem if Path(task) in files else task for task in tasks]
    if unknown := [name for name in names if name not in manager.all_tasks]:
        cure = "`lm-eval ls tasks` lists them; a YAML file has the name of its task"
        raise ConfigError(f"--tasks: lm-eval has no task {unknown[0]!r}; {cure}")
    options["batch_size"] = options.pop("batch")
    model = Model(folder, **options)
    evaluation = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager)
    rows = []
    for task, numbers in evaluation["results"].items():
        for name, value in numbers.items():
            metric, separator, filtered = name.partition(",")
            if separator and not metric.endswith("_stderr") and isinstance(value, int | float):
                deviation = numbers.get(f"{metric}_stderr,{filtered}")
                metric += "" if filtered == "none" else f" ({filtered})"
                rows.append({"task": task, "metric": metric, "value": value, "stderr": deviation})
    return rows


def print_tasks(rows: list[dict[str, Any]]) -> None:
    """Print a table with a row per metric of a task, or JSON with all digits."""
    if tables_as_json.get():
        echo(json.dumps(rows))
        return
    from rich.table import Table

    table = Table()
    for name in ("task", "metric", "value", "stderr"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for row in rows:
        cells = (f"{n:.4f}" if isinstance(n, float) else str(n or "") for n in row.values())
        table.add_row(*cells)
    console(markup=False).print(table)


def print_table(results: list[Evaluation]) -> None:
    """Print a table with a row per source, or JSON with all digits."""
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
    for name in ("tokens", "loss (nats)", "perplexity", "accuracy", "entropy (nats)"):
        table.add_column(name, justify="right")
    for each in results:
        table.add_row(
            each.source, f"{each.tokens:,}", f"{each.loss:.4f}", f"{each.perplexity:.3f}",
            f"{each.token_accuracy:.2%}", f"{each.entropy:.4f}",
        )  # fmt: skip
    console(markup=False).print(table)


def _plain(result: Evaluation) -> dict[str, Any]:
    """Return an evaluation as JSON values, without measures that are None."""
    values = dataclasses.asdict(result)
    measures = values.pop("measures")
    return {name: value for name, value in values.items() if value is not None} | measures


def _add_measures(table: Any, results: list[Evaluation]) -> None:
    """Add a column per measure of the method, and a row per source."""
    unit, *names = results[0].measures
    for name in (unit, "loss", *names):
        table.add_column(name.replace("_", " "), justify="right")
    for each in results:
        numbers = (each.loss, *(each.measures[name] for name in names))
        cells = ("" if number is None else f"{number:.4f}" for number in numbers)
        table.add_row(each.source, f"{each.measures[unit]:,}", *cells)
