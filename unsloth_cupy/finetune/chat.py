"""Chats as the text that a model was trained on: by its own template, or by ChatML.

    <|im_start|>user
    What is the tallest mountain?<|im_end|>
    <|im_start|>assistant
    Mount Everest.<|im_end|>

A template is a program that came with a model: it runs where it can change nothing, read no file
and reach no module, for a limited time.
"""

import functools
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ..errors import ConfigError
from ..files import read_json
from .new_model import TOKENIZER

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
AT_ONCE = 32  # texts that a template is asked for together
SECONDS = 2  # for that; a template takes milliseconds
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Message = dict[str, str]


class Span(NamedTuple):
    """Characters of a text, from start to before stop."""

    start: int
    stop: int


class Chat:
    """A template that makes a text of messages: that of a model's folder, or a new model's.

    Attributes
    ----------
    own : bool
        Whether the template is a model's own, which ends an answer as the model is used to.
    files : dict of str to str
        What a folder needs to hold the same template, by file name.
    """

    def __init__(self, folder: Path | None) -> None:
        self.where, self.files = "ChatML", {} if folder else {CONFIG: _settings(TOKENIZER)}
        self.tokens: dict[str, str] = {}
        self.source = CHATML if folder is None else self._read(folder)
        self.own = self.source != CHATML

    def _read(self, folder: Path) -> str:
        """Return the template of a model's folder; keep the tokens that it may name."""
        path = folder / CONFIG
        settings = read_json(path) if path.is_file() else {}
        for name in (CONFIG, FILE):
            if (folder / name).is_file():
                self.files[name] = _text(folder / name)
        found: Any = settings.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {each.get("name"): each for each in found if isinstance(each, dict)}
            found = named.get("default", {}).get("template")
        if FILE in self.files:
            path, found = folder / FILE, self.files[FILE]
        if found is not None and not isinstance(found, str):
            raise ConfigError(f"{path}: chat_template is not text; copy the file again")
        self.where = str(path) if found is not None else self.where
        tokens = {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in settings.items()
            if key.endswith("_token")
        }
        self.tokens = {key: value for key, value in tokens.items() if isinstance(value, str)}
        return found if found is not None else CHATML

    @functools.cached_property
    def template(self) -> "Template":
        """The program; nobody needs it, or jinja2, who has no chats."""
        return Template(self.source, self.where)

    def keep(self) -> dict[str, str]:
        """Return the files that say how this model was taught, to lie beside its weights."""
        if self.own:
            return self.files
        settings = json.loads(self.files.get(CONFIG, "{}")) | {"chat_template": CHATML}
        return self.files | {CONFIG: _settings(settings)}

    def text(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """Return messages as text; with answer, up to where the assistant begins to speak.

        Raises
        ------
        ConfigError
            The template does not take these messages.
        """
        return self._texts([(messages, answer)])[0]

    def _texts(self, asked: list[tuple[Sequence[Message], bool]]) -> list[str]:
        """Return several texts by one call of the template, which is much faster."""
        return self.template.render([
            {"messages": [*messages], "add_generation_prompt": answer, "tools": None,
             "documents": None, **self.tokens}
            for messages, answer in asked
        ])  # fmt: skip

    def spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return a chat as text, and where in it the assistant speaks.

        A template may write an early answer otherwise once there is a later one (without its
        reasoning, say): such an answer is part of the question then.

        Raises
        ------
        ConfigError
            The last answer cannot be told from what comes before it.
        """
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        asked = [(messages, False)]
        for turn in turns:
            asked.append((messages[: turn + 1], False))
            asked += [(messages[:turn], answer) for answer in (True, False) if turn]
        texts = iter(self._texts(asked))
        whole, found = next(texts), []
        for turn in turns:
            stop = next(texts)
            starts = [next(texts), next(texts)] if turn else [""]
            start = next((s for s in starts if stop.startswith(s)), None)
            last = turn == len(messages) - 1
            if start is not None and len(start) < len(stop) and whole.startswith(stop):
                found.append(Span(len(start), len(stop)))
            elif last:
                raise ConfigError(
                    f"the template of {self.where} does not write an answer behind its question;"
                    " give prompt and completion instead of messages"
                )
        return whole, found


class Template:
    """A program that makes texts, in a process of its own: see ``template``."""

    def __init__(self, source: str, where: str) -> None:
        import jinja2  # noqa: F401 -- which its process needs: a missing package is named here

        self.source, self.where = source, where
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template.py")), str(SECONDS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            encoding="ascii",
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        if why := _asked(process, self.source)[1]:
            raise ConfigError(f"{self.where}: the chat template is broken: {why}; copy it again")
        return process

    def render(self, calls: list[dict[str, Any]]) -> list[str]:
        """Return the texts that the template makes of sets of arguments, or raise a ConfigError."""
        if self.process.poll() is not None:
            self.process = self._started()
        found = []
        for start in range(0, len(calls), AT_ONCE):
            texts, why = _asked(self.process, calls[start : start + AT_ONCE])
            if why:
                raise ConfigError(
                    f"the template of {self.where} does not take the messages: {why}; write them"
                    " as the model's page says, or copy the template from there again"
                )
            found += texts
        return found


def _asked(process: "subprocess.Popen[str]", value: Any) -> tuple[list[str], str]:
    """Return what the process of a template answers: texts, or why there are none.

    Its clock reads frames that are changing, so that it may end the process by a fault.
    """
    started = time.monotonic()
    stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    with suppress(OSError):  # it has ended: there is no answer either
        stdin.write(json.dumps(value) + "\n")
        stdin.flush()
    if line := stdout.readline():
        texts, why = json.loads(line)
        return texts, why
    process.wait()
    late = process.returncode > 0 or time.monotonic() - started >= SECONDS
    return [], f"it takes more than {SECONDS} s" if late else "it crashes"


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with suppress(OSError), process:  # wait, and close its pipes
        pass


def _settings(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; copy it again") from None
