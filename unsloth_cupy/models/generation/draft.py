"""Generation with a draft head: a pass of the model also checks a proposed token.

    pass over (..., t, d)       logits after t: the next token; if it is d, logits after d: one more
    head over (states, tokens)  proposes the next d

Every token is the most likely one of the model's own logits, so a wrong proposal costs time only.
The head reads the normalised state of a token and the embedding of the token after it.  Only the
first draft head is used, for one token at a time.  (DeepSeek-V3 Technical Report, 2024, 5.4.3.)
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...inference.paged_kv_cache import PagedKVCache
from ...placement import on_gpu_of_attribute, to_device_of, to_numpy
from ...serving.drawing import likeliest_of, penalise, wide
from ...serving.options import Options
from ...serving.work import Work
from ...training.find_nan import NonFiniteError
from ..adapters.many import ByRows
from ..layers.block import embedded
from ..layers.call import Call
from ..layers.draft_head import draft_states, with_tables
from ..network import Network
from .decoding import CHUNK, Decoding, cache_form

PAGE = 64  # tokens of a page


@dataclass
class Drafts:
    """How many tokens a draft head proposed in a call of ``generate``, and how many were right."""

    proposed: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        share = self.accepted / max(1, self.proposed)
        return f"{self.accepted} of {self.proposed} drafts accepted ({share:.0%})"


@dataclass
class Row:
    """A row: its tokens, and how many of them model and head have computed."""

    slot: int
    tokens: list[int]
    adapter: str | None = ""  # as in Work
    new: int = 0  # number of new tokens
    finished: bool = False
    sequence: int = -1  # of the model's pages
    of_head: int = -1  # of the head's pages
    computed: int = 0
    seen: int = 0
    draft: list[int] = field(default_factory=list)


class Checking(Decoding):
    """The model's steps, with the states of all new tokens in ``states_of_tokens``."""

    states_of_tokens: Any = None

    def hidden(self, model: Network, call: Call, parameters: Any, tokens: Array) -> Array:
        """Return the normalised states of the new tokens, and note them."""
        self.states_of_tokens = super().hidden(model, call, parameters, tokens)
        return self.states_of_tokens


@on_gpu_of_attribute("model.table")
class Drafting(Decoding):
    """The steps of the first draft head; ``inputs`` are the states of the tokens before."""

    inputs: Any = None

    def __init__(
        self, model: Network, *, rows: int, pages: int, cache_dtype: Any, adapters: Any
    ) -> None:
        config, parameters = with_tables(model.config, 0, model.parameters)
        model = copy.copy(model)
        model.config, model.parameters = config, parameters
        form = cache_form(model, cache_dtype, adapters.values())
        sizes = PAGE, form.pop("kv_heads"), form.pop("dim")
        cache = PagedKVCache(1, pages, *sizes, **form)
        super().__init__(model, rows=rows, pages=pages, page=PAGE, cache=cache, adapters=adapters)
        self.cache.places = {config.layers: (0, 0)}
        self.captures = False  # ``inputs`` change

    def hidden(self, model: Network, call: Call, parameters: Any, tokens: Array) -> Array:
        """Return the normalised states of the head."""
        embeddings = embedded(model.config, parameters, tokens)
        states: Array = draft_states(call, 0, self.inputs, embeddings)
        return states


def check_drafts(model: Network) -> None:
    """Raise a ConfigError unless a model can generate with a draft head."""
    config, cure = model.config, "leave draft out"
    problem = None
    if not config.draft_heads:
        problem = f"this {config.model_type} has no draft head (multi-token prediction tensors)"
    elif model.division is not None or model.context is not None or model.gather is not None:
        problem = "ranks that share a model do not generate with a draft head"
    elif any(rope.original is not None for rope in config.ropes.values()):
        problem = "its rotary angles change with the length of a row"
    elif config.indexer is not None:
        problem = "pages have no sparse attention"
    if problem is not None:
        raise ConfigError(f"generate(draft='mtp'): {problem}; {cure}")


class Generation:
    """The rows of a call, and what computes them.

    Prompts are on the host, padded on the left, where ``real`` is False.
    """

    def __init__(
        self,
        model: Network,
        prompt: Array,
        real: Array,
        ends: Array,
        options: Options,
        drafts: Drafts,
    ) -> None:
        self.options, self.ends, self.drafts = options, ends, drafts
        names: Sequence[str | None] = [""] * len(prompt)
        adapters: Any = {}
        if isinstance(own := model.adapter, ByRows):
            own.check(len(prompt))
            names, adapters, model.adapter = own.rows, own.adapters, None
        self.rows = [
            Row(slot, each[mask].tolist(), name)
            for slot, (each, mask, name) in enumerate(zip(prompt, real, names, strict=True))
        ]
        most = options.max_new_tokens + 1  # a draft may be one token too many
        pages = sum(-(-(len(row.tokens) + most) // PAGE) for row in self.rows)
        sizes: Any = {"rows": len(self.rows), "pages": pages, "cache_dtype": options.cache_dtype}
        sizes["adapters"] = adapters
        self.model = Checking(model, page=PAGE, **sizes)
        self.model.captures = False  # the states of a graph would be overwritten
        self.head = Drafting(model, **sizes)
        for row in self.rows:
            row.sequence = self.model.cache.begin([])
            row.of_head = self.head.cache.begin([])
            row.finished = options.max_new_tokens == 0

    def step(self) -> None:
        """Add one or two tokens to each row, or compute a part of its prompt; propose the next."""
        active = [row for row in self.rows if not row.finished]
        new = {row.slot: row.tokens[row.computed :][:CHUNK] for row in active}
        for row in active:
            whole = row.computed + len(new[row.slot]) == len(row.tokens)
            row.draft = row.draft if whole and row.new + 1 < self.options.max_new_tokens else []
            new[row.slot] += row.draft
        active.sort(key=lambda row: _order(len(new[row.slot]), row.computed))
        before = {row.slot: self._states(row) for row in active if row.draft}
        work = [
            Work(
                row.sequence, np.array(new[row.slot]), row.computed + len(new[row.slot]), row.slot,
                row.adapter, checked=1 + len(row.draft),
            )
            for row in active
        ]  # fmt: skip
        result = self.model(work)
        logits = self.model.drawn_from(result.logits)
        chosen = to_numpy(likeliest_of(logits)).tolist()
        place, states = 0, list[Any]()
        starts = np.cumsum([0, *(len(each.tokens) for each in work)]).tolist()
        for row, start in zip(active, starts, strict=False):
            first, count = row.computed, len(new[row.slot])
            own = slice(place, place + 1 + len(row.draft))
            place = own.stop
            if first + count - len(row.draft) == len(row.tokens):
                self._accept(row, logits[own], chosen[own])
            known = min(first + count, len(row.tokens) - 1)  # tokens with a known next token
            states.append(
                self.model.states_of_tokens[:, start + row.seen - first : start + known - first]
            )
            self._cut(row, first + count, known, before)
        self._propose(
            [r for r in active if not r.finished],
            dict(zip((r.slot for r in active), states, strict=True)),
        )

    def _accept(self, row: Row, logits: Any, chosen: list[int]) -> None:
        """Add the token after the newest one and, if it is the draft, the token after the draft."""
        for place, guess in enumerate([*row.draft, None]):
            token = self._token(row, logits[place : place + 1], chosen[place])
            if token < 0:
                raise NonFiniteError(
                    f"generate: the logits of new token {row.new} contain NaN; find_nan names the"
                    " layer, and a new copy of the model repairs a broken weight",
                    "generate", "logits", None,
                )  # fmt: skip
            row.tokens.append(token)
            row.new += 1
            row.finished = token in self.ends or row.new == self.options.max_new_tokens
            if guess is None:
                return
            self.drafts.proposed += 1
            self.drafts.accepted += token == guess
            if row.finished or token != guess:
                return

    def _token(self, row: Row, logits: Any, likeliest: int) -> int:
        """Return the most likely token; penalty and minimum number of tokens change the logits."""
        allowed, penalty = row.new >= self.options.min_new_tokens, self.options.repetition_penalty
        if likeliest < 0 or (allowed and penalty is None):
            return likeliest
        logits = wide(to_numpy(logits))
        if penalty is not None:
            past = np.array([row.tokens])
            penalise(logits, past, np.ones_like(past, bool), penalty)
        if not allowed:
            logits[:, self.ends] = -np.inf
        return int(logits.argmax())

    def _states(self, row: Row) -> Any:
        """Return a copy of a row's states; None for a model without them."""
        return None if self.model.states is None else self.model.states.taken(row.slot)

    def _cut(self, row: Row, held: int, known: int, before: dict[int, Any]) -> None:
        """Remove rejected tokens from the pages.

        States of layers without attention cannot be cut: the states before the step return, and
        the step's accepted tokens are computed again in the next step.
        """
        keep = row.computed if held > known and self.model.states is not None else known
        row.computed = keep if held > known else held
        if held == row.computed:
            return
        for pool in self.model.cache.pools:
            pool.truncate(row.computed, [row.sequence])
        if self.model.states is not None:
            self.model.states.put(row.slot, before[row.slot])

    def _propose(self, rows: list[Row], states: dict[int, Any]) -> None:
        """Compute the head for tokens whose next token is known; the last one gives the draft."""
        counts = {row.slot: states[row.slot].shape[1] for row in rows}
        rows = [row for row in rows if counts[row.slot]]
        rows.sort(key=lambda row: _order(counts[row.slot], row.seen))
        if not rows:
            return
        work = []
        for row in rows:
            stop = row.seen + counts[row.slot]
            tokens = np.array(row.tokens[row.seen + 1 : stop + 1])
            work.append(Work(row.of_head, tokens, stop, row.slot, row.adapter))
            row.seen = stop
        self.head.inputs = np.concatenate([states[row.slot] for row in rows], axis=1)
        proposed = to_numpy(likeliest_of(self.head.drawn_from(self.head(work).logits))).tolist()
        for row, token in zip(rows, proposed, strict=True):
            row.draft = [token] if token >= 0 and row.seen == len(row.tokens) - 1 else []


def _order(count: int, computed: int) -> int:
    """Return the place of a row among the kinds of rows of a step: see ``Decoding``."""
    return 0 if count == 1 else 1 if computed == 0 else 2


def drafted(generation: Generation, like: Array) -> Iterator[Array]:
    """Yield the new tokens of ``generate``, (batch,) each, on the device of ``like``."""
    config, rows = generation.model.model.config, generation.rows
    pad = config.pad_token
    if pad is None:
        pad = config.end_tokens[0] if config.end_tokens else 0
    for number in range(generation.options.max_new_tokens):
        while any(row.new <= number and not row.finished for row in rows):
            generation.step()
        if all(row.new <= number for row in rows):
            return
        tokens = [row.tokens[number - row.new] if number < row.new else pad for row in rows]
        yield to_device_of(np.array(tokens, like.dtype), like)
