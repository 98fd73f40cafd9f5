"""Launches of elementwise kernels."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from ...core.arrays import contiguous, empty, lanes
from ...core.kernel import load
from ...core.op import Op
from ...core.source import Constants
from .no_kernel import no_kernel
from .strides import RowLayout, has_row_layout, row_layout

THREADS = 256


@cache
def constants(dtype: Any, lanes: int, **more: Any) -> Constants:
    """Return the constants of an elementwise kernel.

    256 threads with one 16-byte access to every array, 8 such blocks on an SM: 32 KB of each array
    are in flight, and 13 KB in total keep an H200's memory busy.
    """
    return Constants(T=dtype, LANES=lanes, THREADS=THREADS, **more)


def launch_rows(
    file: str,
    name: str,
    operands: Sequence[Any],
    results: Sequence[Any],
    *scalars: float,
    **more: Any,
) -> None:
    """Launch a kernel whose parameters are operands, results and scalars.

    Results must be contiguous, or share a row layout with the operands; operands that share no row
    layout are copied into contiguous arrays.  ``more`` are further constants of the kernel.
    """
    lead = results[0]
    plan = walk(*operands, *results)
    chosen = constants(lead.dtype, plan.lanes, STRIDED=plan.strided, **more)
    kernel = load(file, name, operands[0], chosen)
    kernel[plan.tiles, THREADS](*plan.arrays, plan.rows, *scalars)


class Walk(NamedTuple):
    """Arrays of one shape, and how threads traverse them; a block computes one tile."""

    arrays: Sequence[Any]
    rows: dict[str, Any]  # the struct Rows of rows.cuh
    lanes: int  # values per access: 16 bytes of the widest dtype, fewer if alignment requires it
    strided: bool  # True: an array is not contiguous
    tiles: int


def walk(*arrays: Any) -> Walk:
    """Return how to traverse arrays; they are made contiguous if they share no row layout."""
    shape, size = arrays[-1].shape, arrays[-1].size
    columns, layout = size, RowLayout(1, ())  # contiguous arrays are one row
    if not has_row_layout(*arrays):
        arrays = tuple(contiguous(array) for array in arrays)
    strided = not all(array.flags.c_contiguous for array in arrays)
    widest = max(arrays, key=lambda array: array.dtype.itemsize)
    width = 16 // widest.dtype.itemsize
    views: Sequence[Any] = arrays
    if strided:
        columns = shape[-1]
        views, layout = row_layout(*arrays)
        width |= layout.alignment(columns)
    width = lanes(width, widest, *views)
    tiles = -(-columns // (THREADS * width))
    rows = {"layouts": layout.struct(), "columns": columns, "tiles": tiles}
    return Walk(views, rows, width, strided, size // columns * tiles)


def _results(count: int, arrays: Sequence[Any]) -> list[Any]:
    """Return new arrays for ``count`` results.

    Two gradients of operands that are halves of one array, as gate and up of one product, are
    halves of one array, too: the product's gradient needs no copy of them.
    """
    lead, last = arrays[0], arrays[-1]
    columns = lead.shape[-1] if lead.ndim else 0
    if count == 2 and lead.ndim > 1 and last.strides[-2] == 2 * columns * last.itemsize:
        both = empty((*lead.shape[:-1], 2 * columns), lead.dtype, like=lead)  # (*rows, 2 * columns)
        return [both[..., :columns], both[..., columns:]]
    return [empty(lead.shape, lead.dtype, like=lead) for _ in range(count)]


def by_element(op: Op[..., Any], file: str, kernel: str = "", **constants: str) -> Op[..., Any]:
    """Give an op an elementwise kernel, and return the op.

    The kernel has the name of the op, unless ``kernel`` is its name.  Its parameters are operands,
    then results, then options.  ``constants`` maps a constant of the kernel to an option, which
    then is no parameter.  Results are new arrays, or are written over operands: see
    ``in_place.written_over``.
    """
    over, kernel = op.facts.get("over", ()), kernel or op.__name__.removesuffix("_over_")
    places = [op.names.index(name) for name in over]
    outputs, fixed = range(len(op.contract.outputs)), {*constants.values()}

    def launch(arrays: list[Any], options: dict[str, Any]) -> Any:
        """Launch the kernel; return NotImplemented if it cannot write over its operands."""
        results = [arrays[place] for place in places]
        if not places:
            results = _results(len(outputs), arrays)
        elif not has_row_layout(*arrays):
            arrays = [a if i in places else contiguous(a) for i, a in enumerate(arrays)]
            if not has_row_layout(*arrays):
                return no_kernel("the arrays have no common row layout")
        scalars = [value for name, value in options.items() if name not in fixed]
        chosen = {constant: options[name] for constant, name in constants.items()}
        launch_rows(file, kernel, arrays, results, *scalars, **chosen)
        return tuple(results) if len(results) > 1 else results[0]

    op.launch, op.strided = launch, op.names
    return op
