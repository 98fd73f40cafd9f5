"""``unsloth-cupy explain``: shows what an op or a training step does on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..bench.cases import chosen, composed, draw
from ..bench.timing import DEVICE_SCALES
from ..core.dtypes import KERNEL_DTYPES, float_dtype
from ..errors import ConfigError
from ..files import read_json
from ..finetune.run.limit import quantized_kind, tokens_of
from ..finetune.run.run_folder import config_file
from ..machine import echo
from ..memory.ledger import Ledger
from ..memory.plan import CLIPPED
from ..memory.planned import Planned, recording_in
from ..memory.planned_model import new_adapter, planned_training
from ..models.optimizers import OPTIMIZERS
from ..models.parse import parse
from ..models.quantizer import Quantizer
from ..profiling.explain import explain as explained
from ..profiling.explanation import Explanation, Step
from ..profiling.shapes import shape
from ..training.gradients import measure_gradients
from .options import QUANTIZE, option


@click.command()
@click.argument("what", metavar="OP|CONFIG")
@option("--device", str, "GPU: h200, rtx4090, sm_86, or a JSON file with its peak rates.", "h200")
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "Compute dtype.", "bfloat16")
@option("--batch", click.IntRange(1), "Batch size in rows.", 1)
@option(
    "--tokens",
    click.IntRange(1),
    "Length of a row in tokens.  [default: 2048, or all positions if fewer]",
)
@option(
    "--optimizer",
    click.Choice([*OPTIMIZERS, "none"]),
    "Optimizer; none: forward and backward pass only.",
    "adamw",
)
@option("--lora", click.IntRange(1), "LoRA rank: train adapters of this rank and freeze the model.")
@option("--quantize", QUANTIZE, "Quantize the frozen weights; requires --lora.")
def explain(
    what: str,
    device: str,
    dtype: str,
    batch: int,
    tokens: int | None,
    optimizer: str,
    lora: int | None,
    quantize: str | None,
) -> None:
    """Show what a call does on a GPU: kernels, launches, bytes, operations, roofline.

    OP is an op of the README's table; its arrays have the sizes that bench uses on a GPU. CONFIG
    is a config.json or the folder of a model, a run or an adapter, which stands for its base
    model: the command shows a training step as finetune runs it, grouped by op. With --optimizer
    none, the weights are stored in --dtype. Nothing is computed, and no GPU is needed.
    """
    card: Any = read_json(Path(device)) if device.endswith(".json") else device
    kind = float_dtype("explain", dtype, KERNEL_DTYPES)
    path = Path(what)
    if path.exists():
        config = config_file(path)
        values, quantized = read_json(config), quantized_kind(path, quantize, lora, None, None)
        form = Form(batch, tokens, kind, optimizer, lora, quantized)
        try:
            echo(str(_step(values, form, card)))
        except ConfigError as error:
            raise ConfigError(f"{config}: {error}") from error
        return
    if lora or quantize:
        raise ConfigError(f"explain {what}: --lora and --quantize need a model; pass its config")
    for line in composed([what]):
        echo(line)
    for op in chosen(what):
        call = draw(op, DEVICE_SCALES[0], random=False).cast(kind)
        function: Any = op
        echo(str(explained(function, **call.arrays, **call.options, device=card)))


class Form(NamedTuple):
    """The sizes and options of a training step."""

    batch: int
    tokens: int | None
    kind: Any
    optimizer: str
    rank: int | None
    quantization: str | None


def _step(values: dict[str, Any], form: Form, device: Any) -> Explanation:
    """Explain a training step: forward, backward, and the optimizer if any."""
    config, ledger = parse(values), Ledger(1)
    sizes = form.batch, tokens_of(form.tokens, config.positions)
    adapter = None if form.rank is None else new_adapter(config, form.rank)
    codes = None if form.quantization is None else Quantizer("explain", form.quantization)
    with recording_in(ledger):
        model, steps = planned_training(
            ledger, config, Planned, form.kind, form.optimizer, 32, adapter, codes
        )
    moved = 0

    def step(tokens: Any) -> None:
        nonlocal moved
        _, gradients = model.loss_and_gradients(tokens, tokens, graph=True)
        if steps is not None:
            moved = steps.traffic(gradients)
            measure_gradients(gradients, 1.0)
            steps.step(gradients, finite=True, factor=CLIPPED)

    explanation = explained(step, shape(sizes, "int64"), device=device)
    explanation = replace(explanation, graph=model.graphs.told)
    if steps is None:
        return explanation
    bandwidth = None if explanation.card is None else explanation.card.bandwidth
    floor = moved / bandwidth / 1e9 if bandwidth else None
    last = Step(
        op=f"{steps.call}.step",
        arguments=f"{len(steps.parameters)} weights",
        kernel=bool(steps.launchers),
        why="one launch for all weights" if steps.launchers else "passes over each weight",
        launches=explanation.outside,
        arrays=0,
        allocated_bytes=0,
        moved=moved,
        operations=0,
        floor=floor,
        bound="memory",
    )
    return replace(explanation, steps=(*explanation.steps, last), outside=())
