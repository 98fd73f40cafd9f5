"""The order of work: which rows are computed in a step, and which pages they have.

Each step computes one token of every row that has its prompt, and up to ``chunk`` tokens of
prompts.  Rows start in the order of their requests.  If pages run out, the least recently used
prefixes that no row uses become free; then the youngest row is set back: its pages become free, and
it waits with its tokens, which are computed again later.

On a GPU a step begins before the host has the tokens of the step before, unless a row needs them on
the host: so a row that ends is computed one step too long.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.dtypes import FLOAT32
from ..core.gpu import device_of
from ..core.replay import fixed_order
from ..inference.paged_kv_cache import GONE
from ..ops.losses.linear_log_probs import of_logits
from ..placement import Arriving, to_device_of
from .drawing import Uniform, choose, top_log_probs
from .prefixes import Prefixes
from .requests import Event, Finish, Flight, Request, Row, Stem, Top
from .work import Decoder, Work


class Scheduler:
    """Rows, the pages that they have, and the queue of rows that wait.

    Attributes
    ----------
    kept_tokens : int
        Number of tokens of prompts, each once for all its samples, and of new tokens.
    """

    def __init__(self, decoder: Decoder, *, rows: int, chunk: int, prefixes: bool = True) -> None:
        self.decoder, self.rows, self.chunk = decoder, rows, chunk
        self.cache = decoder.cache
        self.tree = Prefixes(self.cache) if prefixes and decoder.shares else None
        self.open: dict[Row, None] = {}  # rows that have not ended, in the order of requests
        self.queue: deque[Row] = deque()
        self.active: list[Row] = []  # in the order in which they started
        self.slots = [*range(rows)][::-1]
        self.stems: list[Request] = []
        self.forked: list[tuple[Row, Any]] = []  # new rows of a computed prompt, and their logits
        self.flight: Flight | None = None  # tokens of the last step that the host has not yet
        self.taking: Row | None = None  # the row that receives its token
        self.uniform = Uniform()
        self.pending: list[Event] = []
        self.births = 0
        self.kept_tokens = 0

    @property
    def waiting(self) -> int:
        """The number of rows that have not started, or were set back."""
        return len(self.queue)

    @property
    def running(self) -> int:
        """The number of rows that have pages."""
        return len(self.active)

    @property
    def computed_rows(self) -> int:
        """The number of tokens that the model has computed."""
        return self.decoder.computed

    @property
    def free_pages(self) -> int:
        """The number of pages that no row uses; earlier prefixes may still be in some of them."""
        return self._free_pages(0)

    def _free_pages(self, pool: int) -> int:
        unused = 0 if self.tree is None else self.tree.unused(pool)
        return len(self.cache.pools[pool].free_pages) + unused

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows to the end of the queue; rows without new tokens end at once."""
        for row in rows:
            if row.options.max_new_tokens:
                self.open[row] = None
                self.queue.append(row)
            else:
                self._end(row, "length")
                self.pending.append(Event(row.request, row.index, [], None, "length"))

    def step(self) -> list[Event]:
        """Compute one step; return the new tokens of rows, and which rows ended.

        On a GPU these are the tokens of the step before.
        """
        self._start_rows()
        # a caller's sequence must not get the last token of its row
        ahead = self.decoder.ahead and not any(row.on_host or row.pinned for row in self.active)
        if not ahead:
            self._land()
        batch = self._batch()
        logits: Any = None
        chosen: Any = None
        if batch:
            greedy = ahead and not self.forked
            greedy = greedy and all(self._greedy(row, count) for row, count in batch)
            logits, routes, chosen = self.decoder([self._work(*each) for each in batch], greedy)
            for place, (row, count) in enumerate(batch):
                row.filled += count
                known = row.sample.routes
                new = row.filled - len(known)
                if routes is not None and new > 0:  # tokens keep the experts of their first pass
                    known.extend(routes[place][-new:])
                self._keep_prefix(row)
        places = [place for place, (row, _) in enumerate(batch) if self._complete(row)]
        ready = [batch[place][0] for place in places]
        self._fork_prompts(ready, places, logits)
        earlier, self.flight = self.flight, None
        if ready or self.forked:
            self.flight = self._draw(ready, places, logits, chosen)
        if earlier is not None:
            self._receive(earlier)
        if not ahead:
            self._land()
        events, self.pending = self.pending, []
        return events

    @staticmethod
    def _complete(row: Row) -> bool:
        """Return whether the next token of a row can be drawn."""
        return row.filled == len(row.tokens) + row.pending

    @staticmethod
    def _greedy(row: Row, count: int) -> bool:
        """Return whether a row's most likely next token is drawn, after this one."""
        alone = row.request.leader is not row  # other samples begin with the same logits
        complete = row.filled + count == len(row.tokens) + row.pending
        return row.options.temperature == 0 and complete and alone

    @staticmethod
    def _work(row: Row, count: int) -> Work:
        tokens = np.zeros(1, np.int64)
        if not row.pending:
            tokens = np.array(row.tokens[row.filled : row.filled + count], np.int64)
        source = row.place if row.pending else -1
        sequence: Any = row.sequence
        return Work(sequence, tokens, row.length, row.slot, row.adapter, source)

    # Rows that start, and the pages of a step

    def _start_rows(self) -> None:
        """Start waiting rows while there are rows and pages."""
        late = deque[Row]()
        while self.queue and len(self.active) < self.rows:
            row = self.queue.popleft()
            request = row.request
            if not row.count and request.leader is not None:
                late.append(row)  # the prompt is being computed by another sample
            elif not row.count and request.stem is not None and self._may_fork(row):
                self._start_from_stem(row)
            elif row.pinned or ((row.count or request.stem is None) and self._fits(row)):
                self._start(row)
            else:
                self.queue.appendleft(row)
                break
        self.queue.extendleft(reversed(late))

    def _fits(self, row: Row) -> bool:
        """Return whether a row's known tokens and its next token have pages."""
        size, pools = self.cache.page, self.cache.pools
        if not self.decoder.repeats:  # no row can be set back: all its tokens need pages
            rows = [*self.active, row]
            every = [len(r.request.prompt) + r.options.max_new_tokens - 1 for r in rows]
            return sum(-(-each // size) for each in every) <= len(pools[0].uses)
        if not self.active:
            return True
        length = len(row.tokens) + 1
        needs = [
            -(-length // size) - (pool.first_seen(length) if n else 0)
            for n, pool in enumerate(pools)
        ]
        if all(need <= len(pool.free_pages) for need, pool in zip(needs, pools, strict=True)):
            return True
        if self.tree is not None:
            needs[0] -= len(self.tree.longest(self._kind(row), row.tokens))
        return all(need <= self._free_pages(n) for n, need in enumerate(needs))

    def _may_fork(self, row: Row) -> bool:
        """Return whether a sample may start from its computed prompt: all its tokens have pages."""
        return self.decoder.repeats or self._fits(row)

    def _kind(self, row: Row) -> Any:
        """Return the kind of prefixes that a row may share."""
        switch = self.decoder.switch
        return row.adapter, switch is not None and row.length >= switch

    def _admit(self, row: Row) -> None:
        self.births += 1
        row.born, row.slot = self.births, self.slots.pop()
        self.active.append(row)

    def _start(self, row: Row) -> None:
        """Give a row a sequence, which begins with the pages of an equal prefix."""
        self._admit(row)
        if not row.pinned:
            nodes = []
            if self.tree is not None:
                nodes = self.tree.longest(self._kind(row), row.tokens)
                row.node = nodes[-1] if nodes else self.tree.root(self._kind(row))
            row.sequence = self.cache.begin([node.pages for node in nodes])
            row.depth = len(nodes)
            row.filled = row.depth * self.cache.page
            for place, node in enumerate(nodes):
                known = len(row.sample.routes) - place * self.cache.page  # of a row set back
                row.sample.routes.extend(node.routes[max(known, 0) :])
        if self.decoder.states is not None:
            self.decoder.states.clear(row.slot)
        if not row.count and len(row.request.samples) > 1:
            row.request.leader = row

    def _start_from_stem(self, row: Row) -> None:
        stem: Any = row.request.stem
        self._admit(row)
        self._fork(row, stem)
        self.forked.append((row, stem.logits))
        self._drop_finished_stem(row.request)

    def _fork(self, row: Row, stem: Stem) -> None:
        row.sequence, row.filled = self.cache.fork(stem.sequence), len(row.tokens)
        row.node, row.depth = stem.node, stem.depth
        row.sample.routes = [*stem.routes]
        if self.decoder.states is not None:
            self.decoder.states.put(row.slot, stem.states)

    def _drop_finished_stem(self, request: Request) -> None:
        """Free the stem of a request if no sample waits for the prompt."""
        if not any(row.request is request and not row.count for row in self.queue):
            self._drop_stem(request)

    def _drop_stem(self, request: Request) -> None:
        if request.stem is not None:
            self.cache.free(request.stem.sequence)
            request.stem = None
            self.stems.remove(request)

    def _batch(self) -> list[tuple[Row, int]]:
        """Return the rows of a step with their numbers of tokens, after making room for them."""
        while True:
            rest, batch = self.chunk, list[tuple[Row, int]]()
            for row in self.active:
                count = len(row.tokens) + row.pending - row.filled
                if row.drawn >= row.options.max_new_tokens:
                    continue  # the host does not have its last token yet
                if count > 1:
                    count = min(count, rest)
                    rest -= count
                if count:
                    batch.append((row, count))
            counts = [count for _, count in batch]
            sequences: list[Any] = [row.sequence for row, _ in batch]
            missing = self.cache.missing(sequences, counts)
            if not any(missing):
                break
            if self.flight is not None:
                self._land()  # rows that ended give up pages
            elif not self._make_room(missing):
                break

        # rows with one token by adapter, because a captured step has a fixed order of adapters,
        # then rows without earlier tokens, then others
        def kind(each: tuple[Row, int]) -> tuple[int, str]:
            row, count = each
            if count == 1:
                return 0, row.adapter or ""
            return 1 + (self.cache.held(row.sequence) > 0), ""

        return sorted(batch, key=kind)

    def _make_room(self, pages: Sequence[int]) -> bool:
        """Free some pages of each pool; return False if nothing can be freed."""
        if self.tree is not None and self.tree.free(pages):
            return True
        if self.stems:
            self._drop_stem(self.stems[-1])
            return True
        rows = [row for row in self.active if not row.pinned]
        if len(self.active) < 2 or not rows or not self.decoder.repeats:
            return False
        self._set_back(max(rows, key=lambda row: row.born))
        return True

    def _set_back(self, row: Row) -> None:
        """Free the pages of a row, and let it wait at the front of the queue."""
        self._leave(row)
        row.filled, row.node, row.depth = 0, None, 0
        self.queue.appendleft(row)

    def _leave(self, row: Row) -> None:
        """Remove a row from the active rows; free its pages unless the caller owns them."""
        self.active.remove(row)
        self.slots.append(row.slot)
        self.forked = [each for each in self.forked if each[0] is not row]
        if row.request.leader is row:
            row.request.leader = None
        if not row.pinned:
            self.cache.free(row.sequence)
            row.sequence = None

    def _keep_prefix(self, row: Row) -> None:
        """Add the pages of a row that are full now to the tree of prefixes."""
        if self.tree is None or row.node is None or row.pinned:
            return
        size = self.cache.page
        for place in range(row.depth, min(row.filled, len(row.tokens)) // size):
            pages = self.cache.pages_of(row.sequence, place)
            if pages[0] == GONE or row.node.gone:  # the page is before the window of all layers
                row.node = None
                return
            part = slice(place * size, (place + 1) * size)
            own, routes = row.tokens[part], row.sample.routes[part]
            row.node, row.depth = self.tree.add(row.node, own, pages, routes), place + 1
            self.cache.share(row.sequence, place, row.node.pages)  # of a row that was first

    # Tokens

    def _fork_prompts(self, ready: list[Row], places: list[int], logits: Any) -> None:
        """Start further samples of prompts that are complete now, while there are rows."""
        for row, place in [*zip(ready, places, strict=True)]:
            request = row.request
            if not request.counted:
                request.counted = True
                self.kept_tokens += len(request.prompt)
            if request.leader is not row:
                continue
            request.leader = None
            others = [r for r in self.queue if r.request is request and not r.count]
            room = self.rows - len(self.active)
            states = None
            if others and self.decoder.states is not None:
                states = self.decoder.states.taken(row.slot)
            own: Any = row.sequence
            stem = Stem(own, logits[place], states, [*row.sample.routes], row.node, row.depth)
            late = others[room:]
            for other in others[:room]:
                if not self._may_fork(other):
                    late.append(other)
                    continue
                self.queue.remove(other)
                self._admit(other)
                self._fork(other, stem)
                ready.append(other)
                places.append(place)
            if late:
                # a captured step writes its logits again
                last, sequence = stem.logits.copy(), self.cache.fork(stem.sequence)
                request.stem = stem._replace(sequence=sequence, logits=last)
                self.stems.append(request)

    def _draw(self, ready: list[Row], places: list[int], logits: Any, chosen: Any) -> Flight:
        """Draw the next token of rows, unless they are ``chosen`` already."""
        if logits is not None and places != [*range(len(logits))]:
            logits = logits[to_device_of(np.array(places, np.int64), logits)]
        if self.forked:
            stems = [own[None] for _, own in self.forked]
            logits = np.concatenate([*([] if logits is None else [logits]), *stems])
            ready = [*ready, *(row for row, _ in self.forked)]
            self.forked = []
        if chosen is None:
            with device_of(logits):
                ends = [row.ends for row in ready]
                chosen = choose(self.decoder.drawn_from(logits), ready, ends, self.uniform)
                if self.decoder.ahead:
                    chosen = to_device_of(chosen, logits)
                    self.decoder.send(chosen)
        log_probs = self._log_probs(logits, ready, chosen)
        for place, row in enumerate(ready):
            row.place, row.pending = place, row.pending + 1
        with device_of(chosen):
            return Flight(ready, Arriving(chosen), log_probs)

    def _log_probs(
        self, logits: Any, rows: Sequence[Row], chosen: Any
    ) -> list[tuple[list[int], list[Arriving]]]:
        """Return the log-probabilities of tokens by the places of their rows.

        Then the most likely tokens and their log-probabilities, if a row has ``top``.
        """
        groups: dict[float, list[int]] = {}
        for place, row in enumerate(rows):
            if row.log_probs:
                groups.setdefault(row.options.temperature or 1.0, []).append(place)
        results = []
        for temperature, places in groups.items():
            part, labels = logits, to_device_of(chosen, logits)
            if len(places) < len(rows):
                index = to_device_of(np.array(places), logits)
                part, labels = part[index], labels[index]
            part = part.astype(np.promote_types(part.dtype, FLOAT32), copy=False)
            with fixed_order(self.decoder.invariant), device_of(part):
                labels = np.maximum(labels, 0)  # -1: the row ends with an error
                own = of_logits(part, labels, temperature, self.decoder.softcap)
                arriving = [Arriving(own)]
                if count := max(rows[place].top for place in places):
                    shown = self.decoder.drawn_from(part)
                    top = top_log_probs(shown, labels, own, count, temperature)
                    arriving += map(Arriving, top)
                results.append((places, arriving))
        return results

    def _land(self) -> None:
        """Wait for the tokens in flight, if there are any."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self._receive(flight)

    def _receive(self, flight: Flight) -> None:
        """Wait for tokens, and add their events to the pending ones."""
        log_probs: list[Any] = [None] * len(flight.rows)
        tops: list[Top] = [[] for _ in flight.rows]
        for places, arriving in flight.log_probs:
            own, *top = (each.wait() for each in arriving)
            for index, place in enumerate(places):
                log_probs[place], count = own[index], flight.rows[place].top
                if count:
                    pairs = (each[index, :count].tolist() for each in top)
                    tops[place] = [*zip(*pairs, strict=True)]
        for row, token, log_prob, top in zip(
            flight.rows, flight.tokens.wait().tolist(), log_probs, tops, strict=True
        ):
            self.taking, row.pending = row, row.pending - 1
            if row.sample.finish is not None:  # it ended one token before, or was cancelled
                continue
            finish: Finish = "error"
            if token >= 0:
                finish = row.take(token)
                self.kept_tokens += 1
                if row.log_probs:
                    row.sample.log_probs.append(log_prob)
                if row.top:
                    row.sample.top_log_probs.append(top)
            new = [token] if token >= 0 else []
            shown = [log_prob][: len(new)] if row.log_probs else None
            likely = [top][: len(new)] if row.top else None
            self.pending.append(Event(row.request, row.index, new, shown, finish, likely))
            if finish is not None:
                self._leave(row)
                self._end(row, finish)
            elif row.length == self.decoder.switch and not row.pinned:
                self._set_back(row)  # all rotary angles of the row change, so do its experts
                row.sample.routes = []
        self.taking = None

    def _end(self, row: Row, finish: Finish) -> None:
        row.sample.finish = finish
        self.open.pop(row, None)

    def restart(self) -> None:
        """Set back all rows after a step that raised an error: none of its results is used.

        Rows end with "error" if they were receiving their token, or if their tokens cannot be
        computed again.
        """
        self.cache.clear()
        self.tree = None if self.tree is None else Prefixes(self.cache)
        self.queue, self.active, self.slots = deque(), [], [*range(self.rows)][::-1]
        self.stems, self.forked, self.flight, self.uniform = [], [], None, Uniform()
        for row in [*self.open]:
            row.request.leader = row.request.stem = row.sequence = row.node = None
            row.filled = row.pending = row.depth = 0
            if row is self.taking or (row.count and not self.decoder.repeats):
                self._end(row, "error")
                self.pending.append(Event(row.request, row.index, [], None, "error"))
            else:
                self.queue.append(row)
        self.taking = None

    def cancel(self, request: Request) -> None:
        """End all samples of a request; their events come with the next step."""
        for row in [row for row in self.active if row.request is request]:
            self._leave(row)
            self._cancelled(row)
        for row in [row for row in self.queue if row.request is request]:
            self.queue.remove(row)
            self._cancelled(row)
        self._drop_stem(request)

    def _cancelled(self, row: Row) -> None:
        self._end(row, "cancelled")
        self.pending.append(Event(row.request, row.index, [], None, "cancelled"))

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.queue or self.active or self.pending or self.flight)
