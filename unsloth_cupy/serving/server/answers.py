"""The text of an answer, as its tokens come, and the objects of OpenAI's API around it."""

import json
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ..requests import Finish
from ..texts import StopStrings, TextStream
from ..tool_calls import CallForm, ToolCall

IMPOSSIBLE = -9999.0  # in place of minus infinity, as in OpenAI's API: JSON has none
UNFINISHED = "\ufffd"  # decoders write this for an incomplete character


class Shown:
    """A tokenizer that writes special tokens: some templates mark tool calls with them."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.backend.decode(tokens, skip_special_tokens=False))


class Likely(NamedTuple):
    """The text of a token, and its log-probability; ``top``: the most likely ones at its place."""

    text: str
    log_prob: float
    top: "Sequence[Likely]" = ()

    @property
    def in_chat(self) -> dict[str, Any]:
        """The fields that a chat completion has of each token."""
        own = None if UNFINISHED in self.text else [*self.text.encode()]
        return {"token": self.text, "logprob": self.log_prob, "bytes": own}


class Answer:
    """The text, tool calls and log-probabilities of a sample, as its tokens come.

    Attributes
    ----------
    text : str
        The text so far, before stop texts and tool calls.
    calls : list of ToolCall
        The tool calls, once the sample has ended.
    finish : str or None
        None while tokens may follow; then "stop", "length", "tool_calls" or "error".
    """

    def __init__(
        self,
        backend: Any,
        prompt: Sequence[int],
        stops: Sequence[str],
        ends: Collection[int],
        *,
        form: CallForm | None = None,
        tools: Sequence[dict[str, Any]] = (),
        one_call: bool = False,
    ) -> None:
        self.backend, self.ends, self.form, self.tools = backend, ends, form, tools
        self.one_call = one_call
        self.special = [*special_texts(backend)] if form is not None else []
        self.pieces = TextStream(Shown(backend) if form is not None else backend, prompt)
        self.stops = StopStrings(stops)
        opening = [form.opening] if form is not None and form.opening else []
        self.openings = StopStrings(opening)
        self.rest = ""
        self.text, self.count = "", 0
        self.finish: Finish = None
        self.calls: list[ToolCall] = []
        self.log_probs: list[Likely] = []

    def _likely(self, token: int, log_prob: Any) -> Likely:
        text = str(self.backend.decode([token], skip_special_tokens=False))
        return Likely(text, max(float(log_prob), IMPOSSIBLE))

    def push(self, tokens: Sequence[int], log_probs: Any, finish: Finish, tops: Any = None) -> str:
        """Add tokens; return the text that is complete now."""
        self.count += len(tokens)
        for place, log_prob in enumerate(log_probs or ()):
            own, top = self._likely(tokens[place], log_prob), tops[place] if tops else ()
            self.log_probs.append(own._replace(top=[self._likely(*each) for each in top]))
        text = ""
        for token in tokens:
            if not (finish == "stop" and token in self.ends):
                text += self.stops.push(self.pieces.push(token)) if not self.stops.has_match else ""
        if finish is not None:
            self.finish = finish
            if not self.stops.has_match:
                text += self.stops.push(self.pieces.flush()) + self.stops.flush()
        shown = text if self.form is None else self._before_calls(text, self.form)
        self.text += shown
        return shown

    def _before_calls(self, text: str, form: CallForm) -> str:
        """Return the text that is no part of a tool call; hold the rest back until the end."""
        shown = ""
        if form.opening and not self.openings.has_match:
            shown = self.openings.push(text)
            if self.openings.pending.startswith(form.opening):
                self.rest = self.openings.pending
        else:
            self.rest += text
            if form.begins(self.rest) < 0 and self.rest.strip():
                shown, self.rest = self.rest, ""
        if self.finish is not None:
            rest = self.rest or self.openings.pending
            self.rest = ""
            calls = form.calls(rest, self.tools) if rest.strip() else None
            if calls is not None:
                self.calls, rest = calls[0][:1] if self.one_call else calls[0], calls[1]
                self.finish = "tool_calls" if self.finish == "stop" else self.finish
            shown += rest
        for each in self.special:
            shown = shown.replace(each, "")
        return shown


def special_texts(backend: Any) -> list[str]:
    """Return the texts of a tokenizer's special tokens."""
    added = backend.get_added_tokens_decoder().values()
    return [each.content for each in added if each.special]


def identity(kind: str) -> str:
    """Return a new identifier, such as chatcmpl-1f0c..."""
    return f"{kind}-{secrets.token_hex(12)}"


def head(name: str, kind: str) -> dict[str, Any]:
    """Return the fields with which an answer or a chunk begins."""
    own = identity("chatcmpl" if kind.startswith("chat") else "cmpl")
    return {"id": own, "object": kind, "created": int(time.time()), "model": name}


def calls_of(answer: Answer, *, numbered: bool) -> list[dict[str, Any]]:
    """Return the tool calls of an answer as OpenAI's API writes them."""
    result = []
    for place, call in enumerate(answer.calls):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        result.append({
            **({"index": place} if numbered else {}),
            "id": identity("call"),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        })  # fmt: skip
    return result


def chat_log_probs(each: Sequence[Likely]) -> dict[str, Any]:
    """Return log-probabilities as in a chat completion."""
    tops = ([likely.in_chat for likely in own.top] for own in each)
    content = [own.in_chat | {"top_logprobs": top} for own, top in zip(each, tops, strict=True)]
    return {"content": content}


def text_log_probs(each: Sequence[Likely], before: int) -> dict[str, Any]:
    """Return log-probabilities as in a completion, whose text begins at ``before``.

    The most likely tokens are a mapping by text, which has the token of the answer too; of tokens
    with the same text it has the most likely one.
    """
    offsets = [before + sum(len(own.text) for own in each[:place]) for place in range(len(each))]
    tops = [{likely.text: likely.log_prob for likely in (own, *reversed(own.top))} for own in each]
    return {
        "tokens": [own.text for own in each],
        "token_logprobs": [own.log_prob for own in each],
        "top_logprobs": tops if any(own.top for own in each) else None,
        "text_offset": offsets,
    }


def usage(prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    asked, new = sum(map(len, prompts)), sum(answer.count for answer in answers)
    return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}


def choice(answer: Answer, number: int, *, chat: bool, log_probs: bool) -> dict[str, Any]:
    """Return a sample that has ended as a choice of an answer that is no stream."""
    result: dict[str, Any] = {"index": number, "finish_reason": answer.finish, "logprobs": None}
    if not chat:
        own = text_log_probs(answer.log_probs, 0) if log_probs else None
        return result | {"text": answer.text, "logprobs": own}
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = calls_of(answer, numbered=False)
    own = chat_log_probs(answer.log_probs) if log_probs else None
    return result | {"message": message, "logprobs": own}
