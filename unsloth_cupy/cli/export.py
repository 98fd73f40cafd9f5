"""``unsloth-cupy export``: writes a model to one GGUF file for llama.cpp and similar programs."""

import re
from pathlib import Path

import click

from ..errors import ConfigError
from ..finetune.data.tokenizer import load_tokenizer
from ..finetune.data.turns import Ending, ending_of
from ..finetune.run.run_folder import model_folder, words_folder
from ..machine import echo, echo_next
from ..models.gguf import TYPES
from .modelfile import check_modelfile, write_modelfile
from .options import BASE, FILE, NewFile, option


@click.command()
@click.argument("folder", metavar="MODEL_FOLDER", type=FILE)
@click.argument("file", metavar="FILE.gguf", type=NewFile())
@click.option(
    "--type", "kind", type=click.Choice(TYPES, case_sensitive=False), metavar="TYPE",
    help="Type of the matrices; vectors stay f32.  [default: the type of --merge-into, or f16]",
)  # fmt: skip
@click.option(
    "--tokenizer",
    type=FILE,
    metavar="PATH",
    help="Folder of the tokenizer.  [default: the model's]",
)
@option("--base", FILE, BASE)
@click.option("--modelfile", is_flag=True, help="Also write FILE.Modelfile for ollama create.")
@click.option("--adapter", is_flag=True, help="Write only the adapter, for llama-cli --lora.")
def export(
    folder: Path,
    file: Path,
    kind: str | None,
    tokenizer: Path | None,
    base: Path | None,
    modelfile: bool,
    adapter: bool,
) -> None:
    """Write the model in MODEL_FOLDER to a GGUF file for llama.cpp.

    The file also contains the tokenizer and the chat template. MODEL_FOLDER is a Hugging Face
    folder (config.json, *.safetensors, tokenizer.json), the folder of a finetune run, or the folder
    of an adapter, which is merged into the weights. Programs that read the file stop generating at
    the token that ends an answer in the chat template. The command prints notes about differences
    between this model and what llama.cpp computes. It compares the file with the model on two
    prompts, as unsloth-cupy verify does, and stores the result in FILE.verified.json and in a key
    of the file.

    \b
    Types and bits per weight:
      floats    f32 32; f16 16; bf16 16
      8 bits    q8_0 8.5
      6 bits    q6_k 6.56
      5 bits    q5_k_m 5.5+; q5_k_s 5.5+; q5_1 6; q5_0 5.5
      4 bits    q4_k_m 4.5+; q4_k_s 4.5+; q4_1 5; q4_0 4.5
      3 bits    q3_k_l 3.44+; q3_k_m 3.44+; q3_k_s 3.44+
      2 bits    q2_k 2.63+
      ternary   tq2_0 2.06; tq1_0 1.69
    A + means that the most sensitive matrices have more bits. Ternary types are for BitNet.
    """  # noqa: D301 -- click reads the \b
    from ..models import export_adapter_gguf, export_gguf
    from ..models.gguf.reading import opened_gguf

    if adapter:
        if modelfile or tokenizer:
            cure = "leave --tokenizer and --modelfile out"
            raise ConfigError(f"export --adapter writes no tokenizer; {cure}")
        echo(export_adapter_gguf(model_folder(folder), file, kind=kind or "f16", base=base))
        echo_next(["llama-cli", "-m", "BASE.gguf", "--lora", file])
        return
    source, place = model_folder(folder), check_modelfile(file) if modelfile else None
    words, notes = tokenizer or words_folder(source, base), []
    ends: Ending | None = None
    loaded = None
    try:
        loaded = load_tokenizer(words)
        ends = ending_of(words, loaded)
    except ConfigError as error:
        notes.append(f"the end token of answers is unknown: {error}")
    report = export_gguf(
        source, file, kind=kind, tokenizer=tokenizer, base=base, progress=True, receipt=True,
        stop=None if ends is None else ends.token,
    )  # fmt: skip
    echo(report)
    if place is not None:
        stop = "" if ends is None else ends.text
        parts, reasons = write_modelfile(place, file, words, loaded, stop)
        notes += reasons
        echo(f"{place}: {', '.join(parts[:-1])}{' and ' * (len(parts) > 1)}{parts[-1]}")
    for note in notes:
        echo(f"note: {note}")
    again = ["unsloth-cupy", "verify", file, "--against", folder]
    values = opened_gguf(file).values
    if values.get(f"{values['general.architecture']}.attention.causal") is False:
        echo_next(["llama-embedding", "-m", file])  # an encoder, which verify does not compare
    elif place is None:
        echo_next(["llama-cli", "-m", file], again)
    else:
        name = re.sub(r"[^\w.-]+", "-", file.stem.lower(), flags=re.ASCII).strip("-._") or "model"
        echo_next(["ollama", "create", name, "-f", place], ["ollama", "run", name], again)
