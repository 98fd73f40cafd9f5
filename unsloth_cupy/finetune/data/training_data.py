"""Training batches and held-out batches of a run, from running text or from a file of records.

An example is the tokens of a text, with a mask of the target tokens.  Each epoch shuffles the
examples.  Batch n contains as many examples as fit, starting after the last example of batch n - 1,
so it depends only on the seed and on n.
"""

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...models.objective import IGNORE
from ...models.text.tokenizer import check_tokens
from ...training.gradients import sums_held
from ..listener import reading
from ..naming import named
from .chat import Chat, LeftOut, left_out_by
from .records import Record, Records
from .rows import Format
from .spans import NOBODY, encoded
from .text import (
    Batch,
    Batches,
    Example,
    Text,
    TrainingData,
    held_out_rows,
    unigram_baseline,
)
from .tokenizer import encode, token_kind
from .tokens import tokens_of
from .turns import end_tokens

if TYPE_CHECKING:
    from ...models.configs.config import Config

PROMPT_TOKENS = 12  # length of the prompt of a sample, from running text
SEEN = 20_000  # search this many batches for the largest; later ones are of the same size
LEAST = 4  # minimum number of target tokens: two rows of 2 tokens of running text


class Examples(Sequence[Example]):
    """A compact list of examples: 2 or 4 bytes per token, and 1 byte for its target mask.

    ``reference`` holds the log-probabilities of a reference model for all tokens, if a method needs
    them; ``taught`` the rows of the stored predictions of a teacher.
    """

    def __init__(self, kind: np.dtype[Any]) -> None:
        self.kind = kind
        self.tokens, self.learned, self.desirable = bytearray(), bytearray(), bytearray()
        self.reference: Array | None = None
        self.taught: Array | None = None
        self.ends, self.lines, self.values = [0], list[int](), array("d")
        self.counts = Counter[str]()  # answers, chats, tokens, ...: the numbers of the summary
        self.left_out = Counter[LeftOut]()

    def append(self, example: Example) -> None:
        """Add an example."""
        self.tokens += example.tokens.astype(self.kind).tobytes()
        self.learned += (example.labels != IGNORE).tobytes()
        self.ends.append(self.ends[-1] + len(example.tokens))
        self.lines.append(example.line)
        self.desirable.append(example.desirable)
        self.values.append(example.value)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: Any) -> Any:
        start, stop = self.ends[index], self.ends[index + 1]
        tokens = np.frombuffer(self.tokens, self.kind, stop - start, start * self.kind.itemsize)
        is_target = np.frombuffer(self.learned, bool, stop - start, start)
        tokens = tokens.astype(np.int64)
        labels, good = np.where(is_target, tokens, IGNORE), bool(self.desirable[index])
        reference, taught = (
            None if a is None else a[start:stop] for a in (self.reference, self.taught)
        )
        value = self.values[index]
        return Example(tokens, labels, self.lines[index], good, reference, taught, value)

    def labels(self) -> Array:
        """Return the target tokens of all examples, (targets,)."""
        labels: Array = np.frombuffer(self.tokens, self.kind)[np.frombuffer(self.learned, bool)]
        return labels

    def lengths(self) -> Iterator[int]:
        """Yield the number of tokens of each example."""
        return (stop - start for start, stop in pairwise(self.ends))

    def largest(self, shape: "Shape") -> tuple[int, int]:
        """Return the number of rows and the tokens per row of the largest batch."""
        longest, group = max(self.lengths()), shape.method.group
        tokens = min(shape.batch * group * shape.length, self.ends[-1])
        rows = -(-tokens // longest) if shape.pack else min(shape.batch * group, len(self))
        return -(-rows // group), longest

    @property
    def most(self) -> int:
        """The largest token id."""
        return int(np.frombuffer(self.tokens, self.kind).max(initial=0))


class Shape(NamedTuple):
    """The shape of a batch."""

    batch: int  # rows, or groups of rows that belong together
    length: int  # tokens in a row
    pack: bool  # whether examples share rows
    pad: int  # the padding token
    method: Format = Format()  # what the training method needs

    def fits(self, count: int, used: int) -> bool:
        """Return whether ``count`` groups with ``used`` tokens in total fit into one batch."""
        most = self.batch * self.method.group * self.length
        return used <= most if self.pack else count <= self.batch

    def batch_of(self, examples: Sequence[Example]) -> Batch:
        """Return examples as one batch: packed into one row without padding, or one per row.

        Unpacked rows are padded to the length of the longest example.
        """
        lengths = [len(example.tokens) for example in examples]
        ends = np.cumsum([0, *lengths])
        size = (1, int(ends[-1])) if self.pack else (len(examples), max(lengths))
        tokens = np.full(size, self.pad, np.int64)
        labels = np.full_like(tokens, IGNORE)
        starts = ends if self.pack else np.arange(len(examples)) * size[1]
        method, beside = self.method, dict[str, Array]()
        if method.sums:
            beside = {"real": np.zeros(size, bool), "desirable": np.ones(size, bool)}
            beside["value"] = np.zeros(size)
            for name in ("reference", "base"):
                if getattr(examples[0], name) is not None:
                    beside[name] = np.zeros(size, np.float32)
        if examples[0].taught is not None:
            beside["taught"] = np.full(size, -1)
        if examples[0].routes is not None:
            beside["routes"] = np.full((*size, *examples[0].routes.shape[1:]), -1, np.int32)
        for start, example in zip(starts.tolist(), examples, strict=False):
            place = slice(start, start + len(example.tokens))
            tokens.reshape(-1)[place] = example.tokens
            labels.reshape(-1)[place] = example.labels
            own: dict[str, Any] = {"real": True, **example._asdict()}
            for name, values in beside.items():
                values.reshape(-1, *values.shape[2:])[place] = own[name]
        count = len(examples) // method.group if method.sums else int((labels != IGNORE).sum())
        offsets = ends if self.pack else None
        return Batch(tokens, labels, offsets, count, int(ends[-1]), method.group, beside)


class Packed:
    """Batches of examples in a shuffled order."""

    def __init__(
        self,
        examples: Sequence[Example],
        shape: Shape,
        seed: int,
        name: str,
        place: Callable[[int], str] | None = None,  # file and line, if there are several files
    ) -> None:
        self.examples, self.shape, self.seed, self.name = examples, shape, seed, name
        self.place = place
        self.starts = [0]  # first group of each batch, numbered through all epochs
        self.group = shape.method.group
        stored = examples.lengths() if isinstance(examples, Examples) else None
        each = np.fromiter(stored or (len(example.tokens) for example in examples), np.int64)
        self.longest = each.reshape(-1, self.group).max(axis=1)  # (groups,) longest text
        self.lengths = array("q", each.reshape(-1, self.group).sum(axis=1).tolist())

    def at(self, step: int) -> Batch:
        """Return the batch of one step."""
        return self.shape.batch_of(self._examples(step))

    def where(self, step: int) -> str:
        """Return the lines of the file that a batch contains, as text."""
        lines = sorted({example.line for example in self._examples(step)})
        shown = ", ".join(map(self.place or str, lines[:20])) + (", ..." if len(lines) > 20 else "")
        if self.place:
            return shown
        return f"line{'s' * (len(lines) > 1)} {shown} of {self.name}"

    def count(self, epochs: float) -> int:
        """Return the number of batches in ``epochs`` passes through the examples."""
        step, examples = 0, epochs * len(self.lengths)
        while self._start(step) < examples:
            step += 1
        return step

    def epoch(self, step: int) -> float:
        """Return the number of epochs in the first ``step`` batches."""
        return self._start(step) / len(self.lengths)

    def _examples(self, step: int) -> list[Example]:
        """Return the examples of a batch."""
        first, group = [each * self.group for each in self._indices(step)], range(self.group)
        return [self.examples[number + place] for number in first for place in group]

    def _start(self, batch: int) -> int:
        """Return the first group of a batch; the batches before it are computed first."""
        while len(self.starts) <= batch:
            first = last = self.starts[-1]
            used = self.lengths[self._index(last)]
            while self.shape.fits(last - first + 1, used) and last - first < len(self.lengths):
                last += 1
                used += self.lengths[self._index(last)]
            self.starts.append(last)
        return self.starts[batch]

    def largest(self, steps: int, accumulate: int, *, by_text: bool = False) -> list[int]:
        """Return the steps of ``accumulate`` batches that may need the most memory.

        One contains the largest first batch of a step, another the largest later batch: later
        batches run while the gradients of earlier batches are in memory.  ``by_text``: each text is
        a pass, and the steps contain the longest text for each number of sums in memory.
        """
        count = min(steps, max(1, SEEN // accumulate)) * accumulate
        if by_text:
            return self._largest_by_text(count)
        sizes = [self._size(number) for number in range(count)]
        first = range(0, count, accumulate)
        parts = first, [number for number in range(count) if number not in first]
        chosen = [max(part, key=lambda n: (sizes[n], -n)) for part in parts if part]
        return list(dict.fromkeys(number // accumulate for number in chosen))

    def _largest_by_text(self, steps: int) -> list[int]:
        longest: dict[int, tuple[int, int]] = {}  # by number of sums: tokens, step
        for step in range(steps):
            own = self._indices(step)
            for held, index in zip(sums_held(len(own)), own, strict=True):
                most = longest.get(held, (0, 0))[0]
                if self.lengths[index] > most:
                    longest[held] = self.lengths[index], step
        chosen, most = list[int](), 0
        for held in sorted(longest, reverse=True):  # a shorter text with fewer sums needs less
            if longest[held][0] > most:
                most = longest[held][0]
                chosen.append(longest[held][1])
        return list(dict.fromkeys(chosen))

    def _size(self, batch: int) -> int:
        """Return the number of tokens of a batch, including padding."""
        own = self._indices(batch)
        if self.shape.pack:
            return sum(self.lengths[index] for index in own)
        return len(own) * self.group * int(self.longest[own].max())

    def _indices(self, batch: int) -> list[int]:
        return [self._index(n) for n in range(self._start(batch), self._start(batch + 1))]

    def _index(self, number: int) -> int:
        """Return the index of a group; ``number`` counts groups through all epochs."""
        epoch, place = divmod(number, len(self.lengths))
        return self._order(epoch)[place]

    @functools.lru_cache(maxsize=2)  # noqa: B019 -- lives as long as the run
    def _order(self, epoch: int) -> list[int]:
        """Return the shuffled indices of the groups in an epoch."""
        order: list[int] = (
            np.random.default_rng([self.seed, epoch]).permutation(len(self.lengths)).tolist()
        )
        return order


def sequential_batches(examples: Sequence[Example], shape: Shape) -> list[Batch]:
    """Return batches that hold each example once, in order."""
    return [
        shape.batch_of([examples[number] for number in range(first, last)])
        for first, last in consecutive(examples, shape)
    ]


def consecutive(examples: Sequence[Example], shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1): the range of examples of each consecutive batch."""
    group, first, used = shape.method.group, 0, 0
    for start in range(0, len(examples), group):
        own = sum(len(examples[number].tokens) for number in range(start, start + group))
        if start > first and not shape.fits((start - first) // group + 1, used + own):
            yield first, start
            first, used = start, 0
        used += own
    yield first, len(examples)


def from_text(
    text: Text, tokenizer: Any, config: "Config", shape: Shape, seed: int
) -> TrainingData:
    """Return the batches of running text; each row is a window of the text."""
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


def ends_of(records: Records, tokenizer: Any, config: "Config", chat: Chat) -> list[int]:
    """Return the tokens that stop generation after a run; for chats, the end of a turn too."""
    if records.chats:
        return end_tokens(chat, tokenizer, config)
    return [token for token in config.end_tokens if token < config.vocab]


def from_records(
    records: Records, tokenizer: Any, config: "Config", shape: Shape, seed: int, chat: Chat
) -> TrainingData:
    """Return the batches of records; the tokens of prompts are not targets.

    Raises
    ------
    ConfigError
        No record has a target in its first ``shape.length`` tokens, or all records together have
        fewer than 4 targets.
    """
    ends = ends_of(records, tokenizer, config, chat)
    method = shape.method
    cut = functools.partial(
        _answers if method.sums else _examples, records, tokenizer, ends, shape.length, chat
    )
    more = (method,) if method.sums else ()
    if method.plain:
        cut, more = functools.partial(_plain, records, tokenizer, shape.length, method), ()
    if method.is_on_policy:
        cut = functools.partial(_prompts, records, tokenizer, shape.length, chat, method)
        more = ()
    (train, long, lost), (held_out, *without) = (
        cut(part, *more) for part in (records.train, records.held_out)
    )
    for part, which in ((train, "training"), (held_out, "evaluation")):
        if not part:
            problem = f"no {which} text reaches its answer within {named(tokens=shape.length)}"
            cure = f"increase {named('tokens')}"
            if method.is_on_policy:
                problem = f"no {which} prompt leaves room for"
                room = named(max_new_tokens=method.max_new_tokens)
                problem += f" {room} within {named(tokens=shape.length)}"
                cure += f", or reduce {named('max_new_tokens')}"
            other = records.evaluated if part is held_out else None
            where = named(eval=other.where) if other else named(text=records.where)
            raise ConfigError(f"{where}: {problem}; {cure}")
    check_tokens(tokenizer, [train.most, held_out.most], config.vocab)
    name = records.path.name if records.path else records.where
    is_one_file = [before for *_, before in records.files] in ([], [f"{records.where}:"])
    place = None if is_one_file else records.place
    batches = Packed(train, shape, seed, name, place)
    targets, held_out_labels = train.labels(), held_out.labels()
    if method.compares:
        for part in (train, held_out):
            part.reference = np.zeros(part.ends[-1], np.float32)
    if len(targets) < LEAST:
        raise ConfigError(
            f"{named(text=records.where)} is too short: all its lines have {len(targets)} target"
            f" token{'s' * (len(targets) != 1)}, and the minimum is {LEAST}; add more lines"
        )
    first, (rows, longest), held_shape = held_out[0], train.largest(shape), shape
    begin = int((first.labels != IGNORE).argmax())
    if method.is_on_policy:  # evaluation samples 1 answer per prompt, a step several
        begin, longest = len(first.tokens), longest + method.max_new_tokens
        held_shape = shape._replace(batch=shape.batch * method.samples)
    prompt = first.tokens[: begin if begin > 1 else PROMPT_TOKENS].tolist()
    if method.sums:
        note, baseline = account_of_answers(train, method, long, lost, shape.length), None
        counts = [part.counts["targets"] for part in (train, held_out)]
    else:
        note = account(train, long, lost, shape.length)
        counts = [len(targets), len(held_out_labels)]
        baseline = unigram_baseline(targets, held_out_labels, config.vocab)
        baseline = None if method.losses else baseline  # only cross-entropy has this baseline
    note += records.repetitions
    if any(without) and records.held_out is not records.train:
        note += "; evaluation data: {1:,} dropped, {0:,} truncated".format(*without)
    return TrainingData(batches, sequential_batches(held_out, held_shape), baseline, counts[0],
                   counts[1], prompt, note, (rows, longest), (train, held_out))  # fmt: skip


def account(examples: Examples, cut: int, dropped: int, length: int) -> str:
    """Return a summary of the training texts: answers, target tokens, truncation."""
    counts, parts = examples.counts, []
    for kind, noun in (("answers", "replies"), ("completions",) * 2, ("texts",) * 2):
        if total := counts[f"all {kind}"]:
            some = f"{counts[kind]:,}" + f" of {total:,}" * (counts[kind] < total)
            parts.append(f"{some} {noun}" + f" in {counts['chats']:,} chats" * (kind == "answers"))
    tokens = f"{len(examples.labels()):,} of {examples.ends[-1]:,} tokens"
    text = f"training on {', '.join(parts)} ({tokens}); "
    if dropped or cut:
        text += f"{dropped:,} dropped, {cut:,} truncated at {named(tokens=length)}"
        text += f" (answers lost: {counts['lost']:,})"
    else:
        text += "none dropped or truncated"
    if (more := counts["lessons"] - counts["chats"]) > 0:
        text += f"; {more:,} additional texts, because the template formats the last reply of a"
        text += " chat differently"
    if endless := counts["endless"]:
        text += f"; {endless:,} replies end without a stop token"
    return text + _left_out(examples)


def account_of_answers(
    examples: Examples, method: Format, cut: int, dropped: int, length: int
) -> str:
    """Return a summary of the training units, such as pairs, rated answers or prompts."""
    units, counts = len(examples) // method.group, examples.counts
    some = f"{units:,}" + f" of {units + dropped:,}" * bool(dropped)
    if method.is_on_policy:
        text = f"sampling answers to {some} prompts, {method.summary}"
        room = f"{named(max_new_tokens=method.max_new_tokens)} within {named(tokens=length)}"
        text += f"; {dropped:,} dropped: no room for {room}" * bool(dropped)
        return text + _left_out(examples)
    good = f", {counts['good']:,} of them desirable" * bool(counts["good"])
    text = f"training on {some} {method.unit}{good}"
    text += f" ({counts['targets']:,} of {counts['tokens']:,} tokens)"
    text += f"; {dropped:,} dropped: the question fills {named(tokens=length)}" * bool(dropped)
    text += f"; {cut:,} truncated at {named(tokens=length)}" * bool(cut)
    text += "; none dropped or truncated" * (not dropped and not cut)
    if same := counts["same"]:
        text += f"; equal answers in {same:,} pair{'s' * (same > 1)}"
    return text + f"; {method.summary}" * bool(method.summary) + _left_out(examples)


def _left_out(examples: Examples) -> str:
    """Return what the template omits, as text to append to a summary."""
    return "".join(f"; {each.said(count)}" for each, count in examples.left_out.items())


def _answers(
    records: Records,
    tokenizer: Any,
    ends: Sequence[int],
    most: int,
    chat: Chat,
    part: Sequence[Record],
    method: Format,
) -> tuple[Examples, int, int]:
    """Return the answers of records, the number of truncated units, and of dropped units.

    A text is truncated to ``most`` tokens.  A unit is dropped if one of its texts has no target
    left.  If the method has groups of 2, each rated answer is followed by a second text: its
    question with the answer of the previous record.
    """
    result, long, dropped = Examples(token_kind(tokenizer)), 0, 0
    share = range(records.size // (len(records.train) + len(records.held_out)))  # as in _examples
    counts = result.counts
    other: tuple[Array, Array] | None = None  # the answer of the previous record
    rated = records.method == "kto"
    if rated and method.group == 2:
        other = _split(*_text_of(records, tokenizer, ends, chat, part[-1].sides[0]))[1]
    for _, record in reading(((share, record) for record in part), records.size, "tokenising"):
        texts, without = list[tuple[Record, Array, Array]](), list[Counter[LeftOut]]()
        for side in record.sides:
            before = chat.left_out.copy()
            texts.append((side, *_text_of(records, tokenizer, ends, chat, side)))
            without.append(chat.left_out - before)
        result.left_out += left_out_by(without)
        next_other = _split(*texts[0][1:])[1] if other is not None else None
        for unit in [[text] for text in texts] if rated else [texts]:
            own: list[tuple[Array, Array, bool]] = []
            for side, tokens, mask in unit:
                own.append((tokens, mask, bool(side.desirable)))
                if other is not None:
                    question = _split(tokens, mask)[0]
                    both = [np.concatenate(each) for each in zip(question, other, strict=True)]
                    own.append((both[0], both[1], bool(side.desirable)))
            if not all(mask[:most].any() for _, mask, _ in own):
                dropped += 1
                continue
            long += any(len(tokens) > most for tokens, *_ in own)
            for tokens, mask, good in own:
                labels = np.where(mask, tokens, IGNORE)[:most]
                value = method.value(record)
                result.append(Example(tokens[:most], labels, record.line, good, value=value))
            real = own if not rated else own[:1]
            counts["tokens"] += sum(min(len(tokens), most) for tokens, *_ in real)
            counts["targets"] += sum(int(mask[:most].sum()) for _, mask, _ in real)
            counts["good"] += rated and own[0][2]
            same = [np.array_equal(own[0][0], each[0]) for each in own[1:]]
            counts["same"] += not rated and all(same)
        other = next_other
    return result, long, dropped


def _plain(
    records: Records, tokenizer: Any, most: int, method: Format, part: Sequence[Record]
) -> tuple[Examples, int, int]:
    """Return the texts of records without a mask, and the number of truncated units."""
    result, long = Examples(token_kind(tokenizer)), 0
    share = range(records.size // (len(records.train) + len(records.held_out)))  # as in _examples
    for _, record in reading(((share, record) for record in part), records.size, "tokenising"):
        texts = [np.asarray(tokenizer.encode(text).ids, np.int64) for text in method.texts(record)]
        if not all(map(len, texts)):
            cure = "use characters that the tokenizer can encode"
            raise ConfigError(f"{records.place(record.line)}: a text has no tokens; {cure}")
        long += any(len(tokens) > most for tokens in texts)
        value = method.value(record)
        for tokens in (each[:most] for each in texts):
            result.append(Example(tokens, tokens, record.line, value=value))
            result.counts["tokens"] += len(tokens)
            result.counts["targets"] += len(tokens)
    return result, long, 0


def _prompts(
    records: Records,
    tokenizer: Any,
    most: int,
    chat: Chat,
    method: Format,
    part: Sequence[Record],
) -> tuple[Examples, int, int]:
    """Return the prompts of records, and the number of prompts without room for an answer."""
    result, dropped = Examples(token_kind(tokenizer)), 0
    share = range(records.size // (len(records.train) + len(records.held_out)))  # as in _examples
    begin, left_out = 0 if part is records.train else len(records.train), chat.left_out.copy()
    every = enumerate(part, begin)
    for _, (number, record) in reading(((share, one) for one in every), records.size, "tokenising"):
        ((text, *_),) = records.texts(record, chat)
        encoding = tokenizer.encode(text, add_special_tokens=not record.messages)
        tokens = np.array(encoding.ids, np.int64)
        if not len(tokens):
            cure = "use characters that the tokenizer can encode"
            raise ConfigError(f"{records.place(record.line)}: a prompt has no tokens; {cure}")
        if len(tokens) + method.max_new_tokens > most:
            dropped += 1
            continue
        result.append(Example(tokens, tokens, record.line, value=number))
    result.counts["targets"] = len(result)
    result.left_out = chat.left_out - left_out
    return result, 0, dropped


def _text_of(
    records: Records, tokenizer: Any, ends: Sequence[int], chat: Chat, record: Record
) -> tuple[Array, Array]:
    """Return the tokens of a question and its answer, and the mask of the target tokens."""
    lessons = records.texts(record, chat)
    if len(lessons) > 1:
        problem = f"the template needs {len(lessons)} texts for the answers; give one answer"
        raise ConfigError(f"{records.place(record.line)}: {problem}")
    text, spans, _ = lessons[0]
    tokens, owners = encoded(tokenizer, text, spans, bool(record.messages), ends, chat)
    owners[:1] = NOBODY  # no earlier token predicts the first one
    if not (mask := owners != NOBODY).any():
        cure = "use characters that the tokenizer can encode"
        raise ConfigError(f"{records.place(record.line)}: an answer has no tokens; {cure}")
    return tokens, mask


def _split(tokens: Array, mask: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Split a text into question and answer, each as (tokens, mask of the target tokens)."""
    start = int(mask.argmax())
    return (tokens[:start], mask[:start]), (tokens[start:], mask[start:])


def _examples(
    records: Records,
    tokenizer: Any,
    ends: Sequence[int],
    most: int,
    chat: Chat,
    part: Sequence[Record],
) -> tuple[Examples, int, int]:
    """Return examples, the number of truncated records, and of records without targets.

    Running text that is longer than a row becomes several examples; a record with a prompt is
    truncated.
    """
    result, long, lost = Examples(token_kind(tokenizer)), 0, 0
    counts, left_out = result.counts, chat.left_out.copy()
    # for the progress bar: a range whose length is the mean number of bytes per record
    share = range(records.size // (len(records.train) + len(records.held_out)))
    for _, record in reading(((share, record) for record in part), records.size, "tokenising"):
        lessons = records.texts(record, chat)
        is_chat, running, is_long = bool(record.messages), record.kind == "texts", False
        # answers of the record, answers left after truncation, answers with a stop token
        turns_all, turns_left, turns_ended = set[int](), set[int](), set[int]()
        for text, spans, turns in lessons:
            tokens, owners = encoded(tokenizer, text, spans, is_chat, ends, chat)
            turns_all.update(turns[n] for n in np.unique(owners[owners != NOBODY]))
            stops = (owners != NOBODY) & np.isin(tokens, ends)
            turns_ended.update(turns[n] for n in np.unique(owners[stops]))
            is_long |= len(tokens) > most and not running
            for start in range(0, len(tokens) if running else 1, most):
                row, span = tokens[start : start + most], owners[start : start + most].copy()
                span[:1] = NOBODY  # no earlier token predicts the first one
                if (span != NOBODY).any():
                    turns_left.update(turns[n] for n in np.unique(span[span != NOBODY]))
                    labels = np.where(span == NOBODY, IGNORE, row)
                    result.append(Example(row, labels, record.line))
        long, lost = long + is_long, lost + (not turns_left)
        counts[f"all {record.kind}"] += record.answers
        counts[record.kind] += len(turns_left)
        counts["lost"] += len(turns_all - turns_left)
        if is_chat:
            counts["chats"] += 1
            counts["lessons"] += max(1, len(lessons))
            counts["endless"] += len(turns_all - turns_ended)
    result.left_out = chat.left_out - left_out
    return result, long, lost
