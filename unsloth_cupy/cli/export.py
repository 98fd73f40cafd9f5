"""``unsloth-cupy export``: a model as one GGUF file, which llama.cpp and its relatives run."""

from pathlib import Path

import click

from ..finetune.run_folder import model_folder
from ..models.gguf import TYPES
from .options import FILE, NewFile


@click.command()
@click.argument("folder", metavar="MODEL_FOLDER", type=FILE)
@click.argument("file", metavar="FILE.gguf", type=NewFile())
@click.option(
    "--type", "kind", type=click.Choice(TYPES, case_sensitive=False), default="f16",
    show_default=True, help="Of the matrices; vectors stay f32.",
)  # fmt: skip
@click.option(
    "--tokenizer",
    type=FILE,
    metavar="PATH",
    help="Folder of the tokenizer.  [default: the model's]",
)
def export(folder: Path, file: Path, kind: str, tokenizer: Path | None) -> None:
    """Write the model in MODEL_FOLDER, its tokenizer and chat template to FILE.gguf.

    MODEL_FOLDER is a Hugging Face folder (config.json, *.safetensors, tokenizer.json), the folder
    of an adapter, which becomes part of the weights, or that of a finetune run. What llama.cpp
    will do otherwise than the model does here is said at the end.
    """
    from ..models import export_gguf

    click.echo(
        export_gguf(model_folder(folder), file, kind=kind, tokenizer=tokenizer, progress=True)
    )
