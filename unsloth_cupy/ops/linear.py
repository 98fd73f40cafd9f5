"""A linear layer.

y = x weight^T + bias
"""

import math

from .._op import op
from .._typing import Array

BLOCK_BYTES = 8 * 2**20  # of a product on its way into a sum


@op("x(*rows, inputs), weight(outputs, inputs), bias?(outputs): param -> y(*rows, outputs)")
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Multiply each row by a weight: ``y = x @ weight.T + bias``.

    Parameters
    ----------
    x : (*rows, inputs) float
        Rows; any number of leading axes.
    weight : (outputs, inputs) float
        As checkpoints store it.
    bias : (outputs,) dtype of x or float32, optional
        Added to each row.

    Returns
    -------
    y : (*rows, outputs) float
        Accumulated in float32 (float64 for float64 arrays) and rounded once.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    y = flat(x) @ weight.T
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], len(weight))


@linear.gradient(
    "dy(*rows, outputs), x(*rows, inputs), weight(outputs, inputs), bias?(outputs): param"
    " -> dx(*rows, inputs), dweight(outputs, inputs), dbias(outputs)"
)
def linear_backward(
    dy: Array, x: Array, weight: Array, bias: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return the gradients of x, weight and bias."""
    rows = flat(dy)
    dx = (rows @ weight).reshape(x.shape)
    return dx, rows.T @ flat(x), None if bias is None else rows.sum(axis=0)


def flat(x: Array) -> Array:
    """Return x as a matrix of its rows: one BLAS call then serves all leading axes."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def accumulate(total: Array, left: Array, right: Array) -> None:
    """Add ``left.T @ right`` to total, block by block: no second array of the size of total."""
    step = max(1, BLOCK_BYTES // max(1, total[:1].nbytes))
    for start in range(0, len(total), step):
        block = slice(start, start + step)
        total[block] += left[:, block].T @ right
