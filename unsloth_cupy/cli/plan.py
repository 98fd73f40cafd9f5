"""``unsloth-cupy plan``: the memory of training, before any is spent."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..memory import OPTIMIZERS, format_bytes, plan_memory
from .options import FILE, option
from .run_folder import model_folder

CARDS = (8, 16, 24, 48, 80, 141)  # GB, as cards are sold
GB = 2**30
HOLDS = {
    "weights": "the model",
    "gradients": "one for each weight",
    "optimizer": "two float32 averages for each weight",
    "master": "float32 copies of 16-bit weights",
    "activations": "what the forward pass keeps for the backward pass",
    "logits": "what the loss holds of them at a time, and the sums of its head's gradient",
}


@click.command()
@click.argument("config", type=FILE)
@option("--batch", click.IntRange(1), "Rows of a step.", 1)
@option("--tokens", click.IntRange(1), "Tokens in a row.", 2048)
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "Of the weights.", "bfloat16")
@option("--optimizer", click.Choice([*OPTIMIZERS]), "none: no optimizer.", "adamw")
def plan(config: Path, batch: int, tokens: int, dtype: str, optimizer: str) -> None:
    """Say how much memory training takes, and which cards have it.

    CONFIG is a model folder or a config.json; no weights are read.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..models.files import read_json

    path = config if config.is_file() else model_folder(config) / "config.json"
    values = read_json(path)
    try:
        estimate = plan_memory(values, batch=batch, tokens=tokens, dtype=dtype, optimizer=optimizer)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    console = Console(highlight=False)
    table = Table(title=escape(f"{path}: {batch} x {tokens} tokens, {dtype}"), title_justify="left")
    table.add_column("held", style="bold")
    table.add_column("memory", justify="right")
    table.add_column("", style="dim")
    for name, meaning in HOLDS.items():
        table.add_row(name, format_bytes(getattr(estimate, name)), meaning)
    table.add_section()
    table.add_row("total", format_bytes(estimate.total), "")
    console.print(table)
    cards = Table(title="what fits", title_justify="left")
    cards.add_column("card", justify="right")
    cards.add_column("this step", justify="right")
    cards.add_column(f"largest batch of {tokens} tokens", justify="right")
    options = {"tokens": tokens, "dtype": dtype, "optimizer": optimizer}
    for size in CARDS:
        share = estimate.total / (size * GB)
        cards.add_row(
            f"{size} GB",
            f"[green]fits, {share:.1%} full[/]" if share <= 1 else "[red]too large[/]",
            str(largest_batch(values, size * GB, **options) or "-"),
        )
    console.print(cards)


def largest_batch(config: Mapping[str, Any], limit: int, **options: Any) -> int:
    """Return the most rows whose step fits into limit bytes; 0 if not even one does."""

    def fits(batch: int) -> bool:
        return plan_memory(config, batch=batch, **options).total <= limit

    most = 1
    while fits(most):
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least
