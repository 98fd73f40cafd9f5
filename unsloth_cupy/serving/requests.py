"""Requests, their samples, and the rows that compute them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import Array
from ..placement import Arriving
from .options import Options
from .prefixes import Node
from .texts import StopStrings, TextStream

BLOCK = 32  # random numbers of a row that are drawn, and sent to a GPU, at a time
Top = list[tuple[int, float]]  # the most likely tokens at a place, with log-probabilities
Finish = str | None  # None, "stop", "length", "cancelled", "error"


class Sample:
    """One completion of a request.

    Attributes
    ----------
    tokens : list of int
        The new tokens so far, including the token that ended the row.
    log_probs : list of float
        Of each new token in softmax(logits / temperature), before top_k, top_p and min_p; of a
        greedy sample with temperature 1.  Only if the request has ``log_probs``.
    top_log_probs : list of list of (int, float)
        For each new token, the most likely tokens at its place, in order, with their
        log-probabilities.  Only if the request has ``top_log_probs``.
    routes : list of (layers with experts, k) int
        The experts of each computed token, those of the prompt first; the model does not compute
        the last token of a finished sample.  Only of an engine with ``routes``.
    finish : str or None
        None while tokens may follow; then "stop", "length", "cancelled" or "error".
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[Any] = []
        self.top_log_probs: list[Top] = []
        self.routes: list[Array] = []
        self.finish: Finish = None

    def __repr__(self) -> str:
        return f"Sample(tokens={self.tokens}, finish={self.finish!r})"


class Event(NamedTuple):
    """New tokens of a sample, or its end."""

    request: "Request"
    sample: int
    tokens: list[int]
    log_probs: list[Any] | None
    finish: Finish
    top_log_probs: list[Top] | None = None


class Request:
    """A prompt and its options; ``samples`` are its completions."""

    def __init__(self, prompt: Sequence[int], options: Options, count: int, number: int) -> None:
        self.prompt, self.options, self.number = [*prompt], options, number
        self.samples = [Sample() for _ in range(count)]
        self.stem: Stem | None = None  # the computed prompt, until all samples have begun
        self.leader: Row | None = None  # the row that computes the prompt
        self.counted = False  # whether kept_tokens has the prompt

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish is not None for sample in self.samples)

    def __repr__(self) -> str:
        return f"Request({self.number}, prompt of {len(self.prompt)} tokens, {self.samples})"


class Stem(NamedTuple):
    """A computed prompt: its sequence, the logits after it, states, experts, and prefix."""

    sequence: int
    logits: Any
    states: Any
    routes: list[Array]
    node: Node | None
    depth: int


class Flight(NamedTuple):
    """Tokens that were drawn for rows, on their way to the host with their log-probabilities."""

    rows: list["Row"]
    tokens: Arriving
    log_probs: list[tuple[list[int], list[Arriving]]]  # with the places of their rows


class Row:
    """A sample that the engine computes: its tokens, and how many of them the caches hold."""

    def __init__(
        self,
        request: Request,
        index: int,
        seed: int,
        ends: Array,
        *,
        number: int | None = None,
        adapter: str | None = "",
        log_probs: bool = False,
        top: int = 0,
        matcher: Any = None,
        allowed: Callable[[Any], Array] | None = None,
        texts: tuple[Any, Sequence[str]] | None = None,
    ) -> None:
        self.request, self.index, self.options = request, index, request.options
        self.sample, self.tokens = request.samples[index], [*request.prompt]
        number = request.options.first + (index if number is None else number)
        self._generator = np.random.default_rng([seed, number])
        self._uniform = np.zeros(0)
        self.ends, self.adapter, self.log_probs = ends, adapter, log_probs
        self.top = top  # number of most likely tokens that the sample has log-probabilities of
        self.end_set = frozenset(ends.tolist())
        self.matcher, self._allowed = matcher, allowed
        self.stops = None
        if texts is not None:
            self.stops = TextStream(texts[0], self.tokens), StopStrings(texts[1])
        self.sequence: int | None = None
        self.pinned = False  # whether the caller owns the sequence
        self.filled = 0  # tokens whose keys and values are in the cache
        self.pending, self.place = 0, -1  # tokens that the host has not yet; place of the last one
        self.behind = 0  # tokens that the longest row of a batch has more: it sets the angles
        self.slot, self.born = 0, 0
        self.node: Node | None = None  # of the last full page in the tree of prefixes
        self.depth = 0  # number of its pages in the tree

    @property
    def count(self) -> int:
        """The number of new tokens."""
        return len(self.sample.tokens)

    @property
    def length(self) -> int:
        """The number of tokens on which the angles of some rotary scalings depend."""
        return len(self.tokens) + self.pending + self.behind

    @property
    def drawn(self) -> int:
        """The number of new tokens, with those that the host has not yet."""
        return len(self.sample.tokens) + self.pending

    @property
    def on_host(self) -> bool:
        """Whether the next token depends on the earlier ones beside the logits."""
        few = self.drawn < self.options.min_new_tokens
        return few or self.matcher is not None or self.options.repetition_penalty is not None

    def uniform(self, count: int = 1) -> Array:
        """Return the random numbers of the next ``count`` tokens."""
        first = self.drawn
        more = first + count - len(self._uniform)  # a greedy row draws none for a while
        if more > 0:
            numbers = self._generator.random(max(more, BLOCK))
            self._uniform = np.concatenate([self._uniform, numbers])
        return self._uniform[first : first + count]

    def allowed(self) -> Array | None:
        """Return which tokens the constraint allows next, (vocab,) bool; None without one."""
        return None if self.matcher is None else self._allowed(self.matcher)  # type: ignore[misc]

    def take(self, token: int) -> Finish:
        """Add a token; return why the row ends with it, or None."""
        self.tokens.append(token)
        self.sample.tokens.append(token)
        if token in self.end_set:
            return "stop"
        if self.matcher is not None:
            if not self.matcher.consume_token(token):
                return "error"
            if self.matcher.is_stopped():
                return "stop"
        if self.stops is not None:
            pieces, stops = self.stops
            stops.push(pieces.push(token))
            if stops.has_match:
                return "stop"
        return "length" if self.count >= self.options.max_new_tokens else None
