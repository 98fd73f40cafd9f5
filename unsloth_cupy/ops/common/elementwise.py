"""How kernels that go element by element are launched."""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from ...core.arrays import empty, lanes, packed
from ...core.kernel import load
from ...core.op import Op
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


def by_element(op: Op[..., Any], file: str, kernel: str = "", **constants: str) -> Op[..., Any]:
    """Give an op a kernel that goes element by element, and return the op.

    The kernel, of the op's name, takes operands, then results, then options, but for those that
    are its constants.  Results are new, or lie over operands: see ``in_place.written_over``.
    """
    over, kernel = op.facts.get("over", ()), kernel or op.__name__.removesuffix("_over_")
    names = [n for n in inspect.signature(op.definition).parameters if n in op.options]
    scalars = [name for name in names if name not in constants.values()]

    def launch(**given: Any) -> Any:
        arrays = [given[name] for name in op.names]
        lead, results = arrays[0], [given[name] for name in over]
        if over and not walkable(*arrays):
            arrays = [given[n] if n in over else packed(given[n]) for n in op.names]
            if not walkable(*arrays):
                return NotImplemented
        results = results or [empty(lead.shape, lead.dtype, like=lead) for _ in op.contract.outputs]
        chosen = {constant: given[option] for constant, option in constants.items()}
        launch_rows(file, kernel, arrays, results, *[given[n] for n in scalars], **chosen)
        return tuple(results) if len(results) > 1 else results[0]

    op.kernel(launch, strided=op.names)
    return op
