"""``unsloth-cupy plan``: the memory of training, before any is spent."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from .. import machine
from ..errors import ConfigError
from ..finetune.limit import quantized_kind, tokens_of
from ..finetune.run_folder import model_folder, model_without_weights
from ..machine import format_bytes
from ..memory.ledger import MemoryPlan
from ..memory.plan import DEVICES, OPTIMIZERS, plan_memory
from ..models.adapter_base import base_of
from ..profiling.scale import plan_ranks
from ..profiling.stage_plan import Layout
from .options import FILE, QUANTIZE, ZERO, NewPicture, Number, option
from .plan_ranks import Interconnect, rate_of, show
from .timeline import draw_timeline

CARDS = (8, 16, 24, 48, 80, 141)  # GB, as cards are sold
GB = 2**30
LARGEST = 4  # workspaces of ops that are shown
RANK = 16  # of the adapters that are compared
HOLDS = {
    "weights": "what the model computes with, adapters too",
    "gradients": "of weights or adapters, and their sums",
    "optimizer": "two averages for each weight that is learned",
    "master": "float32 copies of 16-bit weights",
    "activations": "what the forward pass keeps for the backward pass",
    "logits": "what the loss holds of them at a time, and the sums of its head's gradient",
    "workspace": "what ops hold while they run, and gradients on their way",
}


@click.command()
@click.argument("config", type=FILE)
@option("--batch", click.IntRange(1), "Rows of a forward pass.", 1)
@option("--tokens", click.IntRange(1), "Tokens in a row.  [default: 2048, or all positions]")
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "To compute in.", "bfloat16")
@option("--optimizer", click.Choice(OPTIMIZERS), "none: no optimizer.", "adamw")
@option("--state-bits", click.Choice(["32", "8"]), "Of the optimizer's averages.", "32")
@option("--lora", click.IntRange(1), "Learn adapters of this rank; the model stays as it is.")
@option("--quantize", QUANTIZE, "Keep the model in fewer bits; with --lora.")
@option("--checkpoint-every", click.IntRange(1), "Keep one block's input in so many.")
@click.option("--chunked-mlp", is_flag=True, help="Compute MLPs by chunks of rows, and again.")
@option("--accumulate", click.IntRange(1), "Batches whose gradients make one step.", 1)
@option("--device", click.Choice([*DEVICES]), "cpu: what NumPy takes.", "cuda")
@option("--tensor-parallel", click.IntRange(1), "Ranks that divide each weight.")
@option("--pipeline-parallel", click.IntRange(1), "Ranks that divide the blocks.")
@option("--data-parallel", click.IntRange(1), "Ranks with rows of their own.")
@option("--context-parallel", click.IntRange(1), "Ranks that divide the tokens of each row.")
@option("--zero", ZERO, "1: data ranks divide the optimizer's averages; 3: the weights too.", "0")
@option("--interconnect", Interconnect(), "GB/s in a node, and between nodes.", "900,50")
@option("--node", click.IntRange(1), "Ranks in a node.", 8)
@option("--rate", Number(0, min_open=True), "TFLOP/s of a rank's products.  [default: by device]")
@option("--plot", NewPicture(), "PNG, PDF or SVG file of the step's timeline, if wanted.")
def plan(
    config: Path,
    batch: int,
    tokens: int | None,
    dtype: str,
    optimizer: str,
    state_bits: str,
    lora: int | None,
    quantize: str | None,
    checkpoint_every: int | None,
    chunked_mlp: bool,
    accumulate: int,
    device: str,
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    data_parallel: int | None,
    context_parallel: int | None,
    zero: str,
    interconnect: tuple[float, float],
    node: int,
    rate: float | None,
    plot: Path | None,
) -> None:
    """Say how much memory a step of training takes, and which cards have it.

    CONFIG is a folder of a model or of an adapter, or a config.json; no weights of a model are
    read. With numbers of ranks: memory, bytes and time of each, and a replay of all of them;
    --batch is of one data rank then.
    """
    from ..files import read_json
    from ..models.parse import parse

    folder = None if config.is_file() else model_folder(config)
    path = config if folder is None else (base_of(folder) or folder) / "config.json"
    values = read_json(path)
    adapter, stored = (None, None) if folder is None else model_without_weights(folder)[1:]
    quantize = quantized_kind(folder, quantize, lora, adapter, stored)
    if adapter is not None and lora is not None:
        raise ConfigError(f"{folder} holds an adapter, which is planned as it is; leave --lora out")
    options = {
        "dtype": dtype,
        "optimizer": optimizer,
        "state_bits": int(state_bits),
        "rank": lora,
        "adapter": adapter,
        "quantization": quantize,
        "checkpoint_every": checkpoint_every,
        "chunked_mlp": chunked_mlp,
        "accumulate": accumulate,
        "device": device,
    }

    sizes = (tensor_parallel, pipeline_parallel, data_parallel, context_parallel)
    if any(size is not None for size in sizes):
        if lora or adapter or quantize or chunked_mlp or optimizer == "none":
            raise ConfigError("plan: ranks are planned of all weights that learn; leave others out")
        tensor, pipeline, data, context = (size or 1 for size in sizes)
        layout = Layout(tensor, pipeline, data, int(zero), node, context)
        length = tokens_of(tokens, parse(values).positions)
        speed, told_rate = rate_of(rate, device, dtype)
        many = plan_ranks(
            values, layout, batch=batch, tokens=length, dtype=dtype, microbatches=accumulate,
            rate=speed, interconnect=interconnect, state_bits=int(state_bits),
            checkpoint_every=checkpoint_every, device=device,
        )  # fmt: skip
        what = f"{accumulate} x {batch} x {length} tokens, {dtype}"
        show(many, str(path), what, told_rate, batch * length, plot)
        return

    @functools.cache
    def planned(rows: int, length: int) -> MemoryPlan:
        return plan_memory(values, batch=rows, tokens=length, **options)  # type: ignore[arg-type]

    def otherwise(**changes: Any) -> MemoryPlan:
        return plan_memory(values, batch=batch, tokens=tokens, **{**options, **changes})  # type: ignore[arg-type]

    try:
        positions = parse(values).positions
        tokens = tokens_of(tokens, positions)
        made = planned(batch, tokens)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    told: dict[str, tuple[Any, Any]] = {  # what it is, and what goes without saying
        "lora": (lora, None),
        "quantized to": (quantize, None),
        "checkpoint every": (checkpoint_every, None),
        "accumulate": (accumulate, 1),
        "state bits": (int(state_bits), 32),
    }
    also = "".join(f", {name} {value}" for name, (value, plain) in told.items() if value != plain)
    also += ", chunked MLP" * chunked_mlp
    also += "" if adapter is None else f", the adapter in {folder}"
    title = f"{path}: {batch} x {tokens} tokens, {dtype}{also}"
    console = machine.console()
    console.print(ledger(made, title))
    here = machine.device_memory(None if device == "cpu" else device)[0]
    console.print(cards(planned, batch, tokens, positions, here))
    adapts = adapter is None and stored is None and not parse(values).bit_layers
    if adapts and optimizer != "none":
        console.print(ways(otherwise, lora or RANK, quantize or "nf4", here))
    if plot is not None:
        draw_timeline(plot, made, title)
        console.print(f"timeline: {plot}", markup=False)


def ledger(plan: MemoryPlan, title: str) -> Any:
    """Return the table of a plan: each part at its most and at the peak.

    Below activations are the layers, below workspace the ops that take most while they run.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    table.add_column("held", style="bold")
    table.add_column("at most", justify="right")
    table.add_column("at the peak", justify="right")
    table.add_column("", style="dim")
    for name, meaning in HOLDS.items():
        most, there = getattr(plan, name), plan.at_peak[name]
        table.add_row(name, format_bytes(most), format_bytes(there), meaning)
        inner = runs(plan.layers) if name == "activations" else []
        if name == "workspace":
            inner = sorted(plan.workspaces.items(), key=lambda each: -each[1])[:LARGEST]
        for part, size in inner:
            table.add_row(f"  {part}", format_bytes(size), "", style="dim")
    table.add_section()
    moment = plan.moments[plan.peak]
    where = f"at step {plan.peak + 1} of {len(plan.moments)}: {moment}"
    table.add_row("total", "", format_bytes(plan.total), where)
    return table


def ways(planned: Callable[..., MemoryPlan], rank: int, kind: str, here: int | None) -> Any:
    """Return the table of what the same step takes where all weights learn, or adapters alone."""
    from rich.table import Table

    table = Table(title="the same step by what learns", title_justify="left")
    table.add_column("")
    table.add_column("a step", justify="right")
    table.add_column("smallest card", justify="right")
    sizes = [(f"{size} GB", size * GB) for size in CARDS]
    sizes += [] if here is None else [(f"here: {here / GB:.1f} GB", here)]
    for told, changes in (
        ("all weights", {"rank": None, "quantization": None}),
        (f"--lora {rank}", {"rank": rank, "quantization": None, "chunked_mlp": False}),
        (
            f"--quantize {kind} --lora {rank}",
            {"rank": rank, "quantization": kind, "chunked_mlp": False},
        ),
    ):
        total = planned(**changes).total
        fits = [(size, name) for name, size in sizes if total <= size]
        table.add_row(told, format_bytes(total), min(fits)[1] if fits else "-")
    return table


def runs(layers: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the layers with what each holds; neighbours that hold as much are one line."""
    found: list[tuple[list[str], int]] = []
    for layer, size in layers.items():
        if found and found[-1][1] == size and found[-1][0][-1].startswith("layer "):
            found[-1][0].append(layer)
        else:
            found.append(([layer], size))
    return [
        (names[0], size)
        if len(names) == 1
        else (f"layers {names[0].split()[1]} .. {names[-1].split()[1]}, each", size)
        for names, size in found
    ]


def cards(
    planned: Callable[[int, int], MemoryPlan],
    batch: int,
    tokens: int,
    positions: int,
    here: int | None,
) -> Any:
    """Return the table of what fits on which card and here, in rows of up to so many positions."""
    from rich.table import Table

    table = Table(title="what fits", title_justify="left")
    table.add_column("card", justify="right")
    table.add_column("this step", justify="right")
    table.add_column(f"largest batch of {tokens} tokens", justify="right")
    table.add_column(f"longest rows in a batch of {batch}", justify="right")
    total = planned(batch, tokens).total
    by_batch = Largest(lambda rows: planned(rows, tokens).total)
    step = min(64, positions)
    by_tokens = Largest(lambda length: planned(batch, length).total, step, positions)
    sizes = [] if here is None else [(f"here: {here / GB:.1f} GB", here)]
    for name, limit in [*sizes, *((f"{size} GB", size * GB) for size in CARDS)]:
        fits = (
            f"[green]fits, {total / limit:.1%} full[/]" if total <= limit else "[red]too large[/]"
        )
        rows, length = by_batch(limit), by_tokens(limit)
        table.add_row(name, fits, str(rows or "-"), str(length or "-"))
    return table


class Largest:
    """Finds the largest number whose plan fits; what one search has learned, the next ones use."""

    def __init__(self, plan: Callable[[int], int], step: int = 1, most: int | None = None) -> None:
        self.plan, self.step, self.most = plan, step, None if most is None else most // step
        self.known = {0: 0}  # bytes by number of steps

    def total(self, number: int) -> int:
        """Return the bytes of a plan of so many steps."""
        if number not in self.known:
            self.known[number] = self.plan(number * self.step)
        return self.known[number]

    def __call__(self, limit: int) -> int:
        """Return the largest multiple of step that fits into limit bytes; 0 if not even one does.

        Bytes grow nearly in a straight line, so a guess is where the line through two plans meets
        the limit.  One that fits is the answer if on that line the next number does not fit.
        """
        if self.total(1) > limit:
            return 0
        if self.most is not None and self.total(self.most) <= limit:
            return self.most * self.step
        below, slope = 1, 0.0
        while True:
            above = min((n for n, size in self.known.items() if size > limit), default=2 * below)
            slope = (self.total(above) - self.total(below)) / (above - below)
            if above - below == 1 and self.total(above) > limit:
                return below * self.step
            guess = below + int((limit - self.total(below)) / slope)
            guess = min(max(guess, below + 1), above - 1) if self.total(above) > limit else guess
            if self.total(guess) <= limit:
                below = guess
                if self.total(guess) + slope > limit:
                    return below * self.step
