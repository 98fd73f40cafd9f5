"""Reads running text to train on, holds a part of it out, and shuffles its batches."""

import codecs
import functools
import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import regular
from ..listener import reading
from ..naming import named

HELD_OUT_SHARE = 0.1
HELD_OUT_CHARACTERS = 50_000  # enough for a loss exact to 0.02 nats; evaluation stays cheap
PARAGRAPH = "\n\n"
BREAK = r"\r?\n\r?\n"  # between paragraphs
SMALL = 2**20  # bytes of the largest text that is tokenised as a whole, in memory
PIECE = 2**15  # bytes of a piece of a larger text: an encoding takes 200 bytes for each
BLOCK = 2**22  # bytes read at a time if nothing is tokenised
FARTHEST = 2**20  # bytes before the intended split in which a paragraph's end is searched
COUNTED = 2**20  # tokens counted at a time
IGNORE = -100


class Batch(NamedTuple):
    """Rows of tokens and their labels."""

    tokens: Array  # (batch, length)
    labels: Array  # a token, or IGNORE if it is not learned
    offsets: Array | None  # starts of the texts that share rows, see Transformer.logits
    label_count: int  # number of labels that count in the loss, or of units of texts
    real: int  # number of tokens that are not padding
    group: int = 1  # consecutive texts that belong together
    beside: Mapping[str, Array] = {}  # of each token, what a method knows of it
    facts: Mapping[str, Array] = {}  # of the batch as a whole, which ranks do not divide


def without_texts(batch: Batch) -> Batch:
    """Return a batch of the same kind that holds no text."""
    where = np.s_[:0] if batch.offsets is None else np.s_[:, :0]
    beside = {name: array[where] for name, array in batch.beside.items()}
    offsets = None if batch.offsets is None else batch.offsets[:1]
    arrays = batch.tokens[where], batch.labels[where], offsets
    return Batch(*arrays, 0, 0, batch.group, beside, batch.facts)


def tensors_of(batches: Sequence[Batch]) -> dict[str, Array]:
    """Return all that batches hold as arrays, by names that begin with their numbers."""
    result = dict[str, Array]()
    for number, batch in enumerate(batches):
        arrays = {"tokens": batch.tokens, "labels": batch.labels}
        arrays |= {} if batch.offsets is None else {"offsets": batch.offsets}
        arrays["counts"] = np.array([batch.label_count, batch.real, batch.group])
        for kind in ("beside", "facts"):
            arrays |= {f"{kind}.{name}": array for name, array in getattr(batch, kind).items()}
        result |= {f"{number}.{name}": array for name, array in arrays.items()}
    return result


def batches_of(tensors: Mapping[str, Array]) -> list[Batch]:
    """Return the batches that ``tensors_of`` returned arrays of."""
    result = list[Batch]()
    for number in range(len({name.partition(".")[0] for name in tensors})):
        own = {n.partition(".")[2]: a for n, a in tensors.items() if n.startswith(f"{number}.")}
        count, real, group = map(int, own["counts"])
        beside, facts = (
            {n.partition(".")[2]: a for n, a in own.items() if n.startswith(f"{kind}.")}
            for kind in ("beside", "facts")
        )
        arrays = own["tokens"], own["labels"], own.get("offsets")
        result.append(Batch(*arrays, count, real, group, beside, facts))
    return result


class Example(NamedTuple):
    """The tokens of a text, its labels (a token or IGNORE), and its line in the file."""

    tokens: Array
    labels: Array
    line: int
    desirable: bool = True  # whether its answer is good
    reference: Array | None = None  # log-probabilities of its labels by another model
    taught: Array | None = None  # rows of a teacher's stored predictions
    value: float = 0.0  # of a text, what a method knows of it
    routes: Array | None = None  # of a token, the experts that drew it
    base: Array | None = None  # log-probabilities of its labels by the model before the run


class Tokens(Protocol):
    """Tokens of a text, in memory or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Array: ...


class Source(Protocol):
    """The batches of a run, by step."""

    def at(self, step: int) -> Batch:
        """Return the batch of one step."""

    def where(self, step: int) -> str:
        """Return where in the text a batch comes from, in words."""

    def count(self, epochs: float) -> int:
        """Return the number of batches in ``epochs`` passes through the text."""

    def epoch(self, step: int) -> float:
        """Return how often the text was passed through in the first ``step`` batches."""

    def largest(self, steps: int, accumulate: int) -> list[int]:
        """Return the steps that may need most memory."""


class TrainingData(NamedTuple):
    """The training data of a run: its batches, the held-out batches, and facts about them."""

    batches: Source
    held_out: list[Batch]
    baseline: float | None  # held-out loss of predictions by token frequency only
    learned: int  # number of tokens to train on
    held_out_tokens: int  # number of held-out tokens
    prompt: list[int]  # tokens from which a sample starts
    note: str  # message about truncated or repeated texts, or empty
    largest: tuple[int, int]  # rows, and tokens in a row, of the largest batch
    examples: Sequence[Any] = ()  # texts to train on and those that are held out, of a method


class Text(NamedTuple):
    """A text in two parts that share no paragraph; its file is read in pieces when needed."""

    name: str
    path: Path | None  # None: Python's documentation
    opened: Callable[[], BinaryIO]  # opens the text
    size: int  # bytes
    cut: int  # bytes of the training part, at the beginning
    held_out: str
    digest: str  # SHA-256 of both parts
    note: str  # message about paragraphs that both parts hold, or empty

    def blocks(self) -> Iterator[tuple[bytes, str]]:
        """Yield the training part in blocks of (bytes, their characters); one if it is small."""
        with self.opened() as file:
            yield from decoded(file, self.cut, SMALL if self.cut <= SMALL else PIECE)


def decoded(file: BinaryIO, stop: int, size: int) -> Iterator[tuple[bytes, str]]:
    """Yield the first ``stop`` bytes of a file in blocks, and the characters that end in each.

    A byte order mark at the beginning is not a character.
    """
    decoder, read = codecs.getincrementaldecoder("utf-8-sig")(), 0
    while read < stop and (data := file.read(min(size, stop - read))):
        before = read - len(decoder.getstate()[0])
        read += len(data)
        try:
            yield data, decoder.decode(data, final=read == stop)
        except UnicodeDecodeError as error:
            place = before + error.start
            raise ConfigError(f"byte {place} is {text_byte(error)}") from None


def read_text(path: Path | None, name: str = "", keep: Any = None) -> Text:
    """Return the text of a file, or the documentation that ships with CPython, split in two.

    ``keep`` is an object that must live as long as the file.
    """
    if path is None:
        return split("python-docs", python_documentation())

    def opened(_: Any = keep) -> BinaryIO:
        return regular(path).open("rb")

    try:
        return _split(name or path.stem, None if keep else path, opened)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{named(text=path)}: {reason}; name a readable text file") from None


def text_byte(error: UnicodeDecodeError) -> str:
    """Return the byte that is not UTF-8, in hexadecimal."""
    return f"0x{error.object[error.start]:02x}"


def python_documentation() -> str:
    """Return the language reference as ``pydoc_data.topics`` holds it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "this Python comes without pydoc_data.topics, the default text;"
            f" name a text of your own with {named(text='FILE')}"
        ) from None
    return PARAGRAPH.join(topics.values())


def split(name: str, text: str) -> Text:
    """Return a text that is in memory, split into a training part and a held-out part."""
    data = text.encode()
    return _split(name, None, lambda: io.BytesIO(data))


def resplit(text: Text, share: float) -> Text:
    """Return a text of which this share is held out."""
    return _split(text.name, text.path, text.opened, share)


def _split(
    name: str, path: Path | None, opened: Callable[[], BinaryIO], share: float | None = None
) -> Text:
    """Hold out the end of a text, without the paragraphs that the training part holds too.

    The Python documentation repeats a fifth of its paragraphs, and a held-out loss on them would
    say what the model remembers.  An end that has no others is held out as it is.
    """
    with opened() as file:
        size = file.seek(0, os.SEEK_END)
        characters, blank = _counted(file, size, path)
        if blank:
            raise ConfigError(f"{named(text=path or name)} is empty; name a file with text in it")
        most = math.inf if share else HELD_OUT_CHARACTERS
        end = _last(file, size, int(min(characters * (share or HELD_OUT_SHARE), most)))
        least = max(size // 2, end - FARTHEST)
        file.seek(least)
        last = re.match(b"(?s:.*)" + BREAK.encode(), file.read(end - least))
        cut = least + last.end() if last else end  # None: one long paragraph
        file.seek(cut)
        paragraphs = re.split(BREAK, file.read().decode())
        file.seek(0)
        seen, digest = _seen(file, cut, {paragraph.strip() for paragraph in paragraphs})
    new = [paragraph for paragraph in paragraphs if paragraph.strip() not in seen]
    note = ""
    if any(map(str.strip, paragraphs)) and not any(map(str.strip, new)):
        new = paragraphs
        note = "the end of the text repeats what comes before it: the held-out loss says what the"
        note += " model remembers, not how it does on new text"
    held_out = PARAGRAPH.join(new)
    digest.update(held_out.encode())
    return Text(name, path, opened, size, cut, held_out, digest.hexdigest(), note)


def _counted(file: BinaryIO, size: int, path: Path | None) -> tuple[int, bool]:
    """Return how many characters a file has, and whether all of them are blank."""
    characters, blank = 0, True
    file.seek(0)
    try:
        for _, text in reading(decoded(file, size, BLOCK), size, "reading"):
            characters, blank = characters + len(text), blank and not text.strip()
    except ConfigError as error:
        raise ConfigError(
            f"{named(text=path)} is not UTF-8: {error}; convert it, for example with iconv -t utf-8"
        ) from None
    return characters, blank


def _last(file: BinaryIO, size: int, characters: int) -> int:
    """Return the byte at which the last ``characters`` characters begin."""
    file.seek(max(0, size - 4 * characters))  # a character is at most 4 bytes
    tail = file.read().decode(errors="ignore")  # ignores an incomplete character at the start
    return size - len(tail[len(tail) - characters :].encode())


def _seen(file: BinaryIO, cut: int, paragraphs: set[str]) -> tuple[set[str], Any]:
    """Return which of the wanted paragraphs are in a file before the cut, and its digest so far."""
    seen, digest, rest = set[str](), hashlib.sha256(), ""
    for data, text in reading(decoded(file, cut, BLOCK), cut, "comparing"):
        digest.update(data)
        *whole, rest = re.split(BREAK, rest + text)
        seen.update(paragraphs.intersection(map(str.strip, whole)))
        if len(rest) > 2 * FARTHEST:  # longer than any held-out paragraph
            rest = rest[-FARTHEST:]
    seen.update(paragraphs.intersection([rest.strip()]))
    return seen, digest


class Batches:
    """Rows of tokens in a shuffled order; batch ``step`` depends only on the seed and the step.

    Every epoch splits the text into windows from a different start, and shuffles them again.
    """

    def __init__(self, tokens: Tokens, *, batch: int, length: int, seed: int) -> None:
        self.tokens, self.batch, self.length, self.seed = tokens, batch, length, seed
        self.windows = len(tokens) // length - 1
        if self.windows < 1:
            raise ConfigError(
                f"the text is too short: {len(tokens)} tokens to train on; rows of {length} need"
                f" {2 * length}; give more text, or a smaller {named('tokens')}"
            )

    def at(self, step: int) -> Batch:
        """Return the rows of one step."""
        rows = np.stack([self.tokens[at : at + self.length] for at in self._rows(step)])
        rows = rows.astype(np.int64, copy=False)
        return Batch(rows, rows, None, self.batch * (self.length - 1), rows.size)

    def where(self, step: int) -> str:
        """Return where in the tokens of the text the rows of a batch start, in words."""
        return f"rows from tokens {', '.join(map(str, self._rows(step)))}"

    def count(self, epochs: float) -> int:
        """Return the number of batches in ``epochs`` passes through the text."""
        return math.ceil(epochs * self.windows / self.batch)

    def epoch(self, step: int) -> float:
        """Return how often the text was passed through in the first ``step`` batches."""
        return step * self.batch / self.windows

    def largest(self, steps: int, accumulate: int) -> list[int]:
        """Return the first step: all need the same memory."""
        return [0]

    def _rows(self, step: int) -> list[int]:
        """Return the indices of the tokens at which the rows of a batch start."""
        numbers = range(step * self.batch, (step + 1) * self.batch)
        places = [divmod(number, self.windows) for number in numbers]
        return [int(self._starts(epoch)[place]) for epoch, place in places]

    @functools.lru_cache(maxsize=2)  # noqa: B019 -- lives as long as the run
    def _starts(self, epoch: int) -> Array:
        """Return the shuffled starts of the windows of an epoch."""
        random = np.random.default_rng([self.seed, epoch])
        shift = random.integers(self.length)
        starts = random.permutation(self.windows)
        starts *= self.length
        starts += shift
        return starts


def held_out_rows(tokens: Array, *, batch: int, length: int) -> list[Batch]:
    """Return batches in which every token but the first is a label once.

    Consecutive rows share a token: the last of one is the first of the next, without its label.
    """
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
        count = sum(map(len, parts)) - len(parts)
        batches.append(Batch(rows, labels, None, count, count + len(parts)))
    return batches


def unigram_baseline(train: Tokens, labels: Array, vocabulary: int) -> float:
    """Return the loss of predicting the tokens in ``labels`` by frequency only, in nats per token.

    Frequencies are those of the training tokens, with one added to each count.
    """
    counts = np.ones(vocabulary)
    for start in range(0, len(train), COUNTED):
        counts += np.bincount(train[start : start + COUNTED], minlength=vocabulary)
    return float(-np.log(counts / counts.sum())[labels].mean())
