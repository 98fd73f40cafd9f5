"""The squared rectifier of BitNet's feed-forward layer.

y = max(x, 0)**2

So et al., Primer: Searching for Efficient Transformers for Language Modeling, 2021.
"""

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ..common.elementwise import launch_over, launch_rows
from ..common.in_place import check_changeable


@op("x(*axes) -> y(*axes)", torch=lambda nn, t, o: nn.relu(t["x"]).square())
def relu2(x: Array) -> Array:
    """Square the positive part: ``y = max(x, 0)**2``.

    Parameters
    ----------
    x : (*axes) float

    Returns
    -------
    y : (*axes) float

    Raises
    ------
    DTypeError
        x is not a float array.
    """
    y = np.maximum(x, 0, out=np.empty_like(x))
    return np.square(y, out=y)


@relu2.kernel(strided=("x",))
def _launch(x: Array) -> Array:
    y = empty(x.shape, x.dtype, like=x)
    launch_rows("relu2.cu", "relu2", (x,), (y,))
    return y


@relu2.gradient
def relu2_backward(dy: Array, x: Array) -> Array:
    """Return the gradient of x: ``2 * max(x, 0) * dy``."""
    dx = np.maximum(x, 0, out=np.empty_like(x))
    dx *= 2
    dx *= dy
    return dx


@relu2_backward.kernel(strided=("dy", "x"))
def _launch_backward(dy: Array, x: Array) -> Array:
    dx = empty(x.shape, x.dtype, like=x)
    launch_rows("relu2.cu", "relu2_backward", (dy, x), (dx,))
    return dx


def relu2_backward_(dy: Array, x: Array) -> Array:
    """Write ``relu2_backward`` of x over x: no array is allocated.

    Parameters
    ----------
    dy : (*axes) float
        Gradient of y.
    x : (*axes) float
        What y came from; to be written to.

    Returns
    -------
    dx : x itself

    Raises
    ------
    ConfigError
        x cannot be written to.
    GradientError
        x is on a tape, whose record a change would falsify.
    ShapeError, DTypeError
        As ``relu2``; nothing is then changed.
    """
    check_changeable("relu2_backward_", "call relu2_backward", x=x)
    relu2_backward_over_(dy, x)
    return x


@op(
    "dy(*axes), x(*axes) -> dx(*axes)",
    widen=False,  # a widened copy would take the gradient in its place
    no_gradient="it is a gradient",
)
def relu2_backward_over_(dy: Array, x: Array) -> Array:
    """Write ``relu2_backward`` over x, and return it."""
    x[...] = relu2_backward(dy, x)
    return x


@relu2_backward_over_.kernel
def _launch_backward_over(dy: Array, x: Array) -> Array:
    if not launch_over("relu2.cu", "relu2_backward", dy, x):
        return relu2_backward_over_.definition(dy, x)
    return x
