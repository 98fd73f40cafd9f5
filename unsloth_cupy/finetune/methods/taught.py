"""What a teacher predicts, stored: of each token that is learned, the k likeliest and their log p.

    taught/
      teach.json       the teacher, its vocabulary, the temperature, the length of rows
      texts.npy        a digest of each text, and its first row
      tokens.npy       (rows, k) the likeliest first
      log_probs.npy    (rows, k) float32

A run finds a text by its digest, whatever the order and the division of its data, and reads the
rows of a batch: the arrays stay in their files.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import read_json
from ...models.objective import IGNORE
from ..data.text import Example
from ..data.training_data import Examples
from ..naming import named

FILE = "teach.json"
TEXT = np.dtype([("digest", "V16"), ("row", "<i8")])


class Taught(NamedTuple):
    """Stored predictions of a teacher."""

    folder: Path
    facts: dict[str, Any]
    texts: Array
    tokens: Array
    log_probs: Array

    def rows(self, examples: Examples, where: Any) -> Array:
        """Return the row of each token of examples, -1 of one that is not learned.

        ``where`` returns the place of a line, for a message.

        Raises
        ------
        ConfigError
            The teacher has not seen a text.
        """
        result = np.full(examples.ends[-1], -1)
        known = {each["digest"].tobytes(): int(each["row"]) for each in self.texts}
        for number, example in enumerate(examples):
            first = known.get(digest_of(example))
            if first is None:
                line, length = where(example.line), named(tokens=self.facts["tokens"])
                cure = f"teach with all files, those of {named('eval')} too, and give {length}"
                raise ConfigError(f"{line}: {self.folder} has no predictions of this text; {cure}")
            learned = example.labels != IGNORE
            place = slice(examples.ends[number], examples.ends[number + 1])
            result[place][learned] = np.arange(first, first + int(learned.sum()))
        return result


def digest_of(example: Example) -> bytes:
    """Return what tells one text from another: its tokens, and which of them are learned."""
    data = example.tokens.astype("<i8").tobytes() + (example.labels != IGNORE).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def vocabulary_of(tokenizer: Any) -> str:
    """Return a digest of the tokens of a tokenizer and their numbers."""
    words = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def is_taught(folder: Path) -> bool:
    """Return whether a folder holds stored predictions."""
    return (folder / FILE).is_file()


def read_taught(folder: Path, tokenizer: Any, temperature: float | None) -> Taught:
    """Return stored predictions for a model with this tokenizer, if it is known.

    Raises
    ------
    ConfigError
        They are broken, of another vocabulary or at another temperature.
    """
    shown, facts = named(teacher=folder), read_json(folder / FILE)
    try:
        arrays = [
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("texts", "tokens", "log_probs")
        ]
        texts, tokens, log_probs = arrays
        whole = texts.dtype == TEXT and tokens.shape == log_probs.shape and tokens.ndim == 2
        of_vocabulary, at = facts["vocabulary"], float(facts["temperature"])
        int(facts["tokens"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{shown} is broken ({error}); teach again") from None
    if not whole:
        raise ConfigError(f"{shown} is broken: its arrays do not fit each other; teach again")
    if tokenizer is not None and of_vocabulary != vocabulary_of(tokenizer):
        cure = "teach by a model with the same tokenizer.json"
        raise ConfigError(f"{shown} has predictions of another vocabulary; {cure}")
    if temperature not in (None, at):
        cure = f"leave {named('temperature')} out, or teach at {temperature:g}"
        raise ConfigError(f"{shown} has predictions at the temperature {at:g}; {cure}")
    return Taught(folder, facts, texts, tokens, log_probs)
