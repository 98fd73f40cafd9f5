"""``unsloth-cupy export``: a model as one GGUF file, for llama.cpp and programs like it."""

from pathlib import Path

import click

from ..finetune.run_folder import model_folder
from ..models.gguf import TYPES
from .echo import echo
from .options import BASE, FILE, NewFile, option


@click.command()
@click.argument("folder", metavar="MODEL_FOLDER", type=FILE)
@click.argument("file", metavar="FILE.gguf", type=NewFile())
@click.option(
    "--type", "kind", type=click.Choice(TYPES, case_sensitive=False), default="f16",
    show_default=True, help="Type of the matrices; vectors stay f32.",
)  # fmt: skip
@click.option(
    "--tokenizer",
    type=FILE,
    metavar="PATH",
    help="Folder of the tokenizer.  [default: the model's]",
)
@option("--base", FILE, BASE)
def export(folder: Path, file: Path, kind: str, tokenizer: Path | None, base: Path | None) -> None:
    """Write the model in MODEL_FOLDER, its tokenizer and chat template to FILE.gguf.

    MODEL_FOLDER is a Hugging Face folder (config.json, *.safetensors, tokenizer.json), the folder
    of an adapter, which is merged into the weights, or that of a finetune run. The command ends
    with a list of what llama.cpp will compute differently from the model here.
    """
    from ..models import export_gguf

    echo(
        export_gguf(
            model_folder(folder), file, kind=kind, tokenizer=tokenizer, base=base, progress=True
        )
    )
