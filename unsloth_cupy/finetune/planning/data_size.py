"""The number of steps in an epoch, estimated from a sample of the data."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...models.text.tokenizer import load_tokenizer
from ..data.chat import Chat
from ..data.records import Records
from ..data.text import Text
from ..methods.method import Method
from ..run.preparation import COUNTED_ROWS, MOST_STEPS, lengths_in, with_tokens
from ..run.run_folder import words_folder
from ..run.settings import Settings

if TYPE_CHECKING:
    from ...models.configs.config import Config

SAMPLE = 1 << 20  # bytes of running text to tokenise


class DataSize(NamedTuple):
    """The examples of one epoch: texts, pairs of texts, or rows of running text.

    ``share`` is the mean number of tokens of a text, as a part of ``tokens``, the length of a row;
    ``longest`` are the sorted lengths of the longest text of each example in a sample, empty if
    every text fills its row.
    """

    tokens: int
    examples: float
    share: float = 1.0
    longest: Sequence[int] = ()

    def rows(self, *, packed: bool) -> float:
        """Return the rows of an epoch, in units of the rows of ``batch``."""
        return self.examples * (self.share if packed else 1)

    def row(self, batch: int, *, packed: bool) -> float:
        """Return the mean number of tokens of a row, with padding to the longest of its batch.

        The number of texts up to the i-th of n lengths is i; so the longest of b texts is at most
        the i-th with probability (i / n)**b.
        """
        if packed or not self.longest:
            return self.tokens
        below = np.arange(len(self.longest) + 1) / len(self.longest)
        return float(np.diff(below**batch) @ np.array(self.longest))

    def steps(self, settings: Settings) -> int:
        """Return the optimizer steps of a run, as ``finetune`` chooses them."""
        if settings.steps is not None:
            return settings.steps
        rows, batch = self.rows(packed=settings.pack is not False), settings.batch

        def of(epochs: float) -> int:
            return max(1, math.ceil(rows * epochs / (batch * settings.accumulate)))

        if settings.epochs is not None:
            return of(settings.epochs)
        return next((of(n) for n in (3, 2) if of(n) <= MOST_STEPS), of(1))


def measured(
    data: Text | Records, folder: Path, settings: Settings, config: "Config", method: Method
) -> DataSize:
    """Return the size of training data, from at most ``COUNTED_ROWS`` rows or 1 MiB of text."""
    words = words_folder(folder, settings.base)
    tokenizer, chat = load_tokenizer(words), Chat(words)
    if isinstance(data, Text):
        tokens = settings.decided(new=False).tokens
        block, text = next(data.blocks())
        count = len(tokenizer.encode(text[:SAMPLE]).ids) / max(1, min(len(text), SAMPLE))
        return DataSize(tokens, count * len(text) * data.cut / len(block) / tokens)
    settings = with_tokens(settings, data, tokenizer, chat, config, method)
    tokens = settings.tokens or 0
    sample = data.train[:: -(-len(data.train) // COUNTED_ROWS) or 1]
    lengths = np.minimum(lengths_in(data, tokenizer, chat, config, method, sample), tokens)
    examples = len(data.train) / len(sample) * len(lengths) / method.group
    if method.is_on_policy:  # the lengths of its answers are not known
        return DataSize(tokens, examples)
    longest = np.sort(lengths.reshape(-1, method.group).max(axis=1)).tolist()
    return DataSize(tokens, examples, float(lengths.mean()) / tokens, longest)
