"""``unsloth-cupy generate``: continues a text, or answers a question."""

import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
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
from ..models.text.tokenizer import check_tokens
from ..serving.engine import Engine
from ..serving.server.answers import Answer
from .options import BASE, FILE, QUANTIZE, Device, Integer, Number, Words, option, utf8
from .prompts import Prompt, answer_prompts, chats, read_prompts

FIRST = 4096  # tokens for which the cache of a conversation has room at first


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
    "--prompts",
    FILE,
    "File of prompts: a text or JSON value per line.  The answers are JSON lines.",
)
@option(
    "--cache-dtype",
    click.Choice(["int8"]),
    "Dtype of the KV cache; int8 stores keys and values in 8 bits.",
)
@click.option(
    "--draft", type=click.Choice(["mtp"]),
    help="Let the model's draft head (multi-token prediction) propose tokens: the same text as"
    " without it, in fewer steps.  Implies --temperature 0.",
)  # fmt: skip
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
    prompts: Path | None,
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
    without PROMPT starts a conversation; Ctrl-C ends an answer, Ctrl-D the conversation. The text
    is streamed to standard output; the speed is printed to standard error. --prompts FILE computes
    many prompts together; - reads them from standard input.
    """
    from ..machine import on_device

    ranks = start(
        tensor=tensor_parallel, pipeline=pipeline_parallel, expert=expert_parallel, data=1,
        device=device,
    )  # fmt: skip
    with ranks.ending(click.ClickException):
        _check_words(prompt, prompts, chat=chat, system=system)
        _set_sampling(options, ranks)
        interactive = chat and prompt is None and prompts is None and _at_terminal()
        source = model_folder(folder)
        words, whole = words_folder(source, base), base_of(source, base)
        tokenizer = models.Tokenizer(words)
        first: Message = {"role": "system", "content": system}
        start_messages = [] if system is None else [first]
        asked = list[Prompt]()
        if interactive:
            _check_engine(options, "--chat without PROMPT", alone=ranks.alone)
        elif prompts is not None:
            _check_engine(options, "--prompts", alone=ranks.alone)
            asked, chat = chats(read_prompts(prompts), start_messages, chat=chat)
        with on_device("generate", ranks.device):
            reads = ranks.first and not (interactive or asked)  # only rank 0 has standard input
            text = ranks.broadcast(_prompt(prompt) if reads else "")
            placing: dict[str, Any] = {"device": ranks.device, **ranks.placing}
            placing |= {} if whole is None else {"lora": source}
            model = models.load(whole or source, quantize=quantize, **placing)
            require_head("generate", model.config, CAUSAL)  # before anything is printed
            for each in (ranks.problem, model.origin):
                if each and ranks.first:
                    echo(each, err=True)
            model.tokenizer = tokenizer
            if chat:
                stop = (*stop, *end_answers(model))
            with blas_threads(model.config.hidden):
                if interactive:
                    tokenizer.chat([*start_messages, _question("")])  # a template may refuse them
                    conversation = Conversation(model, stop, **options)
                    echo(
                        f"{folder.resolve().name} on {device_title(ranks.device)}, {model.dtype}."
                        " Ctrl-C ends an answer, Ctrl-D the conversation.",
                        err=True,
                    )
                    converse(conversation.reply, start_messages)
                    return
                started, failed = time.perf_counter(), 0
                if asked:
                    new_tokens, failed = answer_prompts(model, asked, stop=stop, **options)
                else:
                    one = [*start_messages, _question(text)] if chat else text
                    _, new_tokens = stream_text(model, tokenizer, one, stop=stop, **options)
            seconds = time.perf_counter() - started
    if ranks.first:
        where = f"{device_title(ranks.device)}, {model.dtype}"
        where += f", {model.drafts}" * (model.drafts is not None)
        speed = f"{new_tokens / seconds:.1f} tokens/s"
        echo(f"{new_tokens} tokens in {seconds:.1f} s on {where}: {speed}", err=True)
    if failed:
        raise ConfigError(f"{failed} of {len(asked)} prompts failed; the messages above name them")


def _at_terminal() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def _check_words(
    prompt: str | None, prompts: Path | None, *, chat: bool, system: str | None
) -> None:
    """Raise for arguments that exclude each other."""
    if system is not None and not chat:
        raise click.UsageError("--system requires --chat; add --chat.")
    if prompts is not None and prompt is not None:
        raise click.UsageError("--prompts replaces PROMPT; leave one of them out.")


def _set_sampling(options: dict[str, Any], ranks: Any) -> None:
    """Set the temperature, 0 with a draft head unless it was passed, and one seed of all ranks."""
    source = click.get_current_context().get_parameter_source("temperature")
    if options["draft"] and source is click.core.ParameterSource.DEFAULT:
        options["temperature"] = 0.0
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


def _check_engine(options: dict[str, Any], what: str, *, alone: bool) -> None:
    """Raise for options that an engine does not support; leave out ``draft``."""
    if options.pop("draft") is not None:
        raise click.UsageError("--draft requires a PROMPT; leave it out, or add one.")
    if not alone:
        raise ConfigError(f"{what} runs in one process only; give a PROMPT")


def end_answers(model: Any) -> tuple[str, ...]:
    """Add the token that ends an answer in the chat template to the model's end tokens.

    Return the texts that end an answer if no token does.
    """
    template, backend = model.tokenizer.template, model.tokenizer.backend
    ends = model.config.end_tokens
    if not template.stored or not (end := ending(template, backend, ends)).text:
        return ()
    if end.token is None:
        return (end.text,)
    model.config = replace(model.config, end_tokens=(*ends, end.token))
    return ()


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


class Conversation:
    """An engine of one row, which keeps the keys and values of earlier turns.

    A turn computes the tokens that it adds.  Where the chat template changes earlier turns, such
    as thoughts that it leaves out, tokens are computed again from there.
    """

    def __init__(
        self,
        model: Any,
        stop: Sequence[str],
        *,
        max_new_tokens: int,
        cache_dtype: str | None,
        seed: int | None,
        **options: Any,
    ) -> None:
        self.model, self.stop, self.most, self.options = model, stop, max_new_tokens, options
        self.cache_dtype, self.seed, self.turns = cache_dtype, seed, 0
        self.engine: Engine | None = None
        self.text, self.tokens = "", list[int]()
        self._room(0)  # checks the kind of model and the cache before the first question

    def _room(self, tokens: int) -> Engine:
        """Return an engine with room for a text; a new one has twice the room that it needs."""
        if self.engine is None or tokens > len(self.engine.cache.uses):
            pages = min(max(FIRST, 2 * tokens), max(tokens, self.model.config.positions))
            # pages of one token: a turn computes its own tokens alone
            self.engine = Engine(
                self.model, rows=1, pages=pages, page=1, cache_dtype=self.cache_dtype
            )
        return self.engine

    def reply(self, messages: Sequence[Message]) -> str:
        """Write the answer to messages to standard output as it comes, and return it."""
        tokenizer, positions = self.model.tokenizer, self.model.config.positions
        text = tokenizer.chat(messages)
        known, rest = (self.tokens, text.removeprefix(self.text))
        if not (self.text and text.startswith(self.text)):
            known, rest = [], text
        prompt = [*known, *tokenizer.encode(rest, special_tokens=False).tolist()]
        check_tokens(tokenizer.backend, prompt, self.model.config.vocab)
        room = positions - len(prompt)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(prompt)} tokens, and the model has {positions}"
                " positions, which leaves no room for an answer; start a new one"
            )
        new = min(self.most, room)
        seed = None if self.seed is None else self.seed + self.turns
        engine = self._room(len(prompt) + new)
        request = engine.submit(
            prompt, max_new_tokens=new, stop_texts=self.stop, seed=seed, **self.options
        )
        answer = Answer(tokenizer.backend, prompt, self.stop, self.model.config.end_tokens)
        try:
            while answer.finish is None:
                for event in engine.step():
                    if event.request is request:
                        echo(answer.push(event.tokens, None, event.finish), nl=False)
        except KeyboardInterrupt:  # it ends the answer, and the conversation goes on
            engine.cancel(request)
            echo(answer.push([], None, "cancelled"), nl=False)
        echo()
        if answer.finish == "length" and new == room < self.most:
            echo(f"The text ends at the model's {positions} positions.", err=True)
        drawn, self.turns = request.samples[0].tokens, self.turns + 1
        if drawn and drawn[-1] in self.model.config.end_tokens:
            drawn = drawn[:-1]
        self.text, self.tokens = text + answer.text, [*prompt, *drawn]
        if tokenizer.decode(drawn, special_tokens=True) != answer.text:
            self.text = ""  # the tokens are not those of the text
        return answer.text


def converse(reply: Callable[..., str], start_messages: Sequence[Message]) -> None:
    """Hold a conversation: reply to each line of the terminal until the input ends."""
    with suppress(ImportError):
        import readline  # noqa: F401 -- makes input() lines editable
    messages = [*start_messages]
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            messages.append(_question(_line()))
            messages.append({"role": "assistant", "content": reply(messages)})
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
