"""How threads share rows that a kernel reduces along, and where the rows of arrays lie."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core import gpu
from ...core.arrays import packed
from ...core.stand_in import StandIn

MOST = 5  # arrays whose rows lie in one order


def spread(wanted: int, clusters: bool) -> tuple[int, int]:
    """Return how many threads of a block share a row that wants so many, and how many blocks do.

    Clusters of blocks begin with sm_90.

    <= 32            a power of two of threads; several rows a block, no barrier
    <= 512           the block takes a row
    beyond, sm_90    2, 4 or 8 such blocks in a cluster; then 8 of 1024 threads
    beyond, before   1024 threads
    """
    if wanted <= 32:
        return 1 << (wanted - 1).bit_length(), 1
    sizes = (1, 2, 4, 8) if clusters else (1,)
    cluster = next((size for size in sizes if wanted <= 512 * size), sizes[-1])
    return min(1024, -(-wanted // (32 * cluster)) * 32), cluster


def lie(*arrays: Any) -> tuple[Sequence[Any], tuple[int, ...]]:
    """Return arrays for a kernel to walk, and where their rows lie: inner, then two of each array.

    Row r of an array starts ``r // inner * outer + r % inner * step`` values after its first:
    so lie the rows of a slice of the last axis, and the heads of a slice.  Arrays whose rows lie
    in no such order are packed; those that have gaps come as flat views of all they span.
    """
    rows, columns = arrays[0].size // arrays[0].shape[-1], arrays[0].shape[-1]
    if all(a is None or a.flags.c_contiguous for a in arrays):
        return arrays, (rows, *(0, columns) * len(arrays))
    if not walkable(*arrays):
        return lie(*map(packed, arrays))
    axes = _axes([a for a in arrays if a is not None], columns)
    (_, outer), (inner, step) = ([(1, (0,) * len(arrays))] * 2 + axes)[-2:]
    strides = zip(outer, step, strict=False)
    found = [(0, 0) if a is None else next(strides) for a in arrays]
    flat = [a if a is None else spanned(a) for a in arrays]
    return flat, (inner, *(stride for pair in found for stride in pair))


def layouts(layout: tuple[int, ...]) -> dict[str, Any]:
    """Return where rows lie as a kernel takes it: see the struct Layouts of rows.cuh."""
    inner, *strides = *layout, *(0,) * (1 + 2 * MOST - len(layout))
    return {"inner": inner, "outer": strides[::2], "step": strides[1::2]}


def walkable(*arrays: Any) -> bool:
    """Say whether the rows of all these arrays lie in one such order."""
    given = [array for array in arrays if array is not None]
    if all(array.flags.c_contiguous for array in given):
        return True
    axes = _axes(given, given[0].shape[-1])
    rows = given[0].size // given[0].shape[-1]
    return len(axes) < 2 or (len(axes) == 2 and rows < 2**32)  # a kernel divides in 32 bits


def aligned(columns: int, layout: tuple[int, ...]) -> int:
    """Return a number whose powers of two all rows start at multiples of."""
    for stride in layout[1:]:
        columns |= stride
    return columns


def _axes(arrays: Sequence[Any], columns: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return length and strides of the fewest axes that number the rows of all these arrays."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for axis, length in enumerate(arrays[0].shape[:-1]):
        strides = tuple(a.strides[axis] // a.itemsize for a in arrays)
        if length == 1:
            continue
        if axes and axes[-1][1] == tuple(length * stride for stride in strides):
            axes[-1] = axes[-1][0] * length, strides
        else:
            axes.append((length, strides))
    readable = all(
        (a.strides[-1] == a.itemsize or columns == 1)
        and all(stride >= 0 and stride % a.itemsize == 0 for stride in a.strides)
        for a in arrays
    )
    return axes if readable else [(0, ())] * 3


def spanned(array: Any) -> Any:
    """Return the memory from the first to the last element of an array as one axis."""
    extent = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    size = extent // array.itemsize + 1
    if isinstance(array, StandIn):
        return array.spanned(size)
    library = np if isinstance(array, np.ndarray) else gpu.cupy()
    return library.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,))
