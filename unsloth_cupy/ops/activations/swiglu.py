"""The gate of Llama's feed-forward layer.

y = silu(gate) * up        silu(x) = x * sigmoid(x)

Shazeer, GLU Variants Improve Transformer, 2020.
"""

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ..common.elementwise import launch_over, launch_rows
from ..common.in_place import check_changeable


@op("gate(*axes), up(*axes) -> y(*axes)", torch=lambda nn, t, o: nn.silu(t["gate"]) * t["up"])
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


@swiglu.kernel(strided=("gate", "up"))
def _launch(gate: Array, up: Array) -> Array:
    y = empty(gate.shape, gate.dtype, like=gate)
    launch_rows("swiglu.cu", "swiglu", (gate, up), (y,))
    return y


@swiglu.gradient
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


@swiglu_backward.kernel(strided=("dy", "gate", "up"))
def _launch_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    dgate, dup = (empty(gate.shape, gate.dtype, like=gate) for _ in range(2))
    launch_rows("swiglu.cu", "swiglu_backward", (dy, gate, up), (dgate, dup))
    return dgate, dup


def swiglu_backward_(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Write ``swiglu_backward`` of gate and up over gate and up: no array is allocated.

    Parameters
    ----------
    dy : (*axes) float
        Gradient of y.
    gate, up : (*axes) float
        What y came from; to be written to.

    Returns
    -------
    dgate, dup : gate and up themselves

    Raises
    ------
    ConfigError
        gate or up cannot be written to.
    GradientError
        gate or up is on a tape, whose record a change would falsify.
    ShapeError, DTypeError
        As ``swiglu``; nothing is then changed.
    """
    check_changeable("swiglu_backward_", "call swiglu_backward", gate=gate, up=up)
    swiglu_backward_over_(dy, gate, up)
    return gate, up


@op(
    "dy(*axes), gate(*axes), up(*axes) -> dgate(*axes), dup(*axes)",
    widen=False,  # a widened copy would take the gradient in its place
    no_gradient="it is a gradient",
)
def swiglu_backward_over_(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Write ``swiglu_backward`` over gate and up, and return them."""
    gate[...], up[...] = swiglu_backward(dy, gate, up)
    return gate, up


@swiglu_backward_over_.kernel
def _launch_backward_over(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    if not launch_over("swiglu.cu", "swiglu_backward", dy, gate, up):
        return swiglu_backward_over_.definition(dy, gate, up)
    return gate, up


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` in a new array; exact at both ends."""
    y = np.negative(x, out=np.empty_like(x))
    with np.errstate(over="ignore"):  # an infinite exp gives the right limit: 0
        np.exp(y, out=y)
    y += 1
    return np.reciprocal(y, out=y)
