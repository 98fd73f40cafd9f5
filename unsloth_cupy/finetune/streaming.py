"""A model continues a text, which is written as it comes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..errors import ConfigError
from ..placement import placed
from .tokenizer import LONGEST_CHARACTER, check_tokens

if TYPE_CHECKING:
    from ..models import Transformer


def stream_text(
    model: "Transformer",
    tokenizer: Any,
    prompt: str,
    tokens: Sequence[int] = (),
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    **options: Any,
) -> tuple[str, int]:
    """Write prompt and continuation to standard output, up to one of the stop strings.

    ``tokens`` are those of the prompt where they are known, as behind a chat's special tokens.

    Returns
    -------
    continuation, count : str, int
        What was written behind the prompt, and the number of its tokens.
    """
    tokens = list(tokens) or tokenizer.encode(prompt).ids or tokenizer.encode("\n").ids
    if not tokens:
        raise ConfigError("the tokenizer knows no token to start from; give a PROMPT")
    check_tokens(tokenizer, tokens, model.config.vocab)
    positions = model.config.positions
    room = positions - len(tokens)
    if room < 1:
        raise ConfigError(
            f"the text is {len(tokens)} tokens and the model has {positions} positions, which"
            " leaves no room to go on; make it shorter"
        )
    stream, stops, said, made = TextStream(tokenizer, tokens), StopStrings(stop), "", 0
    click.echo(prompt, nl=False)
    prompted = placed(np.array([tokens]), model.table)
    for token in model.stream(prompted, max_new_tokens=min(max_new_tokens, room), **options):
        made += 1
        said += _shown(stops.push(stream.push(int(token[0]))))
        if stops.found:
            break
    else:
        said += _shown(stops.push(stream.flush()) + stops.flush())
    click.echo()
    if made == room < max_new_tokens and not stops.found:
        click.echo(f"The text ends at the model's {positions} positions.", err=True)
    return said, made


def _shown(text: str) -> str:
    click.echo(text, nl=False)
    return text


class TextStream:
    """Tokens go in one by one, text comes out as soon as its characters are complete."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.tokens = list(before)  # a decoder may drop the space before its first token
        self.start = max(0, len(self.tokens) - LONGEST_CHARACTER)
        self.said = len(self.tokens)

    def push(self, token: int) -> str:
        """Take one token; return the text that is now complete, perhaps none."""
        self.tokens.append(token)
        text = self._new()
        unfinished = text.endswith("\ufffd")  # what a decoder writes for half a character
        return "" if unfinished and self._waiting() < LONGEST_CHARACTER else self._say(text)

    def flush(self) -> str:
        """Return what is left when no more tokens come."""
        return self._say(self._new())

    def _waiting(self) -> int:
        return len(self.tokens) - self.said

    def _new(self) -> str:
        known = self.tokenizer.decode(self.tokens[self.start : self.said])
        return str(self.tokenizer.decode(self.tokens[self.start :])[len(known) :])

    def _say(self, text: str) -> str:
        self.start, self.said = self.said, len(self.tokens)
        return text


class StopStrings:
    """Text goes in by pieces and comes out up to the string that is the first to be complete.

    What may be the beginning of one waits until the rest of it comes, or something else.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.found = stops, "", False

    def push(self, text: str) -> str:
        """Take a piece of text; return what can be shown of all that came."""
        self.held += text
        places = [(at + len(s), at) for s in self.stops if (at := self.held.find(s)) >= 0]
        self.found = bool(places)
        ready = min(places)[1] if places else len(self.held) - self._begun()
        shown, self.held = self.held[:ready], self.held[ready:]
        return shown

    def _begun(self) -> int:
        """Return how many of the last characters may be the beginning of a string."""
        longest = max(map(len, self.stops), default=1) - 1
        ends = (self.held[-n:] for n in range(min(longest, len(self.held)), 0, -1))
        return next((len(end) for end in ends if any(s.startswith(end) for s in self.stops)), 0)

    def flush(self) -> str:
        """Return what waits when no more text comes: nothing behind a string that was found."""
        return "" if self.found else self.held
