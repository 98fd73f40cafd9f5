"""Many tensors in one launch: the tables that common/many.cuh reads."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import lanes
from ...core.dtypes import KERNEL_DTYPES, Array
from ...core.source import Constants
from ...core.target import target_of
from ...placement import placed

CHUNK, THREADS = 8192, 256


class Addresses(np.ndarray[Any, Any]):
    """Numbers of which some are addresses: ``places`` has the arrays at them, by position."""

    places: dict[int, Array]


class Table(NamedTuple):
    """What a launch needs to know of its tensors."""

    tensors: Any  # a record of int64 for every tensor, where the tensors live
    owners: Any  # int32 of every chunk: its tensor
    chunks: int
    fields: tuple[str, ...]  # of a record
    kinds: int  # a bit for every kind there is
    lanes: int  # values of one access

    def constants(self, **more: int) -> Constants:
        """Return the constants of a kernel that reads it."""
        return _constants(self.fields, self.kinds, self.lanes, **more)


def launchable(arrays: Sequence[Array]) -> bool:
    """Say whether kernels may take all these arrays together, as they lie."""
    return any(a.size for a in arrays) and all(
        a.dtype in KERNEL_DTYPES and a.flags.c_contiguous and target_of(a) is not None
        for a in arrays
    )


def address(array: Any) -> int:
    """Return where the elements of an array begin."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def table(columns: Mapping[str, Sequence[Array | None]], kinds: Sequence[int]) -> Table:
    """Return the table of tensors whose arrays stand, by field, in columns; upload it once.

    The first column has an array of every tensor; its size is the tensor's.
    """
    lead: Any = next(iter(columns.values()))
    counts = [-(-array.size // CHUNK) for array in lead]
    fields = *columns, "elements", "first", "kind"
    rows = np.zeros((len(lead), len(fields)), np.int64)
    places = {}
    for field, column in enumerate(columns.values()):
        for row, array in enumerate(column):
            if array is not None:
                rows[row, field] = address(array)
                places[row * len(fields) + field] = array
    rows[:, -3] = [array.size for array in lead]
    rows[:, -2] = np.cumsum([0, *counts[:-1]])
    rows[:, -1] = kinds
    owners = np.repeat(np.arange(len(lead), dtype=np.int32), counts)
    width = min(lanes(4, *arrays) for arrays in zip(*columns.values(), strict=True))
    tensors: Any = rows
    if isinstance(lead[0], np.ndarray):
        tensors = rows.view(Addresses)
        tensors.places = places
        tensors.flags.writeable = False
    bits = 0
    for kind in kinds:
        bits |= 1 << kind
    sent = placed(tensors, lead[0]), placed(owners, lead[0])
    return Table(*sent, len(owners), fields, bits, width)


@cache
def _constants(fields: tuple[str, ...], kinds: int, width: int, **more: int) -> Constants:
    """Return the constants of such a kernel; a field's is its place in a record.

    256 threads with eight values of every array: 16 KB of each float32 array are in flight in a
    block, where 13 KB in all of an SM keep an H200's memory busy.
    """
    places = {field.upper(): place for place, field in enumerate(fields)}
    sizes = {"FIELDS": len(fields), "CHUNK": CHUNK, "THREADS": THREADS, "LANES": width}
    return Constants(KINDS=kinds, **places, **sizes, **more)
