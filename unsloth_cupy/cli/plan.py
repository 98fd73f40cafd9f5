"""``unsloth-cupy plan``: the memory of training, before any is spent."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .. import machine
from ..errors import ConfigError
from ..finetune.limit import quantized_kind, tokens_of
from ..finetune.ranks import check_options, chunks_of
from ..finetune.run_folder import config_file, model_folder, model_without_weights
from ..memory.ledger import MemoryPlan
from ..memory.plan import OPTIMIZERS, plan_memory
from ..memory.planned_model import DEVICES
from ..memory.stage_plan import Layout
from ..profiling.scale import plan_ranks
from .options import ATTENTION, FILE, QUANTIZE, SCHEDULE, ZERO, NewPicture, Number, option
from .plan_ranks import Interconnect, rate_of, show
from .plan_tables import cards, ledger, told_of, ways
from .timeline import draw_timeline

RANK = 16  # of the adapters that are compared


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
@option("--context-attention", ATTENTION, "ulysses: ranks divide heads.  [default: ring]")
@option("--schedule", SCHEDULE, "Of the pipeline's work.  [default: 1f1b]")
@option("--chunks", click.IntRange(1), "Of blocks in each stage, if interleaved.  [default: 2]")
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
    context_attention: str | None,
    schedule: str | None,
    chunks: int | None,
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
    path = config_file(config)
    values = read_json(path)
    adapter, stored = (None, None) if folder is None else model_without_weights(folder)[1:]
    quantize = quantized_kind(folder, quantize, lora, adapter, stored)
    if adapter is not None and lora is not None:
        raise ConfigError(f"{folder} holds an adapter, which is planned as it is; leave --lora out")
    options: dict[str, Any] = {
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

    with _named(path):
        positions = parse(values).positions
        length = tokens_of(tokens, positions)
    sizes = (tensor_parallel, pipeline_parallel, data_parallel, context_parallel)
    check_options(
        pipeline_parallel or 1, context_parallel or 1, int(zero), schedule, chunks,
        context_attention, accumulate,
    )  # fmt: skip
    if any(size is not None for size in sizes):
        if optimizer == "none":
            raise ConfigError("plan: ranks are planned with an optimizer; leave --optimizer out")
        tensor, pipeline, data, context = (size or 1 for size in sizes)
        layout = Layout(tensor, pipeline, data, int(zero), node, context)
        speed, told_rate = rate_of(rate, device, dtype)
        del options["optimizer"]
        with _named(path):
            many = plan_ranks(
                values, layout, batch=batch, tokens=length, microbatches=options.pop("accumulate"),
                rate=speed, interconnect=interconnect, schedule=schedule or "1f1b",
                chunks=chunks_of(schedule, chunks),
                context_attention=context_attention or "ring", **options,
            )  # fmt: skip
        also = told_of(options)
        what = f"{accumulate} x {batch} x {length} tokens, {dtype}{also}"
        parts = chunks and f"{chunks} chunks"
        what += "".join(f", {each}" for each in (schedule, parts, context_attention) if each)
        show(many, str(path), what, told_rate, batch * length, plot)
        return

    @functools.cache
    def planned(rows: int, length: int) -> MemoryPlan:
        return plan_memory(values, batch=rows, tokens=length, **options)

    def otherwise(**changes: Any) -> MemoryPlan:
        return plan_memory(values, batch=batch, tokens=length, **{**options, **changes})

    with _named(path):
        made = planned(batch, length)
    also = told_of(options)
    also += "" if adapter is None else f", the adapter in {folder}"
    title = f"{path}: {batch} x {length} tokens, {dtype}{also}"
    console = machine.console()
    console.print(ledger(made, title))
    here = machine.device_memory(None if device == "cpu" else device)[0]
    console.print(cards(planned, batch, length, positions, here))
    adapts = adapter is None and stored is None and not parse(values).bit_layers
    if adapts and optimizer != "none":
        console.print(ways(otherwise, lora or RANK, quantize or "nf4", here))
    if plot is not None:
        draw_timeline(plot, made, title)
        console.print(f"timeline: {plot}", markup=False)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say of which file an error is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
