"""The records of training data: texts, instructions and chats, all checked before training.

A tenth of the records is held out.  Large data sets are stored in a temporary file, so memory holds
only a few bytes per record.
"""

import bisect
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...models.text.chat import Span
from ..listener import reading
from .chat import Chat, Lesson
from .data_files import Located, Temporary, located, name_of
from .forms import Content, content_of, listed
from .labelled import labelled_of
from .preferences import pair_of, rated_of, scored_of
from .prompts import prompt_of
from .related import related_of
from .rows import KINDS, LABELLED, PAIRS, PROMPTS, RATED, RELATED, SCORED, TEXTS
from .tables import PROCESSED, ROW, Row, rows_of
from .text import HELD_OUT_CHARACTERS, HELD_OUT_SHARE, SMALL

RECORDS = 1000  # records per block of text to train a tokenizer on
FIRST = 100  # rows of each file to check before any file is read whole
HELD_OUT_PROMPTS = 100  # an answer is sampled for each: accuracy is exact to 0.05
MOST_NAMES = 1000  # unused columns to remember
IN_MEMORY = 2**26  # bytes of records in memory; more are stored in a file
ITEM = 100  # bytes of Python objects per item, besides its characters
READERS: Mapping[str, Callable[..., Content]] = {
    TEXTS: content_of, PAIRS: pair_of, RATED: rated_of, SCORED: scored_of,
    LABELLED: labelled_of, RELATED: related_of, PROMPTS: prompt_of,
}  # fmt: skip


class Record(NamedTuple):
    """One row of a file: a chat, or a prompt (may be empty) and its answer."""

    line: int  # its line, numbered through all files
    messages: list[dict[str, Any]]
    prompt: str
    answer: str
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    rejected: Any = None  # the other answer of a pair: text, or the whole chat
    desirable: bool | None = None  # the rating of an answer
    value: Any = None  # margin of a pair, label of a text, negatives, or columns for rewards

    @property
    def asks(self) -> bool:
        """Whether the record is a prompt with columns for reward functions."""
        return isinstance(self.value, dict)

    @property
    def sides(self) -> "list[Record]":
        """A list of the record; for a pair, the record of each of the two answers."""
        if self.rejected is None:
            return [self]
        chosen = self._replace(rejected=None, desirable=True)
        other = {"messages": self.rejected} if self.messages else {"answer": self.rejected}
        return [chosen, chosen._replace(desirable=False, **other)]

    def texts(self, chat: Chat) -> list[Lesson]:
        """Return the training texts of the record, with their target spans."""
        beside = (self.messages, self.tools, self.chat_template_kwargs)
        if self.asks:
            return [Lesson(chat.asked(*beside) if self.messages else self.prompt, [], [])]
        if self.messages:
            return chat.spans(*beside)
        whole = self.prompt + self.answer
        return [Lesson(whole, [Span(len(self.prompt), len(whole))], [0])]

    @property
    def answers(self) -> int:
        """The number of answers of a chat; 1 for other records."""
        mine = sum(message["role"] == "assistant" for message in self.messages)
        return mine if self.messages else 1

    @property
    def kind(self) -> str:
        """The kind of targets of the record, in the plural."""
        return "answers" if self.messages else "completions" if self.prompt else "texts"

    def content(self) -> str:
        """Return the content of a record as text, equal for equal records."""
        return repr((*self[1:4], *(each for each in self[4:] if each is not None)))


class Records(NamedTuple):
    """A training part and a held-out part of the rows of files, without common records."""

    path: Path | None  # None for several files or standard input
    name: str
    digest: str
    size: int  # bytes
    train: Sequence[Record]
    held_out: Sequence[Record]
    files: tuple[
        tuple[int, str, str], ...
    ] = ()  # per file: the number of the line before it, its name, the text before a line number
    note: str = ""  # a summary of the forms, in one line
    forms: dict[str, int] = {}  # noqa: RUF012 -- number of records by form
    method: str = "sft"  # the method that reads the records
    evaluated: Any = None  # records of a separate evaluation file, whose lines are negative
    repeated: int = 0  # number of rows that are left out, as they equal rows that are held out

    @property
    def chats(self) -> bool:
        """Whether any training record is a chat."""
        return any(record.messages for record in self.train)

    @property
    def repetitions(self) -> str:
        """The number of repeated rows that are left out, as text to append to a summary."""
        rows = f"{self.repeated:,} repeated row{'s' * (self.repeated > 1)}"
        return f"; {rows} left out (equal to evaluation rows)" * bool(self.repeated)

    @property
    def where(self) -> str:
        """The names of the files, for messages."""
        names = [name for _, name, _ in self.files] or [str(self.path)]
        return names[0] + f" and {len(names) - 1} more" * (len(names) > 1)

    def place(self, line: int) -> str:
        """Return the file and the line of a record, for messages."""
        if line < 0:
            return str(self.evaluated.place(-line))
        if not self.files:
            return f"{self.path}:{line}"
        start, _, before = self.files[bisect.bisect_left(self.files, (line,)) - 1]
        return f"{before}{line - start}"

    def texts(self, record: Record, chat: Chat) -> list[Lesson]:
        """Return ``record.texts(chat)``; errors name the file and the line."""
        try:
            return record.texts(chat)
        except ConfigError as error:
            raise ConfigError(f"{self.place(record.line)}: {error}") from None

    def blocks(self) -> Iterator[tuple[str, str]]:
        """Yield blocks of text to train a new tokenizer on; a small file is one block.

        Each block is (text, text), in the format of ``Text.blocks``.
        """
        records = iter(self.train)
        count = len(self.train) if self.size <= SMALL else RECORDS
        while part := [*islice(records, count)]:
            text = "\n".join(map(_words, part))
            yield text, text


def _words(record: Record) -> str:
    """Return all text of a record, including roles of messages."""
    values = (value for message in record.messages for value in message.values())
    texts = (value if isinstance(value, str) else json.dumps(value) for value in values if value)
    tools = [json.dumps(record.tools)] if record.tools else []
    return "\n".join([*tools, *texts, record.prompt, record.answer])


class Stored(Sequence[Record]):
    """Records in a temporary file, read on access; slices share the file."""

    def __init__(self, kept: Temporary, starts: "array[int]", chosen: Array) -> None:
        self.kept, self.starts, self.chosen = kept, starts, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Stored(self.kept, self.starts, self.chosen[index])
        number = int(self.chosen[index])
        self.kept.file.seek(self.starts[number])
        return Record(
            *json.loads(self.kept.file.read(self.starts[number + 1] - self.starts[number]))
        )


class _Collected:
    """Collects records in memory, and in a temporary file beyond ``IN_MEMORY`` bytes."""

    def __init__(self) -> None:
        self.records, self.waiting = list[Record](), 0  # records in memory, and their bytes
        self.kept: Temporary | None = None
        self.starts = array("q", [0])
        self.digests, self.sizes = bytearray(), array("q")

    def append(self, record: Record) -> None:
        """Add a record."""
        content = record.content()
        self.digests += hashlib.blake2b(content.encode(), digest_size=16).digest()
        self.sizes.append(len(content))
        self.records.append(record)
        self.waiting += ROW + ITEM * content.count(",") + len(content)
        if self.waiting > (SMALL if self.kept else IN_MEMORY):
            self._store()

    def _store(self) -> None:
        """Move the records in memory to the file."""
        self.kept = self.kept or Temporary()
        for record in self.records:
            size = self.kept.file.write(json.dumps(record).encode())
            self.starts.append(self.starts[-1] + size)
        self.records, self.waiting = [], 0

    def some(self, chosen: Array) -> Sequence[Record]:
        """Return the records at these indices."""
        if not self.kept:
            return [self.records[number] for number in chosen.tolist()]
        self._store()
        self.kept.file.flush()
        return Stored(self.kept, self.starts, chosen)


def read_records(
    data: Any,
    name: str = "",
    ignore: Collection[str] = (),
    more: str = "",
    method: str = "sft",
    whole: bool = False,
) -> Records:
    """Return the records of files, split into training and held-out records.

    ``data`` is an argument or a result of ``located``.  ``ignore`` names columns to skip, ``more``
    is a message to append to the summary, ``method`` is the method that reads the rows.  With
    ``whole``, no record is held out, for a file to evaluate on.

    Raises
    ------
    ConfigError
        A file cannot be read, or a row is invalid; the message names file, line and cure.
    """
    if not (isinstance(data, list) and data and all(isinstance(e, Located) for e in data)):
        data, more = located(data)
    files: list[Located] = data
    alone = files[0].path if len(files) == 1 and files[0].keep is None else None
    collected, digest = _Collected(), hashlib.sha256()
    counts, unused, starts, ends = Counter[str](), dict[str, None](), list[int](), list[int]()
    line, size, absent = 0, 0, {*ignore}
    for file in files[1:]:  # report errors in their first rows before reading the first file
        if file.kind not in PROCESSED:
            for number, row in enumerate(islice(rows_of(file, hashlib.sha256()), FIRST), 1):
                _content(file, number, row, ignore, method)
    for file in files:
        starts.append(line)
        own = hashlib.sha256() if len(files) > 1 or file.weight != 1 else digest
        bytes_read = file.path.stat().st_size
        rows = reading(rows_of(file, own), bytes_read, "reading")
        for number, row in enumerate(rows, 1):
            content = _content(file, number, row, ignore, method)
            counts[content.form.name] += 1
            absent.difference_update(row.values)
            if len(unused) < MOST_NAMES:
                unused.update(dict.fromkeys(content.form.unused))
            line = starts[-1] + (number if file.kind == "JSON" else row.line)
            collected.append(Record(line, *content[1:]))
        ends.append(len(collected.sizes))
        size += bytes_read
        if own is not digest:
            digest.update(f"{file.weight} {own.hexdigest()}\n".encode())
    if ignore:
        digest.update(repr(sorted(ignore)).encode())
    where = files[0].name + f" and {len(files) - 1} more" * (len(files) > 1)
    weights = np.repeat([file.weight for file in files], np.diff([0, *ends]))
    most = HELD_OUT_PROMPTS if PROMPTS in KINDS[method] else len(weights)
    train, held_out, repeated = _split(where, collected, weights, most=most, whole=whole)
    # JSON counts objects, not lines: one line may hold several
    before = (f"{f.name}, object " if f.kind == "JSON" else f.before for f in files)
    return Records(
        alone, name or name_of(files), digest.hexdigest(), size, train,
        held_out, tuple(zip(starts, (file.name for file in files), before, strict=True)),
        _summary(where, counts, ignore, unused, more) + _absent(absent), dict(counts), method,
        repeated=repeated,
    )  # fmt: skip


def _content(file: Located, number: int, row: Row, ignore: Collection[str], method: str) -> Content:
    """Return the content of a row, or raise a ConfigError that names file, line and cure."""
    try:
        return READERS[KINDS[method][0]](row.values, ignore)
    except ConfigError as error:
        of_list = f"object {number}: " if file.kind == "JSON" else ""
        raise ConfigError(f"{file.before}{row.line}: {of_list}{error}") from None


def _summary(
    where: str, counts: "Counter[str]", ignore: Collection[str], unused: Collection[str], more: str
) -> str:
    """Return a summary of the forms and unused columns of files, in one line."""
    forms = [f"{count:,} with {form}" for form, count in counts.most_common()]
    text = f"{where}: {forms[0].replace(' with ', ' rows with ', 1)}"
    if len(forms) > 1:
        text = f"{where}: {counts.total():,} rows, {', '.join(forms)}"
    if unused := [name for name in unused if name not in ignore]:
        text += f"; unused column{'s' * (len(unused) > 1)}: {listed(unused)}"
    return text + f"; {more}" * bool(more)


def _absent(columns: Collection[str]) -> str:
    """Return a message about columns to ignore that no row has."""
    return f"; no row has the columns to ignore: {listed(sorted(columns))}" * bool(columns)


def split(records: Records, share: float) -> Records:
    """Return records with another random held-out share; duplicates stay together."""
    times = Counter(record.line for record in records.train)
    every = {record.line: record for part in (records.train, records.held_out) for record in part}
    collected = _Collected()
    for line in sorted(every):
        collected.append(every[line])
    weights = np.array([max(times[line], 1) for line in sorted(every)], float)
    train, held_out, more = _split(records.where, collected, weights, share)
    repeated = records.repeated + more  # no part has the rows that the first split left out
    return records._replace(train=train, held_out=held_out, repeated=repeated)


def _split(
    where: str,
    collected: _Collected,
    weights: Array,
    share: float | None = None,
    most: int | None = None,
    whole: bool = False,
) -> tuple[Sequence[Record], Sequence[Record], int]:
    """Split records at random into training and held-out records; duplicates stay together.

    The last result is the number of records that are left out, because they equal held-out ones.

    ``share`` is the held-out share.  If it is None, a tenth is held out, up to ``most`` records and
    ``HELD_OUT_CHARACTERS``.  With ``whole``, nothing is held out.

    A record of weight 2 occurs twice in the training part; one of weight 0.5, with probability 0.5.
    """
    digests = np.frombuffer(bytes(collected.digests), "V16")
    if len(digests) < 2 - whole:
        cure = "add a line" if whole else "write two lines or more: one is held out for evaluation"
        raise ConfigError(f"{where} {'holds one record' if len(digests) else 'is empty'}; {cure}")
    if whole:
        return collected.some(np.arange(len(digests))), [], 0
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    order = np.random.default_rng(0).permutation(np.sort(first)).tolist()
    held, characters = list[int](), 0
    for index in order[: max(1, int(len(order) * (share or HELD_OUT_SHARE)))]:
        if held and share is None and (characters > HELD_OUT_CHARACTERS or len(held) == most):
            break
        held.append(index)
        characters += collected.sizes[index]
    chance = np.random.default_rng(1).random(len(digests))
    times = np.floor(weights).astype(np.int64) + (chance < weights % 1)
    equal = np.isin(group, group[held]) & (times > 0)
    times[equal] = 0
    equal[held] = False
    train = np.repeat(np.arange(len(digests)), times)
    if not len(train):
        cure = "write lines that differ" if len(first) < 2 else "give more lines, or more weight"
        only = (
            "only equal lines"
            if len(first) < 2
            else "no training line besides the evaluation lines"
        )
        raise ConfigError(f"{where} holds {only}; {cure}")
    held_out = collected.some(np.array(sorted(held)))
    return collected.some(train), held_out, int(equal.sum())
