"""The number of steps in an epoch, estimated from a sample of the data."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    """Rows of a batch, of ``tokens`` tokens each, in one epoch."""

    tokens: int
    rows: int

    def steps(self, settings: Settings) -> int:
        """Return the optimizer steps of a run, as ``finetune`` chooses them."""
        if settings.steps is not None:
            return settings.steps
        rows = settings.batch * settings.accumulate

        def of(epochs: float) -> int:
            return max(1, math.ceil(self.rows * epochs / rows))

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
        return DataSize(tokens, math.ceil(count * len(text) * data.cut / len(block) / tokens))
    settings = with_tokens(settings, data, tokenizer, chat, config, method)
    tokens = settings.tokens or 0
    sample = data.train[:: -(-len(data.train) // COUNTED_ROWS) or 1]
    lengths = lengths_in(data, tokenizer, chat, config, method, sample)
    packed = settings.pack is not False and not method.is_on_policy
    share = sum(min(length, tokens) for length in lengths) / tokens if packed else len(sample)
    return DataSize(tokens, math.ceil(share * len(data.train) / len(sample)))
