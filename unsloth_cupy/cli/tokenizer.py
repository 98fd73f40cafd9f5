"""Text to tokens and back, through the ``tokenizers`` package."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._typing import Array
from ..errors import ConfigError

FILE = "tokenizer.json"
END = "<|endoftext|>"
BYTES = 256
LONGEST_CHARACTER = 4  # bytes of one character in UTF-8, so tokens at most


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder."""
    from tokenizers import Tokenizer

    path = folder / FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {FILE}; copy it from the model's page into the folder"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no narrower class
        raise ConfigError(f"{path} is broken: {error}; fetch it again") from None
    tokenizer.no_truncation()  # some files keep the lengths of an earlier call
    tokenizer.no_padding()
    return tokenizer


def train_tokenizer(text: str | Iterable[str], vocabulary: int, special: Sequence[str] = ()) -> Any:
    """Return a byte-level BPE tokenizer of at most this many tokens, learnt from text or pieces.

    The end of text is a token of its own, and so is each of ``special``.

    Every byte is a token, so that any text has an encoding (Sennrich et al., Neural Machine
    Translation of Rare Words with Subword Units, 2016).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = BYTES + 1 + len(special)
    if vocabulary < least:
        more = f", {' and '.join(special)}" if special else ""
        raise ConfigError(
            f"--vocabulary {vocabulary} is too small: {BYTES} bytes and the end of text{more} need"
            f" {least} tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] if isinstance(text, str) else text, trainer)
    return tokenizer


def encode(tokenizer: Any, text: str) -> Array:
    """Return the tokens of a text, as int64, with no token that marks its start or end."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def token_kind(tokenizer: Any) -> np.dtype[Any]:
    """Return the smallest dtype that all tokens of a tokenizer go into."""
    most = max(tokenizer.get_vocab().values(), default=0)
    return np.dtype(np.uint16 if most < 2**16 else np.uint32)


def check_tokens(tokenizer: Any, tokens: Iterable[int], vocabulary: int) -> None:
    """Raise for a token that a model has no row for; one that no text needs may be there."""
    most = max(tokens, default=0)
    if most >= vocabulary:
        raise ConfigError(
            f"the tokenizer's token {most} ({tokenizer.id_to_token(most)!r}) is beyond the model's"
            f" vocabulary of {vocabulary}; they do not belong together: copy both from one place"
        )


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
