"""Stored predictions of a teacher: the top k tokens and log-probabilities at each target token.

    taught/
      teach.json       the teacher, a digest of its vocabulary, temperature, maximum length
      texts.npy        the digest of each text, and its first row in the other arrays
      tokens.npy       (rows, k) most likely first
      log_probs.npy    (rows, k) float32

A run looks up texts by digest, so the order and the held-out split of its data may differ.  Arrays
are memory-mapped: a run reads only the rows of a batch.
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
        """Return the row of each token of examples in the arrays, -1 if it is not a target.

        ``where(line)`` returns the file and line of an example, for messages.

        Raises
        ------
        ConfigError
            The folder has no predictions for a text.
        """
        result = np.full(examples.ends[-1], -1)
        first_rows = {each["digest"].tobytes(): int(each["row"]) for each in self.texts}
        for number, example in enumerate(examples):
            first = first_rows.get(digest_of(example))
            if first is None:
                line, length = where(example.line), named(tokens=self.facts["tokens"])
                cure = f"run teach on all files, including {named('eval')}, with {length}"
                raise ConfigError(f"{line}: {self.folder} has no predictions for this text; {cure}")
            is_target = example.labels != IGNORE
            place = slice(examples.ends[number], examples.ends[number + 1])
            result[place][is_target] = np.arange(first, first + int(is_target.sum()))
        return result


def digest_of(example: Example) -> bytes:
    """Return a digest of the tokens of a text and of the mask of its target tokens."""
    data = example.tokens.astype("<i8").tobytes() + (example.labels != IGNORE).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def vocabulary_of(tokenizer: Any) -> str:
    """Return a digest of the vocabulary of a tokenizer: tokens and ids."""
    words = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def is_taught(folder: Path) -> bool:
    """Return whether a folder holds the stored predictions of a teacher."""
    return (folder / FILE).is_file()


def read_taught(folder: Path, tokenizer: Any, temperature: float | None) -> Taught:
    """Return the stored predictions of a folder, checked against tokenizer and temperature.

    A tokenizer or temperature of None is not checked.

    Raises
    ------
    ConfigError
        The files are broken, or have another vocabulary or temperature.
    """
    shown, facts = named(teacher=folder), read_json(folder / FILE)
    try:
        arrays = [
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("texts", "tokens", "log_probs")
        ]
        texts, tokens, log_probs = arrays
        whole = texts.dtype == TEXT and tokens.shape == log_probs.shape and tokens.ndim == 2
        vocabulary, stored_temperature = facts["vocabulary"], float(facts["temperature"])
        int(facts["tokens"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{shown} is broken ({error}); run teach again") from None
    if not whole:
        raise ConfigError(f"{shown} is broken: the shapes of its arrays differ; run teach again")
    if tokenizer is not None and vocabulary != vocabulary_of(tokenizer):
        cure = "use a teacher with the same tokenizer.json"
        raise ConfigError(f"{shown} has predictions over another vocabulary; {cure}")
    if temperature not in (None, stored_temperature):
        cure = f"leave {named('temperature')} out, or run teach at {temperature:g}"
        at = f"at the temperature {stored_temperature:g}"
        raise ConfigError(f"{shown} has predictions {at}; {cure}")
    return Taught(folder, facts, texts, tokens, log_probs)
