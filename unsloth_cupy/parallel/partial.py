"""Ops between the layers of a tensor-parallel model: shared arrays, divided norms and bit linears.

If all ranks have the same array, and each rank uses it differently, its gradient is the sum of the
gradients of all ranks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.arrays import contiguous, rounded
from ..ops.common.gemm import gemm
from ..ops.linear.linear import flat
from ..ops.quantized.bit_linear import (
    mean_abs,
    row_absmax,
    row_codes,
    sum_of_abs,
    weight_codes,
)
from .communicator import Communicator, sum_dtype
from .taped import taped, value_of


def summed_back(x: Any, comm: Communicator, rows: slice | None = None) -> Any:
    """Return x unchanged; backward sums its gradient, or some rows of it, over ranks.

    Parameters
    ----------
    x : array or Var
        Its ``rows`` must be equal in all ranks.
    comm : Communicator
    rows : slice, optional
        Slice of the first axis; None: all rows.
    """

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        if rows is None:
            return {"x": comm.all_reduce(dy)}
        dx = dy.copy()
        dx[rows] = comm.all_reduce(contiguous(dy[rows]))
        return {"x": dx}

    return taped("summed_back", value_of(x), back, x=x)


def divided_rms_norm(
    x: Any,
    weight: Any,
    size: int,
    *,
    comm: Communicator,
    eps: float = 1e-6,
    offset: float = 0.0,
    copies: int = 1,
) -> Any:
    """Return this rank's columns of an ``rms_norm`` whose columns are divided among ranks.

    ``y = x / sqrt(sum(x**2) / size + eps) * (weight + offset)``, with the sum over all ranks.

    Parameters
    ----------
    x : (*rows, this rank's columns) float
    weight : (this rank's columns,) float
    size : int
        Number of columns in all ranks, each counted once.
    comm : Communicator
    eps, offset
        As in ``rms_norm``.
    copies : int
        Number of ranks that have each column.  The sum of their gradients of x is the gradient.

    Returns
    -------
    y : (*rows, this rank's columns) float
    """
    value, scale = value_of(x), value_of(weight)
    sum_type = sum_dtype(value.dtype)
    v, factor = value.astype(sum_type), scale.astype(sum_type) + sum_type.type(offset)
    squares = comm.all_reduce((v * v).sum(axis=-1, keepdims=True)) / (size * copies)
    rstd = 1 / np.sqrt(squares + sum_type.type(eps))

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        g = dy.astype(sum_type)
        dv = g * factor
        projection = comm.all_reduce((dv * v).sum(axis=-1, keepdims=True)) / (size * copies)
        dx = rstd * dv - v * (rstd**3 * projection)
        dweight = (g * v * rstd).reshape(-1, v.shape[-1]).sum(axis=0)
        return {"x": rounded(dx, value.dtype), "weight": rounded(dweight, scale.dtype)}

    y = rounded(v * rstd * factor, value.dtype)
    return taped("divided_rms_norm", y, back, x=x, weight=weight)


def divided_bit_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    comm: Communicator,
    size: int,
    shares: Sequence[tuple[slice, float]],
    inputs: bool,
) -> Any:
    """Return this rank's columns of ``bit_linear``, or its term of a sum over ranks.

    Parameters
    ----------
    x : (*rows, inputs) float
        Equal in all ranks, or this rank's inputs.
    weight : (outputs, inputs) float
        This rank's part.
    bias : (outputs,) float, optional
    comm : Communicator
    size : int
        Number of values in the whole weight; the mean of their absolute values is its scale.
    shares : sequence of (slice, float)
        Rows of this rank's part, and their factor in that mean.
    inputs : bool
        Whether inputs are divided.  Each row is then scaled by its largest absolute value in all
        ranks.

    Returns
    -------
    y : (*rows, outputs) float
    """
    value, w = value_of(x), value_of(weight)
    rows = flat(value)
    total: Any = sum(sum_of_abs(w[where]) * share for where, share in shares)
    w_scale = mean_abs(comm.all_reduce(total.astype(sum_dtype(w.dtype), copy=False)), size)
    tops = comm.all_reduce(row_absmax(rows), "max") if inputs else row_absmax(rows)
    codes, scales = row_codes(rows, tops)
    y = gemm(codes, weight_codes(w, w_scale).T, dtype=scales.dtype) * (scales * w_scale)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        grads, codes, scales = {}, *row_codes(rows, tops)
        g = flat(contiguous(dy))
        if "x" in wanted:
            dx = gemm(g, weight_codes(w, w_scale), dtype=scales.dtype) * w_scale
            grads["x"] = rounded(dx, value.dtype).reshape(value.shape)
        if "weight" in wanted:
            grads["weight"] = gemm(g.T, rounded(codes * scales, value.dtype))
        return grads

    y = rounded(y, value.dtype).reshape(*value.shape[:-1], len(w))
    product = taped("bit_linear", y, back, x=x, weight=weight)
    return product if bias is None else product + bias
