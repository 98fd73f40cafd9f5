"""Chats as the text that a model was trained on: formatted by its own template, or as ChatML.

    <|im_start|>user
    What is the tallest mountain?<|im_end|>
    <|im_start|>assistant
    Mount Everest.<|im_end|>

A template is a program from a model's author: it runs in a sandbox, where it cannot change
anything, read files or import modules, in a process without an environment, for a limited time.
"""

import functools
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ..errors import ConfigError
from ..files import read_json, read_text
from .new_model import TOKENIZER

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
AT_ONCE = 32  # texts in one request to the template process
# Environment variables without which Python or jinja2 may not start; the process gets no others.
NEEDED = ("PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
SECONDS = 2  # time limit of a request; a template takes milliseconds
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
    """The template that formats messages as text: of a model's folder, or ChatML for a new model.

    Attributes
    ----------
    own : bool
        Whether the template is the model's own, which writes the end of an answer itself.
    stored : bool
        Whether the folder has a template; a model trained with ChatML has that one.
    files : dict of str to str
        The files that store the template in a folder: their texts by name.
    """

    def __init__(self, folder: Path | None) -> None:
        self.where, self.files = "ChatML", {} if folder else {CONFIG: _settings(TOKENIZER)}
        self.tokens: dict[str, str] = {}
        self.source = CHATML if folder is None else self._read(folder)
        self.own = self.source != CHATML
        self.stored = self.where != "ChatML"

    def _read(self, folder: Path) -> str:
        """Return the template of a model's folder; store the special tokens that it may use."""
        path = folder / CONFIG
        settings = read_json(path) if path.exists() else {}
        for name in (CONFIG, FILE):
            if (folder / name).exists():
                self.files[name] = template_text(folder / name)
        source = default_template(settings)
        if FILE in self.files:
            path, source = folder / FILE, self.files[FILE]
        if source is not None and not isinstance(source, str):
            raise ConfigError(f"{path}: chat_template is not text; copy the file again")
        self.where = str(path) if source is not None else self.where
        tokens = {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in settings.items()
            if key.endswith("_token")
        }
        self.tokens = {key: value for key, value in tokens.items() if isinstance(value, str)}
        return source if source is not None else CHATML

    @functools.cached_property
    def template(self) -> "Template":
        """The template process, started at first use: without chats, jinja2 is not needed."""
        return Template(self.source, self.where)

    def keep(self) -> dict[str, str]:
        """Return the files that store the template used in training, to save with the weights."""
        if self.own:
            return self.files
        settings = json.loads(self.files.get(CONFIG, "{}")) | {"chat_template": CHATML}
        return self.files | {CONFIG: _settings(settings)}

    def text(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """Return messages as text; with ``answer``, with the beginning of an assistant's turn.

        Raises
        ------
        ConfigError
            The template does not accept these messages.
        """
        return self._texts([(messages, answer)])[0]

    def _texts(self, requests: list[tuple[Sequence[Message], bool]]) -> list[str]:
        """Return the text of each (messages, answer); one call for all is much faster."""
        return self.template.render([
            {"messages": [*messages], "add_generation_prompt": answer, "tools": None,
             "documents": None, **self.tokens}
            for messages, answer in requests
        ])  # fmt: skip

    def spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return a chat as text, and the spans of the assistant's answers in it.

        A template may write an early answer differently once there is a later one (for example
        without its reasoning): such an answer gets no span, it is then part of the question.

        Raises
        ------
        ConfigError
            The last answer cannot be separated from the text before it.
        """
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        requests = [(messages, False)]
        for turn in turns:
            requests.append((messages[: turn + 1], False))
            requests += [(messages[:turn], answer) for answer in (True, False) if turn]
        texts = iter(self._texts(requests))
        whole, spans = next(texts), []
        for turn in turns:
            stop = next(texts)
            starts = [next(texts), next(texts)] if turn else [""]
            start = next((s for s in starts if stop.startswith(s)), None)
            last = turn == len(messages) - 1
            if start is not None and len(start) < len(stop) and whole.startswith(stop):
                spans.append(Span(len(start), len(stop)))
            elif last:
                raise ConfigError(
                    f"the template of {self.where} does not write an answer behind its question;"
                    " give prompt and completion instead of messages"
                )
        return whole, spans


class Template:
    """A chat template that runs in a separate process: see ``template.py``."""

    def __init__(self, source: str, where: str) -> None:
        import jinja2  # noqa: F401 -- the process needs it: fail here if it is missing

        self.source, self.where = source, where
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[str]":
        """Start the process and send it the template; raise a ConfigError if that is broken."""
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template.py")), str(SECONDS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            encoding="ascii", env={key: os.environ[key] for key in NEEDED if key in os.environ},
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        if why := _request(process, self.source)[1]:
            raise ConfigError(f"{self.where}: the chat template is broken: {why}; copy it again")
        return process

    def render(self, calls: list[dict[str, Any]]) -> list[str]:
        """Return the text of each call, a set of arguments, or raise a ConfigError."""
        if self.process.poll() is not None:
            self.process = self._started()
        result = []
        for start in range(0, len(calls), AT_ONCE):
            texts, why = _request(self.process, calls[start : start + AT_ONCE])
            if why:
                raise ConfigError(
                    f"the template of {self.where} does not take the messages: {why}; write them"
                    " as the model's page says, or copy the template from there again"
                )
            result += texts
        return result


def _request(process: "subprocess.Popen[str]", value: Any) -> tuple[list[str], str]:
    """Send a request to a template process; return the texts, or the reason why there are none.

    Its watchdog reads frames while they change, so it may also end the process by a crash: a
    crash at the time limit counts as a timeout.
    """
    started = time.monotonic()
    stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    with suppress(OSError):  # the process has ended: then there is no answer to read either
        stdin.write(json.dumps(value) + "\n")
        stdin.flush()
    if line := stdout.readline():
        texts, why = json.loads(line)
        return texts, why
    process.wait()
    late = process.returncode > 0 or time.monotonic() - started >= SECONDS
    return [], f"it takes more than {SECONDS} s" if late else "it crashes"


def _end(process: "subprocess.Popen[str]") -> None:
    """Kill a process, wait for it and close its pipes."""
    process.kill()
    with suppress(OSError), process:
        pass


def _settings(values: dict[str, Any]) -> str:
    """Return the text of a JSON file."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def default_template(settings: Mapping[str, Any]) -> Any:
    """Return the template in a tokenizer_config.json, which may hold several by name."""
    source = settings.get("chat_template")
    if not isinstance(source, list):
        return source
    named = (each for each in source if isinstance(each, dict) and each.get("name") == "default")
    return next(named, {}).get("template")


def template_text(path: Path) -> str:
    """Return the text of a UTF-8 file, or raise a ConfigError."""
    try:
        return read_text(path)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; copy it again") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; copy it again") from None
