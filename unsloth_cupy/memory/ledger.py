"""What a step of training takes and gives back, op by op, and what that amounts to."""

import re
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
HEAD = "linear_cross_entropy"  # what it holds beside its results are logits


class Moment(NamedTuple):
    """A piece of a step: the most that was held while an op ran, by part."""

    op: str
    layer: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.held.values())

    def __str__(self) -> str:
        """Return where it is: ``attention_backward of layer 3``."""
        return f"{self.op} of {self.layer}" if self.layer else self.op


@dataclass(frozen=True)
class MemoryPlan(MemoryEstimate):
    """Bytes of a step of training: the most that each part holds, and all moments of the step.

    ``total`` is the most that is held at a time, less than the sum of the parts: they do not have
    their most at one moment.

    Attributes
    ----------
    workspace : int
        What ops hold while they run, and gradients of activations on their way.
    layers : dict of str to int
        Activations by layer, when they are most.
    workspaces : dict of str to int
        The most that each op takes and gives back while it runs.
    moments : tuple of Moment
        One for every op that has run: ``op``, ``layer``, and ``held`` by part.
    peak : int
        The index of the moment that holds most.
    """

    workspace: int
    layers: Mapping[str, int]
    workspaces: Mapping[str, int]
    moments: tuple[Moment, ...]
    peak: int

    @property
    def at_peak(self) -> Mapping[str, int]:
        """What each part holds at the peak."""
        return self.moments[self.peak].held

    @property
    def total(self) -> int:
        """The most that is held at a time."""
        return self.moments[self.peak].total

    def beyond(self, limit: int) -> Moment | None:
        """Return the first moment that holds more than limit bytes; None where all fits."""
        return next((moment for moment in self.moments if moment.total > limit), None)


class Ledger:
    """What was taken and given back, in order; to which part and layer it belongs."""

    def __init__(self, granule: int) -> None:
        self.granule, self.layer, self.first, self.start = granule, "", 0, 0
        self.sizes: list[int] = []  # by number, as are the next two
        self.parts: list[int] = []
        self.layers: list[str] = []
        self.held: set[int] = set()
        self.changes: list[int] = []  # numbers that were taken; inverted, that were given back
        self.notes: list[tuple[int, str, str]] = []  # changes so far, op, layer

    def take(self, size: int) -> int:
        """Enter so many bytes; return their number."""
        number = len(self.sizes)
        self.sizes.append(-(-size // self.granule) * self.granule)
        self.parts.append(WORKSPACE)
        self.layers.append("")
        self.changes.append(number)
        self.held.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Take the bytes of this number off."""
        self.changes.append(~number)
        self.held.remove(number)

    def enter(self, part: int, named: Mapping[str, Any]) -> None:
        """Say to which part arrays belong, and to which layers by their names."""
        for name, array in held_arrays(named):
            if isinstance(array, Planned):
                self.parts[array.memory.number] = part
                self.layers[array.memory.number] = _layer_of(name)

    def begin(self) -> None:
        """Leave out of the plan what was before a step."""
        self.first, self.start, self.notes = len(self.sizes), len(self.changes), []

    def note(self, op: str, layer: str = "") -> None:
        """Write down that an op has run."""
        self.first = len(self.sizes)
        self.notes.append((len(self.changes), op, layer))

    @contextmanager
    def watching_ops(self) -> Iterator[None]:
        """Be told of every op of a tape, inside a ``with`` block."""
        token = tape.watch_results.set(self.on_op)
        try:
            yield
        finally:
            tape.watch_results.reset(token)

    def on_op(self, op: Any, values: Any, result: Any) -> None:
        """Find the part of what an op has taken: results, gradients among them, and the rest."""
        weights = set()
        for operand, value in zip(op.contract.inputs, values, strict=True):
            home = value.home if isinstance(value, Stored) else value
            if isinstance(home, Planned) and self.parts[home.memory.number] == WEIGHTS:
                weights.add(operand.name)
                self.layer = self.layers[home.memory.number]
        if op.__name__.startswith(HEAD):
            self.layer = "head"
        found = result if type(result) is tuple else (result,)
        for operand, value in zip(op.contract.outputs, found, strict=True):
            number = value.memory.number if isinstance(value, Planned) else -1
            if number < self.first:  # none of this op's own
                continue
            of, self.layers[number] = operand.name[1:], self.layer
            slope = operand.name[0] == "d" and (of in op.names or op.__name__ in _backward())
            self.parts[number] = ACTIVATIONS
            if slope:
                self.parts[number] = GRADIENTS if of in weights else WORKSPACE
        if op.__name__.startswith(HEAD):
            for number in range(self.first, len(self.sizes)):
                if number not in self.held:
                    self.parts[number] = LOGITS
        self.note(op.__name__, self.layer)

    def since(self, start: int) -> tuple[int, int]:
        """Return what changes from a number on have added: at most at a time, and in the end."""
        running = top = 0
        for change in self.changes[start:]:
            running += self.sizes[change] if change >= 0 else -self.sizes[~change]
            top = max(top, running)
        return top, running

    def plan(self) -> MemoryPlan:
        """Return what the changes amount to."""
        numbers = np.array(self.changes)
        taken = numbers >= 0
        numbers = np.where(taken, numbers, ~numbers)
        steps = np.where(taken, 1, -1) * np.array(self.sizes)[numbers]
        by_part = np.array(self.parts)[numbers] == np.arange(len(ALL))[:, None]
        held = np.cumsum(by_part * steps, axis=1)
        total, moments, start = held.sum(axis=0), [], self.start
        workspaces: dict[str, int] = {}
        for stop, op, layer in self.notes:
            workspaces[op] = max(workspaces.get(op, 0), self._within(start, stop))
            begin = max(start - 1, 0)  # what an op finds counts, too
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
        )

    def _within(self, start: int, stop: int) -> int:
        """Return the most held at a time of what was taken and given back between two notes."""
        changes = self.changes[start:stop]
        gone = {~change for change in changes if change < 0}
        own = {n for n in gone.intersection(changes) if self.parts[n] == WORKSPACE}  # no logits
        steps = (
            self.sizes[change] if change >= 0 else -self.sizes[~change]
            for change in changes
            if max(change, ~change) in own
        )
        return max(accumulate(steps, initial=0))

    def _by_layer(self, stop: int) -> dict[str, int]:
        """Return the activations of each layer that are held after so many changes."""
        found: dict[str, int] = {}
        for change in self.changes[: stop + 1]:
            number = max(change, ~change)
            if self.parts[number] == ACTIVATIONS:
                layer = self.layers[number]
                sign = 1 if change >= 0 else -1
                found[layer] = found.get(layer, 0) + sign * self.sizes[number]
        return {layer: size for layer, size in found.items() if size}


@cache
def _backward() -> set[str]:
    return {op.backward.__name__ for op in OPS.values() if op.backward is not None}


def _layer_of(name: str) -> str:
    """Return the layer of a parameter: layer 3, embedding or head."""
    number = re.search(r"\blayers\.(\d+)\.", name)
    if number is not None:
        return f"layer {number[1]}"
    return "embedding" if "embed" in name else "head"
