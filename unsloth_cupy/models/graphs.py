"""Steps of training as CUDA graphs: the passes of a model, forward and backward, in one launch.

A graph repeats its launches with the same addresses and numbers.  So it belongs to a form of call:

    the arrays of the model and of the loss scaler       by identity; they may change in place
    arrays that are keywords of the function             by shape and dtype; the graph copies them
    the seeds of dropout                                 as such an array, which each call fills
    everything else that the function is called with     by value

The optimizer is not a part of it: that takes a few launches a step, with numbers of the host.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core import gpu
from ..core.call import is_integer
from ..core.replay import choices
from ..core.stand_in import is_planned
from ..ops.common import spans
from ..placement import to_device_of
from ..training import tape
from ..training.captured import Captured, Place
from ..training.gradients import add_gradients
from .adapters.adapter import Seeds
from .adapters.many import ByRows
from .objective import TrainingStep, next_token

KEPT, MET = 4, 256  # graphs of a model; forms of calls that it remembers
COUNT, SINK = "count", "sink"  # keywords: a number of labels; a list that takes a method's sums
SEEDS = "seeds of dropout"  # beside the keywords: no function has one of this name
Passes = Callable[[Any, TrainingStep], tuple[Any, dict[str, Any]]]
Sums = dict[str, Any] | None  # of the gradients of earlier passes of a step; None: only one pass


class Graph(NamedTuple):
    """A graph, and its own copies of the arrays of a call."""

    captured: Captured
    arrays: dict[str, Any]


class Call(NamedTuple):
    """One call: passes(function, step), and where its gradients go."""

    passes: Passes
    function: Any
    step: TrainingStep
    sums: Sums

    def __call__(self, function: Any) -> tuple[Any, dict[str, Any]]:
        """Run the passes of a function, and add the gradients to the sums if there are some."""
        value, gradients = self.passes(function, self.step)
        return value, gradients if self.sums is None else add_gradients(self.sums, gradients)


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
        self.graph_of_sums: Graph | None = None  # whose gradients are the sums of the running step
        self.alive: Any = None  # what graphs read: their numbers must stay theirs

    def __call__(
        self, model: Any, passes: Passes, function: Any, step: TrainingStep, sums: Sums = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return ``passes(function, step)``: results that the next call overwrites.

        Gradients are added to ``sums``, in float32, which are returned in place of them.
        """
        if model.adapter is None or not model.adapter.dropout:
            step = step._replace(seed=None)  # nothing is drawn
        call = Call(passes, function, step, sums)
        self.why = next(self._reasons(model, function, step), self.failed)
        if self.why is not None or is_planned(model.table):
            return call(function)
        try:
            return self._graphed(model, call)
        except MemoryError:
            if not self.by_form:
                raise
        self.clear()
        self.why = self.failed = "the GPU has no memory for graphs beside all else"
        return call(function)

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
        if model.seen is not None:
            yield "the experts of its tokens are counted in every step"
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
        function, sums, first = call.function, call.sums, call.sums == {}
        arguments, sink = {**function.keywords}, function.keywords.get(SINK)
        counts = any(each is next_token for each in (function.func, *function.args))
        if counts and is_integer(arguments.get(COUNT)):  # another in every batch
            arguments[COUNT] = to_device_of(np.asarray(arguments[COUNT]), model.table)
        arrays = {name: each for name, each in arguments.items() if gpu.is_cupys(each.__class__)}
        seed = call.step.seed
        if seed is not None:
            arrays[SEEDS] = to_device_of(model.adapter.seeds(seed), model.table)
        fixed = {n: each for n, each in arguments.items() if n not in arrays and n != SINK}
        self._enter(model, call.step)
        graph_of_sums = self.graph_of_sums = self._beginning(sums)
        constants = (*function.args, *fixed.values(), call.step.checkpoint, choices.get())
        if unknown := [type(each).__name__ for each in constants if not _is_constant(each)]:
            cure = "pass arrays of the GPU by keyword"
            self.why = f"the function is called with {unknown[0]}, which has no hash; {cure}"
            return call(function)
        form = (
            *(Itself(function.func), *fixed),
            *((type(each), each) for each in constants),
            *((name, each.shape, each.dtype.str) for name, each in arrays.items()),
            *(sink is None, sums is None, first, id(graph_of_sums)),
        )
        graph = None if sums and graph_of_sums is None else self._graph(form, arrays)
        if graph is None:  # as are all whose sums are new arrays in each step
            return call(function)

        def work() -> tuple[Any, dict[str, Any], list[Any]]:
            own: list[Any] = []
            keywords = {**fixed, **graph.arrays} | ({} if sink is None else {SINK: own})
            seeds = keywords.pop(SEEDS, None)
            held = seeds if seeds is None else Seeds([*model.adapter.scales], seeds)
            run = call._replace(step=call.step._replace(seed=held))
            return *run(functools.partial(function.func, *function.args, **keywords)), own

        value, gradients, own = graph.captured(work)
        if sink is not None:
            sink.extend(each.copy() for each in own)  # those of the next pass will lie there
        if graph.captured.why is not None:
            self.clear()
            self.why = self.failed = graph.captured.why
        elif first and graph.captured.graph is not None:
            self.graph_of_sums = graph
        return value, sums or {**gradients}

    def _beginning(self, sums: Sums) -> Graph | None:
        """Return the graph whose gradients these sums are; None if they are others."""
        if not sums or self.graph_of_sums is None:
            return None
        own: dict[str, Any] = self.graph_of_sums.captured.result[1]
        return self.graph_of_sums if all(own[name] is each for name, each in sums.items()) else None

    def _graph(self, form: Any, arrays: Mapping[str, Any]) -> Graph | None:
        """Return the graph of a form with these arrays in it, or a new one if the form repeats."""
        graph = self.by_form.get(form)
        if graph is not None:
            for name, each in arrays.items():
                graph.arrays[name][...] = each
        elif form not in self.met:
            self.met = {*(self.met if len(self.met) < MET else ()), form}
        elif len(self.by_form) == KEPT:
            self.why = f"calls of {KEPT} other forms are graphs already"
        else:
            if not self.by_form:  # what the runs before have freed is needed now
                gpu.cupy().get_default_memory_pool().free_all_blocks()
            copies = {name: each.copy() for name, each in arrays.items()}
            graph = self.by_form[form] = Graph(Captured(self.place), copies)
        return graph

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
