"""Decoding of generated tokens to text, one by one, up to a stop string."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...machine import echo
from ...placement import to_device_of
from ...serving.options import Options
from ...serving.texts import StopStrings, TextStream
from ..network import Network
from ..text.chat import Message, Tools
from ..text.tokenizer import Tokenizer, check_tokens
from .batch import stream

NEW, TEMPERATURE = 200, 0.8  # defaults of commands and of a run's sample: new tokens, temperature
SHOWN = 80  # most characters of a prompt in a message


def _check_messages(prompt: Any, listed: Sequence[Any]) -> None:
    """Raise if a prompt is not a list of messages: templates silently write nothing for others."""
    cure = 'pass a text, or [{"role": "user", "content": "..."}]'
    if not listed:
        raise ConfigError(f"generate_text: prompt=[] contains no message; {cure}")
    if not all(isinstance(each, dict) for each in listed):
        raise ConfigError(f"generate_text: prompt={str(prompt)[:SHOWN]} is not a chat; {cure}")
    for place, message in enumerate(listed):
        for key in ("role", "content"):
            # the content of an assistant's message may be absent: it may have tool calls only
            optional = key == "content" and message.get("role") == "assistant"
            if message.get(key) is None and not optional:
                raise ConfigError(f"generate_text: prompt[{place}] has no {key}; {cure}")


class Completion:
    """The tokens of a prompt, and the text of new tokens, up to a stop text."""

    def __init__(
        self,
        model: Network,
        tokenizer: Tokenizer | None,
        prompt: "str | Sequence[Message] | Sequence[int]",
        *,
        max_new_tokens: int,
        stop: str | Sequence[str] = (),
        tools: Tools = None,
    ) -> None:
        if tokenizer is None:
            raise ConfigError(
                "generate_text: the model has no tokenizer, as its folder has no tokenizer.json;"
                ' set model.tokenizer = models.Tokenizer("folder")'
            )
        self.tokenizer, self.most = tokenizer, max_new_tokens
        one = isinstance(stop, str) or not isinstance(stop, Iterable)
        self.stop: list[Any] = [stop] if one else [*stop]
        if not all(each and isinstance(each, str) for each in self.stop):
            raise ConfigError(f"generate_text: stop={stop!r} must be a text, or a list of texts")
        self.tokens = self._tokens(prompt, tools)
        check_tokens(tokenizer.backend, self.tokens, model.config.vocab)
        positions = model.config.positions
        self.room = positions - len(self.tokens)
        if self.room < 1:
            raise ConfigError(
                f"the prompt has {len(self.tokens)} tokens and the model has {positions} positions,"
                " which leaves no room for new tokens; make it shorter"
            )
        self.count, self.full = 0, False

    def _tokens(self, prompt: Any, tools: Tools) -> list[int]:
        """Return the tokens of a text or a chat; a prompt of tokens is returned as a list."""
        encode = self.tokenizer.encode
        if not isinstance(prompt, str):
            several = isinstance(prompt, Sequence) or hasattr(prompt, "shape")
            listed: list[Any] = [*prompt] if several else [None]
            if listed and several and not any(isinstance(e, dict | str) for e in listed):
                return [int(token) for token in listed]
            _check_messages(prompt, listed)
            text = self.tokenizer.chat(listed, tools=tools)
            return [*encode(text, special_tokens=False).tolist()]
        tokens = encode(prompt).tolist() or encode("\n").tolist()
        if not tokens:
            raise ConfigError("the tokenizer has no token to start from; give a PROMPT")
        return [*tokens]

    def texts(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of new tokens in pieces, up to a stop text."""
        pieces, stops = TextStream(self.tokenizer.backend, self.tokens), StopStrings(self.stop)
        for token in tokens:
            self.count += 1
            yield stops.push(pieces.push(token))
            if stops.has_match:
                return
        yield stops.push(pieces.flush()) + stops.flush()
        self.full = self.count == self.room < self.most


class Continuation(Completion):
    """An iterable over a model's completion of a prompt: pieces of text, as they are computed.

    All arguments are checked before the first piece.  A second iteration has no tokens.

    Attributes
    ----------
    count : int
        Number of tokens so far.
    full : bool
        Whether the text ended because the model has no more positions.
    """

    def __init__(
        self,
        model: Network,
        tokenizer: Tokenizer | None,
        prompt: "str | Sequence[Message] | Sequence[int]",
        *,
        max_new_tokens: int,
        stop: str | Sequence[str] = (),
        tools: Tools = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model, tokenizer, prompt, max_new_tokens=max_new_tokens, stop=stop, tools=tools
        )
        start = to_device_of(np.array([self.tokens]), model.table)
        most = min(max_new_tokens, self.room)
        self.new_tokens = stream(model, start, None, Options(most, **options))

    def __iter__(self) -> Iterator[str]:
        return self.texts(int(row[0]) for row in self.new_tokens)


def stream_text(
    model: Network,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[Message] | Sequence[int],
    **options: Any,
) -> tuple[str, int]:
    """Write a prompt and its completion to standard output; a chat's prompt is not written.

    ``Transformer.generate_text`` documents the options.  The prompt may also be tokens.

    Returns
    -------
    continuation, count : str, int
        The text after the prompt, and its number of tokens.
    """
    continuation, written = Continuation(model, tokenizer, prompt, **options), ""
    if isinstance(prompt, str):
        echo(prompt, nl=False)
    for piece in continuation:
        echo(piece, nl=False)
        written += piece
    echo()
    if continuation.full:
        echo(f"The text ends at the model's {model.config.positions} positions.", err=True)
    return written, continuation.count
