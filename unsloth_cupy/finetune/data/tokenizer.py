"""Trains and uses tokenizers of the ``tokenizers`` package."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...models.text.tokenizer import load_tokenizer
from ..naming import named

__all__ = ["BYTES", "END", "SETTINGS", "encode", "load_tokenizer", "token_kind", "train_tokenizer"]
END = "<|endoftext|>"
BYTES = 256
# tokenizer_config.json, from which other libraries read the end-of-text and the padding token
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END,
    "eos_token": END,
    "pad_token": END,
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
}


def train_tokenizer(text: str | Iterable[str], vocabulary: int, special: Sequence[str] = ()) -> Any:
    """Return a byte-level BPE tokenizer of at most ``vocabulary`` tokens, trained on a text.

    ``text`` may be an iterable of pieces.  The end of text and each of ``special`` is one token.

    Every byte is a token, so any text can be encoded (Sennrich et al., Neural Machine
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
    """Return the tokens of a text as int64, (tokens,), without special tokens at its ends."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def token_kind(tokenizer: Any) -> np.dtype[Any]:
    """Return uint16 or uint32, the smaller dtype that can store all token ids."""
    most = max(tokenizer.get_vocab().values(), default=0)
    return np.dtype(np.uint16 if most < 2**16 else np.uint32)
