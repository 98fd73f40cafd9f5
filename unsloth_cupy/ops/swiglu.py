"""The gate of Llama's feed-forward layer.

y = silu(gate) * up        silu(x) = x * sigmoid(x)

Shazeer, GLU Variants Improve Transformer, 2020.
"""

import numpy as np

from .._arrays import empty
from .._op import op
from .._typing import Array
from ._flat import launch_flat


@op("gate(*axes), up(*axes) -> y(*axes)")
def swiglu(gate: Array, up: Array) -> Array:
    """Gate up by the swish of gate: ``y = gate * sigmoid(gate) * up``.

    Parameters
    ----------
    gate, up : (*axes) float
        Of one shape and dtype.

    Returns
    -------
    y : (*axes) float

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    y = sigmoid(gate)
    y *= gate
    y *= up
    return y


@swiglu.kernel
def _launch(gate: Array, up: Array) -> Array:
    y = empty(gate.shape, gate.dtype, like=gate)
    launch_flat("swiglu.cu", "swiglu", (gate, up, y))
    return y


@swiglu.gradient("dy(*axes), gate(*axes), up(*axes) -> dgate(*axes), dup(*axes)")
def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return the gradients of gate and up."""
    share = sigmoid(gate)
    dup = share * gate
    slope = 1 - share  # silu' = s + x s (1 - s)
    slope *= dup
    slope += share
    slope *= up
    slope *= dy
    dup *= dy
    return slope, dup


@swiglu_backward.kernel
def _launch_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    dgate, dup = (empty(gate.shape, gate.dtype, like=gate) for _ in range(2))
    launch_flat("swiglu.cu", "swiglu_backward", (dy, gate, up, dgate, dup))
    return dgate, dup


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` in a new array; exact at both ends."""
    y = np.negative(x, out=np.empty_like(x))
    with np.errstate(over="ignore"):  # an infinite exp gives the right limit: 0
        np.exp(y, out=y)
    y += 1
    return np.reciprocal(y, out=y)
