"""The ledger of a training step: records allocations and frees by op, and computes the plan."""

import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import Stored
from ..core.op import OPS
from ..ops.quantized.weight import held_arrays
from ..training import tape
from .estimate import PARTS, MemoryEstimate
from .planned import Planned

ALL = (*PARTS, "workspace")
WEIGHTS, GRADIENTS, OPTIMIZER, MASTER, ACTIVATIONS, LOGITS, WORKSPACE = range(len(ALL))
ROLLOUTS = "rollouts"  # the moment of sampling answers
HEAD = "linear_cross_entropy"  # temporary arrays of this op count as logits


class Moment(NamedTuple):
    """The peak of the held bytes while an op of a step ran, by part."""

    op: str
    layer: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """The sum of all parts in bytes."""
        return sum(self.held.values())

    def __str__(self) -> str:
        """Return the op and its layer: ``attention_backward (layer 3)``."""
        return f"{self.op} ({self.layer})" if self.layer not in ("", self.op) else self.op


@dataclass(frozen=True)
class MemoryPlan(MemoryEstimate):
    """Memory of a training step in bytes: the peak of each part, and all moments of the step.

    ``total`` is the peak of all parts together.  It is at most the sum of the peaks of the parts,
    which occur at different moments.

    Attributes
    ----------
    workspace : int
        Temporary arrays of ops while they run, and gradients of activations.
    layers : dict of str to int
        Activations by layer, at the peak of their sum.
    workspaces : dict of str to int
        Maximum workspace of each op while it runs.
    moments : tuple of Moment
        One per call of an op: ``op``, ``layer``, and ``held`` by part.
    peak : int
        The index of the moment with the largest total.
    host : int
        Peak of the pinned memory on the host that ``offload`` uses; not a part of ``total``.
    """

    workspace: int
    layers: Mapping[str, int]
    workspaces: Mapping[str, int]
    moments: tuple[Moment, ...]
    peak: int
    host: int = 0

    @property
    def at_peak(self) -> Mapping[str, int]:
        """The bytes of each part at the peak."""
        return self.moments[self.peak].held

    @property
    def total(self) -> int:
        """The peak of the held bytes."""
        return self.moments[self.peak].total

    def beyond(self, limit: int) -> Moment | None:
        """Return the first moment that exceeds ``limit`` bytes; None if all moments fit."""
        return next((moment for moment in self.moments if moment.total > limit), None)


class Ledger:
    """All allocations and frees in order, with the part and the layer of each allocation."""

    def __init__(self, granule: int) -> None:
        self.granule, self.layer, self.first, self.start = granule, "", 0, 0
        self.sizes: list[int] = []  # by number of the allocation, like parts and layers
        self.parts: list[int] = []
        self.layers: list[str] = []
        self.held: set[int] = set()
        self.changes: list[int] = []  # numbers of allocations; inverted (~) for frees
        self.notes: list[tuple[int, str, str]] = []  # number of changes so far, op, layer
        self.host, self.host_peak = 0, 0  # bytes of offloaded arrays
        self.newest: Any = lambda: None  # a weak reference to the array that was offloaded last

    def offload(self, moved: Any) -> None:
        """Record an array that moves to the host; the one before is there by now."""
        before = self.newest()
        if before is not None:
            before.array = None
        self.newest = weakref.ref(moved)
        self.host += moved.size
        self.host_peak = max(self.host_peak, self.host)

    def take(self, size: int) -> int:
        """Record an allocation of ``size`` bytes; return its number."""
        number = len(self.sizes)
        self.sizes.append(-(-size // self.granule) * self.granule)
        self.parts.append(WORKSPACE)
        self.layers.append("")
        self.changes.append(number)
        self.held.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Record that the allocation of this number is freed."""
        self.changes.append(~number)
        self.held.remove(number)

    def enter(self, part: int, named: Mapping[str, Any]) -> None:
        """Assign arrays to a part, and to layers by their names."""
        for name, array in held_arrays(named):
            if isinstance(array, Planned):
                self.parts[array.memory.number] = part
                self.layers[array.memory.number] = _layer_of(name)

    def begin(self) -> None:
        """Begin the step: discard all earlier moments."""
        self.first, self.start, self.notes = len(self.sizes), len(self.changes), []

    def note(self, op: str, layer: str = "") -> None:
        """Record that an op has run."""
        self.first = len(self.sizes)
        self.notes.append((len(self.changes), op, layer))

    @contextmanager
    def watching_ops(self) -> Iterator[None]:
        """Watch every op of a tape, inside a ``with`` block."""
        token = tape.watch_results.set(self.on_op)
        try:
            yield
        finally:
            tape.watch_results.reset(token)

    def on_op(self, op: Any, values: Any, result: Any) -> None:
        """Assign the allocations of an op to parts: activations, gradients, workspace, logits."""
        weights = set()
        for operand, value in zip(op.contract.inputs, values, strict=True):
            home = value.home if isinstance(value, Stored) else value
            if isinstance(home, Planned) and self.parts[home.memory.number] == WEIGHTS:
                weights.add(operand.name)
                self.layer = self.layers[home.memory.number]
        if op.__name__.startswith(HEAD):
            self.layer = "head"
        results = result if type(result) is tuple else (result,)
        for operand, value in zip(op.contract.outputs, results, strict=True):
            number = value.memory.number if isinstance(value, Planned) else -1
            if number < self.first:  # not allocated by this op
                continue
            of, self.layers[number] = operand.name[1:], self.layer
            is_gradient = operand.name[0] == "d" and (of in op.names or op.__name__ in _backward())
            self.parts[number] = ACTIVATIONS
            if is_gradient:
                self.parts[number] = GRADIENTS if of in weights else WORKSPACE
        if op.__name__.startswith(HEAD):
            for number in range(self.first, len(self.sizes)):
                if number not in self.held:
                    self.parts[number] = LOGITS
        self.note(op.__name__, self.layer)

    def plan(self) -> MemoryPlan:
        """Compute the plan from all recorded changes."""
        numbers = np.array(self.changes)
        is_allocation = numbers >= 0
        numbers = np.where(is_allocation, numbers, ~numbers)
        steps = np.where(is_allocation, 1, -1) * np.array(self.sizes)[numbers]
        by_part = np.array(self.parts)[numbers] == np.arange(len(ALL))[:, None]
        held = np.cumsum(by_part * steps, axis=1)
        total, moments, start = held.sum(axis=0), [], self.start
        workspaces: dict[str, int] = {}
        for stop, op, layer in self.notes:
            workspaces[op] = max(workspaces.get(op, 0), self._within(start, stop))
            begin = max(start - 1, 0)  # include the bytes held before the op
            top = begin + int(total[begin : max(stop, 1)].argmax())
            moments.append(Moment(op, layer, dict(zip(ALL, held[:, top].tolist(), strict=True))))
            start = stop
        most = held[:, max(self.start - 1, 0) :].max(axis=1).tolist()
        return MemoryPlan(
            **dict(zip(ALL, most, strict=True)),
            layers=self._by_layer(int(held[ACTIVATIONS].argmax())),
            workspaces={op: size for op, size in workspaces.items() if size},
            moments=tuple(moments),
            peak=max(range(len(moments)), key=lambda i: moments[i].total),
            host=self.host_peak,
        )

    def _within(self, start: int, stop: int) -> int:
        """Return the peak workspace that was allocated and freed between two notes."""
        changes = self.changes[start:stop]
        freed = {~change for change in changes if change < 0}
        own = {n for n in freed.intersection(changes) if self.parts[n] == WORKSPACE}  # not logits
        steps = (
            self.sizes[change] if change >= 0 else -self.sizes[~change]
            for change in changes
            if max(change, ~change) in own
        )
        return max(accumulate(steps, initial=0))

    def _by_layer(self, stop: int) -> dict[str, int]:
        """Return the bytes of activations of each layer after change number ``stop``."""
        result: dict[str, int] = {}
        for change in self.changes[: stop + 1]:
            number = max(change, ~change)
            if self.parts[number] == ACTIVATIONS:
                layer = self.layers[number]
                sign = 1 if change >= 0 else -1
                result[layer] = result.get(layer, 0) + sign * self.sizes[number]
        return {layer: size for layer, size in result.items() if size}


@cache
def _backward() -> set[str]:
    return {op.backward.__name__ for op in OPS.values() if op.backward is not None}


def _layer_of(name: str) -> str:
    """Return the layer of a parameter: layer 3, embedding or head."""
    number = re.search(r"\blayers\.(\d+)\.", name)
    if number is not None:
        return f"layer {number[1]}"
    return "embedding" if "embed" in name else "head"
