"""All gradients of a step in one launch: their norm, whether they are finite, their scaling.

norm = sqrt(sum of (gradient / divisor)**2)
factor = min(1, max_norm / norm) / divisor

On the host squares are added in float64.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.target import limits
from ...placement import stream
from ..common import many
from ..common.counters import counters
from ..common.steps import representative_steps

PART = 65536  # elements widened at a time on the host: they stay in its cache
KEPT_TABLES = 16
tables: dict[Any, many.Table] = {}  # by stream and addresses of gradients, which seldom change


class GradientMeasure(NamedTuple):
    """What one look at all gradients tells; on a GPU, arrays of shape () that nobody has read.

    Attributes
    ----------
    norm : float, or float64 array
        The norm of all gradients together, as one vector, after division.
    finite : bool, or bool array
        False where any element is NaN or infinite: skip the step.
    factor : float, or float32 array
        What to multiply gradients by: it divides them, and clips them to the largest norm.
    """

    norm: Any
    finite: Any
    factor: Any


def measured(
    gradients: Sequence[Array],
    *,
    max_norm: float = math.inf,
    divisor: Any = None,
    out: Sequence[Array] | None = None,
) -> GradientMeasure:
    """Look at gradients that kernels take as they lie, once, and write them divided to ``out``.

    ``divisor`` is a float64 array of one element, ``out`` has float32 arrays.
    """
    table = _table(gradients, out)
    lead = gradients[0]
    chosen = table.constants(WRITE=out is not None)
    kernel = load("gradients.cu", "measure", lead, chosen)
    # as many as are resident at once, each with one sum for the last: 16 KB of an SM are in flight
    blocks = min(table.chunks, 4 * limits(lead).processors)
    sums, arrived = empty(blocks, np.float64, lead), counters(1, lead)
    found = GradientMeasure(*(empty((), t, lead) for t in (np.float64, np.bool_, np.float32)))
    kernel[blocks, many.THREADS](
        table.tensors,
        table.owners,
        table.chunks,
        divisor,
        max_norm,
        sums,
        arrived,
        found.norm,
        found.factor,
        found.finite,
    )
    return found


def rescale(gradients: Sequence[Array], found: GradientMeasure) -> None:
    """Multiply gradients by the factor found, in place; leave them where one is not finite."""
    table = _table(gradients, None)
    lead = gradients[0]
    chosen = table.constants(WRITE=False)
    kernel = load("gradients.cu", "rescale", lead, chosen)
    kernel[table.chunks, many.THREADS](table.tensors, table.owners, found.factor, found.finite)


def square_sum(gradient: Any) -> Any:
    """Return the sum of squares, float64, of one gradient of any dtype and layout."""
    flat = gradient.reshape(-1)
    size = PART if isinstance(flat, np.ndarray) else max(flat.size, 1)
    total = np.zeros_like(flat, np.float64, shape=())
    for start in representative_steps(flat, range(0, flat.size, size)):
        wide = flat[start : start + size].astype(np.float64, copy=False)
        total += np.dot(wide, wide)
    return total


def _table(gradients: Sequence[Any], out: Sequence[Any] | None) -> many.Table:
    arrays = [*gradients, *(out or ())]
    key = out is None, stream(arrays[0]), *((many.address(a), a.size, a.dtype) for a in arrays)
    table = tables.get(key)  # other threads may clear them between any two lines
    if table is None:
        if len(tables) >= KEPT_TABLES:
            tables.clear()
        columns = {"gradient": gradients, "out": out or [None] * len(gradients)}
        kinds = [KERNEL_DTYPES.index(gradient.dtype) for gradient in gradients]
        table = tables[key] = many.table(columns, kinds)
    return table
