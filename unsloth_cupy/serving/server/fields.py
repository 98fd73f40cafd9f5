"""The fields of OpenAI's requests, checked: what each means for an engine, or why it is refused.

A field whose value is null is absent, as in OpenAI's clients.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.call import is_integer, is_number
from ...errors import ConfigError

# Fields that change no answer: who sends a request, and how OpenAI stores and bills it.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
# Fields that are accepted with these values alone, which change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
}
COMMON = {
    "model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options",
    "logprobs", "top_k", "min_p", "repetition_penalty", "min_tokens",
}  # fmt: skip
CHAT = COMMON | {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "response_format", "chat_template_kwargs", "reasoning_effort",
}  # fmt: skip
COMPLETION = COMMON | {"prompt", "best_of"}
EMBEDDING = {"model", "input", "encoding_format", "dimensions"}
ROLES = "system", "developer", "user", "assistant", "tool"
FUNCTION = re.compile(r"[\w.-]{1,64}", re.ASCII)
MOST_SAMPLES = 128  # of a prompt, as OpenAI's API allows
MOST_STOPS, LONGEST_STOP = 16, 256  # each new token is compared with all stop texts
MOST_PROMPTS = 2048  # of a request, as OpenAI's API allows
MOST_LOG_PROBS = 20  # most likely tokens at a place, as OpenAI's API allows
DEFAULT_NEW = 16  # tokens of /v1/completions without max_tokens, as in OpenAI's API


class RequestError(ConfigError):
    """A request that is refused: an HTTP status, and the fields of OpenAI's errors."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass
class Asked:
    """A request for generated text.

    ``options`` has, for each prompt, the keywords of ``Engine.submit``; ``one_call`` is whether
    an answer has at most one tool call; ``log_probs`` is what ``log_probs_of`` returns.
    """

    name: str
    options: list[dict[str, Any]]
    samples: int
    stops: list[str]
    stream: bool = False
    usage: bool = False
    log_probs: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    one_call: bool = False


def parsed(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; raise RequestError for anything else."""

    def refuse(text: str) -> Any:
        raise RequestError(f"the body has {text}, which is not JSON")

    try:
        body = json.loads(data, parse_constant=refuse)
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            "the body has a surrogate without its pair; send whole characters"
        ) from None
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def check_names(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise RequestError for a field that has no meaning here."""
    for name in body.keys() - known - HARMLESS:
        if name not in NEUTRAL:
            raise RequestError(f"the field {name!r} is not known; leave it out", name)
        if body[name] not in NEUTRAL[name]:
            problem = f"{name}={json.dumps(body[name])[:80]} is not supported"
            raise RequestError(f"{problem}; leave it out", name)


def integer(body: Mapping[str, Any], name: str, least: int, most: int, default: Any = None) -> Any:
    """Return an integer field in a range."""
    value = body.get(name, default)
    if value is not None and not (is_integer(value, least) and value <= most):
        raise RequestError(f"{name} must be an integer from {least} to {most}", name)
    return value


def number(
    body: Mapping[str, Any],
    name: str,
    valid: Callable[[float], bool],
    must: str,
    default: Any = None,
) -> Any:
    """Return a number field that satisfies a condition."""
    value = body.get(name, default)
    if value is not None and not (is_number(value) and math.isfinite(value) and valid(value)):
        raise RequestError(f"{name} must be {must}", name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false", name)
    return value


def sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of sampling; OpenAI's defaults are temperature 1 and top_p 1."""
    temperature = number(body, "temperature", lambda x: 0 <= x <= 2, "from 0 to 2", 1.0)
    options = {
        "top_p": number(body, "top_p", lambda x: 0 < x <= 1, "above 0, and at most 1"),
        "top_k": integer(body, "top_k", 1, 1 << 31),
        "min_p": number(body, "min_p", lambda x: 0 <= x <= 1, "from 0 to 1"),
        "seed": integer(body, "seed", 0, (1 << 64) - 1),
    }
    if temperature == 0:  # the likeliest token: the others change nothing
        options = dict.fromkeys(options)
    penalty = number(body, "repetition_penalty", lambda x: 0 < x <= 10, "above 0, and at most 10")
    return {**options, "temperature": float(temperature), "repetition_penalty": penalty}


def samples_of(body: Mapping[str, Any]) -> int:
    """Return the number of samples of each prompt."""
    count = integer(body, "n", 1, MOST_SAMPLES, 1)
    if integer(body, "best_of", 1, MOST_SAMPLES, count) != count:
        raise RequestError("best_of must equal n: all samples are returned", "best_of")
    return int(count)


def stops_of(body: Mapping[str, Any]) -> list[str]:
    """Return the stop texts."""
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise RequestError("stop must be a text, or a list of texts", "stop")
    if len(stops) > MOST_STOPS or any(len(each) > LONGEST_STOP for each in stops):
        most = f"at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters"
        raise RequestError(f"stop may have {most}", "stop")
    return stops


def streams(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether the answer is a stream, and whether its last chunk has the usage."""
    stream, options = flag(body, "stream"), body.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise RequestError("stream_options may have include_usage alone", "stream_options")
    if options and not stream:
        raise RequestError("stream_options needs stream=true", "stream_options")
    return stream, flag(options, "include_usage")


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: text contents, arguments as objects."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of one or more messages", "messages")
    return [_message(each, f"messages[{place}]") for place, each in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        roles = ", ".join(ROLES)
        raise RequestError(f"{where}.role must be one of {roles}", f"{where}.role")
    result = {name: value for name, value in message.items() if value is not None}
    known = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
    if others := result.keys() - known - {"refusal", "annotations", "audio"}:
        name = min(others)
        raise RequestError(f"{where}.{name} is not known; leave it out", f"{where}.{name}")
    result = {name: value for name, value in result.items() if name in known}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(result.get(name, ""), str):
            raise RequestError(f"{where}.{name} must be a text", f"{where}.{name}")
    if result["role"] == "developer":
        result["role"] = "system"
    content = result.get("content")
    if isinstance(content, list):
        for place, part in enumerate(content):
            is_text = isinstance(part, dict) and part.get("type") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                problem = "must be a part of type text: other parts are not supported"
                raise RequestError(f"{where}.content[{place}] {problem}", f"{where}.content")
        content = "".join(part["text"] for part in content)
    calls = result.pop("tool_calls", None)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"{where}.content must be a text, or parts of texts", f"{where}.content")
    if calls:
        result["tool_calls"] = [_call(each, f"{where}.tool_calls") for each in _listed(calls)]
    return result | {"content": content}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return an earlier tool call, with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have function.name and function.arguments", where)
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise RequestError(f"{where}: function.arguments is not JSON", where) from None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}: function.arguments must be an object", where)
    return {**call, "function": {**function, "arguments": arguments}}


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that the model may call; none with tool_choice none."""
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError("tool_choice must be auto or none: no call can be forced", "tool_choice")
    if not isinstance(tools, list):
        raise RequestError("tools must be a list", "tools")
    for place, each in enumerate(tools):
        function: Any = each.get("function") if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        valid = isinstance(name, str) and FUNCTION.fullmatch(name)
        if not valid or each.get("type") != "function":
            must = 'must be {"type": "function", "function": {"name": ...}}, name of [a-zA-Z0-9_.-]'
            raise RequestError(f"tools[{place}] {must}", "tools")
        if not isinstance(function.get("parameters", {}), dict):
            raise RequestError(f"tools[{place}].function.parameters must be a schema", "tools")
    return tools if choice == "auto" else []


def constraint_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the constraint of a response_format."""
    value = body.get("response_format", {"type": "text"})
    form: dict[str, Any] = value if isinstance(value, dict) else {}
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    inner: Any = form.get("json_schema") if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        kinds = "text, json_object, or json_schema with json_schema.schema"
        raise RequestError(f"response_format must have the type {kinds}", "response_format")
    return {"json_schema": schema}


def log_probs_of(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return of how many most likely tokens the answer has log-probabilities, beside its own.

    None: the answer has no log-probabilities.
    """
    if not chat:
        most: int | None = integer(body, "logprobs", 0, MOST_LOG_PROBS)
        return most
    top, shown = integer(body, "top_logprobs", 0, MOST_LOG_PROBS), flag(body, "logprobs")
    if top is not None and not shown:
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    return (top or 0) if shown else None


def texts_of(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return a text, a list of texts, tokens, or a list of tokens, as a list."""
    value = body.get(name)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(is_integer(each, 0) for each in value):
            return [value]
        if len(value) > MOST_PROMPTS:
            raise RequestError(f"{name} has {len(value)} entries; send {MOST_PROMPTS}", name)
        kinds = {"tokens" if _is_tokens(each) else type(each).__name__ for each in value}
        if kinds in ({"str"}, {"tokens"}):
            return value
    must = "be a text, tokens, or a list of texts or of tokens"
    raise RequestError(f"{name} must {must}", name)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_integer(each, 0) for each in value)


def new_tokens(
    body: Mapping[str, Any], prompts: Sequence[Sequence[int]], limit: int, default: int | None
) -> list[int]:
    """Return the most new tokens of each prompt; raise RequestError if a text is too long."""
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    most = integer(body, name, 1, (1 << 31) - 1)
    if body.get("max_tokens", most) != most:
        raise RequestError("max_tokens and max_completion_tokens differ; send one", "max_tokens")
    rooms = []
    for prompt in prompts:
        room = limit - len(prompt)
        own = min(default or room, room) if most is None else most
        if room < 1 or own > room:
            asks = f"{len(prompt)} tokens of the prompt" + (f" and {most} new ones" if most else "")
            problem = f"a text may have {limit} tokens; this one has {asks}"
            raise RequestError(problem, name, code="context_length_exceeded")
        rooms.append(own)
    return rooms
