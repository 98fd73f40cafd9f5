"""The public methods of an environment as tools: their schemas, calls and results.

A schema is the one that ``transformers.utils.get_json_schema`` returns for the method: the types of
annotations, and the texts of the docstring's sections ``Args:`` and ``Returns:``.
"""

import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...errors import ConfigError

KINDS: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array",
    Sequence: "array", tuple: "array", dict: "object", Mapping: "object", types.NoneType: "null",
}  # fmt: skip
OWN = "reset", "step", "get_reward", "close"  # methods of an environment that are not tools
SECTIONS = re.compile(r"^(Args|Returns|Raises):[ \t]*\n?", re.MULTILINE)
ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")  # of Args: the name, and its text


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods of an environment that are tools, by name."""
    kind = type(environment)
    methods = {}
    for name in dir(kind):
        own = inspect.getattr_static(kind, name)
        if name[0] != "_" and name not in OWN and isinstance(
            own, types.FunctionType | classmethod | staticmethod
        ):  # fmt: skip
            methods[name] = getattr(environment, name)
    if not methods:
        cure = "define step(answer), or public methods with docstring and annotations as tools"
        raise ConfigError(f"rollouts: {kind.__name__} has neither; {cure}")
    return methods


def schema_of(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a tool, from its docstring and its annotations."""
    about, texts, returned = _documented(inspect.getdoc(method) or "")
    if not about:
        raise ConfigError(f"rollouts: the tool {name} has no docstring, which the model reads")
    if inspect.iscoroutinefunction(method):
        raise ConfigError(f"rollouts: the tool {name} is async; define it without async")
    try:
        hints = get_type_hints(method)
    except NameError as error:
        raise ConfigError(f"rollouts: an annotation of the tool {name}: {error}") from None
    properties, required = dict[str, Any](), list[str]()
    for parameter in inspect.signature(method).parameters.values():
        own, where = parameter.name, f"the parameter {parameter.name} of the tool {name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"rollouts: {where} has no name in a call; define it by its name")
        hint = hints.get(own, parameter.empty)
        kind = None if hint is parameter.empty else _type_of(hint)
        if kind is None:
            allowed = "str, int, float, bool, list, dict, Literal, or unions of them"
            problem = f"rollouts: {where} has no known type; annotate it by {allowed}"
            raise ConfigError(problem)
        properties[own] = kind | ({"description": texts[own]} if own in texts else {})
        if parameter.default is parameter.empty:
            required.append(own)
    parameters = {"type": "object", "properties": properties}
    function = {
        "name": name,
        "description": about,
        "parameters": parameters | ({"required": required} if required else {}),
    }
    result = _type_of(hints["return"]) if "return" in hints else None
    if result is not None:
        function["return"] = result | ({"description": returned} if returned else {})
    return {"type": "function", "function": function}


def _documented(text: str) -> tuple[str, dict[str, str], str]:
    """Return the text of a docstring, texts of arguments by name, and the text of the result."""
    about, *rest = SECTIONS.split(text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    texts: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(sections.get("Args", "")).splitlines():
        entry = ENTRY.match(line)  # lines that go on are indented
        if entry is not None:
            name, texts[entry[1]] = entry[1], entry[2].strip()
        elif name:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return about.strip(), texts, " ".join(sections.get("Returns", "").split())


def _type_of(hint: Any) -> dict[str, Any] | None:
    """Return the schema of an annotation; None if it has none."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of([each.value for each in hint])
    if origin is Literal:
        return _one_of(inner)
    if origin in (Union, types.UnionType):
        return _union(inner)
    each, kind = [_type_of(one) for one in inner if one is not ...], KINDS.get(origin)
    if hint is Any or kind is None or None in each:
        return {} if hint is Any else None
    own: dict[str, Any] = {"type": kind}
    if origin is tuple and inner and ... not in inner:
        own["prefixItems"] = each
    elif each:
        own |= {"items": each[0]} if kind == "array" else {"additionalProperties": each[-1]}
    return own


def _one_of(values: Sequence[Any]) -> dict[str, Any] | None:
    """Return the schema of some values."""
    kinds = sorted({KINDS.get(type(value), "") for value in values if value is not None})
    if not kinds or "" in kinds:
        return None
    own = {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": [*values]}
    return own | ({"nullable": True} if None in values else {})


def _union(inner: Sequence[Any]) -> dict[str, Any] | None:
    """Return the schema of one of several annotations."""
    each: list[Any] = [_type_of(one) for one in inner if one is not types.NoneType]
    if None in each:
        return None
    own: dict[str, Any] = each[0]
    if len(each) > 1:
        simple = all(one.keys() == {"type"} for one in each)
        own = {"type": sorted(one["type"] for one in each)} if simple else {"anyOf": each}
    return own | ({"nullable": True} if types.NoneType in inner else {})


def problem_of(
    methods: Mapping[str, Any], name: str, arguments: Mapping[str, Any], tools: Sequence[Any]
) -> str:
    """Return why a call is impossible, as the model reads it, or ""."""
    if name not in methods:
        return f"error: unknown tool {name}; choose from {', '.join(methods)}"
    signature = inspect.signature(methods[name])
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return f"error: {name}: {error}"
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for own, value in arguments.items():
        schema = schemas[name]["properties"][own]
        default = value is None and signature.parameters[own].default is None
        if not (default or _fits(value, schema)):
            shown = {key: schema[key] for key in schema if key != "description"}
            return f"error: {name}: {own} must fit {json.dumps(shown, ensure_ascii=False)}"
    return ""


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value of JSON has the type of an annotation."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, each) for each in schema["anyOf"])
    kind, kinds = KINDS[type(value)], schema.get("type", [])
    same = {kind}
    if kind == "integer" or (kind == "number" and value.is_integer()):
        same |= {"integer", "number"}  # JSON has one kind of numbers
    allowed = {kinds} if isinstance(kinds, str) else {*kinds}
    if (allowed and not same & allowed) or value not in schema.get("enum", [value]):
        return False
    inner = {"array": "items", "object": "additionalProperties"}.get(kind, "")
    each = value.values() if kind == "object" else value
    return inner not in schema or all(_fits(one, schema[inner]) for one in each)


class RowError(ConfigError):
    """What ends one row."""


def result_text(value: Any, what: str) -> str:
    """Return the result of a tool as a text: JSON, unless it is a text."""
    try:
        text = value
        if not isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False, default=_plain)
        text.encode()
    except UnicodeEncodeError:
        problem = "a surrogate without its pair, which is not text"
        raise RowError(f"{what} returned {problem}") from None
    except Exception as error:
        problem = f"which JSON cannot write: {type(error).__name__}"
        raise RowError(f"{what} returned a {type(value).__name__}, {problem}") from None
    return str(text)


def _plain(value: Any) -> Any:
    """Return a value of another type for JSON: arrays and their numbers as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
