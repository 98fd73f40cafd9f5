"""``unsloth-cupy merge``: merges an adapter into the weights of its base model."""

from pathlib import Path
from typing import Any

import click

from ..finetune.run.results import export_commands, generate_command
from ..finetune.run.run_folder import model_folder
from ..machine import echo, echo_next
from .options import BASE, FILE, option

DTYPES = click.Choice(["bfloat16", "float16", "float32", "float64"])


@click.command()
@click.argument("folder", metavar="RUN_OR_ADAPTER", type=FILE)
@click.argument("out", metavar="OUT", type=FILE)
@option("--dtype", DTYPES, "Dtype of all weights.  [default: the dtypes of the base model]")
@option("--base", FILE, BASE)
def merge(folder: Path, out: Path, dtype: str | None, base: Path | None) -> None:
    """Merge an adapter into its model.

    RUN_OR_ADAPTER is the folder of a finetune run, or of an adapter in peft's format. The result is
    written to the new folder OUT, a Hugging Face folder with weights, config.json,
    generation_config.json, and the tokenizer with its chat template; transformers loads it without
    peft. Quantized weights are dequantized. A model without an adapter is copied. The result is
    compared with the model on two prompts, as unsloth-cupy verify does, and the comparison is
    stored in OUT/verified.json.
    """
    from .. import models

    options: Any = {"dtype": dtype, "base": base, "progress": True, "receipt": True}
    echo(models.merge(model_folder(folder), out, **options))
    commands = [generate_command(out, out), *export_commands(out, out)]
    echo_next(*(["unsloth-cupy", *words] for words in commands))
