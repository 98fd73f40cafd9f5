"""Gradients of an adapter whose layer computes with a rounded weight, straight through that.

y = x Q^T    Q = rounded(W + scale b a), of lora_sum
dx = dy Q    da = scale (dy b)^T x    db = scale dy^T (x a^T)

Neither of the adapter's needs the gradient of the whole weight.

Bengio, Léonard and Courville, Estimating or Propagating Gradients Through Stochastic Neurons, 2013.
"""

from ...core.dtypes import Array
from ..common.gemm import gemm
from ..elements.cast import in_dtype
from ._lora_gradients import rank_gradients
from .linear import flat


def straight_gradients(
    dy: Array, rows: Array, a: Array, b: Array, scale: float
) -> tuple[Array, Array | None, Array]:
    """Return da, db and ``scale dy b``; ``rows`` is what the adapter read, as a matrix."""
    low = gemm(rows, in_dtype(a, rows.dtype).T)
    up, (db,) = rank_gradients([flat(dy)], [b], [low], [scale], [True])
    return gemm(up.T, rows, dtype=a.dtype), db, up
