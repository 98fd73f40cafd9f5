"""CUDA graphs of training steps: forward and backward of a model in one launch.

A graph repeats its launches with the same addresses and numbers.  So a graph serves one form of
call.  Two calls have the same form if they agree in

    the arrays of the model and of the loss scaler     by identity; their values may change in place
    arrays that are keywords of the function           by shape and dtype; the graph copies them
    tokens, where their number varies                  by size, rounded up: the rest is padding
    the seeds of dropout                               by shape, as a keyword; each call copies them
    all other arguments of the function                by value

The optimizer is not in the graph: its few launches per step depend on numbers on the host.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core import gpu
from ..core.arrays import empty
from ..core.call import is_integer
from ..core.replay import choices
from ..core.stand_in import is_planned
from ..ops.common import spans
from ..ops.elements.cast import cast
from ..placement import to_device_of
from ..training import tape
from ..training.captured import Captured, Place
from ..training.gradients import add_gradients
from .adapters.adapter import Seeds
from .adapters.many import ByRows
from .configs.heads import CAUSAL
from .objective import IGNORE, TrainingStep, next_token

# Graphs of a model: a packed run has up to 16 sizes of a batch (see ``rounded``) in two roles, the
# first pass of a step or a later one.  And forms of calls that are remembered.
KEPT, FORMS = 32, 256
IDLE = 256  # calls after which an unused graph may be deleted for another
SHARE = 8  # inputs and results of graphs take at most 1 / SHARE of the GPU memory
COUNT, SINK = "count", "sink"  # keywords: a number of labels; a list to which sums are added
# not identifiers, so no keyword can have these names
SEEDS, FILLED = "seeds of dropout", "number of real tokens"
PADDING = {"tokens": 0, "labels": IGNORE, "mask": 0}  # values of keywords in padding
Passes = Callable[[Any, TrainingStep], tuple[Any, dict[str, Any]]]
Sums = dict[str, Any] | None  # of the gradients of earlier passes of a step; None: only one pass


class Graph:
    """A graph, and its own copies of a call's arrays."""

    def __init__(self, place: Place, arrays: dict[str, Any]) -> None:
        self.captured, self.arrays, self.last = Captured(place), arrays, 0

    def fill(self, arrays: Mapping[str, Any]) -> None:
        """Copy the arrays of a call, which may have fewer tokens, before padding."""
        for name, each in arrays.items():
            own = self.arrays[name]
            if own.shape == each.shape:
                own[...] = each
                continue
            own[..., : each.shape[-1]] = each
            own[..., each.shape[-1] :] = PADDING.get(name, self.arrays["tokens"].size)

    @property
    def held(self) -> list[Any]:
        """The arrays that the graph keeps: its inputs and its results."""
        results = () if self.captured.result is None else self.captured.result[1].values()
        return [*self.arrays.values(), *results]


class Call(NamedTuple):
    """One call: passes(function, step), and the sums to which its gradients are added."""

    passes: Passes
    function: Any
    step: TrainingStep
    sums: Sums
    begins: bool = False  # whether the sums, if there are any, are those of an earlier step

    def __call__(self, function: Any) -> tuple[Any, dict[str, Any]]:
        """Run forward and backward of a function; add the gradients to the sums, if any."""
        value, gradients = self.passes(function, self.step)
        if self.sums is None:
            return value, gradients
        for name in [*gradients] if self.begins and self.sums else ():
            self.sums[name][...] = cast(gradients.pop(name), dtype="float32")
        return value, add_gradients(self.sums, gradients)


class Graphs:
    """The graphs of a model.

    Attributes
    ----------
    why : str or None
        Why calls like the last one never become a graph; None if the last call was a graph, or
        can become one when calls of its form repeat.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self.failed: str | None = None  # why nothing more is captured
        self.clear()

    @property
    def told(self) -> str:
        """A sentence that says whether calls like the last one become a graph."""
        if self.why is not None:
            return f"no graph: {self.why}"
        return "graph: from the third call on, calls with these shapes and options are one launch"

    def clear(self) -> None:
        """Delete all graphs and free their memory."""
        self.place, self.by_form = Place(), dict[Any, Graph]()
        self.forms, self.identities = set[Any](), tuple[Any, ...]()
        self.sums: dict[str, Any] = {}  # gradients of a step's passes; every step overwrites them
        self.calls = 0
        self.size: Any = None  # shapes of the first batch; the sizes of other batches may differ
        self.references: Any = None  # to what graphs read, so that no new object gets the same id

    def __call__(
        self, model: Any, passes: Passes, function: Any, step: TrainingStep, sums: Sums = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return ``passes(function, step)``; the next call overwrites these results.

        With ``sums``, gradients are added to them in float32, and the sums are returned; the first
        pass of a step has {}.
        """
        if model.adapter is None or not model.adapter.dropout:
            step = step._replace(seed=None)  # without dropout, the seed must not change the form
        self.why = next(self._reasons(model, function, step), self.failed)
        call = Call(passes, function, step, sums)
        if self.why is not None or is_planned(model.table):
            return call(function)
        self.calls += 1
        try:
            self._enter(model, step)
            if sums == {}:
                call = call._replace(sums=self.sums, begins=True)
            return self._graphed(model, call)
        except MemoryError:
            if not self.by_form:
                raise
        self.clear()
        self.why = self.failed = "the GPU has no memory for graphs beside the model and its step"
        return call._replace(sums=sums, begins=False)(function)

    def _reasons(self, model: Any, function: Any, step: TrainingStep) -> Iterator[str]:
        """Yield why a call cannot be captured; nothing if it can."""
        table, scaled = model.table, model.config.ropes.values()
        if isinstance(table, np.ndarray):
            yield "its arrays are not on a GPU"
        if not isinstance(function, functools.partial):
            cure = "functools.partial(function, tokens=tokens) names them"
            yield f"the arrays that the function reads are not known; {cure}"
        if (model.division, model.context, model.gather, model.parts) != (None,) * 4:
            yield "ranks divide the model"
        if model.adapter is not None and model.adapter.into is not None:
            yield "weights are rounded to the types of a file, and some of them on the host"
        if isinstance(model.adapter, ByRows):
            yield "each row has its own adapter, which the host looks up"
        lengths = any(function.keywords.get(name) is not None for name in ("mask", "offsets"))
        if lengths and any(rope.original is not None for rope in scaled):
            yield "rotary angles depend on the lengths of texts, which the host reads"
        if tape.watch_results.get() or tape.take_gradients.get() or spans.watchers:
            yield "find_nan, profile or another tool inspects each call"
        if not is_planned(table) and gpu.cupy().get_default_memory_pool().get_limit():
            yield "memory is limited, and a graph allocates outside of CuPy's pool"

    def _graphed(self, model: Any, call: Call) -> tuple[Any, dict[str, Any]]:
        """Return the results of a graph; run the call without one if its form has none yet."""
        function, sums = call.function, call.sums
        arguments, sink = {**function.keywords}, function.keywords.get(SINK)
        counts = any(each is next_token for each in (function.func, *function.args))
        # The number of labels differs between batches: as an array it does not change the form.
        if counts and is_integer(arguments.get(COUNT)):
            arguments[COUNT] = to_device_of(np.asarray(arguments[COUNT]), model.table)
        arrays = {name: each for name, each in arguments.items() if gpu.is_cupys(each.__class__)}
        shapes = {name: each.shape for name, each in arrays.items()}
        if counts and self._varies(model, call, shapes):
            shapes |= rounded(shapes)
            arrays[FILLED] = to_device_of(np.asarray(arrays["tokens"].shape[1]), model.table)
            shapes[FILLED] = ()
        seed = call.step.seed
        if seed is not None:
            arrays[SEEDS] = to_device_of(model.adapter.seeds(seed), model.table)
            shapes[SEEDS] = arrays[SEEDS].shape
        fixed = {n: each for n, each in arguments.items() if n not in arrays and n != SINK}
        arguments_by_place = (Itself(each) if callable(each) else each for each in function.args)
        constants = (*arguments_by_place, *fixed.values(), call.step.checkpoint, choices.get())
        if unknown := [type(each).__name__ for each in constants if not _is_constant(each)]:
            cure = "pass arrays on the GPU by keyword"
            self.why = f"the function is called with {unknown[0]}, which is not hashable; {cure}"
            return call(function)
        form = (
            *(Itself(function.func), *fixed),
            *((type(each), each) for each in constants),
            *((name, shapes[name], each.dtype.str) for name, each in arrays.items()),
            *(sink is None, sums is None, call.begins),
            Itself(getattr(model.seen, "__self__", model.seen)),  # what counts the experts' tokens
        )
        # Sums in other arrays than those of earlier steps are new arrays: no form repeats.
        usual = all(self.sums.get(name) is each for name, each in (sums or {}).items())
        graph = self._graph(form, arrays, shapes) if usual else None
        if graph is None:
            value, gradients = call(function)
            return value, {**gradients}

        def work() -> tuple[Any, dict[str, Any], list[Any]]:
            own: list[Any] = []
            keywords = {**fixed, **graph.arrays} | ({} if sink is None else {SINK: own})
            seeds = keywords.pop(SEEDS, None)
            array_seeds = seeds if seeds is None else Seeds([*model.adapter.scales], seeds)
            run = call._replace(step=call.step._replace(seed=array_seeds))
            model.filled = keywords.pop(FILLED, None)
            try:
                return *run(functools.partial(function.func, *function.args, **keywords)), own
            finally:
                del model.filled

        value, gradients, own_sums = graph.captured(work)
        if sink is not None:
            sink.extend(
                each.copy() for each in own_sums
            )  # the next launch overwrites the originals
        if graph.captured.why is not None:
            self.clear()
            self.why = self.failed = graph.captured.why
        return value, {**gradients}

    def _varies(self, model: Any, call: Call, shapes: Mapping[str, Any]) -> bool:
        """Return whether a call of other sizes than the first one may have padding in a graph.

        It changes no result: a padding token is in a text of its own or after all others of its
        row, and has no label.  Where noise or dropout is drawn by its place in the rows, angles
        depend on the length of rows, or a head reads their last token, rows are left as they are.
        """
        rows, texts, beside = (shapes.get(name) for name in ("tokens", "offsets", "routes"))
        size = rows, texts
        self.size = self.size or size
        packed = texts is not None and rows is not None and rows[0] == 1
        plain = call.function.func is next_token and call.step.seed is None and texts is None
        lengths = any(rope.original is not None for rope in model.config.ropes.values())
        usual = model.head == CAUSAL and not model.invariant and beside is None and not lengths
        return size != self.size and rows is not None and usual and (packed or plain)

    def _graph(
        self, form: Any, arrays: Mapping[str, Any], shapes: Mapping[str, Any]
    ) -> Graph | None:
        """Copy arrays into the graph of a form and return it; create it if the form repeats."""
        graph = self.by_form.pop(form, None)
        if graph is None and form not in self.forms:
            self.forms = {*(self.forms if len(self.forms) < FORMS else ()), form}
            return None
        if graph is None:
            if not self._has_room():
                return None
            if not self.by_form:  # a graph cannot use blocks that the pool holds for earlier calls
                gpu.cupy().get_default_memory_pool().free_all_blocks()
                gpu.cupy().get_default_pinned_memory_pool().free_all_blocks()
            copies = {n: empty(shapes[n], each.dtype, like=each) for n, each in arrays.items()}
            graph = Graph(self.place, copies)
        self.by_form[form] = graph  # the newest is the last
        graph.last = self.calls
        graph.fill(arrays)
        return graph

    def _has_room(self) -> bool:
        """Return whether one more graph may be made; drop the one that was unused for longest.

        Graphs in use stay: sizes that take turns would all be captured again and again.
        """
        room, graphs = gpu.cupy().cuda.runtime.memGetInfo()[1] // SHARE, self.by_form
        while graphs:
            held = {id(each): each.nbytes for graph in graphs.values() for each in graph.held}
            own = sum(held.values()) - sum(held.get(id(each), 0) for each in self.sums.values())
            oldest = next(iter(graphs))
            if len(graphs) < KEPT and own <= room:
                break
            if self.calls - graphs[oldest].last < IDLE:
                self.why = f"{len(graphs)} graphs of other forms are in use"
                return False
            del graphs[oldest]
        return True

    def _enter(self, model: Any, step: TrainingStep) -> None:
        """Delete all graphs if arrays or settings of the model differ from the captured ones."""
        adapter, scaler = model.adapter, step.scaler
        objects = [*model.parameters.values(), model.config]
        objects += [] if scaler is None else [scaler.on_device(model.table)]
        objects += [] if adapter is None else [*adapter.parameters.values(), adapter]
        scales = () if adapter is None else (*adapter.scales.values(),)
        identities = (*map(id, objects), *scales, model.chunked_mlp)
        if identities != self.identities:
            self.clear()
            self.identities, self.references = identities, objects


def rounded(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes of a batch with padding, of which there are few.

    Tokens are rounded up to a multiple of a 16th of the power of two below: 3 % on average.  Where
    texts are packed, one more text is the padding, and empty ones follow it up to a power of two.
    """
    rows, count = shapes["tokens"]
    step = max(16, 1 << max(0, count.bit_length() - 5))
    own: dict[str, Any] = {
        name: (rows, -(-count // step) * step) for name in PADDING if name in shapes
    }
    if "offsets" in shapes:
        own["offsets"] = (max(16, 1 << shapes["offsets"][0].bit_length()) + 1,)
    return own


def _is_constant(value: Any) -> bool:
    """Return whether a value is hashable, so that it can be part of a form."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Itself:
    """A wrapper that compares an object by identity."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.wrapped is self.wrapped

    def __hash__(self) -> int:
        return id(self.wrapped)
