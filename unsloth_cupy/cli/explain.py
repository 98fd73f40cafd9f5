"""``unsloth-cupy explain``: what an op, or a step of a model, does on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..bench.cases import chosen, composed, draw
from ..bench.timing import DEVICE_SCALES
from ..core.dtypes import FLOAT32, KERNEL_DTYPES, float_dtype
from ..errors import ConfigError
from ..files import read_json
from ..finetune.limit import check_tokens
from ..memory.plan import CLIPPED, OPTIMIZERS
from ..memory.planned import Planned
from ..models.parse import parse
from ..models.transformer import Transformer
from ..profiling.explain import explain as explained
from ..profiling.explanation import Step
from ..profiling.shapes import shape
from ..training.gradients import measure_gradients
from ..training.optimizer import AdamW
from ..training.precision import compute_copies
from .options import option


@click.command()
@click.argument("what", metavar="OP|CONFIG")
@option("--device", str, "h200, rtx4090, sm_86, or a file of JSON with rates.", "h200")
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "To compute in.", "bfloat16")
@option("--batch", click.IntRange(1), "Rows of a step.", 1)
@option("--tokens", click.IntRange(1), "Tokens in a row of a step.", 2048)
@option("--optimizer", click.Choice(OPTIMIZERS), "none: a forward and a backward pass.", "adamw")
def explain(what: str, device: str, dtype: str, batch: int, tokens: int, optimizer: str) -> None:
    """Say what a call does on a GPU: launches and why, bytes, operations, floors.

    OP is an op of the README's table, whose arrays are as large as bench has them on a GPU. CONFIG
    is a config.json or the folder of a model: a step of training, as finetune does it, is grouped
    by op; without an optimizer weights are in the dtype. Nothing is computed, and no GPU is needed.
    """
    stated: Any = read_json(Path(device)) if device.endswith(".json") else device
    kind = float_dtype("explain", dtype, KERNEL_DTYPES)
    path = Path(what)
    if path.exists():
        config = path / "config.json" if path.is_dir() else path
        values = read_json(config)
        try:
            click.echo(
                str(_step(values, kind, (batch, tokens), stated, learns=optimizer != "none"))
            )
        except ConfigError as error:
            raise ConfigError(f"{config}: {error}") from error
        return
    for line in composed([what]):
        click.echo(line)
    for op in chosen(what):
        call = draw(op, DEVICE_SCALES[0]).cast(kind)
        shown: Any = op
        click.echo(str(explained(shown, **call.arrays, **call.options, device=stated)))


def _step(
    values: dict[str, Any], kind: Any, sizes: tuple[int, int], device: Any, *, learns: bool
) -> Any:
    """Return what a forward and a backward pass do, and the optimizer behind them if it is used."""
    config = parse(values)
    check_tokens(sizes[1], config.positions)
    rows, shapes = shape(sizes, "int64"), config.shapes()
    if not learns:
        weights: Any = {name: Planned.of(size, kind) for name, size in shapes.items()}
        model = Transformer(config, weights, {})
        return explained(model.loss_and_gradients, rows, rows, device=device)
    masters: Any = {name: Planned.of(size, FLOAT32) for name, size in shapes.items()}
    steps, copies = AdamW(masters), compute_copies(masters, kind.name)
    steps.keep_copies(copies)
    model = Transformer(config, masters | copies, {})

    def step(tokens: Any) -> None:
        _, gradients = model.loss_and_gradients(tokens, tokens)
        measure_gradients(gradients, 1.0)
        steps.step(gradients, finite=True, factor=CLIPPED)

    found = explained(step, rows, device=device)
    # a gradient is read in the model's dtype; weights and two averages are read and written
    moved = sum(array.size * kind.itemsize for array in model.parameters.values())
    moved += sum(6 * a.nbytes for a in masters.values()) + sum(a.nbytes for a in copies.values())
    bandwidth = None if found.card is None else found.card.bandwidth
    floor = moved / bandwidth / 1e9 if bandwidth else None
    last = Step(
        op="AdamW.step",
        arguments=f"{len(masters)} weights",
        kernel=True,
        why="one launch for all weights",
        launches=found.outside,
        arrays=0,
        allocated_bytes=0,
        moved=moved,
        operations=0,
        floor=floor,
        bound="memory",
    )
    return replace(found, steps=(*found.steps, last), outside=())
