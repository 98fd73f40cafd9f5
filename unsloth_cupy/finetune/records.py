"""Reads JSON lines to train on: a text, an instruction or a chat in each, checked in advance.

{"text": "..."}                                                  all of it is learned
{"prompt": "...", "completion": "..."}                           the completion is learned
{"instruction": "...", "input": "...", "output": "..."}          the output; a chat of 2 messages
{"messages": [{"role": "user", "content": "..."}, ...]}          what the assistant says
"""

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import ConfigError
from ..files import regular
from .chat import Chat, Message, Span
from .listener import reading
from .naming import named
from .text import HELD_OUT_CHARACTERS, HELD_OUT_SHARE, SMALL

SUFFIX = ".jsonl"
ROLES = ("system", "user", "assistant", "tool")
# If a line has all keys of several forms, as in some published files, the first of these counts.
FORMS = (("messages",), ("instruction", "output"), ("prompt", "completion"), ("text",))
LONGEST = SMALL  # bytes of a line: its text is tokenised as a whole
RECORDS = 1000  # records of a large file that a new tokenizer reads at a time
SHOWN = 40  # characters of an invalid value in a message


class Record(NamedTuple):
    """One line of a file: a chat, or a prompt (perhaps empty) and the answer to it."""

    line: int
    messages: list[Message]
    prompt: str
    answer: str

    def text(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the whole text, and the spans of it that are learned."""
        if self.messages:
            return chat.spans(self.messages)
        whole = self.prompt + self.answer
        return whole, [Span(len(self.prompt), len(whole))]


class Records(NamedTuple):
    """The lines of a file in two parts that share no record."""

    path: Path
    name: str
    digest: str
    size: int  # bytes
    train: list[Record]
    held_out: list[Record]

    @property
    def chats(self) -> bool:
        """Whether some line is a chat."""
        return any(record.messages for record in self.train)

    def blocks(self) -> Iterator[tuple[str, str]]:
        """Yield the text to train a new tokenizer on, in blocks of which a small file is one.

        Each is (text, text), a pair like those of ``Text.blocks``.
        """
        count = len(self.train) if self.size <= SMALL else RECORDS
        for start in range(0, len(self.train), count):
            part = "\n".join(map(_words, self.train[start : start + count]))
            yield part, part


def _words(record: Record) -> str:
    """Return all text of a record, with the roles of messages."""
    values = chain.from_iterable(message.values() for message in record.messages)
    return "\n".join([*values, record.prompt, record.answer])


def read_records(path: Path) -> Records:
    """Return the records of a file, split into training and held-out records.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is not a record; the message names file, line and cure.
    """
    digest, records = hashlib.sha256(), list[Record]()
    try:
        with regular(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pieces = iter(lambda: file.readline(LONGEST + 1), b"")
            lines = reading(((line,) for line in pieces), size, "reading")
            for number, (whole,) in enumerate(lines, 1):
                if len(whole) > LONGEST:
                    raise ConfigError(
                        f"{path}:{number}: has more than {LONGEST >> 20} MiB, whose tokens would"
                        " take hundreds of MiB of memory; divide its text into several lines"
                    )
                line = whole.removeprefix(b"\xef\xbb\xbf") if number == 1 else whole
                digest.update(line)
                if line.strip():
                    records.append(_record(path, number, line.removesuffix(b"\n")))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{named(text=path)}: {reason}; name a readable file") from None
    if len(records) < 2:
        problem = "is empty" if not records else "holds one record"
        raise ConfigError(f"{named(text=path)} {problem}; write two lines or more: one is held out")
    return Records(path, path.stem, digest.hexdigest(), size, *split(path, records))


def split(
    path: Path, records: list[Record], share: float | None = None
) -> tuple[list[Record], list[Record]]:
    """Return training and held-out records: a random share is held out, with its duplicates.

    None: a tenth, but not more than a loss needs that is exact to 0.02 nats.
    """
    first, digests, sizes = dict[bytes, int](), list[bytes](), list[int]()
    for index, record in enumerate(records):
        content = repr(record[1:])
        digests.append(hashlib.blake2b(content.encode(), digest_size=16).digest())
        sizes.append(len(content))
        first.setdefault(digests[-1], index)
    order = np.random.default_rng(0).permutation(sorted(first.values())).tolist()
    held, characters = set[bytes](), 0
    for index in order[: max(1, int(len(order) * (share or HELD_OUT_SHARE)))]:
        if held and share is None and characters > HELD_OUT_CHARACTERS:
            break
        held.add(digests[index])
        characters += sizes[index]
    train = [record for record, digest in zip(records, digests, strict=True) if digest not in held]
    if not train:
        raise ConfigError(f"{named(text=path)} holds only equal lines; write lines that differ")
    return train, [records[index] for index in sorted(first[digest] for digest in held)]


def _record(path: Path, number: int, line: bytes) -> Record:
    """Return the record of a line, or raise a ConfigError that names file, line and cure."""

    def wrong(problem: str, cure: str) -> NoReturn:
        raise ConfigError(f"{path}:{number}: {problem}; {cure}")

    def text(value: Any, name: str, least: int = 1) -> str:
        if not isinstance(value, str):
            wrong(f"{name} is {_shown(value)}, not text", f"write {name} as a string")
        if len(value.strip()) < least:
            wrong(f"{name} is empty", "write what is to be learned, or remove the line")
        if any("\ud800" <= character <= "\udfff" for character in value):
            wrong(f"{name} holds half a character (a lone surrogate)", "write the whole character")
        return value

    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        wrong(f"is not UTF-8: {byte}", "convert the file, for example with iconv -t utf-8")
    except json.JSONDecodeError as error:
        wrong(f"is not JSON ({error.msg} at column {error.colno})", "write one object in each line")
    except (ValueError, RecursionError) as error:
        wrong(f"cannot be read as JSON ({error})", "write one object in each line")
    if not isinstance(values, dict):
        wrong(f"is {_shown(values)}, not an object", 'write {"text": "..."} or another form')
    complete = (form for form in FORMS if all(key in values for key in form))
    partial = (form for form in FORMS if any(key in values for key in form))
    form = next(chain(complete, partial), None)
    if form is None:
        keys = ", ".join(map(repr, values)) or "nothing"
        forms = "; ".join(" and ".join(keys) for keys in FORMS)
        wrong(f"holds {_shown(keys)}", f"write one of these forms: {forms}")
    if missing := [key for key in form if key not in values]:
        wrong(f"has {form[form[0] in missing]} but no {missing[0]}", f"add {missing[0]}")
    match form[0]:
        case "messages":
            return Record(number, _messages(values["messages"], text, wrong), "", "")
        case "instruction":
            more = values.get("input")
            question = text(values["instruction"], "instruction")
            question += "" if more in (None, "") else "\n\n" + text(more, "input")
            answer = text(values["output"], "output")
            turns = [("user", question), ("assistant", answer)]
            return Record(number, [{"role": r, "content": c} for r, c in turns], "", "")
        case "prompt":
            prompt = text(values["prompt"], "prompt", 0)
            return Record(number, [], prompt, text(values["completion"], "completion"))
        case _:
            return Record(number, [], "", text(values["text"], "text"))


def _messages(values: Any, text: Any, wrong: Any) -> list[Message]:
    """Return the messages of a chat; ``text`` checks a string, ``wrong`` raises an error."""
    if not isinstance(values, list) or not values:
        wrong(f"messages is {_shown(values)}", 'write [{"role": "user", "content": "..."}, ...]')
    messages: list[Message] = []
    for place, message in enumerate(values):
        name = f"messages[{place}]"
        if not isinstance(message, dict):
            wrong(f"{name} is {_shown(message)}", 'write {"role": "user", "content": "..."}')
        for key in ("role", "content"):
            if key not in message:
                wrong(f"{name} has no {key}", "each message has a role and a content")
        role = message["role"]
        if role not in ROLES:
            wrong(f"{name} has the role {_shown(role)}", f"choose from {', '.join(ROLES)}")
        content = text(message["content"], f"{name}.content", int(role == "assistant"))
        messages.append({"role": role, "content": content})
    if all(message["role"] != "assistant" for message in messages):
        wrong("no message is the assistant's", "add the answer that is to be learned")
    return messages


def _shown(value: Any) -> str:
    """Return the beginning of a value, as JSON, for a message."""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
