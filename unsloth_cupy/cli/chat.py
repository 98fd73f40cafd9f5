"""Chats as the text that a model was trained on: by its own template, or by ChatML.

    <|im_start|>user
    What is the tallest mountain?<|im_end|>
    <|im_start|>assistant
    Mount Everest.<|im_end|>

A template is a program that came with a model: it runs where it can change nothing, read no file
and reach no module (jinja2.sandbox).
"""

import functools
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..errors import ConfigError
from ..models.files import read_json

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
TODAY = date(2024, 7, 26)  # in templates that ask: texts stay the same when a run goes on
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
    """A template that makes a text of messages.

    Attributes
    ----------
    own : bool
        Whether the template is a model's own, which ends an answer as the model is used to.
    files : dict of str to str
        What a folder needs to hold the same template, by file name.
    """

    def __init__(self, folder: Path | None) -> None:
        self.where, self.files = "ChatML", dict[str, str]()
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
            raise ConfigError(f"{path}: chat_template is no text; copy the file again")
        self.where = str(path) if found is not None else self.where
        tokens = {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in settings.items()
            if key.endswith("_token")
        }
        self.tokens = {key: value for key, value in tokens.items() if isinstance(value, str)}
        return found if found is not None else CHATML

    @functools.cached_property
    def template(self) -> Any:
        """The program; nobody needs it, or jinja2, who has no chats."""
        return _compiled(self.source, self.where)

    def keep(self) -> dict[str, str]:
        """Return the files that say how this model was taught, to lie beside its weights."""
        if self.own:
            return self.files
        settings = json.loads(self.files.get(CONFIG, "{}")) | {"chat_template": CHATML}
        return self.files | {CONFIG: json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}

    def text(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """Return messages as text; with answer, up to where the assistant begins to speak.

        Raises
        ------
        ConfigError
            The template does not take these messages.
        """
        given = [dict(message) for message in messages]
        try:
            made = self.template.render(
                messages=given, add_generation_prompt=answer, tools=None, documents=None,
                **self.tokens,
            )  # fmt: skip
        except Exception as error:  # a template may fail in any way a program can
            why = str(error) or "it fails"
            raise ConfigError(
                f"the template of {self.where} does not take the messages: {why}; write them as the"
                " model's page says"
            ) from None
        return str(made)

    def spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return a chat as text, and where in it the assistant speaks.

        A template may write an early answer otherwise once there is a later one (without its
        reasoning, say): such an answer is part of the question then.

        Raises
        ------
        ConfigError
            The last answer cannot be told from what comes before it.
        """
        whole, found = self.text(messages), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            stop = self.text(messages[: number + 1])
            starts = [""] if not number else [
                self.text(messages[:number], answer=answer) for answer in (True, False)
            ]  # fmt: skip
            start = next((s for s in starts if stop.startswith(s)), None)
            last = number == len(messages) - 1
            if start is not None and whole.startswith(stop):
                found.append(Span(len(start), len(stop)))
            elif last:
                raise ConfigError(
                    f"the template of {self.where} does not write an answer behind its question;"
                    " give prompt and completion instead of messages"
                )
        return whole, found


def _compiled(source: str, where: str) -> Any:
    """Return a template that can do nothing but make text."""
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """``{% generation %}`` marks what an assistant says; here its text alone matters."""

        tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def fail(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})  # for no web page

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = TODAY.strftime
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"{where}: the chat template is broken: {error}; copy it again") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; copy it again") from None
