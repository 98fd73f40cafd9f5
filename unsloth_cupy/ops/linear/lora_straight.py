"""Straight-through gradients of an adapter whose layer computes with a rounded weight.

y = x Q^T    Q = rounded(W + scale b a), of lora_sum
dx = dy Q    da = scale (dy b)^T x    db = scale dy^T (x a^T)

Neither da nor db needs the gradient of the whole weight.

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
    """Return da, db and ``scale dy b``; ``rows`` (rows, inputs) is the input of the adapter."""
    low = gemm(rows, in_dtype(a, rows.dtype).T)
    up, (db,) = rank_gradients([flat(dy)], [b], [low], [scale], [True])
    return gemm(up.T, rows, dtype=a.dtype), db, up
