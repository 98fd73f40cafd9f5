"""Formatting of chats as text, by the model's own chat template or as ChatML.

    <|im_start|>user
    What is the tallest mountain?<|im_end|>
    <|im_start|>assistant
    Mount Everest.<|im_end|>

A template is a program by the model's author.  It runs in a separate process without environment
variables, for a limited time, in a sandbox where it cannot change anything, read files or import
modules.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ...errors import ConfigError
from ...files import read_json, read_text

FILE, CONFIG, MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
AT_ONCE = 32  # most texts in one request to the template process
# Environment variables that Python or jinja2 may need to start; the process gets no others.
NEEDED = ("PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
SECONDS = 2  # limit of processor time for one text; a template takes milliseconds
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Message = Mapping[str, Any]
FIXED = datetime(2024, 7, 26)  # date in training texts, so that a resumed run has the same texts
Tools = Sequence[Mapping[str, Any]] | None
Options = Mapping[str, Any] | None  # further arguments of a template, such as enable_thinking
REASONING = ("reasoning_content", "reasoning", "thinking")  # templates' names of the same field
PARTS = re.compile(r"[.'\"]type\b")  # a template that reads lists of parts reads their type
PRIVATE = range(0xE000, 0xF900)  # private-use characters, which no script has


class Span(NamedTuple):
    """A range of characters in a text; stop is exclusive."""

    start: int
    stop: int


class Rendered(NamedTuple):
    """A rendered text, the spans that are marked as the assistant's, and an error or ""."""

    text: str
    marks: list[Span]
    error: str


class Chat:
    """A template that formats messages as text: that of a model's folder, or ChatML.

    Attributes
    ----------
    own : bool
        Whether the template is the model's own, which writes the end of an answer itself.
    stored : bool
        Whether the folder has a template; after training with ChatML it is ChatML.
    files : dict of str to str
        Contents of the files that store the template in a folder, by file name.
    """

    def __init__(self, folder: Path | None) -> None:
        self.where, self.files = "ChatML", dict[str, str]()
        self.tokens: dict[str, str] = {}
        self.source = CHATML if folder is None else self._read(folder)
        self.own = self.source != CHATML
        self.stored = self.where != "ChatML"

    def _read(self, folder: Path) -> str:
        """Return the template of a model's folder, and set ``files`` and ``tokens``."""
        path = folder / CONFIG
        settings = read_json(path) if path.exists() else {}
        more = read_json(folder / MAP) if (folder / MAP).exists() else {}
        for name in (CONFIG, FILE, MAP):
            if (folder / name).exists():
                self.files[name] = template_text(folder / name)
        source = default_template(settings)
        if FILE in self.files:
            path, source = folder / FILE, self.files[FILE]
        if source is not None and not isinstance(source, str):
            raise ConfigError(f"{path}: chat_template is not text; copy the file again")
        self.where = str(path) if source is not None else self.where
        newer = "added_tokens_decoder" in settings  # newer files contain all special tokens
        self.tokens = named_tokens(settings if newer else settings | more)
        return source if source is not None else CHATML

    @functools.cached_property
    def template(self) -> "Template":
        """The template process, which starts at first use: jinja2 is needed only for chats."""
        return Template(self.source, self.where)

    def keep(self) -> dict[str, str]:
        """Return the files that store the template of training, to save them with the weights."""
        if self.own:
            return self.files
        settings = json.loads(self.files.get(CONFIG, "{}")) | {"chat_template": CHATML}
        return self.files | {CONFIG: settings_text(settings)}

    def text(
        self,
        messages: Sequence[Message],
        *,
        answer: bool = False,
        tools: Tools = None,
        today: bool = True,
    ) -> str:
        """Return messages as text; with ``answer``, up to the beginning of an assistant's turn.

        The date in the text is today's with ``answer`` and ``today``, otherwise a fixed date.

        Raises
        ------
        ConfigError
            The template does not accept these messages.
        """
        now = datetime.now() if answer and today else FIXED
        (result,) = self.rendered([(messages, answer)], tools, now)
        if result.error:
            raise self.refused(result.error)
        return result.text

    def question(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        options: Options = None,
        today: bool = True,
    ) -> str:
        """Return messages as the text after which the assistant's answer begins.

        It is ``text(messages, answer=True)``.  If the template does not write the beginning of an
        answer there, it is appended.  Without ``today``, the date is that of training texts.
        """
        mark = placeholder(messages)
        answered = [*messages, {"role": "assistant", "content": mark}]
        requests = [(messages, True), (messages, False), (answered, False)]
        now = datetime.now() if today else FIXED
        prompt, plain, other = self.rendered(requests, tools, now, options)
        if prompt.error:
            raise self.refused(prompt.error)
        prefix = other.text.partition(mark)[0].rstrip(" ")
        ignored = plain.text == prompt.text  # the template ignores add_generation_prompt
        extends = mark in other.text and prefix.startswith(prompt.text)
        return prefix if ignored and extends else prompt.text

    def rendered(
        self,
        requests: Iterable[tuple[Sequence[Message], bool]],
        tools: Tools = None,
        now: datetime = FIXED,
        options: Options = None,
    ) -> list[Rendered]:
        """Return the text of each (messages, answer); one call for many texts is much faster."""
        form = in_parts if self.takes_parts else dict
        return self.template.render([
            {"documents": None, **self.tokens, **(options or {}), "tools": tools,
             "messages": [form(self._named(each)) for each in messages],
             "add_generation_prompt": answer, "now": now.isoformat()}
            for messages, answer in requests
        ])  # fmt: skip

    @functools.cached_property
    def reasoning(self) -> list[str]:
        """The field names from which the template reads the reasoning before an answer."""
        read = r"""(\.{0}\b|['"]{0}['"])"""  # the word alone may be in a comment or a text
        return [key for key in REASONING if re.search(read.format(key), self.source)]

    def _named(self, message: Message) -> Message:
        """Return a message with its reasoning under the name that the template reads."""
        name = next((key for key in REASONING if message.get(key)), None)
        if name is None or not self.reasoning or name in self.reasoning:
            return message
        others = {key: value for key, value in message.items() if key != name}
        return others | {self.reasoning[0]: message[name]}

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether the template only supports contents that are lists of parts, such as images."""
        if not PARTS.search(self.source):
            return False
        own = {"now": FIXED.isoformat(), **self.tokens}
        message = {"role": "user", "content": (mark := chr(PRIVATE[0]))}
        plain, parts = self.template.render(
            [{"messages": [form(message)], **own} for form in (dict, in_parts)]
        )
        return mark not in plain.text and mark in parts.text

    def refused(self, why: str) -> ConfigError:
        """Return the error for messages that the template rejects."""
        return ConfigError(
            f"the template of {self.where} rejects the messages: {why}; write them as the model's"
            " page describes, or copy the template from there again"
        )


def in_parts(message: Message) -> dict[str, Any]:
    """Return a message whose text content is converted to a list of one part."""
    content = message.get("content")
    text = isinstance(content, str)
    return dict(message) | ({"content": [{"type": "text", "text": content}]} if text else {})


def placeholder(messages: Sequence[Message]) -> str:
    """Return a character that no message contains."""
    text = json.dumps([*map(dict, messages)], ensure_ascii=False)
    return next(each for each in map(chr, PRIVATE) if each not in text)


class Template:
    """A chat template that runs in a separate process: see ``template.py``."""

    def __init__(self, source: str, where: str) -> None:
        import jinja2  # noqa: F401 -- the process needs it: raise here if it is missing

        self.source, self.where = source, where
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[str]":
        """Start the process and send it the template; raise a ConfigError for a broken template."""
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template.py")), str(SECONDS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            encoding="ascii", env={key: os.environ[key] for key in NEEDED if key in os.environ},
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        why, ended = _request(process, self.source)
        if why or ended:
            why = why or ended
            raise ConfigError(f"{self.where}: the chat template is broken: {why}; copy it again")
        return process

    def render(self, calls: list[dict[str, Any]]) -> list[Rendered]:
        """Return the text or the error of each call; a call is a dict of arguments."""
        if self.process.poll() is not None:
            self.process = self._started()
        result = []
        for start in range(0, len(calls), AT_ONCE):
            answers, ended = _request(self.process, calls[start : start + AT_ONCE])
            if ended:
                return [Rendered("", [], ended)] * len(calls)
            for content, why in answers:
                text, marks = content or ("", [])
                result.append(Rendered(text, [Span(*each) for each in marks], why))
        return result


def _request(process: "subprocess.Popen[str]", value: Any) -> tuple[Any, str]:
    """Send a request to a template process; return (answer, ""), or (None, reason)."""
    stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    with suppress(OSError):  # the process has ended: readline below returns ""
        stdin.write(json.dumps(value) + "\n")
        stdin.flush()
    if line := stdout.readline():
        return json.loads(line), ""
    process.wait()
    # Without this signal, as on Windows, the process ends itself at the limit: see template.py.
    timer = getattr(signal, "SIGPROF", None)
    late = process.returncode == -timer if timer else process.returncode > 0
    return None, f"it takes more than {SECONDS} s" if late else "it crashes"


def _end(process: "subprocess.Popen[str]") -> None:
    """Kill a process, wait for it and close its pipes."""
    process.kill()
    with suppress(OSError), process:
        pass


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a template may use, by the names that transformers passes."""
    extra = settings.get("extra_special_tokens")
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
    return {key: value for key, value in tokens.items() if isinstance(value, str)}


def settings_text(values: dict[str, Any]) -> str:
    """Return the text of a JSON file."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def default_template(settings: Mapping[str, Any]) -> Any:
    """Return the template in a tokenizer_config.json; of several, the one named default."""
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
