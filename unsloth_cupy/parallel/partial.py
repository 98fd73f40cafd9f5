"""Between the layers of a model that is divided among ranks: weights held by several, and norms.

What all ranks hold alike, and each uses in another way, has a gradient that is the sum of theirs.
"""

from typing import Any

import numpy as np

from ..core.arrays import packed, rounded
from ._taped import taped, value_of
from .communicator import Communicator, sum_dtype


def summed_back(x: Any, comm: Communicator, rows: slice | None = None) -> Any:
    """Return x as it is; its gradient is summed over ranks, or that of some rows alone.

    Parameters
    ----------
    x : array or Var
        Alike in all ranks, or its ``rows`` are.
    comm : Communicator
    rows : slice, optional
        Along the first axis; None: all.
    """

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        if rows is None:
            return {"x": comm.all_reduce(dy)}
        whole = dy.copy()
        whole[rows] = comm.all_reduce(packed(dy[rows]))
        return {"x": whole}

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
    """Return this rank's columns of ``rms_norm``, of rows whose columns are divided among ranks.

    ``y = x / sqrt(sum(x**2) / size + eps) * (weight + offset)``, where the sum is over all ranks.

    Parameters
    ----------
    x : (*rows, this rank's columns) float
    weight : (this rank's columns,) float
    size : int
        Columns of all ranks, each counted once.
    comm : Communicator
    eps, offset
        As in ``rms_norm``.
    copies : int
        How many ranks hold each column; gradients of x are then each rank's part of the whole.

    Returns
    -------
    y : (*rows, this rank's columns) float
    """
    value, scale = value_of(x), value_of(weight)
    wide = sum_dtype(value.dtype)
    v, factor = value.astype(wide), scale.astype(wide) + wide.type(offset)
    squares = comm.all_reduce((v * v).sum(axis=-1, keepdims=True)) / (size * copies)
    rstd = 1 / np.sqrt(squares + wide.type(eps))

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        g = dy.astype(wide)
        slope = g * factor
        along = comm.all_reduce((slope * v).sum(axis=-1, keepdims=True)) / (size * copies)
        dx = rstd * slope - v * (rstd**3 * along)
        dweight = (g * v * rstd).reshape(-1, v.shape[-1]).sum(axis=0)
        return {"x": rounded(dx, value.dtype), "weight": rounded(dweight, scale.dtype)}

    y = rounded(v * rstd * factor, value.dtype)
    return taped("divided_rms_norm", y, back, x=x, weight=weight)
