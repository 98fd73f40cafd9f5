"""Decoding of generated tokens to text, one by one, up to a stop string."""

from collections.abc import Sequence
from typing import Any

LONGEST_CHARACTER = 4  # most bytes of a character in UTF-8, and so most tokens of a character


class TextStream:
    """A decoder of single tokens, which returns text as soon as its characters are complete."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.tokens = list(before)
        self.done = len(self.tokens)  # number of tokens whose text has been returned
        self.start = self._before(max(0, self.done - LONGEST_CHARACTER))

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete now, which may be empty."""
        self.tokens.append(token)
        text = self._new()
        unfinished = text.endswith("\ufffd")  # decoders write this for an incomplete character
        return "" if unfinished and self._waiting() < LONGEST_CHARACTER else self._take(text)

    def flush(self) -> str:
        """Return the remaining text after the last token."""
        return self._take(self._new())

    def _waiting(self) -> int:
        """Return the number of tokens whose text has not been returned."""
        return len(self.tokens) - self.done

    def _new(self) -> str:
        """Return the text of tokens that are not done, decoded together with tokens before them."""
        known = self.tokenizer.decode(self.tokens[self.start : self.done])
        return str(self.tokenizer.decode(self.tokens[self.start :])[len(known) :])

    def _take(self, text: str) -> str:
        """Return the text, and mark all tokens as done."""
        start, self.done = self.done, len(self.tokens)
        self.start = self._before(start)
        return text

    def _before(self, start: int) -> int:
        """Return the last index up to ``start`` such that the tokens from it to ``done`` have text.

        Decoding begins at this index, because decoders may drop the space before their first word,
        special tokens have no text, and decoding must not begin inside a character.
        """
        while start:
            text = self.tokenizer.decode(self.tokens[start : self.done])
            if text and text[0] != "\ufffd":
                break
            start = max(0, 2 * start - self.done - 1)
        return start


class StopStrings:
    """A filter that passes pieces of text, up to the first complete stop string.

    Text that may be the beginning of a stop string is held back until the next piece decides.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.pending, self.has_match = stops, "", False

    def push(self, text: str) -> str:
        """Add a piece of text; return the text that cannot be part of a stop string."""
        self.pending += text
        places = [(at + len(s), at) for s in self.stops if (at := self.pending.find(s)) >= 0]
        self.has_match = bool(places)
        ready = min(places)[1] if places else len(self.pending) - self._begun()
        shown, self.pending = self.pending[:ready], self.pending[ready:]
        return shown

    def _begun(self) -> int:
        """Return the number of last characters that may be the beginning of a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        ends = (self.pending[-n:] for n in range(min(longest, len(self.pending)), 0, -1))
        return next((len(end) for end in ends if any(s.startswith(end) for s in self.stops)), 0)

    def flush(self) -> str:
        """Return the text that is held back, after the last piece; "" after a stop string."""
        return "" if self.has_match else self.pending
