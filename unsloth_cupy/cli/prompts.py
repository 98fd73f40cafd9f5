"""Files of prompts, and their answers as JSON lines, computed together by an engine."""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, DeviceMemoryError
from ..finetune.data.data_files import located
from ..finetune.data.forms import CHATS, QUESTIONS, TEXTS, normal
from ..finetune.data.prompts import ARGUMENTS, prompt_of
from ..finetune.data.tables import PROMPTS, rows_of
from ..machine import echo
from ..models.configs.heads import CAUSAL
from ..models.generation.decoding import CHUNK, free_pages
from ..models.generation.streaming import Completion
from ..models.text.chat import Message
from ..serving.engine import Engine
from ..serving.requests import Request
from .progress import SECONDS_BETWEEN_LINES

PAGE = 64  # tokens of a page of the cache
ROWS = 64  # answers that are computed together, as in ``serve``
ASKING = ("instruction", "prompt", "question")  # columns that go before a text
ANSWERED = ("completion", "tokens", "finish")  # columns of an answer, beside those of its line
WRITE = 'write {"prompt": "..."} or {"messages": [...]}'


class Prompt(NamedTuple):
    """A prompt of a file: its place for messages, the columns of its line, and a text or a chat."""

    place: str
    columns: dict[str, Any]
    content: str | Sequence[Message]
    tools: Any


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts in a file, or in standard input for "-".

    A line of a text file is a prompt.  A line of JSON is a text, messages, or a row as in
    ``prompt_of``, whose answers at the end of the messages are left out.

    Raises
    ------
    ConfigError
        The file cannot be read, or has no prompt; the message has the line, and the cure.
    """
    prompts = list[Prompt]()
    files, _ = located(path, "--prompts")
    for file in files:
        kind = PROMPTS if file.kind == "text" else file.kind
        for row in rows_of(file._replace(kind=kind), hashlib.sha256()):
            place = f"{file.before}{row.line}"
            try:
                prompts.append(_prompt(place, row.values))
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from None
    if not prompts:
        raise ConfigError(f"{files[0].name} has no prompt; write one per line")
    return prompts


def _prompt(place: str, values: Any) -> Prompt:
    """Return the prompt of a line."""
    columns = {"prompt": values} if isinstance(values, str) else values
    columns = {"messages": values} if isinstance(values, list) else columns
    if not isinstance(columns, dict):
        raise ConfigError(f"is {json.dumps(values)}, which is not a prompt; {WRITE}")
    row = {name: _before_answer(value) for name, value in columns.items()}
    for known in ((*CHATS, *ASKING), TEXTS, QUESTIONS):
        if own := [name for name in row if normal(name) in known and row[name] is not None]:
            break
    else:
        raise ConfigError(f"has no prompt; {WRITE}")
    if known is TEXTS:
        row = {"prompt": row[own[0]]}
    content = prompt_of(row, ARGUMENTS)
    if not (content.messages or content.prompt.strip()):
        raise ConfigError(f"{own[0]} is empty; write a text, or remove the line")
    return Prompt(place, columns, content.messages or content.prompt, content.tools)


def _before_answer(value: Any) -> Any:
    """Return messages up to the last question; other values are unchanged."""
    end = len(value) if isinstance(value, list) else 0
    while end and isinstance(value[end - 1], dict) and value[end - 1].get("role") == "assistant":
        end -= 1
    return value[:end] if isinstance(value, list) else value


def chats(
    prompts: Sequence[Prompt], start: list[Message], *, chat: bool
) -> tuple[list[Prompt], bool]:
    """Return prompts with their first messages, and whether they are chats.

    A file with messages is one of chats; texts are messages of the user with ``chat``.
    """
    first = next((each.place for each in prompts if not isinstance(each.content, str)), None)
    result = list[Prompt]()
    for each in prompts:
        own = each.content
        if isinstance(own, str) and not chat and first is not None:
            problem = f"is a text, and {first} has messages"
            raise ConfigError(f"{each.place}: {problem}; add --chat, or write messages")
        if start and not isinstance(own, str) and own[0]["role"] == "system":
            raise ConfigError(f"{each.place}: has a system message; leave --system out")
        if taken := [name for name in ANSWERED if name in each.columns]:
            problem = f"has the column {taken[0]}, which the answer has too"
            raise ConfigError(f"{each.place}: {problem}; rename it")
        if each.columns.get("chat_template_kwargs"):
            problem = "has chat_template_kwargs, which are for training only"
            raise ConfigError(f"{each.place}: {problem}; remove them")
        messages: Any = [{"role": "user", "content": own}] if isinstance(own, str) else own
        is_chat = chat or not isinstance(own, str)
        result.append(each._replace(content=[*start, *messages] if is_chat else own))
    return result, chat or first is not None


def answer_prompts(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    stop: Sequence[str],
    max_new_tokens: int,
    seed: int | None,
    cache_dtype: str | None,
    **options: Any,
) -> tuple[int, int]:
    """Print the answers as JSON lines in the order of the prompts, as soon as that allows.

    Prompt i, from 0, has the seed ``seed + i``.

    Returns
    -------
    tokens, failed : int
        The number of new tokens, and of prompts that ended with an error.

    Raises
    ------
    ConfigError
        A prompt has too many tokens, or the template rejects it; nothing is computed then.
    """
    texts = list[Completion]()
    for each in prompts:
        try:
            texts.append(
                Completion(
                    model, model.tokenizer, each.content, max_new_tokens=max_new_tokens, stop=stop,
                    tools=each.tools,
                )
            )  # fmt: skip
        except ConfigError as error:
            raise ConfigError(f"{each.place}: {error}") from None
    new = [min(max_new_tokens, text.room) for text in texts]
    longest = max(len(text.tokens) + count for text, count in zip(texts, new, strict=True))
    engine: Any = engine_of(model, min(ROWS, len(prompts)), longest, cache_dtype)
    numbers, ended = dict[Request, int](), dict[int, tuple[str, int, Any]]()
    submitted = written = tokens = failed = 0
    shown = time.monotonic()
    with engine:
        while written < len(prompts):
            # few requests wait: a step that ends one looks at all of them
            while submitted < len(prompts) and engine.waiting < ROWS:
                number, submitted = submitted, submitted + 1
                try:
                    request = engine.submit(
                        texts[number].tokens, max_new_tokens=new[number], stop_texts=stop,
                        seed=None if seed is None else seed + number, **options,
                    )  # fmt: skip
                except DeviceMemoryError as error:  # the text has more tokens than the cache
                    echo(f"{prompts[number].place}: {error}", err=True)
                    ended[number] = "", 0, "error"
                else:
                    numbers[request] = number
            for event in engine.step():
                if event.finish is not None:
                    number, sample = numbers.pop(event.request), event.request.samples[0]
                    text = "".join(texts[number].texts(sample.tokens))
                    ended[number] = text, len(sample.tokens), sample.finish
                    if sample.finish == "error":
                        problem = f"the logits of new token {len(sample.tokens)} contain NaN"
                        echo(f"{prompts[number].place}: {problem}", err=True)
            while written in ended:
                answer = dict(zip(ANSWERED, ended.pop(written), strict=True))
                echo(json.dumps(prompts[written].columns | answer))
                tokens, failed = tokens + answer["tokens"], failed + (answer["finish"] == "error")
                written += 1
            if not sys.stdout.isatty() and time.monotonic() - shown >= SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                echo(f"{written} of {len(prompts)} prompts", err=True)
    return tokens, failed


def engine_of(model: Any, rows: int, tokens: int | None, cache_dtype: str | None) -> Engine | None:
    """Return an engine whose cache has room for rows of so many tokens, if memory allows."""
    if model.config.head != CAUSAL:
        return None
    pages = free_pages(model, rows, PAGE, CHUNK, cache_dtype, {**model.adapters})
    longest = min(tokens or model.config.positions, model.config.positions)
    pages = min(pages, rows * -(-longest // PAGE))
    return Engine(model, rows=rows, pages=pages, page=PAGE, cache_dtype=cache_dtype)
