"""SwiGLU, the gated activation of Llama's feed-forward layer.

y = silu(gate) * up        silu(x) = x * sigmoid(x)

Shazeer, GLU Variants Improve Transformer, 2020.
"""

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ..common.elementwise import by_element
from ..common.in_place import in_place, written_over


@op("gate(*axes), up(*axes) -> y(*axes)", torch=lambda nn, t, o: nn.silu(t["gate"]) * t["up"])
def swiglu(gate: Array, up: Array) -> Array:
    """Multiply up by the swish of gate: ``y = gate * sigmoid(gate) * up``.

    Parameters
    ----------
    gate, up : (*axes) float
        Both have the same shape and dtype.

    Returns
    -------
    y : (*axes) float

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import swiglu, swiglu_backward, swiglu_backward_
    >>> gate, up = np.random.default_rng(0).standard_normal((2, 4, 64), np.float32)
    >>> y = swiglu(gate, up)
    >>> np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-5)
    >>> dgate, dup = swiglu_backward(np.ones_like(y), gate, up)
    >>> _ = swiglu_backward_(np.ones_like(y), gate, up)  # overwrites gate and up
    >>> np.testing.assert_array_equal(gate, dgate)
    """
    y = sigmoid(gate)
    y *= gate
    y *= up
    return y


@swiglu.gradient
def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return the gradients of gate and up."""
    sigma = sigmoid(gate)
    dup = sigma * gate
    slope = 1 - sigma  # silu'(x) = s + x s (1 - s) with s = sigmoid(x)
    slope *= dup
    slope += sigma
    slope *= up
    slope *= dy
    dup *= dy
    return slope, dup


by_element(swiglu, "swiglu.cu")
by_element(swiglu_backward, "swiglu.cu")
swiglu_backward_over_ = by_element(written_over(swiglu_backward, "gate", "up"), "swiglu.cu")
swiglu_backward_ = in_place(swiglu_backward_over_)


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` in a new array; exact at both limits, 0 and 1."""
    y = np.negative(x, out=np.empty_like(x))
    with np.errstate(over="ignore"):  # where exp is infinite, 1 / (1 + exp) is the limit, 0
        np.exp(y, out=y)
    y += 1
    return np.reciprocal(y, out=y)
