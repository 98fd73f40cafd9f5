"""Loads, trains and uses tokenizers of the ``tokenizers`` package."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from .naming import named

FILE = "tokenizer.json"
END = "<|endoftext|>"
BYTES = 256
LONGEST_CHARACTER = 4  # bytes of a character in UTF-8 at most, so also tokens at most


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder."""
    from tokenizers import Tokenizer

    path = folder / FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {FILE}; copy it from the model's page into the folder"
        )
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f"{path} is broken: {error}; fetch it again") from None
    tokenizer.no_truncation()  # some files store truncation and padding of an earlier call
    tokenizer.no_padding()
    return tokenizer


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
