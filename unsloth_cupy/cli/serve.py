"""``unsloth-cupy serve``: a server with OpenAI's API."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .. import models
from ..errors import ConfigError
from ..finetune.run.run_folder import model_folder, words_folder
from ..finetune.run.settings import DEVICES
from ..machine import blas_threads, device_title, echo, format_bytes, on_device, resolve_device
from ..models.adapters.adapter_base import base_of
from ..models.configs.heads import CAUSAL, NONE
from .generate import end_answers
from .options import BASE, FILE, QUANTIZE, Device, Integer, Size, Words, option
from .prompts import PAGE, engine_of

KEY = "UNSLOTH_CUPY_API_KEY"


class Named(click.ParamType):  # type: ignore[type-arg]
    """NAME=PATH."""

    name = "adapter"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name and the path, or fail with the form."""
        name, separator, path = str(value).partition("=")
        if not (name and separator and path):
            self.fail(f"{value!r} is not NAME=PATH; write sql=runs/sql.", param, ctx)
        return name, Path(path)


@click.command()
@click.argument("folder", metavar="MODEL", type=FILE)
@option("--host", Words(nonempty=True), "Address to listen on.", "127.0.0.1")
@option("--port", Integer(0, 65535), "Port to listen on; 0 chooses a free one.", 8000)
@option("--name", Words(nonempty=True), "Name of the model.  [default: name of the folder or file]")
@click.option(
    "--adapter", "adapters", multiple=True, type=Named(), metavar="NAME=PATH",
    help="Adapter that requests choose by its name as the model; may be repeated.",
)  # fmt: skip
@option("--rows", Integer(1), "Most answers that are computed together.", 64)
@option(
    "--tokens",
    Integer(2),
    "Most tokens of a text, prompt and answer.  [default: all positions of the model]",
)
@option("--queue", Integer(0), "Most answers that wait; further requests get status 429.", 256)
@option("--max-body", Size(), "Most bytes of a request.", "8MiB")
@option("--device", Device(), DEVICES, "auto")
@option("--quantize", QUANTIZE, "Quantize the weights, for example to nf4.")
@option(
    "--cache-dtype",
    click.Choice(["int8"]),
    "Dtype of the KV cache; int8 stores keys and values in 8 bits.",
)
@option("--base", FILE, BASE)
def serve(
    folder: Path,
    host: str,
    port: int,
    name: str | None,
    adapters: tuple[tuple[str, Path], ...],
    rows: int,
    tokens: int | None,
    queue: int,
    max_body: int,
    device: str | None,
    quantize: str | None,
    cache_dtype: str | None,
    base: Path | None,
) -> None:
    """Serve MODEL over HTTP with OpenAI's API.

    MODEL is a Hugging Face folder, the folder of a finetune run, or a GGUF file. Requests are
    computed together. If the environment variable UNSLOTH_CUPY_API_KEY is set, requests need this
    key; an address that other machines reach requires it. After Ctrl-C or SIGTERM, new requests get
    status 503, and the server ends when the last answer has ended.
    """
    try:
        from ..serving.server.app import Server
        from ..serving.server.running import bound, is_local
        from ..serving.server.running import serve as answer
    except ModuleNotFoundError as error:
        cure = "pip install 'unsloth_cupy[serve]'"
        raise ConfigError(f"serve needs the package {error.name}; install it with {cure}") from None
    key = os.environ.get(KEY) or None
    if key is None and not is_local(host):
        cure = f"set {KEY}, or leave --host out"
        raise ConfigError(
            f"serve: other machines reach --host {host}, which requires a key; {cure}"
        )
    with bound(host, port) as listener:
        device, problem = resolve_device(device) if device == "auto" else (device, "")
        if problem:
            echo(f"serve: {problem}", err=True)
        name = name or folder.resolve().name.removesuffix(".gguf")
        with on_device("serve", device):
            model = loaded(folder, name, adapters, base, device=device, quantize=quantize)
            stops = end_answers(model) if model.config.head == CAUSAL else ()
            engine = engine_of(model, rows, tokens, cache_dtype)
            limit = min(tokens or model.config.positions, model.config.positions)
            if engine is not None:
                limit = min(limit, len(engine.cache.uses) * PAGE)
            server = Server(
                model, engine, name=name, limit=limit, rows=rows, queue=queue, most_body=max_body,
                key=key, chat_stops=stops, local=key is None,
            )  # fmt: skip
            shown = f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{listener.getsockname()[1]}"

            def ready() -> None:
                echo(f"{name} on {device_title(device)}, {model.dtype}")
                for own in model.adapters:
                    echo(f"adapter {own}")
                echo(f"{rows} rows of at most {limit:,} tokens; {queue} answers may wait")
                if engine is not None:
                    pages = len(engine.cache.uses)
                    held = format_bytes(engine.cache.keys.nbytes + engine.cache.values.nbytes)
                    echo(f"KV cache of {pages:,} pages, {pages * PAGE:,} tokens: {held}")
                echo(f"{address}/v1, {'no key' if key is None else f'with the key in {KEY}'}")
                echo(example(address, name, has_key=key is not None, embeds=engine is None))

            with blas_threads(model.config.hidden):
                answer(server, listener, ready)


def loaded(
    folder: Path, name: str, adapters: Sequence[tuple[str, Path]], base: Path | None, **options: Any
) -> Any:
    """Return a model with its tokenizer and its adapters by name."""
    source = model_folder(folder)
    whole = base_of(source, base)
    options |= {} if whole is None else {"lora": source}
    tokenizer = models.Tokenizer(words_folder(source, base))
    model = models.load(whole or source, **options)
    model.tokenizer = tokenizer
    if model.config.head not in (CAUSAL, NONE):
        raise ConfigError(f"serve: {name} is a classifier; serve a model that writes texts")
    for own, path in adapters:
        if own == name:
            raise ConfigError(f"serve: --adapter {own} is the name of the model; choose another")
        model.load_adapter(path, own)
    return model


def example(address: str, name: str, *, has_key: bool, embeds: bool) -> str:
    """Return a command that sends a request."""
    path, body = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if embeds:
        path, body = "embeddings", '"input": "Hello"'
    key = f' -H "Authorization: Bearer ${KEY}"' if has_key else ""
    kind = "-H 'Content-Type: application/json'"
    return f"""curl {address}/v1/{path} {kind}{key} -d '{{"model": "{name}", {body}}}'"""
