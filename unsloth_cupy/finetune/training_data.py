"""Training batches and held-out batches of a run, from running text or from a file of records.

An example is the tokens of a text and, for each, whether it is a label to be learned.  Each epoch
shuffles the examples; batch n takes as many as fit of those that follow batch n - 1, so it depends
only on the seed and n.
"""

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from ..models.chat import Span
from ..models.tokenizer import check_tokens
from .chat import Chat
from .listener import reading
from .naming import named
from .records import Record, Records
from .text import IGNORE, Batch, Batches, Text, TrainingData, held_out_rows, unigram_baseline
from .tokenizer import encode, token_kind
from .tokens import tokens_of

if TYPE_CHECKING:
    from ..models.config import Config

PROMPT_TOKENS = 12  # tokens of running text from which a sample starts
SEEN = 20_000  # batches among which the largest is looked for: later ones are as large
NOBODY = -1  # the span of a token that is not learned
LEAST = 4  # minimum of tokens to learn: as many as running text has in two rows of 2


class Example(NamedTuple):
    """The tokens of a text, its labels (a token or IGNORE), and its line in the file."""

    tokens: Array
    labels: Array
    line: int


class Examples(Sequence[Example]):
    """Many examples in little memory: 2 or 4 bytes for a token, and 1 for whether it is learned."""

    def __init__(self, kind: np.dtype[Any]) -> None:
        self.kind = kind
        self.tokens, self.learned = bytearray(), bytearray()
        self.ends, self.lines = [0], list[int]()
        self.counts = Counter[str]()  # of answers, by what they are, and of their chats

    def append(self, example: Example) -> None:
        """Add an example."""
        self.tokens += example.tokens.astype(self.kind).tobytes()
        self.learned += (example.labels != IGNORE).tobytes()
        self.ends.append(self.ends[-1] + len(example.tokens))
        self.lines.append(example.line)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: Any) -> Any:
        start, stop = self.ends[index], self.ends[index + 1]
        tokens = np.frombuffer(self.tokens, self.kind, stop - start, start * self.kind.itemsize)
        learned = np.frombuffer(self.learned, bool, stop - start, start)
        tokens = tokens.astype(np.int64)
        return Example(tokens, np.where(learned, tokens, IGNORE), self.lines[index])

    def labels(self) -> Array:
        """Return the learned tokens of all examples."""
        labels: Array = np.frombuffer(self.tokens, self.kind)[np.frombuffer(self.learned, bool)]
        return labels

    def lengths(self) -> Iterator[int]:
        """Return the number of tokens of each example."""
        return (stop - start for start, stop in pairwise(self.ends))

    def largest(self, shape: "Shape") -> tuple[int, int]:
        """Return the rows, and the tokens in a row, of the largest batch of these examples."""
        longest = max(stop - start for start, stop in pairwise(self.ends))
        tokens = min(shape.batch * shape.length, self.ends[-1])
        return (-(-tokens // longest) if shape.pack else min(shape.batch, len(self)), longest)

    @property
    def most(self) -> int:
        """The largest token."""
        return int(np.frombuffer(self.tokens, self.kind).max(initial=0))


class Shape(NamedTuple):
    """The shape of a batch."""

    batch: int  # rows
    length: int  # tokens in a row
    pack: bool  # whether examples share rows
    pad: int  # the token that fills rows up

    def fits(self, count: int, used: int) -> bool:
        """Return whether ``count`` examples of ``used`` tokens in all fit into one batch."""
        return used <= self.batch * self.length if self.pack else count <= self.batch

    def batch_of(self, examples: Sequence[Example]) -> Batch:
        """Return examples as one batch: packed end to end, or one in each row.

        Packed examples need no padding; else rows are as long as the longest example.
        """
        lengths = [len(example.tokens) for example in examples]
        ends = np.cumsum([0, *lengths])
        size = (1, int(ends[-1])) if self.pack else (len(examples), max(lengths))
        tokens = np.full(size, self.pad, np.int64)
        labels = np.full_like(tokens, IGNORE)
        starts = ends if self.pack else np.arange(len(examples)) * size[1]
        for start, example in zip(starts.tolist(), examples, strict=False):
            place = slice(start, start + len(example.tokens))
            tokens.reshape(-1)[place] = example.tokens
            labels.reshape(-1)[place] = example.labels
        count = int((labels != IGNORE).sum())
        return Batch(tokens, labels, ends if self.pack else None, count, int(ends[-1]))


class Packed:
    """Batches of examples in a shuffled order."""

    def __init__(
        self,
        examples: Sequence[Example],
        shape: Shape,
        seed: int,
        name: str,
        place: Callable[[int], str] | None = None,  # the file of a line, if there are several
    ) -> None:
        self.examples, self.shape, self.seed, self.name = examples, shape, seed, name
        self.place = place
        self.starts = [0]  # number of the first example of each batch, counted over all epochs
        known = examples.lengths() if isinstance(examples, Examples) else None
        self.lengths = array("q", known or (len(example.tokens) for example in examples))

    def at(self, step: int) -> Batch:
        """Return the batch of one step."""
        return self.shape.batch_of(self._examples(step))

    def where(self, step: int) -> str:
        """Return the lines of the file that a batch comes from, as text."""
        lines = sorted({example.line for example in self._examples(step)})
        shown = ", ".join(map(self.place or str, lines[:20])) + (", ..." if len(lines) > 20 else "")
        if self.place:
            return shown
        return f"line{'s' * (len(lines) > 1)} {shown} of {self.name}"

    def count(self, epochs: float) -> int:
        """Return the number of batches in ``epochs`` passes through the examples."""
        step, wanted = 0, epochs * len(self.examples)
        while self.starts[-1] < wanted:
            self._find_batches(len(self.starts))
        while self.starts[step] < wanted:
            step += 1
        return step

    def epoch(self, step: int) -> float:
        """Return how often the examples were passed through in the first ``step`` batches."""
        self._find_batches(step)
        return self.starts[step] / len(self.examples)

    def _examples(self, step: int) -> list[Example]:
        """Return the examples of a batch."""
        self._find_batches(step + 1)
        return [self.examples[each] for each in self._indices(step)]

    def _find_batches(self, count: int) -> None:
        """Find the limits of the first ``count`` batches."""
        while len(self.starts) <= count:
            first = last = self.starts[-1]
            used = self.lengths[self._index(last)]
            while self.shape.fits(last - first + 1, used) and last - first < len(self.examples):
                last += 1
                used += self.lengths[self._index(last)]
            self.starts.append(last)

    def largest(self, steps: int, accumulate: int) -> list[int]:
        """Return the steps that may need most memory, of ``accumulate`` batches each.

        They have the largest of their first batches, and of the others: the gradients of earlier
        batches are in memory while those run.
        """
        count = min(steps, max(1, SEEN // accumulate)) * accumulate
        self._find_batches(count)
        sizes = [self._size(number) for number in range(count)]
        first = range(0, count, accumulate)
        parts = first, [number for number in range(count) if number not in first]
        chosen = [max(part, key=lambda n: (sizes[n], -n)) for part in parts if part]
        return list(dict.fromkeys(number // accumulate for number in chosen))

    def _size(self, batch: int) -> int:
        """Return the tokens of a batch, with its padding."""
        lengths = [self.lengths[index] for index in self._indices(batch)]
        return sum(lengths) if self.shape.pack else len(lengths) * max(lengths)

    def _indices(self, batch: int) -> list[int]:
        return [self._index(n) for n in range(self.starts[batch], self.starts[batch + 1])]

    def _index(self, number: int) -> int:
        """Return the index of an example by its number, counted over all epochs."""
        epoch, place = divmod(number, len(self.examples))
        return self._order(epoch)[place]

    @functools.lru_cache(maxsize=2)  # noqa: B019 -- lives as long as the run
    def _order(self, epoch: int) -> list[int]:
        """Return the shuffled indices of the examples in an epoch."""
        order: list[int] = (
            np.random.default_rng([self.seed, epoch]).permutation(len(self.examples)).tolist()
        )
        return order


def sequential_batches(examples: Sequence[Example], shape: Shape) -> list[Batch]:
    """Return batches that hold each example once, in order."""
    batches: list[Batch] = []
    waiting: list[Example] = []
    for example in examples:
        used = sum(len(each.tokens) for each in waiting) + len(example.tokens)
        if not shape.fits(len(waiting) + 1, used):
            batches.append(shape.batch_of(waiting))
            waiting = []
        waiting.append(example)
    return [*batches, shape.batch_of(waiting)]


def from_text(
    text: Text, tokenizer: Any, config: "Config", shape: Shape, seed: int
) -> TrainingData:
    """Return the batches of running text, each row a window of it."""
    held_out, train = encode(tokenizer, text.held_out), tokens_of(text, tokenizer)
    most = [int(part.max()) for part in (train, held_out) if len(part)]
    check_tokens(tokenizer, most, config.vocab)
    batches = Batches(train, batch=shape.batch, length=shape.length, seed=seed)
    rows = held_out_rows(held_out, batch=shape.batch, length=shape.length)
    baseline = unigram_baseline(train, held_out[1:], config.vocab)
    prompt = held_out[:PROMPT_TOKENS].tolist()
    largest = (shape.batch, shape.length)
    return TrainingData(
        batches, rows, baseline, len(train), len(held_out), prompt, text.note, largest
    )


def from_records(
    records: Records, tokenizer: Any, config: "Config", shape: Shape, seed: int, chat: Chat
) -> TrainingData:
    """Return the batches of the records in a file, in which prompts are not learned.

    Raises
    ------
    ConfigError
        No record has a label in its first ``shape.length`` tokens, or all records together
        have fewer than 4.
    """
    ends = [token for token in config.end_tokens if token < config.vocab]
    cut = functools.partial(_examples, records, tokenizer, ends, shape.length, chat)
    (train, long, lost), (held_out, *_) = cut(records.train), cut(records.held_out)
    for part, which in ((train, "learned"), (held_out, "held out")):
        if not part:
            raise ConfigError(
                f"{named(text=records.where)}: no text that is {which} gets to its answer in"
                f" {named(tokens=shape.length)}; give more {named('tokens')}"
            )
    check_tokens(tokenizer, [train.most, held_out.most], config.vocab)
    name = records.path.name if records.path else records.where
    lines_of_one = [of_it for _, _, of_it in records.files] in ([], [":"])
    place = None if lines_of_one else records.place
    batches = Packed(train, shape, seed, name, place)
    learned, held_out_labels = train.labels(), held_out.labels()
    if len(learned) < LEAST:
        raise ConfigError(
            f"{named(text=records.where)} is too short: it has {len(learned)} token"
            f"{'s' * (len(learned) > 1)} to learn in all its lines; {LEAST} are the minimum: give"
            " more lines"
        )
    first = held_out[0]
    begin = int((first.labels != IGNORE).argmax())
    prompt = first.tokens[: begin if begin > 1 else PROMPT_TOKENS].tolist()
    note = account(train, long, lost, shape.length)
    baseline = unigram_baseline(learned, held_out_labels, config.vocab)
    return TrainingData(batches, sequential_batches(held_out, shape), baseline, len(learned),
                   len(held_out_labels), prompt, note, train.largest(shape))  # fmt: skip


def account(examples: Examples, cut: int, dropped: int, length: int) -> str:
    """Return in words what of the texts is learned."""
    counts, parts = examples.counts, []
    for kind in ("answers", "completions", "texts"):
        if every := counts[f"all {kind}"]:
            parts.append(f"{counts[kind]:,} of {every:,} {kind}")
            parts[-1] += f" of {counts['chats']:,} chats" * (kind == "answers")
    learned = f"{len(examples.labels()):,} of {examples.ends[-1]:,} tokens"
    text = f"{', '.join(parts)} are learned ({learned}), {dropped:,} dropped"
    text += f", {cut:,} cut at {named(tokens=length)} (which lose {counts['lost']:,} answers)"
    if (more := counts["lessons"] - counts["chats"]) > 0:
        text += f"; {more:,} more texts, as the template writes the last answer in its own way"
    return text


def _examples(
    records: Records,
    tokenizer: Any,
    ends: Sequence[int],
    most: int,
    chat: Chat,
    part: Sequence[Record],
) -> tuple[Examples, int, int]:
    """Return examples, the number of truncated records, and the number without labels.

    Running text longer than a row is split into several examples; a record with a prompt is
    truncated.
    """
    result, long, lost = Examples(token_kind(tokenizer)), 0, 0
    counts = result.counts
    # for the progress bar: about the bytes of a record, as the length of a range
    share = range(records.size // (len(records.train) + len(records.held_out)))
    for _, record in reading(((share, record) for record in part), records.size, "tokenising"):
        try:
            lessons = record.texts(chat)
        except ConfigError as error:
            raise ConfigError(f"{records.place(record.line)}: {error}") from None
        is_chat, running, is_long = bool(record.messages), record.kind == "texts", False
        known, kept = set[int](), set[int]()  # answers, and those that stay when texts are cut
        for text, spans, turns in lessons:
            tokens, owners = encoded(tokenizer, text, spans, is_chat, ends, chat)
            owners[:1] = NOBODY  # no token before it predicts it
            known.update(turns[n] for n in np.unique(owners[owners != NOBODY]))
            is_long |= len(tokens) > most and not running
            for start in range(0, len(tokens) if running else 1, most):
                own, mine = tokens[start : start + most], owners[start : start + most].copy()
                mine[:1] = NOBODY
                if (mine != NOBODY).any():
                    kept.update(turns[n] for n in np.unique(mine[mine != NOBODY]))
                    labels = np.where(mine == NOBODY, IGNORE, own)
                    result.append(Example(own, labels, record.line))
        long, lost = long + is_long, lost + (not kept)
        counts[f"all {record.kind}"] += record.answers
        counts[record.kind] += len(kept)
        counts["lost"] += len(known - kept)
        if is_chat:
            counts["chats"] += 1
            counts["lessons"] += max(1, len(lessons))
    return result, long, lost


def encoded(
    tokenizer: Any, text: str, spans: Sequence[Span], is_chat: bool, ends: Sequence[int], chat: Chat
) -> tuple[Array, Array]:
    """Return the tokens of a text, as the model reads them, and which span each belongs to.

    A token belongs to the span that it overlaps, or to ``NOBODY``.  An answer is over at its first
    end token, where generation stops, unless the template marks answers itself.  A text gets an end
    token if it is not a chat of a model's own template, which writes all special tokens.
    """
    encoding = tokenizer.encode(text, add_special_tokens=not is_chat)
    tokens = np.asarray(encoding.ids, np.int64)
    places = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
    starts, stops = places.T
    # offsets may leave spaces out: a token of spaces alone then begins where the one before ended
    before = np.maximum.accumulate(np.append(0, stops))[:-1]
    spaces = (starts == stops) & (np.asarray(encoding.special_tokens_mask) == 0)
    starts = np.where(spaces, np.minimum(starts, before), starts)
    owners = np.full(len(tokens), NOBODY)
    ended = False
    for number, (start, stop) in enumerate(spans):
        empty = (starts == stops) & spaces  # the first one
        inside = np.flatnonzero((stops + empty > start) & (starts < stop))
        last = np.flatnonzero(np.isin(tokens[inside], ends))
        ended = is_chat and not chat.marked and len(last) > 0
        owners[inside[: last[0] + 1] if ended else inside] = number
        after = int(inside[-1]) + 1 if len(inside) else len(tokens)
        open_end = is_chat and chat.own and not ended and not chat.marked and after < len(tokens)
        if open_end and tokens[after] in ends:  # the answer ends as the next question begins
            owners[after] = number
    if len(ends) and not (is_chat and (chat.own or ended)):
        if not len(tokens) or tokens[-1] not in ends:
            tokens, owners = np.append(tokens, ends[0]), np.append(owners, NOBODY)
        owners[-1] = len(spans) - 1
    return tokens, owners
