"""``unsloth-cupy explain``: what an op, or a step of a model, does on a GPU."""

from pathlib import Path
from typing import Any

import click

from ..bench.cases import chosen, composed, draw
from ..bench.timing import DEVICE_SCALES
from ..core.dtypes import KERNEL_DTYPES, float_dtype
from ..errors import ConfigError
from ..files import read_json
from ..memory.planned import Planned
from ..models.parse import parse
from ..models.transformer import Transformer
from ..profiling.explain import explain as explained
from ..profiling.shapes import shape
from .options import option


@click.command()
@click.argument("what", metavar="OP|CONFIG")
@option("--device", str, "h200, rtx4090, sm_86, or a file of JSON with rates.", "h200")
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "To compute in.", "bfloat16")
@option("--batch", click.IntRange(1), "Rows of a step.", 1)
@option("--tokens", click.IntRange(1), "Tokens in a row of a step.", 2048)
def explain(what: str, device: str, dtype: str, batch: int, tokens: int) -> None:
    """Say what a call does on a GPU: launches and why, bytes, operations, floors.

    OP is an op of the README's table, whose arrays are as large as bench has them on a GPU. CONFIG
    is a config.json or the folder of a model: a forward and a backward pass, of weights in the
    dtype, are grouped by op. Nothing is computed, and no GPU is needed.
    """
    stated: Any = read_json(Path(device)) if device.endswith(".json") else device
    kind = float_dtype("explain", dtype, KERNEL_DTYPES)
    path = Path(what)
    if path.exists():
        config = path / "config.json" if path.is_dir() else path
        values = read_json(config)
        try:
            click.echo(str(_step(values, kind, (batch, tokens), stated)))
        except ConfigError as error:
            raise ConfigError(f"{config}: {error}") from error
        return
    for line in composed([what]):
        click.echo(line)
    for op in chosen(what):
        call = draw(op, DEVICE_SCALES[0]).cast(kind)
        shown: Any = op
        click.echo(str(explained(shown, **call.arrays, **call.options, device=stated)))


def _step(values: dict[str, Any], kind: Any, sizes: tuple[int, int], device: Any) -> Any:
    """Return what a forward and a backward pass do."""
    config = parse(values)
    parameters: Any = {name: Planned.of(size, kind) for name, size in config.shapes().items()}
    model = Transformer(config, parameters, {})
    rows = shape(sizes, "int64")
    return explained(model.loss_and_gradients, rows, rows, device=device)
