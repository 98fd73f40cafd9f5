"""``unsloth-cupy explain``: shows what an op or a training step does on a GPU."""

from pathlib import Path
from typing import Any

import click

from ..bench.cases import chosen, composed, draw
from ..bench.timing import DEVICE_SCALES
from ..core.dtypes import KERNEL_DTYPES, float_dtype
from ..errors import ConfigError
from ..files import read_json
from ..finetune.methods.registry import METHODS
from ..finetune.run.limit import quantized_kind, tokens_of
from ..finetune.run.run_folder import config_file
from ..finetune.run.settings import Settings
from ..machine import echo
from ..memory.planned_model import new_adapter
from ..models.configs.heads import NONE, SEQUENCE
from ..models.objective import next_token
from ..models.optimizers import OPTIMIZERS
from ..models.parse import parse
from ..profiling.explain import explain as explained
from ..profiling.training_step import explain_step
from ..training.checkpoint import CheckpointConfig
from .options import QUANTIZE, Integer, option

OF_HEADS = {SEQUENCE: "classify", NONE: "embed"}  # the methods that train other heads


@click.command()
@click.argument("what", metavar="OP|CONFIG")
@option(
    "--device",
    str,
    "GPU, such as h200, rtx4090 or sm_86, or a JSON file with its peak rates.",
    "h200",
)
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "Compute dtype.", "bfloat16")
@option("--batch", Integer(1), "Batch size in rows.", 1)
@option(
    "--tokens",
    Integer(1),
    "Length of a row in tokens.  [default: 2048, or all positions of the model if fewer]",
)
@option(
    "--optimizer",
    click.Choice([*OPTIMIZERS, "none"]),
    "Optimizer.  none: only the forward and the backward pass, with weights in --dtype.",
    "adamw",
)
@option("--lora", Integer(1), "LoRA rank: train adapters of this rank and freeze the model.")
@option("--quantize", QUANTIZE, "Quantize the frozen weights; requires --lora.")
@option(
    "--recompute-every",
    Integer(1),
    "Gradient checkpointing: store only the input of every Nth block.",
)
@click.option(
    "--offload",
    is_flag=True,
    help="Store these inputs in host memory, and show the copy stream; requires --recompute-every.",
)
def explain(
    what: str,
    device: str,
    dtype: str,
    batch: int,
    tokens: int | None,
    optimizer: str,
    lora: int | None,
    quantize: str | None,
    recompute_every: int | None,
    offload: bool,
) -> None:
    """Show the kernels and the least time of a call on a GPU.

    OP is the name of an op, such as attention; its arrays have the sizes that bench uses on a GPU.
    CONFIG is a config.json, or the folder of a model, a run or an adapter; for an adapter, its base
    model is used. For a CONFIG, the command shows a training step as finetune runs it, grouped by
    op. The output has launches, bytes, operations, and a lower bound on the time (roofline).
    Nothing is computed, and no GPU is needed.
    """
    card: Any = read_json(Path(device)) if device.endswith(".json") else device
    kind = float_dtype("explain", dtype, KERNEL_DTYPES)
    path = Path(what)
    if offload and recompute_every is None:
        cure = "it moves the inputs of recomputed blocks: add --recompute-every, as in"
        raise ConfigError(f"explain --offload: {cure} --recompute-every 1")
    parts = None
    if recompute_every is not None:
        parts = CheckpointConfig(recompute_every=recompute_every, offload=offload)
    if path.exists():
        config = config_file(path)
        values, quantized = read_json(config), quantized_kind(path, quantize, lora, None, None)
        try:
            parsed = parse(values)
            name = OF_HEADS.get(parsed.head)
            objective = METHODS[name].bound(Settings(method=name)) if name else next_token
            explanation = explain_step(
                parsed, batch=batch, tokens=tokens_of(tokens, parsed.positions), dtype=kind,
                optimizer=optimizer, quantization=quantized, device=card,
                adapter=None if lora is None else new_adapter(parsed, lora), checkpoint=parts,
                objective=objective,
            )  # fmt: skip
            echo(str(explanation))
        except ConfigError as error:
            raise ConfigError(f"{config}: {error}") from error
        return
    if lora or quantize or parts:
        options = "--lora, --quantize and --recompute-every need a model"
        raise ConfigError(f"explain {what}: {options}; pass its config")
    for line in composed([what]):
        echo(line)
    for op in chosen(what):
        call = draw(op, DEVICE_SCALES[0], random=False).cast(kind)
        function: Any = op
        echo(str(explained(function, **call.arrays, **call.options, device=card)))
