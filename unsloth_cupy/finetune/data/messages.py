"""Checks the messages of a chat, in the format of OpenAI or of ShareGPT.

    [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
    [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]

Other keys of a message (tool_calls, reasoning_content, name, weight, tool_call_id) are preserved.
An answer needs content, calls or reasoning; an answer of weight 0 may be empty.
"""

import json
import re
from typing import Any, NoReturn

from ...errors import ConfigError
from ...models.text.chat import REASONING

ROLES = ("system", "user", "assistant", "tool")
OTHERS = {  # role names in published files
    "developer": "system", "human": "user", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "function": "tool", "observation": "tool", "ipython": "tool",
    "function_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # roles whose text is a tool call in JSON
LEARNED = (  # names of the weight of a message in published files
    *("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "learn"),
)
FLAG = re.compile("loss|train|learn|mask|weight|supervis|target|ignore|skip|exclu", re.I)
SPANS = "train_detail"  # a weight for parts of an answer
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
TEXT_PARTS = (None, "text", "input_text", "output_text")
DEEPEST = 64  # maximum nesting of calls and tools
SHOWN = 40  # maximum characters of an invalid value in a message


def shown(value: Any) -> str:
    """Return the beginning of a value as JSON for a message."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
    except RecursionError:
        text = "nested too deeply"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")


def text_of(value: Any, name: str, least: int = 1) -> str:
    """Return a valid text, or raise a ConfigError; ``least`` is 0 if it may be empty."""
    if not isinstance(value, str):
        _wrong(f"{name} is {shown(value)}, not text", f"write {name} as a string")
    if len(value.strip()) < least:
        _wrong(f"{name} is empty", "write a text, or remove the line")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        _wrong(f"{name} holds half a character (a lone surrogate)", "write the whole character")
    return value


def check_plain(value: Any, name: str, left: int = DEEPEST) -> None:
    """Raise a ConfigError for too deep nesting or a lone surrogate.

    Code that reads the value later supports neither.
    """
    if isinstance(value, str):
        text_of(value, name, 0)
    elif isinstance(value, list | dict):
        if not left:
            _wrong(f"{name} is nested more than {DEEPEST} times", "write it flat")
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            check_plain(each, name, left - 1)


def checked_messages(values: Any, name: str, *, answered: bool = True) -> list[dict[str, Any]]:
    """Return checked messages; with ``answered``, one of them must be an answer.

    Raises
    ------
    ConfigError
        A message has no role, an unknown role, or content that is not text.
    """
    if not isinstance(values, list) or not values:
        _wrong(f"{name} is {shown(values)}", 'write [{"role": "user", "content": "..."}, ...]')
    messages = [_message(value, f"{name}[{place}]") for place, value in enumerate(values)]
    if answered and all(message["role"] != "assistant" for message in messages):
        _wrong("no message has the role assistant", "add the answer to train on")
    return messages


def _message(value: Any, name: str) -> dict[str, Any]:
    """Return one checked message."""
    if not isinstance(value, dict):
        _wrong(f"{name} is {shown(value)}", 'write {"role": "user", "content": "..."}')
    role_key = "from" if "from" in value and "role" not in value else "role"
    key = "value" if "value" in value and "content" not in value else "content"
    if role_key not in value:
        _wrong(f"{name} has no {role_key}", "each message has a role and a content")
    raw_role = value[role_key]
    role = OTHERS.get(raw_role, raw_role) if isinstance(raw_role, str) else raw_role
    if role not in ROLES:
        _wrong(f"{name} has the role {shown(raw_role)}", f"choose from {', '.join(ROLES)}")
    more = {k: v for k, v in value.items() if k not in (role_key, key) and v is not None}
    if isinstance(more.get("function_call"), dict):  # the format of OpenAI before tools
        more["tool_calls"] = [{"type": "function", "function": more.pop("function_call")}]
    content = value.get(key)
    if raw_role in CALLS:
        more["tool_calls"], content = _calls(content, f"{name}.{key}"), None
    if "tool_calls" in more:
        more["tool_calls"] = _checked_calls(more["tool_calls"], f"{name}.tool_calls")
        if not more["tool_calls"]:
            del more["tool_calls"]
    check_plain(more, name)
    _check_kinds(more, name)
    has_reasoning = any(more.get(each, "").strip() for each in REASONING)
    may_be_empty = role == "assistant" and (
        has_reasoning or "tool_calls" in more or more.get("weight") == 0
    )
    if key not in value and not may_be_empty:
        _wrong(f"{name} has no {key}", "each message has a role and a content")
    if content is None and may_be_empty:
        content = None if "tool_calls" in more else ""
        return {"role": role, "content": content, **more}
    least = int(role == "assistant" and not may_be_empty)
    return {"role": role, "content": _joined(content, f"{name}.{key}", least), **more}


def _joined(content: Any, name: str, least: int) -> str:
    """Return the text of content: a string, or a list of text parts."""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        for place, part in enumerate(content):
            if (kind := part.get("type")) not in TEXT_PARTS:
                what = f"{name}[{place}] has the type {shown(kind)}"
                _wrong(f"{what}, and only text is supported", "remove such messages")
        parts = (text_of(p.get("text"), f"{name}[{i}].text", 0) for i, p in enumerate(content))
        content = "".join(parts)
    return text_of(content, name, least)


def _check_kinds(more: dict[str, Any], name: str) -> None:
    """Check the other keys of a message; rename known training flags to ``weight``."""
    for key in ("name", *REASONING, "tool_call_id"):
        if key in more:
            text_of(more[key], f"{name}.{key}", 0)
    for key in MEDIA:
        if more.get(key):
            _wrong(f"{name} has {key}, and only text is supported", "remove such messages")
    if more.get(SPANS):
        _wrong(f"{name} has {SPANS}, but an answer has one weight", "use weight, 0 or 1, instead")
    weights = {key: more.pop(key) for key in LEARNED if key in more}
    for key, value in weights.items():
        if value not in (0, 1):
            cure = "write 1 (train on this message) or 0"
            _wrong(f"{name}.{key} is {shown(json.dumps(value))}", cure)
    if len({*map(int, weights.values())}) > 1:
        _wrong(f"{name} has {' and '.join(weights)}, which differ", "keep one of them")
    for key, value in more.items():
        text = isinstance(value, str) and value.lower() not in ("0", "1", "true", "false")
        if FLAG.search(key) and key != SPANS and not text:
            cure = "write it as weight, 0 or 1, if it selects targets, else leave it out"
            _wrong(f"{name} has {shown(key)}, which is unknown", cure)
    if weights:
        more["weight"] = int(next(iter(weights.values())))


def _calls(text: Any, name: str) -> list[Any]:
    """Return the calls of a ShareGPT message, whose text is a call or a list of calls in JSON."""
    try:
        calls = json.loads(text_of(text, name))
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not (isinstance(calls, list) and calls and all(isinstance(call, dict) for call in calls)):
        cure = 'write {"name": "...", "arguments": {...}}'
        _wrong(f"{name} is {shown(text)}, not a call in JSON", cure)
    return [{"type": "function", "function": call} for call in calls]


def _checked_calls(calls: Any, name: str) -> list[Any]:
    """Return tool calls, checked for the name and arguments of a function."""
    cure = 'write [{"type": "function", "function": {"name": "...", "arguments": {...}}}]'
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError):
            _wrong(f"{name} is {shown(calls)}", cure)
    if not isinstance(calls, list):
        _wrong(f"{name} is {shown(calls)}", cure)
    for place, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            _wrong(f"{name}[{place}] is {shown(call)}", cure)
        if not isinstance(function.get("arguments", {}), dict | str):
            problem = f"{name}[{place}] has the arguments {shown(function['arguments'])}"
            _wrong(problem, "write them as an object")
    return calls
