"""How kernels that go element by element are launched."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from ...core.arrays import lanes, packed
from ...core.kernel import load
from ...core.source import Constants
from .rows import aligned, layouts, lie, walkable


@cache
def constants(dtype: Any, lanes: int, **more: Any) -> Constants:
    """Return the constants of such a kernel.

    256 threads with one access of every array: 32 KB of each array are in flight on an SM, where
    13 KB in all keep an H200's memory busy.
    """
    return Constants(T=dtype, LANES=lanes, THREADS=256, **more)


def launch_rows(
    file: str,
    name: str,
    given: Sequence[Any],
    made: Sequence[Any],
    *scalars: float,
    **more: Any,
) -> None:
    """Run a kernel whose parameters are arrays given and made, where they lie, and scalars.

    Arrays made must be packed, or walkable together with those given: see rows.cuh.
    """
    lead = made[0]
    arrays: Sequence[Any] = (*given, *made)
    columns, layout = lead.size, (1, *(0, 0) * len(arrays))
    width = 16 // lead.dtype.itemsize
    if not walkable(*arrays):
        arrays = [packed(array) for array in arrays]
    strided = not all(array.flags.c_contiguous for array in arrays)
    if strided:
        columns = lead.shape[-1]
        arrays, layout = lie(*arrays)
        width |= aligned(columns, layout)
    chosen = constants(lead.dtype, lanes(width, *arrays), STRIDED=strided, **more)
    kernel = load(file, name, given[0], chosen)
    tiles = -(-columns // (chosen["THREADS"] * chosen["LANES"]))
    rows = lead.size // columns
    walk = {"layouts": layouts(layout), "columns": columns, "tiles": tiles}
    kernel[rows * tiles, chosen["THREADS"]](*arrays, walk, *scalars)


def launch_over(file: str, name: str, dy: Any, *changed: Any, **more: Any) -> bool:
    """Run a backward kernel that writes over the arrays it is told to change.

    Return whether it could: their rows must lie in an order that kernels walk.
    """
    dy = dy if walkable(dy, *changed) else packed(dy)
    if not walkable(dy, *changed):
        return False
    launch_rows(file, name, (dy, *changed), changed, **more)
    return True
