"""``unsloth-cupy generate``: a model continues a text."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from .. import _arrays
from ..errors import ConfigError
from .chat import Chat
from .machine import blas_threads
from .options import FILE, Device, Number, option
from .run_folder import load_model, model_folder
from .tokenizer import TextStream, check_tokens, load_tokenizer

if TYPE_CHECKING:
    from ..models import Transformer


@click.command()
@click.argument("folder", metavar="MODEL_FOLDER", type=FILE)
@click.argument("prompt", default="")
@option("--max-new-tokens", click.IntRange(1), "Tokens to write at most.", 200)
@option("--temperature", Number(0), "0 always takes the likeliest token.", 0.8)
@option("--top-k", click.IntRange(1), "Choose among the N likeliest tokens.")
@option(
    "--top-p", Number(0, 1, min_open=True), "Choose among the likeliest tokens with this share."
)
@option("--seed", click.IntRange(0), "Of the choices.", 0)
@click.option("--chat", is_flag=True, help="PROMPT is a question, put by the model's template.")
@option("--device", Device(), "cpu, cuda or cuda:1.", "cpu")
def generate(
    folder: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    chat: bool,
    device: str | None,
) -> None:
    """Continue PROMPT with the model in MODEL_FOLDER.

    MODEL_FOLDER is a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or the folder
    of a finetune run. The text goes to standard output as it is written, the speed to standard
    error.
    """
    from ..models.folder import on_device

    source = model_folder(folder)
    tokenizer, tokens = load_tokenizer(source), []
    if chat:
        text = Chat(source).text([{"role": "user", "content": prompt}], answer=True)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
    with on_device("generate", device):
        model = load_model(source, device=device)
        started = time.perf_counter()
        with blas_threads(model.config.hidden):
            count = stream_text(
                model, tokenizer, "" if chat else prompt, tokens, max_new_tokens=max_new_tokens,
                temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            )  # fmt: skip
        seconds = time.perf_counter() - started
    click.echo(f"{count} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s", err=True)


def stream_text(
    model: "Transformer",
    tokenizer: Any,
    prompt: str,
    tokens: Sequence[int] = (),
    **options: Any,
) -> int:
    """Write prompt and continuation to standard output; return the number of new tokens.

    ``tokens`` are those of the prompt where they are known, as behind a chat's special tokens.
    """
    tokens = list(tokens) or tokenizer.encode(prompt).ids or tokenizer.encode("\n").ids
    if not tokens:
        raise ConfigError("the tokenizer knows no token to start from; give a PROMPT")
    check_tokens(tokenizer, tokens, model.config.vocab)
    if getattr(sys.stdout, "errors", "") == "strict":  # a terminal may lack a character
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    stream = TextStream(tokenizer, tokens)
    click.echo(prompt, nl=False)
    count = 0
    for token in model.stream(_arrays.placed(np.array([tokens]), model.table), **options):
        click.echo(stream.push(int(token[0])), nl=False)
        count += 1
    click.echo(stream.flush())
    return count
