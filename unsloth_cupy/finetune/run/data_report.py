"""A report on training data: counts, lengths, target tokens, examples.

report = inspect_data("chat.jsonl", "model")
report.learned, report.total, report.unit          3888, 10211, "tokens"
"""

import json
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from ...errors import ConfigError
from ...files import path_of
from ...models.text.chat import REASONING
from ..data.chat import Chat, LeftOut, Lesson, left_out_by
from ..data.forms import SIDES
from ..data.messages import shown
from ..data.records import Record, Records
from ..data.sources import find_data
from ..data.spans import NOBODY, encoded
from ..data.text import BREAK, Text
from ..data.tokenizer import load_tokenizer
from ..data.turns import end_tokens
from ..listener import reading
from .run_folder import model_folder, model_without_weights, words_folder

EXAMPLES = 3
LONGEST_EXAMPLE = 2000  # characters
PLAIN = (  # ChatML that writes all keys of a chat, for reports without a model
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ (call.function or call) | tojson }}"
    "</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AGAIN = (
    "\n... and the text up to an earlier answer, because the template writes the last answer"
    " differently:\n"
)
TOKENISED = 20_000  # maximum number of texts to tokenise


class Piece(NamedTuple):
    """A part of an example; ``learned``: it is a target of training."""

    text: str
    learned: bool


class Shown(NamedTuple):
    """An example, with its file and line; ``side`` of a pair: "chosen" or "rejected", else ""."""

    where: str
    pieces: list[Piece]
    side: str = ""


class DataReport(NamedTuple):
    """A report on training data."""

    note: str  # the recognised format, in one line
    forms: dict[str, int]  # texts by form
    train: int  # texts to train on
    held_out: int
    unit: str  # unit of lengths: "tokens" with a model, else "characters"
    counted: int  # texts whose lengths were counted
    lengths: dict[str, int]  # "least", "median", "99 %" and "most"
    histogram: list[tuple[int, int, int]]  # first length, last length, number of texts
    learned: int  # target tokens (or characters)
    total: int  # all tokens (or characters)
    unlearned: int  # texts without a target
    left_out: list[str]  # parts of the data that the model's template does not write, in words
    examples: list[Shown]


def inspect_data(
    data: Any,
    model: Any = None,
    *,
    ignore: Collection[str] = (),
    method: str = "sft",
    examples: int = EXAMPLES,
) -> DataReport:
    """Return a report on training data: counts, lengths, target tokens, examples.

    Parameters
    ----------
    data : path, str, list of these, iterable of mappings, or what read_data returns
        See ``read_data``.
    model : path, optional
        The folder of a model, an adapter or a run, whose tokenizer and chat template are used.
        None: lengths are in characters, and chats are formatted as ChatML.
    ignore : collection of str, optional
        Columns to ignore.
    method : str
        As in ``read_data``; each answer of a pair is a text.
    examples : int, optional
        Number of examples in the report.

    Raises
    ------
    ConfigError
        As in ``read_data``; or the folder holds no model.
    """
    if not isinstance(data, Text | Records):
        data = find_data(data, ignore, "inspect_data", method).read()
    words = Words(model, runs_on=isinstance(data, Text))
    lengths, learned, total, unlearned, shown = array("q"), 0, 0, 0, list[Shown]()
    left_out, chat = Counter[LeftOut](), words.chat
    for where, record in _records(data, TOKENISED if model is not None else None):
        without = list[Counter[LeftOut]]()
        names = ("",) if record.rejected is None else SIDES
        for name, side in zip(names, record.sides, strict=True):
            chat.left_out.clear()
            size, targets = words.counts(side, where)
            without.append(chat.left_out.copy())
            lengths.append(size)
            total, learned, unlearned = total + size, learned + targets, unlearned + (not targets)
            if len(shown) < examples:
                shown.append(Shown(where, words.pieces(side, where), name))
        left_out += left_out_by(without)
    if not lengths:
        raise ConfigError(f"inspect_data({data.name!r}): holds no text to train on")
    least, middle, high, most = np.quantile(lengths, [0, 0.5, 0.99, 1], method="higher").tolist()
    named = {"least": least, "median": middle, "99 %": high, "most": most}
    records = isinstance(data, Records)
    note = f"{data.path or data.name}: running text, all tokens are targets"
    return DataReport(
        data.note + data.repetitions if records else note,
        data.forms if records else {"text": 1},
        len(data.train) if records else len(lengths), len(data.held_out) if records else 0,
        "characters" if model is None else "tokens", len(lengths), named, _histogram(lengths),
        learned, total, unlearned,
        [each.said(n) for each, n in left_out.items() if model is not None], shown,
    )  # fmt: skip


def _records(data: Text | Records, most: int | None) -> Iterator[tuple[str, Record]]:
    """Yield at most ``most`` records with their places; for running text, its paragraphs."""
    if isinstance(data, Records):
        step = 1 if most is None else max(1, -(-len(data.train) // most))
        size = len(range(0, len(data.train), step))
        chosen = (data.train[number] for number in range(0, len(data.train), step))
        share = range(data.size // max(size, 1))
        for _, record in reading(((share, record) for record in chosen), data.size, "counting"):
            known = "" if record.value in (None, {}) else f", {shown(record.value)}"
            yield data.place(record.line) + known, record
        return
    paragraphs = ((f"{data.path or data.name}, paragraph {n}", Record(n, [], "", text))
                  for n, text in enumerate(_paragraphs(data), 1) if text.strip())  # fmt: skip
    yield from islice(paragraphs, most)


def _paragraphs(data: Text) -> Iterator[str]:
    rest = ""
    for _, text in reading(data.blocks(), data.cut, "counting"):
        *whole, rest = re.split(BREAK, rest + text)
        yield from whole
    yield rest


class Words:
    """Counts and shows texts as a model reads them; without a model, by characters.

    ``runs_on``: texts are paragraphs of a running text, which have no end token.
    """

    def __init__(self, model: Any, *, runs_on: bool) -> None:
        self.tokenizer: Any = None
        self.ends: list[int] = []
        self.chat = Chat(None)
        self.chat.source = PLAIN
        if model is not None:
            folder = model_folder(path_of("inspect_data: model", model))
            words = words_folder(folder)
            self.tokenizer, self.chat = load_tokenizer(words), Chat(words)
            config = model_without_weights(folder).config
            self.ends = [] if runs_on else end_tokens(self.chat, self.tokenizer, config)

    def counts(self, record: Record, where: str) -> tuple[int, int]:
        """Return the length of a text, and the number of its targets."""
        if self.tokenizer is None:
            lengths = [(_characters(m), m) for m in record.messages]
            answers = [n for n, m in lengths if m["role"] == "assistant" and m.get("weight", 1)]
            beside = len(record.prompt) + len(record.answer)
            return sum(n for n, _ in lengths) + beside, sum(answers) + len(record.answer)
        lessons = [self._encoded(record, lesson) for lesson in self._lessons(record, where)]
        return len(lessons[0][0]), sum(int(learned.sum()) for _, learned in lessons)

    def _lessons(self, record: Record, where: str) -> list[Lesson]:
        """Return the training texts of a record; the first one is the whole record."""
        try:
            return record.texts(self.chat)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _encoded(self, record: Record, lesson: Lesson) -> tuple[Any, Any]:
        """Return the tokens of a text, and a mask of its target tokens."""
        is_chat, ends = bool(record.messages), [] if record.asks else self.ends
        tokens, owners = encoded(
            self.tokenizer, lesson.text, lesson.spans, is_chat, ends, self.chat
        )
        return tokens, owners != NOBODY

    def pieces(self, record: Record, where: str) -> list[Piece]:
        """Return the beginning of a text in pieces: targets, and other text."""
        pieces = list[Piece]()
        for lesson in self._lessons(record, where):
            pieces += [Piece(AGAIN, False)] * bool(pieces)
            if self.tokenizer is None:
                text, spans, _ = lesson
                units: Sequence[Any] = text
                marks = [any(a <= n < b for a, b in spans) for n in range(len(text))]
            else:
                tokens, learned = self._encoded(record, lesson)
                units, marks = tokens.tolist(), learned.tolist()
            for known, run in groupby(zip(units, marks, strict=True), key=lambda pair: pair[1]):
                part = [unit for unit, _ in run]
                words = "".join(part) if self.tokenizer is None else self._decoded(part)
                pieces.append(Piece(words, known))
        return _begin(pieces)

    def _decoded(self, tokens: list[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


def _characters(message: dict[str, Any]) -> int:
    """Return the number of characters of a message: content, reasoning and tool calls."""
    calls = message.get("tool_calls")
    texts = (message["content"], *(message.get(key) for key in REASONING))
    return sum(len(text or "") for text in texts) + len(json.dumps(calls)) * bool(calls)


def _begin(pieces: list[Piece]) -> list[Piece]:
    """Truncate an example to its first ``LONGEST_EXAMPLE`` characters."""
    result, left = list[Piece](), LONGEST_EXAMPLE
    for piece in pieces:
        if len(piece.text) > left:
            return [*result, Piece(piece.text[:left], piece.learned), Piece(" ...", False)]
        result.append(piece)
        left -= len(piece.text)
    return result


def _histogram(lengths: "array[int]") -> list[tuple[int, int, int]]:
    """Return a histogram of lengths, with bins between powers of two."""
    bins = np.frexp(np.maximum(lengths, 1))[1]
    counts = np.bincount(bins)
    first = int(bins.min())
    return [(0 if power == 1 else 2 ** (power - 1), 2**power - 1, int(counts[power]))
            for power in range(first, len(counts))]  # fmt: skip
