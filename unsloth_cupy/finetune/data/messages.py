"""The messages of a chat, checked: as OpenAI writes them, or as ShareGPT does.

    [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
    [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]

Other keys of a message (tool_calls, reasoning_content, name, weight, tool_call_id) stay.  An answer
has a content, or calls, or reasoning; one that is not learned may be empty.
"""

import json
import re
from typing import Any, NoReturn

from ...errors import ConfigError
from ...models.text.chat import REASONING

ROLES = ("system", "user", "assistant", "tool")
OTHERS = {  # names of roles in published files
    "developer": "system", "human": "user", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "function": "tool", "observation": "tool", "ipython": "tool",
    "function_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # roles whose text is a call in JSON
LEARNED = (  # one thing, by its names in files
    *("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "learn"),
)
FLAG = re.compile("loss|train|learn|mask|weight|supervis|target|ignore|skip|exclu", re.I)
SPANS = "train_detail"  # which characters of an answer are learned
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
TEXT_PARTS = (None, "text", "input_text", "output_text")
DEEPEST = 64  # lists and objects inside of each other, in calls and tools
SHOWN = 40  # characters of an invalid value in a message


def shown(value: Any) -> str:
    """Return the beginning of a value, as JSON, for a message."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
    except RecursionError:
        text = "nested too deeply"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")


def text_of(value: Any, name: str, least: int = 1) -> str:
    """Return a text, or raise a ConfigError; ``least`` is 0 where it may be empty."""
    if not isinstance(value, str):
        _wrong(f"{name} is {shown(value)}, not text", f"write {name} as a string")
    if len(value.strip()) < least:
        _wrong(f"{name} is empty", "write what is to be learned, or remove the line")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        _wrong(f"{name} holds half a character (a lone surrogate)", "write the whole character")
    return value


def check_plain(value: Any, name: str, left: int = DEEPEST) -> None:
    """Raise a ConfigError if a value is nested too deeply, or a text in it holds half a character.

    What reads it later could do neither.
    """
    if isinstance(value, str):
        text_of(value, name, 0)
    elif isinstance(value, list | dict):
        if not left:
            _wrong(f"{name} is nested more than {DEEPEST} times", "write it flat")
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            check_plain(each, name, left - 1)


def checked_messages(values: Any, name: str, *, answered: bool = True) -> list[dict[str, Any]]:
    """Return messages with a role and a content; with ``answered`` the assistant must say one.

    Raises
    ------
    ConfigError
        A message has no role, an unknown one, or a content that is not a text.
    """
    if not isinstance(values, list) or not values:
        _wrong(f"{name} is {shown(values)}", 'write [{"role": "user", "content": "..."}, ...]')
    messages = [_message(value, f"{name}[{place}]") for place, value in enumerate(values)]
    if answered and all(message["role"] != "assistant" for message in messages):
        _wrong("no message is the assistant's", "add the answer that is to be learned")
    return messages


def _message(value: Any, name: str) -> dict[str, Any]:
    """Return one message."""
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
    if isinstance(more.get("function_call"), dict):  # as OpenAI wrote it before there were tools
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
    thought = any(more.get(each, "").strip() for each in REASONING)
    spare = role == "assistant" and (thought or "tool_calls" in more or more.get("weight") == 0)
    if key not in value and not spare:
        _wrong(f"{name} has no {key}", "each message has a role and a content")
    if content is None and spare:
        content = None if "tool_calls" in more else ""
        return {"role": role, "content": content, **more}
    least = int(role == "assistant" and not spare)
    return {"role": role, "content": _joined(content, f"{name}.{key}", least), **more}


def _joined(content: Any, name: str, least: int) -> str:
    """Return the text of a content: it is one, or a list of parts of text."""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        for place, part in enumerate(content):
            if (kind := part.get("type")) not in TEXT_PARTS:
                what = f"{name}[{place}] is of the type {shown(kind)}"
                _wrong(f"{what}, and text alone is learned", "leave such messages out")
        parts = (text_of(p.get("text"), f"{name}[{i}].text", 0) for i, p in enumerate(content))
        content = "".join(parts)
    return text_of(content, name, least)


def _check_kinds(more: dict[str, Any], name: str) -> None:
    """Check a message's other keys; what says whether it is learned becomes its weight."""
    for key in ("name", *REASONING, "tool_call_id"):
        if key in more:
            text_of(more[key], f"{name}.{key}", 0)
    for key in MEDIA:
        if more.get(key):
            _wrong(f"{name} has {key}, and text alone is learned", "leave such messages out")
    if more.get(SPANS):
        _wrong(f"{name} has {SPANS}, and an answer is learned as a whole", "give it a weight")
    weights = {key: more.pop(key) for key in LEARNED if key in more}
    for key, value in weights.items():
        if value not in (0, 1):
            cure = "give 0, not learned, or 1"
            _wrong(f"{name}.{key} is {shown(json.dumps(value))}", cure)
    if len({*map(int, weights.values())}) > 1:
        _wrong(f"{name} has {' and '.join(weights)}, which differ", "give one of them")
    for key, value in more.items():
        text = isinstance(value, str) and value.lower() not in ("0", "1", "true", "false")
        if FLAG.search(key) and key != SPANS and not text:
            cure = "write it as weight, 0 or 1, if it says what is learned, else leave it out"
            _wrong(f"{name} has {shown(key)}, which is not known", cure)
    if weights:
        more["weight"] = int(next(iter(weights.values())))


def _calls(text: Any, name: str) -> list[Any]:
    """Return the calls of a ShareGPT message, whose text is one in JSON or a list of them."""
    try:
        calls = json.loads(text_of(text, name))
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not (isinstance(calls, list) and calls and all(isinstance(call, dict) for call in calls)):
        cure = 'write {"name": "...", "arguments": {...}}'
        _wrong(f"{name} is {shown(text)}, no call in JSON", cure)
    return [{"type": "function", "function": call} for call in calls]


def _checked_calls(calls: Any, name: str) -> list[Any]:
    """Return calls of tools, each with a function's name and arguments."""
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
