"""Steps of training as CUDA graphs: the passes of a model, forward and backward, in one launch.

A graph repeats its launches with the same addresses and numbers.  So it belongs to a form of call:

    the arrays of the model and of the loss scaler       by identity; they may change in place
    arrays that are keywords of the function             by shape and dtype; the graph copies them
    tokens, where their number varies                    by size, rounded up: the rest is padding
    the seeds of dropout                                 as such an array, which each call fills
    everything else that the function is called with     by value

The optimizer is not a part of it: that takes a few launches a step, with numbers of the host.
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
KEPT, MET = 32, 256
IDLE = 256  # calls without a graph, after which it makes room for another
SHARE = 8  # of a GPU's memory, one part in so many is for inputs and results of graphs
COUNT, SINK = "count", "sink"  # keywords: a number of labels; a list that takes a method's sums
# beside the keywords, as no function has one of these names
SEEDS, FILLED = "seeds of dropout", "tokens that are no padding"
PADDING = {"tokens": 0, "labels": IGNORE, "mask": 0}  # values of keywords in padding
Passes = Callable[[Any, TrainingStep], tuple[Any, dict[str, Any]]]
Sums = dict[str, Any] | None  # of the gradients of earlier passes of a step; None: only one pass


class Graph:
    """A graph, and its own copies of the arrays of a call."""

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
    """One call: passes(function, step), and where its gradients go."""

    passes: Passes
    function: Any
    step: TrainingStep
    sums: Sums
    begins: bool = False  # whether the sums, if there are any, are those of an earlier step

    def __call__(self, function: Any) -> tuple[Any, dict[str, Any]]:
        """Run the passes of a function, and add the gradients to the sums if there are some."""
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
        Why the last call is not a graph and never will be; None if it is one, or may become one
        when calls of its form repeat.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self.failed: str | None = None  # why nothing more is captured
        self.clear()

    @property
    def told(self) -> str:
        """Whether calls like the last one become a graph, in words."""
        if self.why is not None:
            return f"no graph: {self.why}"
        return "graph: from its third call on, a call of this form is one launch"

    def clear(self) -> None:
        """Drop all graphs with their memory."""
        self.place, self.by_form = Place(), dict[Any, Graph]()
        self.met, self.world = set[Any](), tuple[Any, ...]()
        self.sums: dict[str, Any] = {}  # of the gradients of a step's passes, in every step
        self.calls = 0
        self.size: Any = None  # of the first batch: the number of tokens of others may vary
        self.alive: Any = None  # what graphs read: their numbers must stay theirs

    def __call__(
        self, model: Any, passes: Passes, function: Any, step: TrainingStep, sums: Sums = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return ``passes(function, step)``: results that the next call overwrites.

        Gradients are added to ``sums``, in float32, which are returned in place of them: {} in the
        first pass of a step.
        """
        if model.adapter is None or not model.adapter.dropout:
            step = step._replace(seed=None)  # nothing is drawn
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
        self.why = self.failed = "the GPU has no memory for graphs beside all else"
        return call._replace(sums=sums, begins=False)(function)

    def _reasons(self, model: Any, function: Any, step: TrainingStep) -> Iterator[str]:
        """Yield why a call cannot be captured; nothing if it can."""
        table, scaled = model.table, model.config.ropes.values()
        if isinstance(table, np.ndarray):
            yield "its arrays are not on a GPU"
        if not isinstance(function, functools.partial):
            cure = "functools.partial(function, tokens=tokens) names them"
            yield f"what the function reads is not known; {cure}"
        if step.checkpoint is not None and step.checkpoint.offload:
            yield "a checkpoint with offload sends activations to the host and back"
        if (model.division, model.context, model.gather, model.parts) != (None,) * 4:
            yield "ranks divide the model"
        if model.adapter is not None and model.adapter.into is not None:
            yield "weights are rounded as a file has them, of some kinds on the host"
        if isinstance(model.adapter, ByRows):
            yield "rows have adapters of their own, which the host finds"
        lengths = any(function.keywords.get(name) is not None for name in ("mask", "offsets"))
        if lengths and any(rope.original is not None for rope in scaled):
            yield "rotary angles depend on lengths of texts, which the host reads"
        if tape.watch_results.get() or tape.take_gradients.get() or spans.watchers:
            yield "something looks at each call, such as find_nan or profile"
        if not is_planned(table) and gpu.cupy().get_default_memory_pool().get_limit():
            yield "memory is limited, and a graph has memory beside CuPy's pool"

    def _graphed(self, model: Any, call: Call) -> tuple[Any, dict[str, Any]]:
        """Return the results of a graph, or of a run on the way to one."""
        function, sums = call.function, call.sums
        arguments, sink = {**function.keywords}, function.keywords.get(SINK)
        counts = any(each is next_token for each in (function.func, *function.args))
        if counts and is_integer(arguments.get(COUNT)):  # another in every batch
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
        constants = (*function.args, *fixed.values(), call.step.checkpoint, choices.get())
        if unknown := [type(each).__name__ for each in constants if not _is_constant(each)]:
            cure = "pass arrays of the GPU by keyword"
            self.why = f"the function is called with {unknown[0]}, which has no hash; {cure}"
            return call(function)
        form = (
            *(Itself(function.func), *fixed),
            *((type(each), each) for each in constants),
            *((name, shapes[name], each.dtype.str) for name, each in arrays.items()),
            *(sink is None, sums is None, call.begins),
            Itself(getattr(model.seen, "__self__", model.seen)),  # what counts the experts' tokens
        )
        usual = all(self.sums.get(name) is each for name, each in (sums or {}).items())
        graph = self._graph(form, arrays, shapes) if usual else None
        if graph is None:  # as for all sums in other arrays
            value, gradients = call(function)
            return value, {**gradients}

        def work() -> tuple[Any, dict[str, Any], list[Any]]:
            own: list[Any] = []
            keywords = {**fixed, **graph.arrays} | ({} if sink is None else {SINK: own})
            seeds = keywords.pop(SEEDS, None)
            held = seeds if seeds is None else Seeds([*model.adapter.scales], seeds)
            run = call._replace(step=call.step._replace(seed=held))
            model.filled = keywords.pop(FILLED, None)
            try:
                return *run(functools.partial(function.func, *function.args, **keywords)), own
            finally:
                del model.filled

        value, gradients, own_sums = graph.captured(work)
        if sink is not None:
            sink.extend(each.copy() for each in own_sums)  # those of the next pass will lie there
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
        """Return the graph of a form with these arrays in it, or a new one if the form repeats."""
        graph = self.by_form.pop(form, None)
        if graph is None and form not in self.met:
            self.met = {*(self.met if len(self.met) < MET else ()), form}
            return None
        if graph is None:
            if not self._has_room():
                return None
            if not self.by_form:  # what the runs before have freed is needed now
                gpu.cupy().get_default_memory_pool().free_all_blocks()
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
        """Drop all graphs if they have read other arrays, or other settings of the model."""
        adapter, scaler = model.adapter, step.scaler
        read = [*model.parameters.values(), model.config]
        read += [] if scaler is None else [scaler.on_device(model.table)]
        read += [] if adapter is None else [*adapter.parameters.values(), adapter]
        scales = () if adapter is None else (*adapter.scales.values(),)
        world = (*map(id, read), *scales, model.chunked_mlp)
        if world != self.world:
            self.clear()
            self.world, self.alive = world, read


def rounded(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes of a batch with padding, of which there are few.

    Tokens are rounded up to a multiple of a 16th of the power of two below: 3 % on average.  Where
    texts are packed, one more text is the padding, and empty ones follow it up to a power of two.
    """
    rows, count = shapes["tokens"]
    step = max(16, 1 << (count.bit_length() - 5))
    own: dict[str, Any] = {
        name: (rows, -(-count // step) * step) for name in PADDING if name in shapes
    }
    if "offsets" in shapes:
        own["offsets"] = (max(16, 1 << shapes["offsets"][0].bit_length()) + 1,)
    return own


def _is_constant(value: Any) -> bool:
    """Return whether a value can be compared with others."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Itself:
    """Equal to another if it holds the same object."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)
