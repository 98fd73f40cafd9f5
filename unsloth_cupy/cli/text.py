"""Text to learn from: reading it, holding a part out, and the order in which batches come."""

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from .._typing import Array
from ..errors import ConfigError

HELD_OUT_SHARE = 0.1
HELD_OUT_CHARACTERS = 50_000  # enough for a loss steady to 0.02 nats; evaluating stays cheap
PARAGRAPH = "\n\n"
IGNORE = -100


class Batch(NamedTuple):
    """Rows of tokens and their labels."""

    tokens: Array  # (batch, length)
    labels: Array  # a token, or IGNORE where none is to be learned
    offsets: Array | None  # where texts start that share rows, see Transformer.logits
    asked: int  # labels that count
    real: int  # tokens that are no padding


class Source(Protocol):
    """Where a run takes its batches from."""

    def at(self, step: int) -> Batch:
        """Return the batch of one step."""

    def where(self, step: int) -> str:
        """Return where in the text a batch comes from."""


class Lessons(NamedTuple):
    """What a model is to learn, and how it is examined."""

    batches: Source
    held_out: list[Batch]
    baseline: float  # loss of guessing by frequency alone
    learned: int  # tokens
    asked: int  # tokens that are held out
    prompt: list[int]  # what a sample goes on from
    told: str  # what of the text is left out


class Text(NamedTuple):
    """A text in two parts that share no paragraph."""

    name: str
    train: str
    held_out: str

    @property
    def digest(self) -> str:
        """What tells this text from others."""
        return hashlib.sha256((self.train + self.held_out).encode()).hexdigest()

    @property
    def words(self) -> str:
        """What a new tokenizer is made for."""
        return self.train


def read_text(path: Path | None) -> Text:
    """Return the text of a file, or the documentation that ships with CPython, split in two."""
    if path is None:
        return split("python-docs", python_documentation())
    if path.suffix.lower() == ".json":
        raise ConfigError(
            f"--text {path} is JSON, not text; write one object in each line of a .jsonl file"
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--text {path}: {reason}; name a readable text file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--text {path} is not UTF-8: byte {error.start} is {text_byte(error)};"
            " convert it, for example with iconv -t utf-8"
        ) from None
    if not text.strip():
        raise ConfigError(f"--text {path} is empty; name a file with text in it")
    return split(path.stem, text)


def text_byte(error: UnicodeDecodeError) -> str:
    """Return the byte that is no UTF-8, in hexadecimal."""
    return f"0x{error.object[error.start]:02x}"


def python_documentation() -> str:
    """Return the language reference as ``pydoc_data.topics`` holds it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "this Python comes without pydoc_data.topics, the default text;"
            " name a text of your own with --text FILE"
        ) from None
    return PARAGRAPH.join(topics.values())


def split(name: str, text: str) -> Text:
    """Hold out the end of the text, less the paragraphs that the rest holds too.

    The Python documentation repeats a fifth of its paragraphs; a loss on text that was
    trained on would say nothing.
    """
    wanted = min(len(text) * HELD_OUT_SHARE, HELD_OUT_CHARACTERS)
    cut = text.rfind(PARAGRAPH, 0, len(text) - int(wanted)) + len(PARAGRAPH)
    if cut < len(text) // 2:  # one long paragraph
        cut = len(text) - int(wanted)
    train = text[:cut]
    seen = {paragraph.strip() for paragraph in train.split(PARAGRAPH)}
    kept = [p for p in text[cut:].split(PARAGRAPH) if p.strip() not in seen]
    return Text(name, train, PARAGRAPH.join(kept))


class Batches:
    """Rows of tokens in a shuffled order; batch ``step`` depends on seed and step alone.

    Every epoch cuts the text into windows from another start and shuffles them anew.
    """

    def __init__(self, tokens: Array, *, batch: int, length: int, seed: int) -> None:
        self.tokens, self.batch, self.length, self.seed = tokens, batch, length, seed
        self.windows = len(tokens) // length - 1
        if self.windows < 1:
            raise ConfigError(
                f"the text is too short: {len(tokens)} tokens to train on; rows of {length} need"
                f" {2 * length}; give more text, or a smaller --tokens"
            )

    def at(self, step: int) -> Batch:
        """Return the rows of one step."""
        rows = np.stack([self.tokens[at : at + self.length] for at in self._rows(step)])
        return Batch(rows, rows, None, self.batch * (self.length - 1), rows.size)

    def where(self, step: int) -> str:
        """Return where in the text a batch comes from."""
        return f"rows from tokens {', '.join(map(str, self._rows(step)))}"

    def _rows(self, step: int) -> list[int]:
        """Return the tokens at which the rows of a batch start."""
        numbers = range(step * self.batch, (step + 1) * self.batch)
        places = [divmod(number, self.windows) for number in numbers]
        return [int(self._starts(epoch)[place]) for epoch, place in places]

    @functools.lru_cache(maxsize=2)  # noqa: B019 -- lives as long as the run
    def _starts(self, epoch: int) -> Array:
        random = np.random.default_rng([self.seed, epoch])
        shift = random.integers(self.length)
        return random.permutation(self.windows) * self.length + shift


def held_out_rows(tokens: Array, *, batch: int, length: int) -> list[Batch]:
    """Return batches that ask for every token but the first once."""
    if len(tokens) < 2:
        raise ConfigError("the text is too short to hold a part of it out; give more text")
    batches = []
    for first in range(0, len(tokens) - 1, batch * (length - 1)):
        starts = range(first, min(first + batch * (length - 1), len(tokens) - 1), length - 1)
        parts = [tokens[start : start + length] for start in starts]
        rows = np.zeros((len(parts), max(map(len, parts))), tokens.dtype)
        labels = np.full_like(rows, IGNORE)
        for row, label, part in zip(rows, labels, parts, strict=True):
            row[: len(part)] = part
            label[1 : len(part)] = part[1:]
        asked = sum(map(len, parts)) - len(parts)
        batches.append(Batch(rows, labels, None, asked, asked + len(parts)))
    return batches


def unigram_baseline(train: Array, asked: Array, vocabulary: int) -> float:
    """Return the loss of guessing by frequency alone, in nats per token that is asked for.

    Frequencies are counted in what is trained on, each plus one.
    """
    counts = np.bincount(train, minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[asked].mean())
