"""``unsloth-cupy generate``: continues a text, or answers a question."""

import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click

from .. import models
from ..errors import ConfigError
from ..finetune.data.tables import LONGEST
from ..finetune.data.turns import ending
from ..finetune.run.ranks import start
from ..finetune.run.run_folder import model_folder, words_folder
from ..finetune.run.settings import DEVICES
from ..machine import blas_threads, device_title, echo
from ..models.adapters.adapter_base import base_of
from ..models.configs.heads import CAUSAL, require_head
from ..models.generation.streaming import NEW, TEMPERATURE, stream_text
from ..models.text.chat import Message
from .options import BASE, FILE, QUANTIZE, Device, Integer, Number, Words, option, utf8

Write = Callable[..., tuple[str, int]]  # stream_text with its first arguments bound


@click.command()
@click.argument("folder", metavar="MODEL_FOLDER", type=FILE)
@click.argument("prompt", required=False, type=Words())
@option("--max-new-tokens", Integer(1), "Maximum number of new tokens.", NEW)
@option(
    "--temperature",
    Number(0),
    "Sampling temperature; 0 always chooses the most likely token.",
    TEMPERATURE,
)
@option("--top-k", Integer(1), "Sample from the N most likely tokens.")
@option(
    "--top-p",
    Number(0, 1, min_open=True),
    "Sample from the fewest most likely tokens whose total probability reaches X.",
)
@option(
    "--min-p",
    Number(0, 1),
    "Sample from tokens with at least X times the probability of the most likely one.",
)
@option(
    "--repetition-penalty",
    Number(0, min_open=True),
    "A value above 1 makes tokens that are already in the text less likely.",
)
@option("--seed", Integer(0), "Random seed.  [default: different for each call]")
@click.option(
    "--stop", multiple=True, type=Words(nonempty=True), metavar="TEXT",
    help="Stop before this text; may be repeated.",
)  # fmt: skip
@click.option(
    "--chat", is_flag=True, help="Format PROMPT as a user message with the chat template."
)
@option("--system", Words(), "System message for --chat.")
@option(
    "--cache-dtype",
    click.Choice(["int8"]),
    "Dtype of the KV cache; int8 stores keys and values in 8 bits.",
)
@option("--base", FILE, BASE)
@option("--quantize", QUANTIZE, "Quantize the weights, for example to nf4.")
@option("--device", Device(), DEVICES, "auto")
@option("--tensor-parallel", Integer(1), "Number of ranks (mpiexec) that split each weight.")
@option("--pipeline-parallel", Integer(1), "Number of ranks (mpiexec) that split the layers.")
@option("--expert-parallel", Integer(1), "Number of ranks (mpiexec) that split the experts.")
def generate(
    folder: Path,
    prompt: str | None,
    stop: tuple[str, ...],
    chat: bool,
    system: str | None,
    base: Path | None,
    quantize: str | None,
    device: str | None,
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    expert_parallel: int | None,
    **options: Any,
) -> None:
    """Continue PROMPT with the model in MODEL_FOLDER.

    MODEL_FOLDER is a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or the folder
    of a finetune run. The prompt is read from standard input, without its final line break, if
    PROMPT is -, or if PROMPT is omitted and standard input is not a terminal. At a terminal, --chat
    without PROMPT starts a conversation; Ctrl-D ends it. The text is streamed to standard output;
    the speed is printed to standard error.
    """
    from ..machine import on_device

    ranks = start(
        tensor=tensor_parallel, pipeline=pipeline_parallel, expert=expert_parallel, data=1,
        device=device,
    )  # fmt: skip
    with ranks.ending(click.ClickException):
        if system is not None and not chat:
            raise click.UsageError("--system requires --chat; add --chat.")
        random = [name for name in ("top_k", "top_p", "min_p", "seed") if options[name] is not None]
        if options["temperature"]:
            if options["seed"] is None and not ranks.alone:
                options["seed"] = ranks.broadcast(secrets.randbits(63))
        elif random:
            flags = ", ".join("--" + name.replace("_", "-") for name in random)
            raise click.UsageError(
                f"--temperature 0 always chooses the most likely token: leave {flags} out, or raise"
                " --temperature."
            )
        interactive = chat and prompt is None and sys.stdin is not None and sys.stdin.isatty()
        source = model_folder(folder)
        words, whole = words_folder(source, base), base_of(source, base)
        tokenizer = models.Tokenizer(words)
        start_messages = [] if system is None else [{"role": "system", "content": system}]
        if interactive and not ranks.alone:
            raise ConfigError("--chat without PROMPT runs in one process only; give a PROMPT")
        with on_device("generate", ranks.device):
            reads = ranks.first and not interactive  # only rank 0 has standard input
            text = ranks.broadcast(_prompt(prompt) if reads else "")
            placing: dict[str, Any] = {"device": ranks.device, **ranks.placing}
            placing |= {} if whole is None else {"lora": source}
            model = models.load(whole or source, quantize=quantize, **placing)
            require_head("generate", model.config, CAUSAL)  # before the prompt is printed
            for each in (ranks.problem, model.origin):
                if each and ranks.first:
                    echo(each, err=True)
            template, backend = tokenizer.template, tokenizer.backend
            ends = model.config.end_tokens
            if chat and template.stored and (end := ending(template, backend, ends)).text:
                ends = ends if end.token is None else (*ends, end.token)
                model.config = replace(model.config, end_tokens=ends)
                stop = stop if end.token is not None else (*stop, end.text)
            write: Write = partial(stream_text, model, tokenizer, stop=stop, **options)
            with blas_threads(model.config.hidden):
                if interactive:
                    converse(write, start_messages, options["seed"])
                    return
                started = time.perf_counter()
                _, new_tokens = write([*start_messages, _question(text)] if chat else text)
            seconds = time.perf_counter() - started
    if ranks.first:
        speed = new_tokens / seconds
        where = f"{device_title(ranks.device)}, {model.dtype}"
        echo(f"{new_tokens} tokens in {seconds:.1f} s on {where}: {speed:.1f} tokens/s", err=True)


def _prompt(prompt: str | None) -> str:
    """Return the prompt argument, else standard input, else an empty text."""
    if prompt not in (None, "-"):
        return str(prompt)
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        return ""
    try:
        data = sys.stdin.buffer.read(LONGEST + 1)
        if len(data) > LONGEST:
            raise ConfigError(f"has more than {LONGEST >> 20} MiB; give a shorter PROMPT")
        text = utf8(data)
    except ConfigError as error:
        raise ConfigError(f"standard input {error}") from None
    return text.removesuffix("\n").removesuffix("\r")


def _question(text: str) -> Message:
    """Return a chat message of the role user."""
    return {"role": "user", "content": text}


def converse(reply: Write, start_messages: Sequence[Message], seed: int | None) -> None:
    """Hold a conversation: reply to each line of the terminal until the input ends."""
    with suppress(ImportError):
        import readline  # noqa: F401 -- makes input() lines editable
    messages = [*start_messages]
    with suppress(EOFError, KeyboardInterrupt):
        for turn in count():
            messages.append(_question(_line()))
            text, _ = reply(messages, seed=None if seed is None else seed + turn)
            messages.append({"role": "assistant", "content": text})
    echo()


def _line() -> str:
    """Read lines from the terminal until one is not blank; return that line."""
    while True:
        try:
            line = utf8(input("> ").encode("utf-8", "surrogateescape"))
        except (ConfigError, UnicodeDecodeError):
            echo("The line is not UTF-8; type it again.", err=True)
            continue
        if line.strip():
            return line
