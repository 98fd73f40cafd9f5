"""New tokens that a run adds to a model: read from a file, with rows of embedding and head."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import read_text
from ..data.text import COUNTED, TrainingData
from ..naming import named

if TYPE_CHECKING:
    from ...models.configs.config import Config

MULTIPLE = 64  # a larger embedding has a multiple of 64 rows, for fast products
SHOWN = 5  # maximum number of tokens that a message lists


def add_tokens(tokenizer: Any, file: str | Path) -> list[int]:
    """Add the tokens of a file, one per line, to a tokenizer; return their ids in file order.

    Each line is a token, including its spaces.  A token that the tokenizer knows keeps its id.

    Raises
    ------
    ConfigError
        A line is empty or repeated, or the file is not UTF-8 or has no token.
    """
    from tokenizers import AddedToken

    shown, lines = named(new_tokens=str(file)), read_lines(file)
    if not lines:
        raise ConfigError(f"{shown} is empty; write one token per line")
    known: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ConfigError(f"{shown}, line {number} is empty; remove it")
        if line in known:
            problem = f"line {number} repeats line {known[line]}, {line!r}"
            raise ConfigError(f"{shown}, {problem}; remove one")
        known[line] = number
    tokenizer.add_tokens([AddedToken(line, normalized=False) for line in lines])
    return [tokenizer.token_to_id(line) for line in lines]


def read_lines(file: str | Path) -> list[str]:
    """Return the lines of a file without line breaks."""
    try:
        text = read_text(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        cure = "name a UTF-8 file with one token per line"
        raise ConfigError(
            f"{named(new_tokens=str(file))} cannot be read: {error}; {cure}"
        ) from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def rows_with(config: "Config", tokens: Sequence[int]) -> int:
    """Return the number of embedding rows that these tokens require."""
    needed = max(tokens) + 1
    return config.vocab if needed <= config.vocab else -(-needed // MULTIPLE) * MULTIPLE


def account(tokenizer: Any, tokens: Sequence[int], training_data: TrainingData) -> str:
    """Return in words how often new tokens occur in the training data, and which never do."""
    counts = np.zeros(max(tokens) + 1, np.int64)
    for part in parts_of(training_data):
        counts += np.bincount(part[part < len(counts)], minlength=len(counts))
    seen = counts[list(tokens)]
    never = [tokenizer.id_to_token(t) for t, n in zip(tokens, seen, strict=True) if not n]
    report = f"{len(tokens)} new tokens occur {int(seen.sum()):,} times in the training data"
    if never:
        shown = ", ".join(map(repr, never[:SHOWN])) + ", ..." * (len(never) > SHOWN)
        report += f", {len(never)} of them do not occur: {shown}"
    return report


def parts_of(training_data: TrainingData) -> Iterator[Array]:
    """Yield the tokens of the training data in parts."""
    if training_data.examples:
        examples = training_data.examples[0]
        yield np.frombuffer(examples.tokens, examples.kind)
        return
    tokens: Any = training_data.batches
    for start in range(0, len(tokens.tokens), COUNTED):
        yield tokens.tokens[start : start + COUNTED]
