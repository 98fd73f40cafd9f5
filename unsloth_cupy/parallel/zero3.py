"""A model of which each rank keeps a part of every parameter: whole while a block runs, no longer.

    bytes of weights, gradients and states in a rank = those of the model / ranks
        + one block + what lies outside of the blocks

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import empty
from ..core.dtypes import Stored
from ..errors import ConfigError
from ..ops.optimizers.gradients import GradientMeasure
from ..ops.quantized.weight import Quantized
from ..training.checkpoint import CheckpointConfig
from ..training.precision import compute_copies
from ..training.variable import Var
from ._ahead import Ahead
from ._shards import ZERO, Cut, Entered, gathered, measured_parts
from .communicator import Communicator
from .data import counted_by_all
from .zero import STATES


class Part(NamedTuple):
    """A part of a quantized weight: of each array that it is kept in."""

    kind: Callable[..., Quantized]
    facts: dict[str, Any]
    shape: tuple[int, ...]
    dtype: Any
    arrays: dict[str, Any]
    cuts: dict[str, Cut]

    def held(self) -> dict[str, Any]:
        """Return the arrays of this part, by name."""
        return self.arrays


class Parts:
    """What this rank keeps of parameters, each by its name: a part of it, flat.

    Attributes
    ----------
    comm : Communicator
    cuts : dict of str to Cut
        How those are cut that are not quantized.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.cuts = comm, dict[str, Cut]()

    def read(self, name: str, shape: tuple[int, ...], rows: Callable[[slice], Any]) -> Any:
        """Return this rank's part of an array of a shape, of whose rows no others are asked for."""
        cut = self.cuts[name] = Cut.of(shape, self.comm.size)
        width, rank = max(1, cut.size // max(1, shape[0])), self.comm.rank
        start, stop = (min(end * cut.length, cut.size) for end in (rank, rank + 1))
        lines = slice(start // width, -(-stop // width)) if start < stop else slice(0, 0)
        flat = rows(lines).reshape(-1)
        own = flat[start - lines.start * width :][: stop - start]
        return np.append(own, np.zeros(cut.length - own.size, own.dtype))

    def read_quantized(
        self, shape: tuple[int, ...], step: int, rows: Callable[[slice], Quantized]
    ) -> Part:
        """Return this rank's part of a quantized weight, made of some of its rows.

        Rows at multiples of ``step`` are whole elements of every array.
        """
        first = rows(slice(0, min(step, shape[0])))
        step, rank, facts = len(first), self.comm.rank, first.facts()
        cuts, lines, arrays = dict[str, Cut](), dict[str, slice](), dict[str, Any]()
        for key, held in first.held().items():
            count = -(-held.size * shape[0] // step)
            whole = (shape[0], *held.shape[1:]) if held.ndim > 1 else (count,)
            cut = cuts[key] = Cut.of(whole, self.comm.size)
            start, stop = (min(end * cut.length, cut.size) for end in (rank, rank + 1))
            last = min(-(-stop // held.size) * step, shape[0])
            lines[key] = slice(start // held.size * step, last) if start < stop else slice(0, 0)
        read = _rows_of(lines, first, rows)
        for key, held in first.held().items():
            array, top = read[key]
            before = rank * cuts[key].length - top // step * held.size
            own = array.reshape(-1)[before : before + cuts[key].length]
            arrays[key] = empty((cuts[key].length,), held.dtype, held)
            arrays[key][...] = 0
            arrays[key][: own.size] = own
        facts |= {"shape": shape} if "shape" in facts else {}
        return Part(type(first), facts, shape, first.dtype, arrays, cuts)

    def keep(self, name: str, value: Any) -> Any:
        """Return this rank's part of a parameter."""
        size, rank = self.comm.size, self.comm.rank
        if isinstance(value, Quantized):
            cuts = {key: Cut.of(a.shape, size) for key, a in value.held().items()}
            parts = {key: cuts[key].part(a, rank) for key, a in value.held().items()}
            return Part(type(value), value.facts(), value.shape, value.dtype, parts, cuts)
        if isinstance(value, Stored):
            raise ConfigError(f"Zero3: {name} is not a weight that can be divided: {value!r}")
        self.cuts[name] = Cut.of(value.shape, size)
        return self.cuts[name].part(value, rank)


def _rows_of(
    lines: Mapping[str, slice], first: Quantized, rows: Callable[[slice], Quantized]
) -> dict[str, tuple[Any, int]]:
    """Return arrays of a weight by name, each of its rows and where they begin.

    Rows that arrays share are made once.
    """
    some = [where for where in lines.values() if where.stop]
    starts, stops = (at.start for at in some), (at.stop for at in some)
    every = slice(min(starts, default=0), max(stops, default=0))
    if every.stop - every.start <= sum(where.stop - where.start for where in some):
        lines = {key: every if where.stop else where for key, where in lines.items()}
    wanted = {at.start: at for at in lines.values() if at.stop}
    made = {start: rows(at).held() for start, at in wanted.items()}
    none = first.held()
    return {k: (made[at.start][k] if at.stop else none[k][:0], at.start) for k, at in lines.items()}


class Zero3:
    """A model whose parameters, gradients and states are divided among ranks, and learns so.

    Each rank passes its rows of a batch.  The weights of a block are gathered when it runs, once
    more on the way back, and are then let go; its gradients are summed and divided at once.
    Parameters outside of blocks are whole during a step.  An adapter's own stay whole; the weights
    under it are divided, quantized ones too.

    ``AdamW(model.trainable)`` steps this rank's parts.

    Parameters
    ----------
    model : Transformer
        Its parameters become flat parts, those of rank 0; or they are parts already, where
        ``models.load(folder, parts=comm)`` has read no more.
    comm : Communicator

    Raises
    ------
    ConfigError
        The model is divided by a Zero3 already, or is in parts of other ranks.
    """

    def __init__(self, model: Any, comm: Communicator) -> None:
        if model.gather is not None:
            raise ConfigError("Zero3: the model is not whole, it has a Zero3; use that one")
        if model.parts is not None and model.parts.comm is not comm:
            raise ConfigError("Zero3: comm is not that of load(folder, parts=comm); pass that one")
        self.model, self.comm = model, comm
        keeps, model.parts = model.parts, None
        self.cuts: dict[str, Cut] = {} if keeps is None else keeps.cuts
        self.ahead = Ahead(comm, lambda name: model.parameters[name])
        for array in () if model.adapter is None else model.adapter.parameters.values():
            array[...] = comm.broadcast(array)
        if keeps is None:
            keeps = Parts(comm)
            self.cuts = keeps.cuts
            for name, value in model.parameters.items():
                same = value if isinstance(value, Stored) else comm.broadcast(value)
                model.parameters[name] = keeps.keep(name, same)
        model.gather = self.gather
        if model.division is not None:
            model.division.kept = self.kept

    def kept(self, name: str, rows: slice) -> slice:
        """Return where rows of a parameter lie in what this rank keeps of it."""
        cut = self.cuts.get(name)
        if cut is None:
            return rows
        width, before = cut.size // cut.shape[0], self.comm.rank * cut.length
        first, last, _ = rows.indices(cut.shape[0])
        return slice(max(0, first * width - before), max(0, last * width - before))

    def gather(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole parameters: what the model calls for each block."""
        learned = {name: value for name, value in parameters.items() if type(value) is Var}
        frozen = {n: v for n, v in parameters.items() if n in self.cuts and n not in learned}
        found = dict(parameters) | self.ahead(frozen, self.cuts)
        for name, value in parameters.items():
            if type(value) is Part:
                arrays = gathered(value.arrays, value.cuts, self.comm)
                found[name] = value.kind(**arrays, **value.facts)
        return found | self._entered(learned)

    def _entered(self, learned: Mapping[str, Var]) -> dict[str, Var]:
        """Return Vars of whole parameters, whose gradients are summed over ranks."""
        if not learned:
            return {}
        values = {name: var.value for name, var in learned.items()}
        parts = {name: value for name, value in values.items() if name in self.cuts}
        whole = values | self.ahead(parts, self.cuts)
        tape = next(iter(learned.values())).tape
        made = {name: Var(value, tape) for name, value in whole.items()}
        inputs, outputs = ({n: var.index for n, var in vs.items()} for vs in (learned, made))
        tape.note(Entered(values, inputs, outputs, self.cuts, self.comm))
        return made

    def loss_and_gradients(
        self,
        tokens: Any,
        labels: Any,
        *,
        count: Any = None,
        checkpoint: CheckpointConfig | None = None,
        **options: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Return the mean loss over the labels of all ranks, and this rank's part of its gradients.

        Arguments are this rank's rows and the options of ``Transformer.loss_and_gradients``;
        ``checkpoint`` says how many blocks are whole at a time, one where it is None.
        """
        if count is None:
            count = counted_by_all(self.model, labels, options.get("offsets"), self.comm)
        self.ahead.begin()
        checkpoint = CheckpointConfig() if checkpoint is None else checkpoint
        loss, gradients = self.model.loss_and_gradients(
            tokens, labels, count=count, checkpoint=checkpoint, **options
        )
        return self.comm.all_reduce(loss), gradients

    def measure_gradients(
        self, gradients: Mapping[str, Any], max_norm: float = math.inf, *, scaler: Any = None
    ) -> GradientMeasure:
        """Return what the function of this name returns of whole gradients, alike in all ranks."""
        alike = {name: array for name, array in gradients.items() if name not in self.cuts}
        own = {name: array for name, array in gradients.items() if name in self.cuts}
        return measured_parts(own, alike, self.model.table, self.comm, max_norm, scaler)

    def compute_copies(self, dtype: Any) -> dict[str, Any]:
        """Return what the function of this name returns, of the parts of matrices."""
        found = self.model.parameters
        rows = {n: found[n][None] for n, cut in self.cuts.items() if len(cut.shape) > 1}
        return {name: copy[0] for name, copy in compute_copies(rows, dtype).items()}

    def gathered(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole arrays of parts by the names of parameters, or of an ``AdamW.state()``.

        What it returns does not depend on the number of ranks; ``divided`` takes it back.
        """
        found = dict(arrays)
        for name, array in arrays.items():
            cut, _ = self._cut_of(name)
            if cut is not None:
                found[name] = gathered({name: array}, {name: cut}, self.comm)[name]
        return found

    def divided(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of whole arrays by the names that ``gathered`` takes."""
        found = dict(arrays)
        for name, array in arrays.items():
            cut, field = self._cut_of(name)
            if cut is not None:
                codes = field in STATES[:2] and array.dtype == np.uint8
                fill = ZERO[field == "mean"] if codes else 0
                found[name] = cut.part(array, self.comm.rank, fill)
        return found

    def _cut_of(self, name: str) -> tuple[Cut | None, str]:
        """Return how an array of this name is divided, and which state of an optimizer it is."""
        if name in self.cuts:
            return self.cuts[name], ""
        field, _, parameter = name.partition(".")
        if field not in STATES or parameter not in self.cuts:
            return None, field
        cut = self.cuts[parameter]
        return (cut.scales() if field.endswith("scale") else cut), field

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Let the model have all its parameters inside a ``with`` block: to generate, or to save.

        What changes them there is lost.
        """
        parts = self.model.parameters
        self.model.parameters, self.model.gather = self.gather(parts), None
        try:
            yield self.model
        finally:
            self.model.parameters, self.model.gather = parts, self.gather
