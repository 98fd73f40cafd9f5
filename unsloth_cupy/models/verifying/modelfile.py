"""A Modelfile as Ollama reads it: instructions, quotes, and templates in Go's template language.

A value in triple or double quotes is literal: there are no escapes.  Ollama adds the begin token of
the GGUF file to the text of a template, even if the text has it already.  It stops at the file's
end tokens and at the texts of PARAMETER stop.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...files import read_text
from ..text.chat import FIXED

NAMES = ("FROM", "TEMPLATE", "SYSTEM", "ADAPTER", "PARAMETER", "LICENSE", "MESSAGE", "REQUIRES")
ACTION = re.compile(r"\{\{(-(?=\s))?(.*?)((?<=\s)-)?\}\}", re.DOTALL)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|`[^`]*`|[()|]|[^\s()|"`]+')
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
STEPS = 100_000  # most actions of a text


class Modelfile(NamedTuple):
    """The instructions of a Modelfile."""

    source: Path  # FROM: a GGUF file
    template: str
    system: str
    stops: tuple[str, ...]

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return messages as the text that Ollama tokenizes, up to the start of an answer."""
        if self.system and all(each["role"] != "system" for each in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return _Template(self.template).text(messages)


def is_modelfile(path: Path) -> bool:
    """Return whether a path names a Modelfile."""
    named = path.name.lower() == "modelfile" or path.suffix.lower() == ".modelfile"
    return named and path.is_file()


def read_modelfile(path: Path) -> Modelfile:
    """Return a Modelfile.

    Raises
    ------
    ConfigError
        It has no FROM with a GGUF file, no TEMPLATE, or an ADAPTER.
    """
    try:
        values = [*_instructions(path, read_text(path))]
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; write it again") from None
    last = {name: value for name, value in values if name != "PARAMETER"}
    stops = [v.partition(" ")[2] for n, v in values if n == "PARAMETER" and v.startswith("stop ")]
    source = path.parent / last.get("FROM", "")
    if not source.is_file():
        cure = "name the file that export wrote, such as FROM ./model.gguf"
        raise ConfigError(f"{path}: FROM is {last.get('FROM')!r}, which is not a file; {cure}")
    if "ADAPTER" in last:
        cure = "export the merged model, and name its file in FROM"
        raise ConfigError(f"{path}: ADAPTER is not supported; {cure}")
    if "TEMPLATE" not in last:
        cure = "write one, as export --modelfile does"
        raise ConfigError(f"{path} has no TEMPLATE, so Ollama chooses one; {cure}")
    return Modelfile(source, last["TEMPLATE"], last.get("SYSTEM", ""), tuple(map(_unquoted, stops)))


def _instructions(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield instructions: name and value; characters that Go does not print are dropped."""
    lines = text.splitlines(keepends=True)
    while lines:
        line = lines.pop(0)
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.partition(" ")
        if name.upper() not in NAMES:
            raise ConfigError(f"{path}: {name.strip()[:20]!r} is not an instruction of a Modelfile")
        before = ""
        if name.upper() == "PARAMETER":
            before, _, rest = rest.partition(" ")
            before += " "
        quotes = next((each for each in ('"""', '"') if rest.lstrip().startswith(each)), "")
        while quotes and not _closed(rest.strip(), quotes):
            if not lines:
                raise ConfigError(f"{path}: the quotes of {name} are not closed; close them")
            rest += lines.pop(0)
        value = _unquoted(rest.strip())
        yield name.upper(), before + "".join(c for c in value if c.isprintable() or c in "\t\r\n")


def _closed(value: str, quotes: str) -> bool:
    """Return whether a value ends with its quotes."""
    return len(value) >= 2 * len(quotes) and value.endswith(quotes)


def _unquoted(value: str) -> str:
    """Return a value without its quotes."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes) and _closed(value, quotes):
            return value[len(quotes) : len(value) - len(quotes)]
    return value


# ---- Go's template language ---------------------------------------------------------------------
class _Cut(Exception):  # noqa: N818 -- no error: the text up to the answer is complete
    """The end of a text: the place of the answer."""


class _Template:
    """A template: a list of texts and actions, run with the fields that Ollama passes."""

    def __init__(self, source: str) -> None:
        self.source, self.steps = source, 0
        self.parts: list[tuple[str, str]] = []  # ("text" or "action", content)
        place, trims = 0, False
        for match in ACTION.finditer(source):
            text = source[place : match.start()]
            text = text.lstrip() if trims else text
            self.parts.append(("text", text.rstrip() if match[1] else text))
            if not match[2].strip().startswith("/*"):
                self.parts.append(("action", match[2].strip()))
            place, trims = match.end(), bool(match[3])
        rest = source[place:]
        self.parts.append(("text", rest.lstrip() if trims else rest))

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return messages as text."""
        roles = [(each["role"], str(each.get("content") or "")) for each in messages]
        system = "\n\n".join(text for role, text in roles if role == "system")
        values = [{"Role": role, "Content": text} for role, text in roles]
        if ".Messages" in self.source:
            return self._run({"Messages": values, "System": system, "Response": ""})
        result, turn = "", dict.fromkeys(("System", "Prompt", "Response"), "")
        keys = {"system": "System", "user": "Prompt", "assistant": "Response"}
        for role, text in roles:
            later = {"system": ("Prompt", "Response"), "user": ("Response",)}.get(role, ())
            if any(turn[key] for key in later):
                result, turn = result + self._run(turn), dict.fromkeys(turn, "")
            turn[keys.get(role, "Prompt")] = text
        return result + self._run(turn, cut=True)

    def _run(self, fields: Mapping[str, Any], *, cut: bool = False) -> str:
        """Return the text for some fields; with ``cut``, up to the response."""
        self.fields, self.cut, out = fields, cut, list[str]()
        try:
            end = self._block(0, fields, {"$": fields}, out, True)
        except _Cut:
            return "".join(out)
        except RecursionError:
            raise self._wrong("its blocks are nested too deep") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise self._wrong(f"it fails: {error}") from None
        if end != len(self.parts):
            raise self._wrong("an {{ end }} is missing or too many")
        return "".join(out)

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"the TEMPLATE of the Modelfile is broken: {problem}; write it again")

    def _block(
        self, place: int, dot: Any, names: dict[str, Any], out: list[str], runs: bool
    ) -> int:
        """Run parts up to the action that ends or divides a block; return its place."""
        while place < len(self.parts):
            self.steps += 1
            if self.steps > STEPS:
                raise self._wrong(f"it has more than {STEPS:,} steps")
            kind, content = self.parts[place]
            word = content.partition(" ")[0]
            if kind == "text":
                out += [content] * runs
            elif word in ("end", "else"):
                return place
            elif word in ("if", "with", "range"):
                place = self._choice(place, dot, names, out, runs)
            elif runs and (match := re.fullmatch(r"(\$\w+)\s*:?=\s*(.*)", content, re.DOTALL)):
                names[match[1]] = self._value(match[2], dot, names)
            elif runs:
                value = self._value(content, dot, names)
                out.append("" if value is None else str(value))
                if self.cut and ".Response" in content:
                    raise _Cut
            place += 1
        return place

    def _choice(
        self, place: int, dot: Any, names: dict[str, Any], out: list[str], runs: bool
    ) -> int:
        """Run an if, a with or a range; return the place of its end."""
        word, _, rest = self.parts[place][1].partition(" ")
        variables, _, source = rest.rpartition(":=")
        value: Any = self._value(source, dot, names) if runs else None
        chosen, end = bool(value) and runs, place
        targets = [each.strip() for each in variables.split(",") if each.strip()]
        if word == "range" and chosen:
            for pair in enumerate(value):
                inner = {**names, **dict(zip(targets, pair[2 - len(targets) :], strict=True))}
                end = self._block(place + 1, pair[1], inner, out, True)
        else:
            inner = {**names, **dict.fromkeys(targets, value)}
            end = self._block(place + 1, value if word == "with" else dot, inner, out, chosen)
        while end < len(self.parts) and self.parts[end][1].startswith("else"):
            condition = self.parts[end][1].removeprefix("else").strip().removeprefix("if")
            open_yet = runs and not chosen
            takes = open_yet and (not condition or bool(self._value(condition, dot, names)))
            end = self._block(end + 1, dot, names, out, takes)
            chosen = chosen or takes
        if end >= len(self.parts):
            raise self._wrong("an {{ end }} is missing")
        return end

    # ---- expressions ----------------------------------------------------------------------------
    def _value(self, source: str, dot: Any, names: Mapping[str, Any]) -> Any:
        """Return the value of a pipeline."""
        value, rest = self._pipeline(WORD.findall(source), dot, names)
        if rest or WORD.sub("", source).strip():
            raise self._wrong(f"{source[:40]!r} is not understood")
        return value

    def _pipeline(
        self, words: list[str], dot: Any, names: Mapping[str, Any]
    ) -> tuple[Any, list[str]]:
        """Return the value of words up to a closing bracket, and the words after it."""
        operands, function = list[Any](), ""
        while words and words[0] != ")":
            word, *words = words
            if word == "|":
                operands, function = [self._called(function, operands)], ""
            elif word == "(":
                value, words = self._pipeline(words, dot, names)
                operands.append(value)
                words = words[1:]
            elif word in FUNCTIONS:
                function = word
            else:
                operands.append(self._operand(word, dot, names))
        return self._called(function, operands), words

    def _called(self, function: str, operands: Sequence[Any]) -> Any:
        """Return the result of a function, or the only operand."""
        if function:
            return FUNCTIONS[function](*operands)
        if len(operands) != 1:
            raise self._wrong("a function is unknown")
        return operands[0]

    def _operand(self, word: str, dot: Any, names: Mapping[str, Any]) -> Any:
        """Return a literal, a field or a variable."""
        if word[0] == '"':
            return re.sub(r"\\(U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|.)", _escape, word[1:-1])
        if word[0] == "`":
            return word[1:-1]
        if re.fullmatch(r"-?\d+", word):
            return int(word)
        if word in ("true", "false", "nil"):
            return {"true": True, "false": False}.get(word)
        root, *path = word.split(".")
        if root and root not in names:
            raise self._wrong(f"{word[:40]!r} is unknown")
        value = names[root] if root else dot
        for key in filter(None, path):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def _escape(match: re.Match[str]) -> str:
    """Return the character of an escape in a Go string."""
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else ESCAPES[code]


def _first(until: bool, values: Sequence[Any]) -> Any:
    """Return the first value that is ``until``, as Go's or and and do, or the last one."""
    return next((each for each in values if bool(each) == until), values[-1])


FUNCTIONS: Mapping[str, Any] = {
    "eq": lambda first, *others: any(first == each for each in others),
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda *values: _first(False, values),
    "or": lambda *values: _first(True, values),
    "not": lambda value: not value,
    "len": lambda value: len(value or ()),
    "slice": lambda value, *ends: value[slice(*ends) if len(ends) > 1 else slice(ends[0], None)],
    "index": lambda value, *keys: value[keys[0]],
    "json": lambda value: json.dumps(value, ensure_ascii=False),
    "print": lambda *values: "".join(map(str, values)),
    "currentDate": lambda: FIXED.strftime("%Y-%m-%d"),
}
