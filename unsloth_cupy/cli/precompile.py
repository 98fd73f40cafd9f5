"""``unsloth-cupy precompile``: kernels of a model on disk before its first step."""

import time
from pathlib import Path
from typing import Any

import click

from ..compiled import cache
from ..core.gpu import count, limits_of
from ..errors import ConfigError
from ..files import read_json
from ..finetune.limit import tokens_of
from ..finetune.run_folder import config_file
from ..models.parse import parse
from ..profiling import precompile as room
from ..profiling.cards import NAMES, Card, card_of
from .options import FILE, QUANTIZE, option


@click.command()
@click.argument("config", type=FILE)
@option("--arch", str, "sm_90,sm_86 or cards, as h200,rtx4090.  [default: the GPU that is here]")
@option("--tokens", str, "In a row, as 512,2048.  [default: 2048, or all positions]")
@option("--batch", str, "Rows, as 1,8.", "1")
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "To compute in.", "bfloat16")
@option("--lora", click.IntRange(1), "Learn adapters of this rank.")
@option("--quantize", QUANTIZE, "Keep the model in fewer bits; without --lora it generates alone.")
@option("--state-bits", click.Choice(["32", "8"]), "Of the optimizer's averages.", "32")
@option("--checkpoint-every", click.IntRange(1), "Keep one block's input in so many.")
@click.option("--chunked-mlp", is_flag=True, help="Compute MLPs by chunks of rows, and again.")
@option("--accumulate", click.IntRange(1), "Batches whose gradients make one step.", 1)
@option("--processes", click.IntRange(1), "That compile.  [default: one for each core]")
def precompile(
    config: Path,
    arch: str | None,
    tokens: str | None,
    batch: str,
    dtype: str,
    lora: int | None,
    quantize: str | None,
    state_bits: str,
    checkpoint_every: int | None,
    chunked_mlp: bool,
    accumulate: int,
    processes: int | None,
) -> None:
    """Compile every kernel that training and generation of a model will ask for.

    CONFIG is a config.json or the folder of a model, of a run or of an adapter, whose base it is
    then; no weights are read, and no GPU is needed.
    Binaries are kept in UNSLOTH_CUPY_CACHE_DIR/kernels, where the library finds them.
    """
    room.needs_compiler()
    path = config_file(config)
    values = read_json(path)
    options: Any = {
        "rank": lora,
        "quantization": quantize,
        "state_bits": int(state_bits),
        "checkpoint_every": checkpoint_every,
        "chunked_mlp": chunked_mlp,
        "accumulate": accumulate,
    }
    root, rows_of = cache.folder(), numbers("--batch", batch)
    asked: list[int | None] = [None] if tokens is None else [*numbers("--tokens", tokens)]
    for card in cards(arch):
        try:
            lengths = [tokens_of(each, parse(values).positions) for each in asked]
            launches = [
                launch
                for rows in rows_of
                for length in lengths
                for launch in room.launches_of(
                    values, card, batch=rows, tokens=length, dtype=dtype, **options
                )
            ]
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        units = room.units_of(launches, card.architecture)
        kernels = len({(launch.kernel, launch.source) for launch in launches})
        start, seconds, fresh = time.perf_counter(), 0.0, 0
        for done in room.precompile(units, root, processes):
            fresh, seconds = fresh + (done.seconds > 0), seconds + done.seconds
        wall = time.perf_counter() - start
        click.echo(
            f"sm_{card.architecture}: {kernels} kernels in {len(units)} units, {fresh} compiled in"
            f" {wall:.1f} s ({seconds:.1f} s of compilers), {len(units) - fresh} were there"
        )
    click.echo(f"kept in {root}")


def cards(named: str | None) -> list[Card]:
    """Return what kernels are compiled for: each architecture once, as its first card."""
    if named is None:
        if not count():
            raise ConfigError("precompile: there is no GPU here; say for which, as --arch sm_90")
        here = limits_of(0)
        return [Card(f"sm_{here.architecture}", here.architecture, here.processors)]
    found = []
    for each in named.split(","):
        try:
            found.append(card_of(each))
        except ConfigError:
            problem = f"{each!r} is not an architecture; choose from {', '.join(NAMES)}"
            raise ConfigError(f"--arch {named!r}: {problem}") from None
    return found


def numbers(name: str, text: str) -> list[int]:
    """Return the positive integers of a list with commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) < 2**31 for part in parts):
        raise ConfigError(f"{name} {text!r} is not a list of integers from 1 on, as 512,2048")
    return [int(part) for part in parts]
