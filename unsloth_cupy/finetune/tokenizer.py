"""Loads, trains and uses tokenizers of the ``tokenizers`` package."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from ..files import TOKENIZER, of_library, read_text
from .naming import named

FILE = "tokenizer.json"
END = "<|endoftext|>"
BYTES = 256
LONGEST_CHARACTER = 4  # bytes of a character in UTF-8 at most, so also tokens at most


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder."""
    from tokenizers import Tokenizer

    path = folder / FILE
    if not path.exists():
        raise ConfigError(
            f"{folder} holds no {FILE}; copy it from the model's page into the folder"
        )
    with _whole(path):
        tokenizer = Tokenizer.from_str(read_text(path, TOKENIZER))
        tokenizer.no_truncation()  # some files store truncation and padding of an earlier call
        tokenizer.no_padding()
    return Guarded(tokenizer, path)


class Guarded:
    """A tokenizer of a file, whose calls raise ConfigError where its package fails or panics.

    Some faults of a file show only when a text is encoded or decoded.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self._tokenizer, self._path = tokenizer, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for before __init__, as copy does
            raise AttributeError(name)
        value = getattr(self._tokenizer, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*arguments: Any, **options: Any) -> Any:
            with _whole(self._path):
                return value(*arguments, **options)

        return call


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raise a ConfigError that names a tokenizer's file where the package raises an error."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError) or not of_library(error):
            raise
        raise ConfigError(f"{path} is broken: {error}; fetch it again") from None


def train_tokenizer(text: str | Iterable[str], vocabulary: int, special: Sequence[str] = ()) -> Any:
    """Return a byte-level BPE tokenizer of at most ``vocabulary`` tokens, trained on a text.

    ``text`` may be in pieces.  The end of text is one token, and so is each of ``special``.

    Every byte is a token, so that any text has an encoding (Sennrich et al., Neural Machine
    Translation of Rare Words with Subword Units, 2016).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = BYTES + 1 + len(special)
    if vocabulary < least:
        more = f", {' and '.join(special)}" if special else ""
        raise ConfigError(
            f"{named(vocabulary=vocabulary)} is too small: {BYTES} bytes and the end of text"
            f"{more} need {least} tokens"
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
    """Return the tokens of a text as int64, without special tokens at its start and end."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def token_kind(tokenizer: Any) -> np.dtype[Any]:
    """Return the smaller of uint16 and uint32 that holds all tokens of a tokenizer."""
    most = max(tokenizer.get_vocab().values(), default=0)
    return np.dtype(np.uint16 if most < 2**16 else np.uint32)


def check_tokens(tokenizer: Any, tokens: Iterable[int], vocabulary: int) -> None:
    """Raise for a token beyond the model's vocabulary among these tokens of a text.

    Tokens that the text does not use are not checked.
    """
    most = max(tokens, default=0)
    if most >= vocabulary:
        raise ConfigError(
            f"the tokenizer's token {most} ({tokenizer.id_to_token(most)!r}) is beyond the model's"
            f" vocabulary of {vocabulary}; they do not belong together: copy both from one place"
        )
