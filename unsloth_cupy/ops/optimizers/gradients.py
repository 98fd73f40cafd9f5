"""The norm of all gradients of a step, a test that they are finite, and their scaling factor.

One launch computes all three.

norm = sqrt(sum of (gradient / divisor)**2)
factor = min(1, max_norm / norm) / divisor

On the host squares are summed in float64.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.stand_in import representative_steps
from ...core.target import limits
from ...placement import stream
from ..common import many
from ..common.counters import counters

PART = 65536  # elements that the host widens at a time: they stay in its cache
KEPT_TABLES = 16  # beyond it all tables are dropped
tables: dict[Any, many.Table] = {}  # by stream and addresses of gradients, which seldom change


class GradientMeasure(NamedTuple):
    """The result of one pass over all gradients; on a GPU, arrays of shape () on the device.

    Attributes
    ----------
    norm : float, or float64 array
        The norm of all gradients, as one vector, after the division by the divisor.
    finite : bool, or bool array
        False if any element is NaN or infinite: skip the step then.
    factor : float, or float32 array
        The factor that divides the gradients by the divisor and clips their norm to max_norm.
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
    """Measure gradients in one pass; write them, divided, to ``out`` if it is passed.

    Kernels must be able to read the gradients without copies.  ``divisor`` is a float64 array with
    one element, ``out`` a sequence of float32 arrays.
    """
    table = _table(gradients, out)
    lead = gradients[0]
    chosen = table.constants(WRITE=out is not None)
    kernel = load("gradients.cu", "measure", lead, chosen)
    # four blocks per SM are resident: 16 KB of 16-bit gradients in flight; the block that finishes
    # last adds the sums of all
    blocks = min(table.chunks, 4 * limits(lead).processors)
    sums, arrived = empty(blocks, np.float64, lead), counters(1, lead)
    measure = GradientMeasure(*(empty((), t, lead) for t in (np.float64, np.bool_, np.float32)))
    kernel[blocks, many.THREADS](
        table.tensors,
        table.owners,
        table.chunks,
        divisor,
        max_norm,
        sums,
        arrived,
        measure.norm,
        measure.factor,
        measure.finite,
    )
    return measure


def rescale(gradients: Sequence[Array], measure: GradientMeasure) -> None:
    """Multiply gradients by the factor of a measure, in place, unless ``finite`` is False."""
    table = _table(gradients, None)
    lead = gradients[0]
    chosen = table.constants(WRITE=False)
    kernel = load("gradients.cu", "rescale", lead, chosen)
    kernel[table.chunks, many.THREADS](table.tensors, table.owners, measure.factor, measure.finite)


def square_sum(gradient: Any) -> Any:
    """Return the float64 sum of squares of one gradient of any dtype and layout."""
    flat = gradient.reshape(-1)  # (size,)
    size = PART if isinstance(flat, np.ndarray) else max(flat.size, 1)
    # CuPy takes shape=() in zeros_like for the shape of the array
    total = np.zeros_like(flat, np.float64, shape=(1,)).reshape(())  # ()
    for start in representative_steps(flat, range(0, flat.size, size)):
        wide = flat[start : start + size].astype(np.float64, copy=False)
        total += np.dot(wide, wide)
    return total


def _table(gradients: Sequence[Any], out: Sequence[Any] | None) -> many.Table:
    """Return the table of gradients and out, from a cache."""
    arrays = [*gradients, *(out or ())]
    key = out is None, stream(arrays[0]), *((many.address(a), a.size, a.dtype) for a in arrays)
    table = tables.get(key)  # one lookup: another thread may clear the cache at any time
    if table is None:
        if len(tables) >= KEPT_TABLES:
            tables.clear()
        columns = {"gradient": gradients, "out": out or [None] * len(gradients)}
        kinds = [KERNEL_DTYPES.index(gradient.dtype) for gradient in gradients]
        table = tables[key] = many.table(columns, kinds)
    return table
