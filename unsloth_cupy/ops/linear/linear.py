"""A linear layer.

y = x weight^T + bias
"""

import math
from collections.abc import Set

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ..common.checks import requested_gradients
from ..common.columns import row_sum
from ..common.gemm import gemm
from .changed_matrix import weight_gradient


@op(
    "x(*rows, inputs), weight(outputs, inputs): weight, bias?(outputs): param -> y(*rows, outputs)",
    widen=False,  # products take 16-bit operands as they are
    products=True,
    torch=lambda nn, t, o: nn.linear(t["x"], t["weight"]),
    operations=lambda a: 2 * a["x"].size * a["weight"].shape[0],
)
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Multiply each row by a weight: ``y = x @ weight.T + bias``.

    Parameters
    ----------
    x : (*rows, inputs) float
        Rows, with any number of leading axes.
    weight : (outputs, inputs) float, or a quantized weight
        In the layout of checkpoints.  A quantized weight is frozen, and is dequantized in parts,
        never as a whole.
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

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import linear, linear_backward
    >>> x, weight = np.ones((3, 8), np.float32), np.ones((4, 8), np.float32)
    >>> y = linear(x, weight, np.ones(4, np.float32))
    >>> np.testing.assert_array_equal(y, np.full((3, 4), 9))
    >>> dx, dweight, dbias = linear_backward(y, x, weight)
    >>> np.testing.assert_array_equal(dx, y @ weight)
    """
    shape = *x.shape[:-1], weight.shape[0]
    y = empty(shape, x.dtype if bias is None else np.promote_types(x.dtype, bias.dtype), like=x)
    if bias is not None:
        y[...] = bias  # the product is added to it, in float32
    gemm(flat(x), weight.T, out=flat(y), add=bias is not None)
    return y if y.dtype == x.dtype else y.astype(x.dtype)


@linear.gradient(widen=False)
def linear_backward(
    dy: Array, x: Array, weight: Array, bias: Array | None, *, wanted: Set[str] | None = None
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the gradients of x, weight and bias; None for a gradient that is not ``wanted``."""
    rows, dx, dweight, dbias = flat(dy), None, None, None
    needed = requested_gradients("linear_backward", wanted, x=x, weight=weight, bias=bias)
    if "x" in needed:
        dx = empty(x.shape, dy.dtype, like=x)
        gemm(rows, weight, out=flat(dx))
    if "weight" in needed:
        dweight = weight_gradient(rows, flat(x), weight)
    if bias is not None and "bias" in needed:
        dbias = row_sum(rows, bias.dtype)
    return dx, dweight, dbias


def flat(x: Array) -> Array:
    """Return x as a matrix (rows, columns), so that one product computes all leading axes."""
    # (rows, columns); -1 would not do, if there are no columns
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


linear_backward.facts["products"] = True
linear_backward.facts["operations"] = lambda a: (
    2 * a["x"].size * a["weight"].shape[0] * sum(a.get(n) is not None for n in ("dx", "dweight"))
)
