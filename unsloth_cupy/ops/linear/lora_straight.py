"""An adapter whose layer computes with a rounded weight, and learns as if it were not rounded.

y = x Q^T    Q = rounded(W + scale b a)
dx = dy Q    da = scale (dy b)^T x    db = scale dy^T (x a^T)        straight through the rounding

Neither gradient needs that of the whole weight.  ``lora_sum`` adds in one order whatever computes
it, so that a file written later, elsewhere, is rounded from equal bits.

Bengio, Léonard and Courville, Estimating or Propagating Gradients Through Stochastic Neurons, 2013.
"""

from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import FLOAT32, Array, Stored
from ...core.stand_in import representative_steps
from ..common.gemm import gemm
from ..elements.cast import in_dtype
from ._lora_gradients import rank_gradients
from .linear import flat

AT_ONCE = {True: 2**15, False: 2**26}  # values: on the host they stay in cache


def lora_sum(weight: Any, a: Array, b: Array, scale: float) -> Array:
    """Return ``weight + scale b a``, (outputs, inputs), in float32 or wider.

    Each value is ``((b[0] a[0] + b[1] a[1]) + ...) + weight``, every product and sum rounded: the
    bits depend on no device, BLAS or number of threads.
    """
    wide = np.promote_types(weight.dtype, FLOAT32)
    if isinstance(weight, Stored):
        weight = weight.computed_in(wide)
    outputs, inputs = weight.shape
    result: Array = empty((outputs, inputs), wide, like=a)
    columns = b.astype(wide, copy=False) * wide.type(scale)
    rows = a.astype(wide, copy=False)
    step = max(1, AT_ONCE[isinstance(a, np.ndarray)] // max(1, inputs))
    for top in representative_steps(a, range(0, outputs, step)):
        part = slice(top, min(top + step, outputs))
        total, term = result[part], empty(result[part].shape, wide, like=a)
        total[...] = 0
        for rank in representative_steps(a, range(len(rows))):
            np.multiply(columns[part, rank, None], rows[rank], out=term)
            np.add(total, term, out=total)
        np.add(total, weight[part].astype(wide, copy=False), out=total)
    return result


def straight_gradients(
    dy: Array, rows: Array, a: Array, b: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Return da, db and ``scale dy b``; ``rows`` is what the adapter read, as a matrix."""
    low = gemm(rows, in_dtype(a, rows.dtype).T)
    up, db = rank_gradients(flat(dy), b, low, b.dtype, scale)
    da: Array = gemm(up.T, rows, dtype=a.dtype)
    assert db is not None
    return da, db, up
