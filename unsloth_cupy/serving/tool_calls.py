"""Tool calls in an answer, in the form in which the model's own chat template writes them.

The template writes calls with placeholders; the text around the placeholders is the form:

    object   opening {"name": NAME, "arguments": {...}} closing
    named    opening NAME between {...} closing
    tagged   opening NAME between KEY equals VALUE next KEY equals VALUE closing
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ConfigError

NAMES, KEYS, VALUES = ("zqcall", "zqnext"), ("zqfirst", "zqother"), ("zqone", "zqtwo")
IDS = "zqcallid1", "zqcallid2"  # nine letters or digits, as Mistral's templates require
SAY, ASK = "\ue000", "zqask"
WORD = re.compile(r"[\w.-]+")  # the name of a function
DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    """A call of a function by a model."""

    name: str
    arguments: dict[str, Any]


class CallForm(NamedTuple):
    """The text that a template writes around tool calls.

    ``tag`` is (between KEY and VALUE, between arguments, after the last one), or None if arguments
    are a JSON object; ``bare`` is the text after the name of a call without arguments.
    """

    opening: str
    between: str | None  # None: the name is inside the JSON object
    closing: str
    separator: str | None  # between two calls; None: the template writes one call only
    tag: tuple[str, str, str] | None = None
    bare: str = ""

    def begins(self, text: str) -> int:
        """Return the place of the first call in a text, or of what may become one; -1: none."""
        if self.opening:
            return text.find(self.opening)
        start = len(text) - len(text.lstrip())
        return start if text[start : start + 1] in ("{", "[") else -1

    def calls(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[ToolCall], str] | None:
        """Return the calls of a text that begins with one, and the text behind them.

        None if the text is not a complete call.
        """
        schemas = {each["function"]["name"]: each["function"] for each in tools}
        calls: list[ToolCall] = []
        place, before = 0, self.opening
        following = self.separator or ""
        if self.opening and following.endswith(self.opening):
            following = self.opening
        try:
            while True:
                own, place = self._call(text, _after(text, place, before), schemas)
                calls += own
                before = following
                if not before or text.find(before.strip(), place) < 0:
                    break
        except (ValueError, IndexError, KeyError, TypeError):
            return None
        rest = text[place:].strip().removeprefix(self.closing.strip()).strip()
        return None if rest and not self.opening else (calls, rest)

    def _call(
        self, text: str, place: int, schemas: Mapping[str, Any]
    ) -> tuple[list[ToolCall], int]:
        """Return the call at a place, or several in a list, and the place behind it."""
        if self.between is None:
            value, place = DECODER.raw_decode(text, _inside(text, place))
            return [*map(_of_object, value if isinstance(value, list) else [value])], place
        name, place = _name(text, place)
        if self.tag is None:
            start = _inside(text, _after(text, place, self.between))
            arguments, place = DECODER.raw_decode(text, start)
        else:
            parameters = schemas.get(name, {}).get("parameters") or {}
            arguments, place = self._tagged(text, place, parameters.get("properties") or {})
        return [ToolCall(name, {**arguments})], place

    def _tagged(
        self, text: str, place: int, properties: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """Return the arguments from a place on, and the place behind the call."""
        between, (equals, following, last) = self.between or "", self.tag or ("", "", "")
        arguments: dict[str, Any] = {}
        if not text.startswith(between, place):
            return arguments, _after(text, place, self.bare)
        place += len(between)
        while True:
            key, _, _ = text[place:].partition(equals)
            start = _after(text, place, equals)
            ends = [(text.find(end, start), end) for end in (following, last)]
            stop, end = min(each for each in ends if each[0] >= 0)
            arguments[key.strip()] = _value(text[start:stop], properties.get(key.strip()))
            place = stop + len(end)
            if end == last:
                return arguments, place


def _after(text: str, place: int, words: str) -> int:
    """Return the place behind the next occurrence of words, if need be without spaces around."""
    start = text.find(words, place)
    if start < 0:
        words = words.strip()
        start = text.index(words, place)
    return start + len(words)


def _inside(text: str, place: int) -> int:
    """Return the place of the next character that is not a space."""
    return place + len(text[place:]) - len(text[place:].lstrip())


def _name(text: str, place: int) -> tuple[str, int]:
    """Return the name of a function from a place on, and the place behind it."""
    start = _inside(text, place)
    match = WORD.match(text, start)
    if match is None:
        raise ConfigError("the call has no name")
    return match[0], match.end()


def _of_object(value: Mapping[str, Any]) -> ToolCall:
    """Return the call of a JSON object; its arguments may be JSON in a text."""
    inner = value.get("function", value)
    inner = inner if isinstance(inner, Mapping) else {**value, "name": inner}
    arguments = inner.get("arguments", inner.get("parameters", {}))
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return ToolCall(str(inner["name"]), {**(arguments or {})})


def _value(text: str, schema: Any) -> Any:
    """Return an argument that a template writes without quotes, by the type in its schema."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def form_of(chat: Any) -> CallForm | None:
    """Return the form of tool calls in a chat template; None if it writes no tools or no calls."""
    ask = {"role": "user", "content": ASK}
    first = dict(zip(KEYS, VALUES, strict=True))
    arguments: list[list[dict[str, str]]] = [[first], [first, first], [{}]]
    answers = [{"role": "assistant", "content": SAY}, *map(_answer, arguments)]
    properties = {key: {"type": "string"} for key in KEYS}
    tools = [tool(name, "", properties, [*KEYS]) for name in NAMES]
    plain, called, twice, bare = chat.rendered([([ask, each], False) for each in answers], tools)
    if plain.error or called.error or NAMES[0] not in plain.text:
        return None  # the template does not write the list of tools
    start = _common(called.text, plain.text)
    end = len(called.text) - _common(called.text[start:][::-1], plain.text[::-1])
    text = called.text[start:end]
    return _form(
        text, _piece(twice, start, end, called.text), _piece(bare, start, end, called.text)
    )


def _piece(rendered: Any, start: int, end: int, whole: str) -> str:
    """Return the part of another text in place of ``whole[start:end]``."""
    text: str = "" if rendered.error else rendered.text
    return text[start : len(text) - (len(whole) - end)]


def _form(text: str, twice: str, bare: str) -> CallForm | None:
    """Return the form of texts: of a call, of two calls, and of a call without arguments."""
    name, key = text.find(NAMES[0]), text.find(KEYS[0])
    if name < 0 or key < 0:
        return None
    for place in (match.start() for match in re.finditer(r"\{", text)):
        try:
            _, stop = DECODER.raw_decode(text, place)
        except ValueError:
            continue
        is_list = text[:place].rstrip().endswith("[") and text[stop:].lstrip().startswith("]")
        opening, closing = text[:place], text[stop:]
        if is_list:
            opening, closing = opening.rstrip()[:-1], closing.lstrip()[1:]
        if place < name < stop:
            separator = _between(twice, text[:stop], "{")
            return CallForm(opening.strip(), None, closing, None if is_list else separator)
        if name < place < key < stop:
            between = text[name + len(NAMES[0]) : place]
            return CallForm(
                text[:name].strip(), between, closing, _between(twice, text[:stop], NAMES[1])
            )
    places = [text.find(each) for each in (KEYS[0], VALUES[0], KEYS[1], VALUES[1])]
    if sorted(places) != places or places[0] < 0:
        return None
    between = text[name + len(NAMES[0]) : places[0]]
    equals = text[places[0] + len(KEYS[0]) : places[1]]
    following = text[places[1] + len(VALUES[0]) : places[2]]
    closing = text[places[3] + len(VALUES[1]) :]
    if equals.endswith('"'):  # texts are quoted too: every value is JSON
        equals, following, closing = equals[:-1], following[1:], closing[1:]
    separator = _between(twice, text, NAMES[1])
    after = bare.partition(NAMES[0])[2]
    return CallForm(
        text[:name].strip(), between, "", separator, (equals, following, closing), after
    )


def _between(twice: str, first: str, following: str) -> str | None:
    """Return the text between two calls; None if the template does not write two."""
    if not twice.startswith(first) or following not in twice[len(first) :]:
        return None
    return twice[len(first) :].partition(following)[0]


def _answer(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a message with calls of placeholders."""
    each = zip(IDS, NAMES, calls, strict=False)
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": own, "type": "function", "function": {"name": name, "arguments": {**arguments}}}
            for own, name, arguments in each
        ],
    }


def tool(
    name: str, text: str, properties: Mapping[str, Any], required: Sequence[str]
) -> dict[str, Any]:
    """Return the JSON schema of a function that a model may call."""
    parameters = {"type": "object", "properties": {**properties}, "required": [*required]}
    return {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": parameters},
    }


def _common(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(a), len(b)))
