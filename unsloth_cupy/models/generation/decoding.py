"""The computation of an engine's step: new tokens of many rows, end to end in one row.

    decoding = Decoding(model, rows=64, pages=1024, page=64)
    logits = decoding([Work(sequence, tokens, of_row, slot), ...])

A row has a sequence of pages; layers without attention have a state for each slot.  On a GPU a step
of one token per row is captured into a CUDA graph for each rounded number of rows, and for each
order of adapters if rows have different ones.
"""

import copy
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core import gpu
from ...core.dtypes import Array
from ...core.replay import fixed_order
from ...core.stand_in import is_planned
from ...errors import ConfigError, DeviceMemoryError
from ...inference.packed_rows import PackedRows
from ...inference.page_pools import PagePools
from ...inference.paged_kv_cache import PagedKVCache
from ...inference.paged_rows import PagedRows
from ...machine import bytes_requested, device_memory, format_bytes
from ...ops.elements.cast import in_dtype
from ...parallel.nccl import NcclCommunicator
from ...placement import on_gpu_of_attribute, to_device_of, to_numpy
from ...serving.drawing import likeliest_of
from ...serving.work import Computed, Work
from ...training.captured import Captured, Place
from ..adapters.adapter import DOWN, MAGNITUDE, UP, Adapter
from ..adapters.joined import join_downs
from ..adapters.many import MARK, ByRows
from ..configs.config import CHUNKED
from ..invariant import check_invariant
from ..layers.attending import packed, project_of, whole_of
from ..layers.block import blocks, embedded, inputs_of_layers
from ..layers.call import (
    Attention,
    Call,
    Keys,
    Latents,
    Mixtures,
    Project,
    Recurrence,
    no_states,
)
from ..layers.head import capped, exact_logits
from ..layers.norms import join
from ..network import Network
from ..ranks.stages import routed_by_all, through_blocks

CHUNK = 512  # most tokens of prompts in a step, unless the caller says otherwise
Names = tuple[str | None, ...]  # adapters of rows, as in Work; (): all have the active one
# of a captured step: rows, pages of a table, whether it is greedy, adapters
Form = tuple[int, int, bool, Names]
Reach = tuple[int | None, int | None]  # window and chunk of a layer, None: it has none
LEAST = 8  # pages in the table of a captured step; tables double from here
# steps for which a captured step with up to twice the rows and pages takes the place of a new one:
# a new one runs kernel by kernel twice, which a number of rows that soon changes does not repay
PATIENCE = 8
# orders of adapters that have graphs, or count toward ``PATIENCE``; the least recently used one is
# dropped for a new one.  The rows of a call end one by one: 32 rows make at most so many.
ORDERS = 32


@on_gpu_of_attribute("model.table")
class Decoding:
    """A model with the caches of its rows: a callable that computes one step.

    Attributes
    ----------
    cache : PagePools
        Keys and values of layers with attention; layers with a window or chunks have pages of their
        own if others read all tokens.
    states : States or None
        The states of layers without attention, by slot.
    switch : int or None
        The number of tokens from which longrope has other angles for all positions of a row.
    shares : bool
        Whether a row may use the pages of another row that begins alike, and be computed again.
    ahead : bool
        Whether a step may begin before the host has the tokens of the step before.
    computed : int
        Number of tokens computed so far, with those that fill up captured steps.
    vocab, invariant : int, bool
        Of the model.
    """

    def __init__(
        self,
        model: Network,
        *,
        rows: int,
        pages: int,
        page: int,
        chunk: int = CHUNK,
        cache: PagedKVCache | None = None,
        cache_dtype: Any = None,
        notes: bool = False,
        adapters: dict[str, Adapter] | None = None,
        most: int | None = None,
    ) -> None:
        """Create the caches; ``most``, if not None, is the largest number of tokens in a row."""
        self.model = model = model.settled()
        self.adapters: dict[str, Any] = {} if adapters is None else adapters
        self.notes = notes and model.config.experts is not None
        config = model.config
        if cache is None:
            self.cache = page_pools(
                model,
                pages,
                page,
                cache_dtype,
                self.adapters,
                most_in_window(config, rows, page, chunk),
            )
        else:
            layers = own_attention(model)
            if len(cache.keys) == config.layers:
                layers = [*range(config.layers)]
            places = {n: (0, place) for place, n in enumerate(layers)}
            self.cache = PagePools([cache], places, config.chunk)
        self.states: Any = States(rows, model.table) if config.recurrent else None
        self.most = most
        originals = [rope.original for rope in config.ropes.values() if rope.original is not None]
        grows = bool(originals) and (most is None or most > min(originals))
        self.switch = switch_of(config) if grows else None
        self.by_length = grows  # angles of a token depend on the length of its row
        self.shares = not config.recurrent and (not grows or self.switch is not None)
        self.repeats = not grows or self.switch is not None
        self.vocab, self.invariant = config.vocab, model.invariant
        self.softcap = config.logit_softcap if model.invariant else None
        self.captures = captures(model) and not grows
        self.ahead = self.captures and not self.notes  # the host reads the experts of each step
        # the last drawn tokens, on the device: a step of a graph reads and writes them there
        self.drawn = self._placed(np.zeros(rounded_rows(rows)))
        self.place, self.graphs, self.wanted = Place(), dict[Form, Any](), Counter[Form]()
        self.last: tuple[Names, Network] = ((), model)
        # of captured steps, model and parameters, None: not prepared; the last used ones are last
        self.orders: dict[Names, tuple[Any, ...] | None] = {}
        self.low: dict[str, dict[str, Any]] = {}  # A and B of each named adapter, rounded
        self.computed = 0
        if model.invariant:
            division = model.division is not None or model.context is not None
            check_invariant(config, division, PagedRows("generate", self.cache.first, [], 0), None)

    def __call__(self, work: Sequence[Work], greedy: bool = False) -> Computed:
        """Compute the new tokens of rows; a ``greedy`` step also chooses and sends the next tokens.

        Logits (rows, vocab) are those after the last token of each row, or after its last
        ``checked`` tokens, row by row.  Routes are the experts of
        the new tokens by row, (tokens, layers with experts, k) on the host, if ``notes`` is true.
        The order of rows: those with one token, then those without earlier tokens, then the others.
        """
        names, form = self._names(work), None
        if self.captures and all(len(each.tokens) == 1 for each in work):
            form = self._form(work, names, greedy)
        if form is not None:
            logits, routes, chosen = self._played(work, form)
        else:
            counts = [len(each.tokens) for each in work]
            self.computed += sum(counts)
            rows = PackedRows(self.cache, [w.sequence for w in work], counts)
            tokens, source = np.concatenate([w.tokens for w in work]), self._source(work, counts)
            model = self._model(names)
            with model.ordered():
                rows.place(self._placed(np.concatenate([tokens, rows.numbers])))
            parameters = model.entered(model.parameters)
            slots = self._placed([w.slot for w in work])
            used = (
                model.used(parameters, None),
                whole_of(model.adapter),
                self._project(model, rows.offsets),
            )
            logits, routes = self._computed(model, parameters, used, rows, source, slots, work)
            chosen = self._chosen(logits) if greedy else None
        if routes is None or is_planned(routes):
            return Computed(logits, None, chosen)
        starts = np.cumsum([len(each.tokens) for each in work])
        return Computed(logits, np.split(to_numpy(routes)[: starts[-1]], starts[:-1]), chosen)

    def send(self, tokens: Array) -> None:
        """Store tokens, (rows,) on the device, as the input of later work."""
        self.drawn[: len(tokens)] = np.maximum(tokens, 0)

    def _chosen(self, logits: Array) -> Array:
        """Return the most likely tokens, and send them."""
        chosen: Array = likeliest_of(self.drawn_from(logits))
        self.send(chosen)
        return chosen

    def _source(self, work: Sequence[Work], counts: Sequence[int]) -> Any:
        """Return the places of tokens among those drawn, then those passed; None: all passed."""
        if all(each.source < 0 for each in work):
            return None
        place = len(self.drawn) + np.arange(sum(counts))
        for first, each in zip(np.cumsum(counts) - counts, work, strict=True):
            if each.source >= 0:
                place[first] = each.source
        return self._placed(place)

    def _form(self, work: Sequence[Work], names: Names, greedy: bool) -> Form | None:
        """Return the form of the captured step to launch for rows, None: direct launches.

        Rows that fill up a step have the adapter of the last row.  Orders of adapters are many, and
        calls with a few tokens end before a graph repays its capture: so a step of several adapters
        is not captured before its form was needed ``PATIENCE`` times.
        """
        rows, tables = rounded_rows(len(work)), self.cache.first.tables
        pages = max(len(tables[each.sequence]) for each in work) + 1
        pages = max(LEAST, 1 << (pages - 1).bit_length())
        form = rows, pages, greedy, names + names[-1:] * (rows - len(work))
        self._use(form[3])
        self.wanted[form] += 1
        if form in self.graphs or self.wanted[form] > PATIENCE:
            return form
        larger = (
            each
            for each, (*_, captured) in self.graphs.items()
            if captured.graph is not None and each[2] == greedy
            if rows <= each[0] <= 2 * rows and pages <= each[1] <= 2 * pages
            if each[3][: len(names)] == names and bool(each[3]) == bool(names)
        )
        return min(larger, key=lambda each: each[:2], default=None if names else form)

    def _played(self, work: Sequence[Work], form: Form) -> tuple[Array, Any, Any]:
        """Compute rows with one token each, by the graph of a form."""
        sequences, greedy, names = [w.sequence for w in work], form[2], form[3]
        self.computed += form[0]
        rows = PackedRows(self.cache, sequences, [1] * len(work), rows=form[0], pages=form[1])
        tokens, source = np.zeros(form[0], np.int64), len(self.drawn) + np.arange(form[0])
        for place, each in enumerate(work):
            tokens[place] = each.tokens[0]
            if each.source >= 0:
                source[place] = each.source
        numbers = np.concatenate([tokens, rows.numbers, source])
        if form not in self.graphs:
            rows.longest = min(form[1] * self.cache.page, self.most or sys.maxsize)
            placed = self._placed(numbers)
            rows.place(placed[: -form[0]])
            self.graphs[form] = rows, placed, Captured(self.place)
        first, placed, captured = self.graphs[form]
        placed[...] = self._placed(numbers)
        model, parameters, *used = self._prepared(names)

        def run() -> tuple[Array, Any, Any]:
            source = placed[-form[0] :]
            logits, routes = self._computed(model, parameters, used, first, source, None, ())
            return logits, routes, self._chosen(logits) if greedy else None

        if type(placed) is np.ndarray or is_planned(placed):
            results = run()
        else:
            try:
                results = captured(run)
            except MemoryError as error:
                more, (free, whole) = bytes_requested(error), gpu.cupy().cuda.runtime.memGetInfo()
                raise DeviceMemoryError(
                    f"generate: a step needs {format_bytes(more)} more, and the GPU has"
                    f" {format_bytes(free)} free; generate fewer rows or fewer tokens at a time",
                    whole - free + more,
                    whole,
                ) from error
            comm = None if model.division is None else model.division.comm
            if captured.graph is not None and isinstance(comm, NcclCommunicator):
                comm.launched("generate")
        logits, routes, chosen = results
        return logits[: len(work)], routes, None if chosen is None else chosen[: len(work)]

    def _prepared(self, names: Names) -> tuple[Any, ...]:
        """Return model and parameters, and of blocks: parameters, dense weights, linear layers.

        Adapters are rounded once, each for all orders in which rows have it.
        """
        self._use(names)
        prepared = self.orders[names]
        if prepared is None:
            model = self._model(names)
            parameters, adapter = model.entered(model.parameters), model.adapter
            used = model.used(parameters, None)
            if isinstance(adapter, ByRows):
                low = dict[str, Any]()
                for key, each in adapter.adapters.items():
                    if key not in self.low:
                        own = {name: used[f"{name}{MARK}{key}"] for name in each.parameters}
                        self.low[key] = self._rounded(own)
                    low |= {f"{name}{MARK}{key}": own for name, own in self.low[key].items()}
            else:
                low = self._rounded(used)
            ends = [n for n in used if self.cache.latent and n.endswith(".kv_b_proj.weight")]
            whole = {name: whole_of(adapter)(used, name) for name in ends}
            project = self._project(model, range(len(names) + 1))
            prepared = model, parameters, {**used, **low}, lambda _, n: whole[n], project
            self.orders[names] = prepared
        return prepared

    def _use(self, names: Names) -> None:
        """Note that an order of adapters is used now; drop the least recently used of too many."""
        self.orders[names] = self.orders.pop(names, None)
        if len(self.orders) > ORDERS:
            oldest = next(filter(None, self.orders))  # () is the most common one
            del self.orders[oldest]
            for form in [each for each in self.wanted if each[3] == oldest]:
                del self.wanted[form]
                self.graphs.pop(form, None)

    def _rounded(self, parameters: Any) -> dict[str, Any]:
        """Return A and B of an adapter in the dtype of the model, the A of an input joined.

        DoRA computes norms of weights with A and B as they are, so those are not rounded.
        """
        low = {name: each for name, each in parameters.items() if name.endswith((DOWN, UP))}
        for name, each in low.items():
            if name.removesuffix(DOWN).removesuffix(UP) + MAGNITUDE not in parameters:
                low[name] = in_dtype(each, self.model.dtype)
        return join_downs(low)

    @staticmethod
    def _project(model: Network, offsets: Sequence[int]) -> Project:
        """Return the linear layers of rows that begin at ``offsets``, end to end in one row."""
        tokens = np.zeros((1, offsets[-1]), np.int32)
        place = np.array(offsets, np.int32)
        return project_of(model.config, model.adapter, None, model.division, tokens, place)

    def _computed(
        self,
        model: Network,
        parameters: Any,
        used: Any,
        rows: PackedRows,
        source: Any,
        slots: Any,
        work: Sequence[Work],
    ) -> tuple[Array, Any]:
        """Return the logits after the last tokens of rows, and the experts of all tokens."""
        tokens: Any = rows.tokens[None]
        if source is not None:
            tokens = np.concatenate([self.drawn, rows.tokens])[source][None]
        positions: Any = rows.positions[None]
        if self.by_length:
            tables, positions = self._tables_of_rows(model, rows, work), None
        else:
            length = max(rows.longest, 1)
            tables = {kind: table(length) for kind, table in model.tables.items()}
            if isinstance(positions, np.ndarray) and not rows.fixed:  # gathered once for all layers
                place = rows.known[0]
                tables = {kind: tuple(t[place] for t in each) for kind, each in tables.items()}
                positions = None
        offsets: Any = np.array(rows.offsets, np.int32)
        own, states, latents, attend = None, no_states, None, rows.attend
        begins = rows.all_fresh and tokens.size >= len(rows.offsets)  # of latent attention
        if model.config.indexer is not None:  # by heads, no query leaves out keys
            begins = begins and rows.longest <= model.config.indexer.keys
        if self.states is not None:
            own, self.states.index, states = self._placed(offsets), slots, self.states.recurrent
        if self.cache.latent is not None:
            latents = Latents(lambda layer: begins, rows.append, rows.attend, rows.index_keys)
            if begins:
                attend = partial(packed, self._placed(offsets), max(rows.counts))
        turn = rows.turn if rows.turns and positions is not None else None
        stacks = {} if model.adapter is None else model.adapter.used_stacks()
        call = Call(
            model.config,
            used[0],
            used[2],
            Attention(
                attend,
                tables,
                positions,
                Keys(turn, latents, cached=True),
                used[1],
                partial(rows.attend, in_chunk=True),
            ),
            Mixtures(stacks, [] if self.notes else None, ranks=model.expert_ranks),
            Recurrence(states, None, own),
            False if isinstance(model.adapter, ByRows) else model.chunked_mlp,
            model.slices,
            model.gather,
        )
        count = len(rows.offsets) - 1
        ends = None if tokens.size == count else self._placed(_checked(rows.offsets, work))

        def head(x: Array) -> Array:
            x = x if ends is None else x[:, ends]
            if model.invariant:
                with fixed_order():
                    exact: Array = exact_logits(model.config, parameters, x)[0]
                    return exact
            logits: Array = model.next_logits(parameters, x)[0]
            return logits

        with model.ordered():
            if staged(model):
                logits = through_blocks(model, call, tokens, head, count)
            else:
                logits = head(self.hidden(model, call, parameters, tokens))
        if not self.notes:
            return logits, None
        routers: Any = call.experts.routers
        if staged(model):
            stages: Any = None if model.division is None else model.division.stages
            routers = routed_by_all(model, stages, routers, tokens.shape)
        return logits, np.stack([each.experts[0] for each in routers], axis=1)

    def hidden(self, model: Network, call: Call, parameters: Any, tokens: Array) -> Array:
        """Return the normalised states of the new tokens, (1, tokens, hidden)."""
        branch = embedded(model.config, parameters, tokens, model.slices)
        inputs = inputs_of_layers(model.config, parameters, tokens, branch)
        branch, stream = blocks(call, branch, None, inputs=inputs)
        states: Array = join(call, "model.", model.config.norms.last, branch, stream)[0]
        return states

    def drawn_from(self, logits: Array) -> Array:
        """Return the logits that tokens are drawn from: with the model's cap."""
        return capped(self.model.config, logits) if self.invariant else logits

    def _tables_of_rows(
        self, model: Network, rows: PackedRows, work: Sequence[Work]
    ) -> dict[str, tuple[Any, ...]]:
        """Return the rotary tables of each token, whose angles depend on its row's length."""
        by_kind = {}
        for kind, table in model.tables.items():
            parts = [
                [each[start : start + len(w.tokens)] for each in table(max(w.length, 1))]
                for w, start in zip(work, rows.before, strict=True)
            ]
            by_kind[kind] = tuple(np.concatenate(each) for each in zip(*parts, strict=True))
        return by_kind

    def _names(self, work: Sequence[Work]) -> Names:
        """Return the adapters of rows; (): all have the active adapter, or none if none is active.

        If no adapter is active, the name of none is None alone.
        """
        plain = None if self.model.adapter is None else ""
        names = tuple(plain if each.adapter == "" else each.adapter for each in work)
        return () if {*names} == {plain} else names

    def _model(self, names: Names) -> Network:
        """Return the model with the adapter of each row."""
        if not names:
            return self.model
        if self.last[0] != names:
            model, active = copy.copy(self.model), self.model.adapter
            adapters = self.adapters if active is None else {**self.adapters, "": active}
            model.adapter = ByRows(adapters, names)
            self.last = names, model
        return self.last[1]

    def _placed(self, numbers: Any) -> Any:
        """Return integers as an int32 array on the device of the model."""
        return to_device_of(np.asarray(numbers, np.int32), self.model.table)


class States:
    """The states of layers without attention: a row of each array for each slot."""

    def __init__(self, slots: int, like: Array) -> None:
        self.slots, self.like = slots, like
        self.arrays: dict[int, tuple[Array, ...]] = {}
        self.index: Any = None  # the slots of a step's rows, in order

    def recurrent(self, layer: int, tokens: int = 0, *states: Array) -> tuple[Any, ...]:
        """Return the states of the step's rows; first store ``states``, if passed."""
        if states:
            if layer not in self.arrays:
                self.arrays[layer] = tuple(
                    np.zeros_like(each, shape=(self.slots, *each.shape[1:])) for each in states
                )
            for stored, each in zip(self.arrays[layer], states, strict=True):
                stored[self.index] = each
        if layer not in self.arrays:
            return None, None  # no row has earlier tokens
        return tuple(each[self.index] for each in self.arrays[layer])

    def clear(self, slot: int) -> None:
        """Set the states of a slot to the initial states."""
        for each in self.arrays.values():
            for stored in each:
                stored[slot] = 0

    def taken(self, slot: int) -> dict[int, tuple[Array, ...]]:
        """Return a copy of the states of a slot, by layer."""
        each = self.arrays.items()
        return {layer: tuple(stored[slot].copy() for stored in own) for layer, own in each}

    def put(self, slot: int, states: dict[int, tuple[Array, ...]]) -> None:
        """Store states, which ``taken`` returned, in a slot."""
        for layer, own in states.items():
            for stored, each in zip(self.arrays[layer], own, strict=True):
                stored[slot] = each


def captures(model: Network) -> bool:
    """Return whether a step of one token per row can be one CUDA graph.

    It needs a GPU, and weights that are whole in memory.  With expert ranks, the host reads the
    numbers of rows to send, and an indexer sorts scores with a library that waits for the GPU: no
    graph can capture that.
    """
    config = model.config
    divided = model.expert_ranks is not None or model.gather is not None or staged(model)
    other = config.recurrent or config.indexer is not None
    return not (divided or other or isinstance(model.table, np.ndarray))


def staged(model: Network) -> bool:
    """Return whether ranks hold different blocks."""
    return model.division is not None and model.division.stages is not None


def own_attention(model: Network) -> list[int]:
    """Return the layers with attention that this rank computes."""
    stages = None if model.division is None else model.division.stages
    layers = range(model.config.layers)
    own = (n for n in layers if stages is None or stages.holds(n))
    return [n for n in own if model.config.attends(n)]


def cache_form(model: Network, dtype: Any, adapters: Any = ()) -> dict[str, Any]:
    """Return the arguments of a PagedKVCache, but for its layers and pages.

    int8 codes have one scale per row, but the two parts of a latent row differ in scale: an int8
    cache stores whole heads.  So does that of an invariant model, as training computes them, and
    one for adapters that change ``kv_b_proj``.
    """
    config = model.config
    sizes: dict[str, Any] = {"kv_heads": config.kv_heads, "dim": config.dim, "latent": None}
    several = any(".kv_b_proj." in name for each in adapters for name in each.parameters)
    if dtype is None and not model.invariant and not several:
        sizes = model.cache_sizes
    if config.indexer is not None and sizes["latent"] is None and not model.invariant:
        problem = f"the indexer of a {config.model_type} stores its keys in latent rows"
        cure = "leave out cache_dtype, invariant, and adapters of kv_b_proj"
        raise ConfigError(f"generate: {problem}; {cure}")
    return {**sizes, "dtype": model.dtype if dtype is None else dtype, "like": model.table}


def by_reach(model: Network, form: dict[str, Any]) -> list[tuple[Reach, list[int]]]:
    """Return the layers of each pool with their window and chunk, those without either first."""
    layers: dict[Reach, list[int]] = {}
    for layer in own_attention(model):
        window, chunk = model.config.window_of(layer), None
        if model.config.layer_types[layer] == CHUNKED:
            chunk = model.config.chunk
        reach = (window, chunk) if form["latent"] is None else (None, None)
        layers.setdefault(reach, []).append(layer)
    return sorted(layers.items(), key=lambda each: any(each[0])) or [((None, None), [])]


def most_in_window(config: Any, rows: int, page: int, chunk: int) -> int:
    """Return the most pages of layers with a window or chunks: for all rows, and for new tokens.

    ``chunk`` is the number of new tokens.  The window of a token begins anywhere in a page.
    """
    reach = config.window or config.chunk or 0
    return rows * (1 + -(-reach // page)) + -(-chunk // page) if reach else 0


def page_pools(
    model: Network, pages: int, page: int, dtype: Any, adapters: Any, most: int
) -> PagePools:
    """Return new caches for the attention layers of a model.

    The first has ``pages`` pages, a further one for layers with a window or chunks at most
    ``most``.
    """
    form = cache_form(model, dtype, (adapters or {}).values())
    sizes = page, form.pop("kv_heads"), form.pop("dim")
    pools, places = list[PagedKVCache](), dict[int, tuple[int, int]]()
    for number, ((window, chunk), layers) in enumerate(by_reach(model, form)):
        own = min(pages, most) if number else pages
        more = {**form, "window": window, "chunk": chunk}
        pools.append(PagedKVCache(len(layers), own, *sizes, **more))
        places |= {layer: (number, place) for place, layer in enumerate(layers)}
    return PagePools(pools, places, model.config.chunk)


def free_pages(model: Network, rows: int, page: int, chunk: int, dtype: Any, adapters: Any) -> int:
    """Return the pages that rows of all positions fill, at most four fifths of the free memory."""
    form = cache_form(model, dtype, adapters.values())
    numbers = page * form["kv_heads"] * form["dim"] * np.dtype(form["dtype"]).itemsize
    size = max(1, numbers * (1 if form["latent"] is not None else 2))
    like: Any = model.table
    where = None if isinstance(like, np.ndarray) else f"cuda:{like.device.id}"
    free = device_memory(where)[1]
    most = rows * -(-model.config.positions // page)
    if free is None:
        return max(1, most)
    counts = [len(layers) for _, layers in by_reach(model, form)]
    room = free * 4 // 5 // size  # pages of one layer
    limit = most_in_window(model.config, rows, page, chunk)
    if len(counts) > 1 and room > limit * sum(counts):
        room, counts = room - limit * counts[1], counts[:1]
    return max(1, min(most, room // max(1, sum(counts))))


def _checked(offsets: Sequence[int], work: Sequence[Work]) -> Any:
    """Return the places of the tokens whose logits are computed."""
    stops = zip(offsets[1:], work, strict=True)
    return np.concatenate([np.arange(stop - each.checked, stop) for stop, each in stops])


def switch_of(config: Any) -> int | None:
    """Return the length from which longrope has other angles for all positions, or None."""
    ropes = (rope for rope in config.ropes.values() if rope.original is not None)
    originals = (r.original for r in ropes if (r.scaling or {}).get("rope_type") == "longrope")
    return next((original + 1 for original in originals if original is not None), None)


def rounded_rows(rows: int) -> int:
    """Return the rows of a captured step: at most 1 / 32 more, so that there are few shapes."""
    step = max(1, 1 << (rows - 1).bit_length() >> 5)
    return -(-rows // step) * step
