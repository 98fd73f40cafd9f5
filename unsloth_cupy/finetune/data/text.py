"""Reads running text, splits it into training and held-out text, and shuffles its batches."""

import codecs
import functools
import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import regular
from ...models.objective import IGNORE
from ..listener import reading
from ..naming import named

HELD_OUT_SHARE = 0.1
HELD_OUT_CHARACTERS = 50_000  # the held-out loss is exact to 0.02 nats, and evaluation is cheap
PARAGRAPH = "\n\n"
BREAK = r"\r?\n\r?\n"  # between paragraphs
SMALL = 2**20  # bytes; a text up to this size is tokenized as a whole, in memory
PIECE = 2**15  # bytes per piece of a larger text: an encoding takes 200 bytes per byte of text
BLOCK = 2**22  # bytes per read if nothing is tokenized
FARTHEST = 2**20  # search this many bytes before the split for the end of a paragraph
COUNTED = 2**20  # count this many tokens at a time


class Batch(NamedTuple):
    """Rows of tokens and their labels."""

    tokens: Array  # (batch, length)
    labels: Array  # the token, or IGNORE if it is no target
    offsets: Array | None  # starts of packed texts, see Transformer.logits
    label_count: int  # target tokens, or units of texts, for the mean of the loss
    real: int  # number of tokens without padding
    group: int = 1  # number of consecutive texts that belong together
    beside: Mapping[str, Array] = {}  # arrays of a method with one value per token
    facts: Mapping[str, Array] = {}  # arrays for the whole batch, which ranks do not divide


def without_texts(batch: Batch) -> Batch:
    """Return a batch with the same arrays but no text."""
    where = np.s_[:0] if batch.offsets is None else np.s_[:, :0]
    beside = {name: array[where] for name, array in batch.beside.items()}
    offsets = None if batch.offsets is None else batch.offsets[:1]
    arrays = batch.tokens[where], batch.labels[where], offsets
    return Batch(*arrays, 0, 0, batch.group, beside, batch.facts)


def texts_of(batch: Batch) -> list[Batch]:
    """Return each text of a batch as a batch of its own, without the tokens after its last label.

    The result for a text does not depend on padding, on packing, or on the other texts.
    """
    rows, width = batch.tokens.shape
    starts = np.arange(0, rows * width + 1, width) if batch.offsets is None else batch.offsets
    result = []
    for start, stop in pairwise(starts.tolist()):
        labels = batch.labels.reshape(1, -1)[:, start:stop]
        end = int(np.flatnonzero(labels[0] != IGNORE).max(initial=1)) + 1
        own, count = slice(start, start + end), int((labels[:, 1:] != IGNORE).sum())
        tokens = batch.tokens.reshape(1, -1)[:, own]
        result.append(Batch(tokens, labels[:, :end], None, count, tokens.size))
    return result


def tensors_of(batches: Sequence[Batch]) -> dict[str, Array]:
    """Return the content of batches as arrays named "NUMBER.NAME", to store them."""
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
    """Return the batches from the arrays that ``tensors_of`` returned."""
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
    desirable: bool = True  # the rating of the answer
    reference: Array | None = None  # log-probabilities of the labels under another model
    taught: Array | None = None  # rows in the stored predictions of a teacher
    value: float = 0.0  # a number of the method, such as a margin, a label or an advantage
    routes: Array | None = None  # experts that the model chose when it sampled each token
    base: Array | None = None  # log-probabilities of the labels under the initial model


class Tokens(Protocol):
    """Tokens of a text, in memory or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Array: ...


class Source(Protocol):
    """The batches of a run, by step."""

    def at(self, step: int) -> Batch:
        """Return the batch of one step."""

    def where(self, step: int) -> str:
        """Return the place of a batch in the text, for messages."""

    def count(self, epochs: float) -> int:
        """Return the number of batches in ``epochs`` passes through the text."""

    def epoch(self, step: int) -> float:
        """Return the number of epochs in the first ``step`` batches."""

    def largest(self, steps: int, accumulate: int, *, by_text: bool = False) -> list[int]:
        """Return the steps that may need the most memory; ``by_text``: each text is a pass."""


class TrainingData(NamedTuple):
    """The training data of a run: its batches, the held-out batches, and facts about them."""

    batches: Source
    held_out: list[Batch]
    baseline: float | None  # held-out loss of predictions from token frequencies
    learned: int  # number of target tokens in the training data
    held_out_tokens: int  # number of target tokens in the held-out data
    prompt: list[int]  # the prompt of samples, as tokens
    note: str  # summary of the data, or a warning; may be empty
    largest: tuple[int, int]  # rows and tokens per row of the largest batch
    examples: Sequence[Any] = ()  # training and held-out examples, for methods that need them


class Text(NamedTuple):
    """A training part and a held-out part of a text, which share no paragraph; read in pieces."""

    name: str
    path: Path | None  # None: Python's documentation
    opened: Callable[[], BinaryIO]  # opens the text
    size: int  # bytes
    cut: int  # bytes of the training part, which comes first
    held_out: str
    digest: str  # SHA-256 of both parts
    note: str  # warning about paragraphs in both parts, or empty

    def blocks(self) -> Iterator[tuple[bytes, str]]:
        """Yield the training part as blocks of (bytes, text); a small text is one block."""
        with self.opened() as file:
            yield from decoded(file, self.cut, SMALL if self.cut <= SMALL else PIECE)


def decoded(file: BinaryIO, stop: int, size: int) -> Iterator[tuple[bytes, str]]:
    """Yield the first ``stop`` bytes of a file as blocks of (bytes, characters that end in them).

    A byte order mark at the beginning is skipped.
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
    """Return the text of a file, or CPython's documentation for None, with a held-out part.

    ``keep`` is an object that must outlive the text, such as a temporary file.
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
    """Return the invalid byte in hexadecimal."""
    return f"0x{error.object[error.start]:02x}"


def python_documentation() -> str:
    """Return the language reference as ``pydoc_data.topics`` holds it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "this Python comes without pydoc_data.topics, the default text;"
            f" pass your own text with {named(text='FILE')}"
        ) from None
    return PARAGRAPH.join(topics.values())


def split(name: str, text: str) -> Text:
    """Return a string as a Text with a training part and a held-out part."""
    data = text.encode()
    return _split(name, None, lambda: io.BytesIO(data))


def resplit(text: Text, share: float) -> Text:
    """Return a text with another held-out share."""
    return _split(text.name, text.path, text.opened, share)


def _split(
    name: str, path: Path | None, opened: Callable[[], BinaryIO], share: float | None = None
) -> Text:
    """Hold out the end of a text, except paragraphs that the training part also contains.

    Repeated paragraphs would measure memorization: the Python documentation repeats a fifth of its
    paragraphs.  If the end has no other paragraphs, it is held out unchanged, with a warning.
    """
    with opened() as file:
        size = file.seek(0, os.SEEK_END)
        characters, blank = _counted(file, size, path)
        if blank:
            raise ConfigError(f"{named(text=path or name)} is empty; pass a file with text in it")
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
        note = "the end of the text repeats earlier paragraphs, so the evaluation loss measures"
        note += " memorization, not performance on new text"
    held_out = PARAGRAPH.join(new)
    digest.update(held_out.encode())
    return Text(name, path, opened, size, cut, held_out, digest.hexdigest(), note)


def _counted(file: BinaryIO, size: int, path: Path | None) -> tuple[int, bool]:
    """Return the number of characters of a file, and whether all of them are blank."""
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
    """Return the byte offset of the last ``characters`` characters."""
    file.seek(max(0, size - 4 * characters))  # a character is at most 4 bytes
    tail = file.read().decode(errors="ignore")  # ignores an incomplete character at the start
    return size - len(tail[len(tail) - characters :].encode())


def _seen(file: BinaryIO, cut: int, paragraphs: set[str]) -> tuple[set[str], Any]:
    """Return the ``paragraphs`` that occur before the cut, and the digest up to the cut."""
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
    """Shuffled windows of a text; batch ``step`` depends only on the seed and the step.

    Every epoch shifts the start of the windows and shuffles them again.
    """

    def __init__(self, tokens: Tokens, *, batch: int, length: int, seed: int) -> None:
        self.tokens, self.batch, self.length, self.seed = tokens, batch, length, seed
        self.windows = len(tokens) // length - 1
        if self.windows < 1:
            raise ConfigError(
                f"the text is too short: it has {len(tokens)} training tokens; rows of {length}"
                f" need {2 * length}; add text, or reduce {named('tokens')}"
            )

    def at(self, step: int) -> Batch:
        """Return the rows of one step."""
        rows = np.stack([self.tokens[at : at + self.length] for at in self._rows(step)])
        rows = rows.astype(np.int64, copy=False)
        return Batch(rows, rows, None, self.batch * (self.length - 1), rows.size)

    def where(self, step: int) -> str:
        """Return the first tokens of the rows of a batch, for messages."""
        return f"rows from tokens {', '.join(map(str, self._rows(step)))}"

    def count(self, epochs: float) -> int:
        """Return the number of batches in ``epochs`` passes through the text."""
        return math.ceil(epochs * self.windows / self.batch)

    def epoch(self, step: int) -> float:
        """Return the number of epochs in the first ``step`` batches."""
        return step * self.batch / self.windows

    def largest(self, steps: int, accumulate: int, *, by_text: bool = False) -> list[int]:
        """Return the first step: all steps need the same memory."""
        return [0]

    def _rows(self, step: int) -> list[int]:
        """Return the index of the first token of each row of a batch."""
        numbers = range(step * self.batch, (step + 1) * self.batch)
        places = [divmod(number, self.windows) for number in numbers]
        return [int(self._starts(epoch)[place]) for epoch, place in places]

    @functools.lru_cache(maxsize=2)  # noqa: B019 -- lives as long as the run
    def _starts(self, epoch: int) -> Array:
        """Return the shuffled first tokens of the windows of an epoch, (windows,)."""
        random = np.random.default_rng([self.seed, epoch])
        shift = random.integers(self.length)
        starts = random.permutation(self.windows)
        starts *= self.length
        starts += shift
        return starts


def held_out_rows(tokens: Array, *, batch: int, length: int) -> list[Batch]:
    """Return batches in which every token except the first is a label exactly once.

    The last token of a row is also the first of the next row, where it is no label.
    """
    if len(tokens) < 2:
        raise ConfigError("the text is too short for an evaluation part; add text")
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
    """Return the loss of a unigram model on ``labels``, in nats per token.

    The model is the frequency of the training tokens, with one added to each count.
    """
    counts = np.ones(vocabulary)
    for start in range(0, len(train), COUNTED):
        counts += np.bincount(train[start : start + COUNTED], minlength=vocabulary)
    return float(-np.log(counts / counts.sum())[labels].mean())
