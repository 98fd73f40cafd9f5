"""Arrays that ranks store in parts (ZeRO-3): functions that cut, gather and sum them.

    part of rank r = elements r * length .. (r + 1) * length, in C order, padded with zeros

All parts of an array have the same length, so that the parts of a block are rows of one matrix, and
need one exchange.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import empty
from ..ops.common.dynamic_codes import BLOCK, dynamic_map
from ..ops.optimizers.gradients import GradientMeasure
from ..training.adamw import SMALL
from ..training.gradients import measure_gradients
from ..training.tape import Gradients, add_up
from .communicator import Communicator

# The 8-bit code of 0 in the signed and in the unsigned dynamic map.
ZERO = {signed: int(np.flatnonzero(dynamic_map(signed) == 0)[0]) for signed in (True, False)}


class Cut(NamedTuple):
    """The division of an array: its shape and size, and the number of elements per rank."""

    shape: tuple[int, ...]
    size: int
    length: int

    @classmethod
    def of(cls, shape: tuple[int, ...], ranks: int) -> "Cut":
        """Return the cut of an array among ranks.

        If an array has SMALL elements or more, so has each part, and parts are whole quantization
        blocks of the optimizer's 8-bit moments.
        """
        size = int(np.prod(shape, dtype=np.int64))
        length = -(-size // ranks)
        if size >= SMALL:
            length = max(SMALL, -(-length // BLOCK) * BLOCK)
        return cls(tuple(shape), size, length)

    def scales(self) -> "Cut":
        """Return the cut of the scales that belong to its 8-bit moments."""
        count = -(-self.size // BLOCK)
        return Cut((count,), count, self.length // BLOCK)

    def part(self, array: Any, rank: int, fill: int = 0) -> Any:
        """Return the part of a rank as a new array, padded with ``fill``."""
        result = empty((self.length,), array.dtype, array)
        result[...] = fill
        own = self.of_rank(array, rank)
        result[: own.size] = own
        return result

    def of_rank(self, array: Any, rank: int) -> Any:
        """Return the elements of a rank, without padding."""
        return array.reshape(-1)[rank * self.length : (rank + 1) * self.length]

    def whole(self, rows: Any) -> Any:
        """Return the whole array from the parts of all ranks, which are (ranks, length)."""
        return rows.reshape(-1)[: self.size].reshape(self.shape)


def by_dtype(arrays: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of arrays, grouped by dtype."""
    groups: dict[Any, list[str]] = {}
    for name, array in arrays.items():
        groups.setdefault(array.dtype, []).append(name)
    return list(groups.values())


def gathered(parts: Mapping[str, Any], cuts: Mapping[str, Cut], comm: Communicator) -> Any:
    """Return the whole arrays of these parts; one exchange gathers all parts of a dtype."""
    whole: dict[str, Any] = {}
    for names in by_dtype(parts):
        first = parts[names[0]]
        own = np.concatenate([parts[name] for name in names]) if len(names) > 1 else first
        rows = comm.all_gather(own[None])
        start = 0
        for name in names:
            stop = start + cuts[name].length
            whole[name] = cuts[name].whole(rows[:, start:stop])
            start = stop
    return {name: whole[name] for name in parts}


def scattered(arrays: Mapping[str, Any], cuts: Mapping[str, Cut], comm: Communicator) -> Any:
    """Return this rank's parts of the sums over ranks of whole arrays, one dtype at a time."""
    parts: dict[str, Any] = {}
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
        parts |= {name: sums[place].copy() for name, place in places.items()}  # copies free sums
    return parts


def summed(arrays: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """Return the sums over ranks of whole arrays."""
    sums: dict[str, Any] = {}
    for names in by_dtype(arrays):
        flat = comm.all_reduce(np.concatenate([arrays[name].reshape(-1) for name in names]))
        start = 0
        for name in names:
            stop = start + arrays[name].size
            sums[name] = flat[start:stop].reshape(arrays[name].shape).copy()
            start = stop
    return sums


def measured_parts(
    own: Mapping[str, Any],
    replicated: Mapping[str, Any],
    like: Any,
    comm: Communicator,
    max_norm: float,
    scaler: Any,
) -> GradientMeasure:
    """Return ``measure_gradients`` of divided gradients (own) and of replicated gradients.

    The result is on the device of ``like``, even in ranks without parts.
    """
    total: Any = np.zeros_like(like, np.float64, shape=(1,)).reshape(())  # CuPy rejects shape=()
    if own:
        total = total + measure_gradients(own, scaler=scaler).norm ** 2
    total = comm.all_reduce(total)
    if replicated:
        total = total + measure_gradients(replicated, scaler=scaler).norm ** 2
    divisor = 1.0 if scaler is None else scaler.value
    norm = np.sqrt(total)
    if isinstance(norm, np.ndarray | np.generic):
        norm = float(norm)
        by = max_norm / norm if norm > max_norm else 1.0
        return GradientMeasure(norm, math.isfinite(norm), by / divisor)
    clipped = np.where(norm > max_norm, max_norm / norm.clip(1e-300), 1.0)
    return GradientMeasure(norm, np.isfinite(norm), (clipped / divisor).astype(np.float32))


class Entered(NamedTuple):
    """A tape entry of a block's parameters: gathered from parts, or equal in all ranks.

    Backward reaches this entry after the whole block, so that one exchange sums its gradients.
    """

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    cuts: Mapping[str, Cut]
    comm: Communicator

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the sums over ranks to the gradients of inputs, or this rank's part of the sums."""
        grads_by_name = {name: take[name] for name in inputs if take.get(name) is not None}
        for name in inputs.keys() - grads_by_name.keys():  # the block did not use it
            grads_by_name[name] = self._zeros(name)
        parts = {name: grads_by_name[name] for name in inputs if name in self.cuts}
        others = {name: grads_by_name[name] for name in inputs if name not in self.cuts}
        sums = scattered(parts, self.cuts, self.comm) | summed(others, self.comm)
        for name, index in inputs.items():
            grads[index] = add_up(grads.get(index), sums[name])

    def _zeros(self, name: str) -> Any:
        """Return a gradient of zeros for a whole parameter."""
        value = self.values[name]
        shape = self.cuts[name].shape if name in self.cuts else value.shape
        return np.zeros_like(value, shape=shape)
