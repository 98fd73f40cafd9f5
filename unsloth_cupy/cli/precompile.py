"""``unsloth-cupy precompile``: compiles the kernels of a model to disk before they are used."""

import time
from pathlib import Path
from typing import Any

import click

from .. import kernel_cache as cache
from ..core.gpu import count, cupy, limits_of
from ..errors import ConfigError
from ..files import read_json
from ..finetune.run.limit import tokens_of
from ..finetune.run.run_folder import config_file
from ..machine import echo
from ..models.optimizers import OPTIMIZERS
from ..models.parse import parse
from ..profiling import precompile as compilation
from ..profiling.cards import Card, card_named
from .options import FILE, QUANTIZE, Integer, option
from .progress import progress


@click.command()
@click.argument("config", type=FILE)
@option(
    "--arch",
    str,
    "GPUs or architectures, for example sm_90,rtx4090.  [default: this machine's GPU]",
)
@option(
    "--tokens",
    str,
    "Row lengths in tokens, for example 512,2048.  [default: 2048, or all positions of the model if"
    " fewer]",
)
@option("--batch", str, "Batch sizes in rows, for example 1,8.", "1")
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "Compute dtype.", "bfloat16")
@option("--lora", Integer(1), "LoRA rank: train adapters of this rank.")
@option(
    "--quantize",
    QUANTIZE,
    "Quantize the weights.  Without --lora, only the kernels of generation are compiled.",
)
@option("--optimizer", click.Choice([*OPTIMIZERS]), "Optimizer of the training step.", "adamw")
@option("--state-bits", click.Choice(["32", "8"]), "Bits per value of the optimizer states.", "32")
@option(
    "--recompute-every",
    Integer(1),
    "Gradient checkpointing: store only the input of every Nth block.",
)
@click.option(
    "--chunked-mlp/--no-chunked-mlp", default=None,
    help="Compute MLPs and experts in chunks of tokens.  [default: in recomputed blocks with"
    " more tokens than one chunk]",
)  # fmt: skip
@option("--accumulate", Integer(1), "Gradient accumulation: number of batches per step.", 1)
@option("--processes", Integer(1), "Number of compiler processes.  [default: one per core]")
def precompile(
    config: Path,
    arch: str | None,
    tokens: str | None,
    batch: str,
    dtype: str,
    lora: int | None,
    quantize: str | None,
    optimizer: str,
    state_bits: str,
    recompute_every: int | None,
    chunked_mlp: bool | None,
    accumulate: int,
    processes: int | None,
) -> None:
    """Compile the kernels of a model ahead of time.

    All kernels that training and generation launch are compiled. CONFIG is a config.json or the
    folder of a model, a run or an adapter; for an adapter, its base model is used. No weights are
    read, and no GPU is needed. Binaries are written to UNSLOTH_CUPY_CACHE_DIR/kernels, where the
    library finds them.
    """
    compilation.needs_compiler()
    path = config_file(config)
    values = read_json(path)
    options: Any = {
        "rank": lora,
        "quantization": quantize,
        "optimizer": optimizer,
        "state_bits": int(state_bits),
        "recompute_every": recompute_every,
        "chunked_mlp": chunked_mlp,
        "accumulate": accumulate,
    }
    root, rows_of = cache.folder(), numbers("--batch", batch)
    counts: list[int | None] = [None] if tokens is None else [*numbers("--tokens", tokens)]
    for card in cards(arch):
        if refused := cache.refusal(card.architecture, cupy().cuda.nvrtc):
            raise ConfigError(f"precompile: {refused}")
        try:
            lengths = [tokens_of(each, parse(values).positions) for each in counts]
            launches = [
                launch
                for rows in rows_of
                for length in lengths
                for launch in compilation.launches_of(
                    values, card, batch=rows, tokens=length, dtype=dtype, **options
                )
            ]
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        units = compilation.units_of(launches, card.architecture)
        kernels = len({(launch.kernel, launch.source) for launch in launches})
        start, seconds, compiled = time.perf_counter(), 0.0, 0
        finished = compilation.precompile(units, root, processes)
        for unit in progress(finished, len(units), "compiled", lambda each: each.unit.kernel):
            compiled, seconds = compiled + (unit.seconds > 0), seconds + unit.seconds
        wall = time.perf_counter() - start
        echo(
            f"sm_{card.architecture}: {kernels} kernels in {len(units)} translation units;"
            f" {compiled} compiled in {wall:.1f} s ({seconds:.1f} s of compiler time),"
            f" {len(units) - compiled} already in the cache"
        )
    echo(f"saved in {root}")


def cards(names: str | None) -> list[Card]:
    """Return the cards to compile for; without names, the GPU of this machine."""
    if names is None:
        if not count():
            raise ConfigError("precompile: this machine has no GPU; name one, as --arch sm_90")
        here = limits_of(0)
        return [Card(f"sm_{here.architecture}", here.architecture, here.processors)]
    try:
        return [card_named(each.strip()) for each in names.split(",")]
    except ConfigError as error:
        raise ConfigError(f"--arch {names!r}: {error}") from None


def numbers(name: str, text: str) -> list[int]:
    """Return the positive integers of a comma-separated option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) < 2**31 for part in parts):
        raise ConfigError(f"{name} {text!r} is not a list of positive integers such as 512,2048")
    return [int(part) for part in parts]
