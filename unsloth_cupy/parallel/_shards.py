"""Arrays of which each rank keeps a part: how they are cut, put together, and summed.

    part of rank r = elements r * length .. (r + 1) * length, in C order, zeros behind the last

All parts of an array are of one length, so that those of a block travel as rows of one matrix.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import empty
from ..ops.common.dynamic_codes import BLOCK, dynamic_map
from ..ops.optimizers.gradients import GradientMeasure
from ..training.gradients import measure_gradients
from ..training.optimizer import SMALL
from ..training.tape import Gradients, add_up
from .communicator import Communicator

ZERO = {signed: int(np.flatnonzero(dynamic_map(signed) == 0)[0]) for signed in (True, False)}


class Cut(NamedTuple):
    """How an array is divided: what it is, and how many elements a rank keeps."""

    shape: tuple[int, ...]
    size: int
    length: int

    @classmethod
    def of(cls, shape: tuple[int, ...], ranks: int) -> "Cut":
        """Return the cut of an array among ranks.

        A part of one of SMALL elements or more has as many, in whole blocks of 8-bit averages.
        """
        size = int(np.prod(shape, dtype=np.int64))
        length = -(-size // ranks)
        if size >= SMALL:
            length = max(SMALL, -(-length // BLOCK) * BLOCK)
        return cls(tuple(shape), size, length)

    def scales(self) -> "Cut":
        """Return the cut of the scales of its 8-bit averages."""
        count = -(-self.size // BLOCK)
        return Cut((count,), count, self.length // BLOCK)

    def part(self, array: Any, rank: int, fill: int = 0) -> Any:
        """Return the part of a rank: a new array."""
        made = empty((self.length,), array.dtype, array)
        made[...] = fill
        own = self.of_rank(array, rank)
        made[: own.size] = own
        return made

    def of_rank(self, array: Any, rank: int) -> Any:
        """Return the elements of a rank, without zeros behind them."""
        return array.reshape(-1)[rank * self.length : (rank + 1) * self.length]

    def whole(self, rows: Any) -> Any:
        """Return the array of the parts of all ranks, (ranks, length)."""
        return rows.reshape(-1)[: self.size].reshape(self.shape)


def by_dtype(arrays: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of arrays, those of one dtype together."""
    groups: dict[Any, list[str]] = {}
    for name, array in arrays.items():
        groups.setdefault(array.dtype, []).append(name)
    return list(groups.values())


def gathered(parts: Mapping[str, Any], cuts: Mapping[str, Cut], comm: Communicator) -> Any:
    """Return the whole arrays of this rank's parts, which travel together."""
    found: dict[str, Any] = {}
    for names in by_dtype(parts):
        rows = comm.all_gather(np.concatenate([parts[name] for name in names])[None])
        start = 0
        for name in names:
            stop = start + cuts[name].length
            found[name] = cuts[name].whole(rows[:, start:stop])
            start = stop
    return {name: found[name] for name in parts}


def scattered(arrays: Mapping[str, Any], cuts: Mapping[str, Cut], comm: Communicator) -> Any:
    """Return this rank's parts of the sums over ranks of whole arrays."""
    found: dict[str, Any] = {}
    for names in by_dtype(arrays):
        first, stop = arrays[names[0]], 0
        length = sum(cuts[name].length for name in names)
        rows = empty((comm.size, length), first.dtype, first)
        rows[...] = 0
        places: dict[str, slice] = {}
        for name in names:
            places[name] = slice(stop, stop + cuts[name].length)
            for rank in range(comm.size):
                own = cuts[name].of_rank(arrays[name], rank)
                rows[rank, stop : stop + own.size] = own
            stop = places[name].stop
        sums = comm.reduce_scatter(rows)[0]
        found |= {name: sums[place].copy() for name, place in places.items()}  # let sums go
    return found


def summed(arrays: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """Return the sums over ranks of whole arrays."""
    found: dict[str, Any] = {}
    for names in by_dtype(arrays):
        flat = comm.all_reduce(np.concatenate([arrays[name].reshape(-1) for name in names]))
        start = 0
        for name in names:
            stop = start + arrays[name].size
            found[name] = flat[start:stop].reshape(arrays[name].shape).copy()
            start = stop
    return found


def measured_parts(
    own: Mapping[str, Any],
    alike: Mapping[str, Any],
    like: Any,
    comm: Communicator,
    max_norm: float,
    scaler: Any,
) -> GradientMeasure:
    """Return ``measure_gradients`` of gradients of which ranks have parts, and of others alike.

    It is made where ``like`` lies, which has parts or not.
    """
    total: Any = np.zeros_like(like, np.float64, shape=())
    if own:
        total = total + measure_gradients(own, scaler=scaler).norm ** 2
    total = comm.all_reduce(total)
    if alike:
        total = total + measure_gradients(alike, scaler=scaler).norm ** 2
    divisor = 1.0 if scaler is None else scaler.value
    norm = np.sqrt(total)
    if isinstance(norm, np.ndarray | np.generic):
        norm = float(norm)
        by = max_norm / norm if norm > max_norm else 1.0
        return GradientMeasure(norm, math.isfinite(norm), by / divisor)
    clipped = np.where(norm > max_norm, max_norm / norm.clip(1e-300), 1.0)
    return GradientMeasure(norm, np.isfinite(norm), (clipped / divisor).astype(np.float32))


class Entered(NamedTuple):
    """Parameters of a block on a tape: parts that became whole, and others that ranks hold alike.

    On the way back it comes behind the whole block: gradients travel together.
    """

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    cuts: Mapping[str, Cut]
    comm: Communicator

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add sums over ranks to the gradients of inputs: of parts, this rank's."""
        known = {name: take[name] for name in inputs if take.get(name) is not None}
        for name in inputs.keys() - known.keys():  # nobody used it
            known[name] = self._zeros(name)
        parts = {name: known[name] for name in inputs if name in self.cuts}
        others = {name: known[name] for name in inputs if name not in self.cuts}
        found = scattered(parts, self.cuts, self.comm) | summed(others, self.comm)
        for name, index in inputs.items():
            grads[index] = add_up(grads.get(index), found[name])

    def _zeros(self, name: str) -> Any:
        value = self.values[name]
        shape = self.cuts[name].shape if name in self.cuts else value.shape
        return np.zeros_like(value, shape=shape)
