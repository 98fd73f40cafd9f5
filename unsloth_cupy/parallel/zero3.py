"""ZeRO-3: each rank stores a part of every parameter; a block's parameters are gathered to run it.

    bytes of weights, gradients and states per rank = bytes of the model / world size
        + one block + parameters outside of the blocks

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
"""

import math
import reprlib
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
from ..training.precision import DTYPES, MixedPrecisionConfig, compute_copies
from ..training.variable import Var
from ._prefetch import Prefetch
from ._shards import ZERO, Cut, Entered, gathered, measured_parts
from .communicator import Communicator, check_communicator
from .data import counted_by_all
from .zero import STATES


class Part(NamedTuple):
    """One rank's part of a quantized weight: a part of each of its arrays."""

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
    """Computes this rank's part of each parameter, as a flat array.

    Attributes
    ----------
    comm : Communicator
    cuts : dict of str to Cut
        How the parameters that are not quantized are cut, by name.
    """

    def __init__(self, comm: Communicator) -> None:
        check_communicator("load(parts=)", comm)
        self.comm, self.cuts = comm, dict[str, Cut]()

    def read(self, name: str, shape: tuple[int, ...], rows: Callable[[Any], Any]) -> Any:
        """Return this rank's part of an array with this shape; only the needed rows are read.

        An array of shape () is whole in every rank.
        """
        if not shape:
            return rows(...)
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
        """Return this rank's part of a quantized weight; only the needed rows are read.

        ``step`` rows have a whole number of elements in every array of the weight.
        """
        first = rows(slice(0, min(step, shape[0])))
        step, rank, facts = len(first), self.comm.rank, first.facts()
        cuts, lines, arrays = dict[str, Cut](), dict[str, slice](), dict[str, Any]()
        for key, example in first.held().items():
            count = -(-example.size * shape[0] // step)
            whole = (shape[0], *example.shape[1:]) if example.ndim > 1 else (count,)
            cut = cuts[key] = Cut.of(whole, self.comm.size)
            start, stop = (min(end * cut.length, cut.size) for end in (rank, rank + 1))
            last = min(-(-stop // example.size) * step, shape[0])
            lines[key] = slice(start // example.size * step, last) if start < stop else slice(0, 0)
        read = _rows_of(lines, first, rows)
        for key, example in first.held().items():
            array, top = read[key]
            before = rank * cuts[key].length - top // step * example.size
            own = array.reshape(-1)[before : before + cuts[key].length]
            arrays[key] = empty((cuts[key].length,), example.dtype, example)
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
            raise ConfigError(f"Zero3: {name} cannot be divided among ranks: {value!r}")
        if not value.shape:
            return value
        self.cuts[name] = Cut.of(value.shape, size)
        return self.cuts[name].part(value, rank)

    def outside(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters with whole weights outside of the blocks; all ranks must call it."""
        parts = {n: a for n, a in parameters.items() if ".layers." not in n and n in self.cuts}
        return {**parameters, **gathered(parts, self.cuts, self.comm)}


def _rows_of(
    lines: Mapping[str, slice], first: Quantized, rows: Callable[[slice], Quantized]
) -> dict[str, tuple[Any, int]]:
    """Return (array, first row) by name; an array has at least the rows ``lines[name]``.

    Rows that several arrays need are read only once.
    """
    needed = [where for where in lines.values() if where.stop]
    starts, stops = (at.start for at in needed), (at.stop for at in needed)
    union = slice(min(starts, default=0), max(stops, default=0))
    if union.stop - union.start <= sum(where.stop - where.start for where in needed):
        lines = {key: union if where.stop else where for key, where in lines.items()}
    by_start = {at.start: at for at in lines.values() if at.stop}
    read = {start: rows(at).held() for start, at in by_start.items()}
    none = first.held()
    return {k: (read[at.start][k] if at.stop else none[k][:0], at.start) for k, at in lines.items()}


class Zero3:
    """Training of a model whose parameters, gradients and states are divided among ranks.

    Each rank passes its rows of a batch.  The weights of a block are gathered when it runs, and
    again in backward, and are released afterwards.  Its gradients are summed and divided
    immediately.  Parameters outside of blocks are whole during a step.  The parameters of an
    adapter stay whole; the weights that it adapts are divided, including quantized ones.

    ``AdamW(model.trainable)`` updates this rank's parts.

    Parameters
    ----------
    model : Transformer
        Its parameters become flat parts of rank 0's parameters; or they are parts already, read by
        ``models.load(folder, parts=comm)``.
    comm : Communicator

    Raises
    ------
    ConfigError
        A Zero3 divides the model already, or its parts belong to another communicator.
    """

    def __init__(self, model: Any, comm: Communicator) -> None:
        check_communicator("Zero3", comm)
        if not hasattr(model, "gather"):
            raise ConfigError(f"Zero3: {reprlib.repr(model)} is not a model; pass a Transformer")
        if model.gather is not None:
            raise ConfigError("Zero3: another Zero3 divides this model already; use that Zero3")
        if model.parts is not None and model.parts.comm is not comm:
            raise ConfigError("Zero3: pass the same comm as to load(folder, parts=comm)")
        if model.division is not None and model.division.experts is not None:
            problem = "ranks store different experts, which a Zero3 would sum together"
            raise ConfigError(f"Zero3: {problem}; pass it to DataParallel, or load it without them")
        inner = () if model.adapter is None else model.adapter.outer
        if whole := next((name for name in inner if ".layers." in name), None):
            problem = f"the adapter trains {whole} whole, and a Zero3 would divide it"
            raise ConfigError(f"Zero3: {problem}; merge it first, or pass it to DataParallel")
        self.model, self.comm = model, comm
        parts, model.parts = model.parts, None
        self.cuts: dict[str, Cut] = {} if parts is None else parts.cuts
        self.ahead = Prefetch(comm, lambda name: model.parameters[name])
        for array in () if model.adapter is None else model.adapter.parameters.values():
            array[...] = comm.broadcast(array)
        if parts is None:
            parts = Parts(comm)
            self.cuts = parts.cuts
            for name, value in model.parameters.items():
                same = value if isinstance(value, Stored) else comm.broadcast(value)
                model.parameters[name] = parts.keep(name, same)
        model.gather = self.gather
        if model.division is not None:
            model.division.kept = self.kept

    def kept(self, name: str, rows: slice) -> slice:
        """Return the slice of rows of a parameter in this rank's flat part of the parameter."""
        cut = self.cuts.get(name)
        if cut is None:
            return rows
        width, before = cut.size // cut.shape[0], self.comm.rank * cut.length
        first, last, _ = rows.indices(cut.shape[0])
        return slice(max(0, first * width - before), max(0, last * width - before))

    def gather(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole parameters; the model calls this for each block."""
        trained = {name: value for name, value in parameters.items() if type(value) is Var}
        frozen = {n: v for n, v in parameters.items() if n in self.cuts and n not in trained}
        whole = dict(parameters) | self.ahead(frozen, self.cuts)
        for name, value in parameters.items():
            if type(value) is Part:
                arrays = gathered(value.arrays, value.cuts, self.comm)
                whole[name] = value.kind(**arrays, **value.facts)
        return whole | self._entered(trained)

    def _entered(self, trained: Mapping[str, Var]) -> dict[str, Var]:
        """Return Vars of whole parameters; backward sums their gradients over ranks."""
        if not trained:
            return {}
        values = {name: var.value for name, var in trained.items()}
        parts = {name: value for name, value in values.items() if name in self.cuts}
        whole = values | self.ahead(parts, self.cuts)
        tape = next(iter(trained.values())).tape
        result = {name: Var(value, tape) for name, value in whole.items()}
        inputs, outputs = ({n: var.index for n, var in vs.items()} for vs in (trained, result))
        tape.note(Entered(values, inputs, outputs, self.cuts, self.comm))
        return result

    def loss_and_gradients(
        self, tokens: Any, labels: Any, *, count: Any = None, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the mean loss over the labels of all ranks, and this rank's part of its gradients.

        Pass this rank's rows, and options of ``Transformer.loss_and_gradients``.  ``checkpoint``
        sets how many blocks are whole at a time; None: one.
        """
        if count is None:
            count = counted_by_all(self.model, labels, options.get("offsets"), self.comm)
        names = "mask", "offsets", "routes"
        arrays = {name: options.pop(name) for name in names if name in options}
        return self.value_and_gradients(
            lambda model: model.loss(tokens, labels, count=count, **arrays), **options
        )

    def value_and_gradients(
        self,
        function: Callable[[Any], Any],
        *,
        checkpoint: CheckpointConfig | None = None,
        **options: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Return the sum over ranks of ``function(model)``, and this rank's part of its gradients.

        The function computes this rank's term of the sum.  ``Transformer.value_and_gradients``
        documents the options.  ``checkpoint`` sets how many blocks are whole at a time; None: one.
        """
        self.ahead.begin()
        checkpoint = CheckpointConfig() if checkpoint is None else checkpoint
        value, gradients = self.model.value_and_gradients(
            function, checkpoint=checkpoint, **options
        )
        return self.comm.all_reduce(value), gradients

    def measure_gradients(
        self, gradients: Mapping[str, Any], max_norm: float = math.inf, *, scaler: Any = None
    ) -> GradientMeasure:
        """Return ``measure_gradients`` of the whole gradients, equal in all ranks."""
        replicated = {name: array for name, array in gradients.items() if name not in self.cuts}
        own = {name: array for name, array in gradients.items() if name in self.cuts}
        return measured_parts(own, replicated, self.model.table, self.comm, max_norm, scaler)

    def compute_copies(self, dtype: Any) -> dict[str, Any]:
        """Return ``compute_copies`` for this rank's parts of matrices."""
        kind = DTYPES[MixedPrecisionConfig(dtype).compute_dtype]
        parts = self.model.narrowed(kind).items()
        cuts = self.cuts
        rows = {n: own[None] for n, own in parts if n in cuts and len(cuts[n].shape) > 1}
        return {name: copy[0] for name, copy in compute_copies(rows, dtype).items()}

    def gathered(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole arrays of parts, which are named as parameters or as ``AdamW.state()``.

        The result does not depend on the number of ranks; ``divided`` is the inverse.
        """
        whole = dict(arrays)
        for name, array in arrays.items():
            cut, _ = self.cut_of(name)
            if cut is not None:
                whole[name] = gathered({name: array}, {name: cut}, self.comm)[name]
        return whole

    def divided(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of whole arrays, which are named as in ``gathered``."""
        parts = dict(arrays)
        for name, array in arrays.items():
            cut, field = self.cut_of(name)
            if cut is not None:
                codes = field in STATES[:2] and array.dtype == np.uint8
                fill = ZERO[field == "mean"] if codes else 0
                parts[name] = cut.part(array, self.comm.rank, fill)
        return parts

    def cut_of(self, name: str) -> tuple[Cut | None, str]:
        """Return the cut of an array by name, and the optimizer state that it belongs to, or ""."""
        if name in self.cuts:
            return self.cuts[name], ""
        field, _, parameter = name.partition(".")
        if field not in STATES or parameter not in self.cuts:
            return None, field
        cut = self.cuts[parameter]
        return (cut.scales() if field.endswith("scale") else cut), field

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Return a context in which the model has its whole parameters, to generate or to save.

        Changes to the parameters inside of the ``with`` block are lost.
        """
        parts = self.model.parameters
        self.model.parameters, self.model.gather = self.gather(parts), None
        try:
            yield self.model
        finally:
            self.model.parameters, self.model.gather = parts, self.gather
