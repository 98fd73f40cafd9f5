"""Tables of launches over many tensors, as common/many.cuh reads them."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import lanes
from ...core.dtypes import KERNEL_DTYPES, Array
from ...core.source import Constants
from ...core.target import target_of
from ...placement import to_device_of

CHUNK, THREADS = 8192, 256  # elements of a tensor that a block processes; threads of a block


class Addresses(np.ndarray[Any, Any]):
    """Integers, some of which are addresses; ``places`` maps positions of these to their arrays."""

    places: dict[int, Array]


class Table(NamedTuple):
    """The tables of a launch over many tensors, and the constants that go with them."""

    tensors: Any  # (tensors, fields) int64, a record for each tensor, on the tensors' device
    owners: Any  # (chunks,) int32, the index of the tensor that each chunk belongs to
    chunks: int
    fields: tuple[str, ...]  # names of the numbers in a record
    kinds: int  # a bit for every kind that occurs
    lanes: int  # values per access

    def constants(self, **more: int) -> Constants:
        """Return the constants of a kernel that reads the table."""
        return _constants(self.fields, self.kinds, self.lanes, **more)


def launchable(arrays: Sequence[Array]) -> bool:
    """Return whether one launch can process all these arrays without copies."""
    return any(a.size for a in arrays) and all(
        a.dtype in KERNEL_DTYPES and a.flags.c_contiguous and target_of(a) is not None
        for a in arrays
    )


def address(array: Any) -> int:
    """Return the address of the first element of an array."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def table(columns: Mapping[str, Sequence[Array | None]], kinds: Sequence[int]) -> Table:
    """Return the table of tensors, uploaded to their device.

    ``columns`` maps a field to the array of each tensor, or None for tensors without one; the first
    column has an array for every tensor, of the tensor's size.  ``kinds`` has the kind of each
    tensor.
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
    # 4 values: 16 bytes of float32
    width = min(lanes(4, *arrays) for arrays in zip(*columns.values(), strict=True))
    tensors: Any = rows
    if isinstance(lead[0], np.ndarray):  # the emulator needs the arrays behind the addresses
        tensors = rows.view(Addresses)
        tensors.places = places
        tensors.flags.writeable = False
    bits = 0
    for kind in kinds:
        bits |= 1 << kind
    uploaded = to_device_of(tensors, lead[0]), to_device_of(owners, lead[0])
    return Table(*uploaded, len(owners), fields, bits, width)


@cache
def _constants(fields: tuple[str, ...], kinds: int, width: int, **more: int) -> Constants:
    """Return the constants of a kernel, among them the position of each field in a record.

    256 threads with eight values of every array: a block has 8 KB of each float32 array in flight,
    and 13 KB in total on an SM keep an H200's memory busy.
    """
    places = {field.upper(): place for place, field in enumerate(fields)}
    sizes = {"FIELDS": len(fields), "CHUNK": CHUNK, "THREADS": THREADS, "LANES": width}
    return Constants(KINDS=kinds, **places, **sizes, **more)
