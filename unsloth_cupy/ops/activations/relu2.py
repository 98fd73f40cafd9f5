"""Squared ReLU, the activation of BitNet's feed-forward layer.

y = max(x, 0)**2

So et al., Primer: Searching for Efficient Transformers for Language Modeling, 2021.
"""

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ..common.elementwise import by_element
from ..common.in_place import in_place, written_over


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

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import relu2, relu2_backward, relu2_backward_
    >>> x = np.array([-1.0, 0.5, 3.0], np.float32)
    >>> np.testing.assert_array_equal(relu2(x), [0, 0.25, 9])
    >>> np.testing.assert_array_equal(relu2_backward(np.ones_like(x), x), [0, 1, 6])
    >>> _ = relu2_backward_(np.ones_like(x), x)
    >>> np.testing.assert_array_equal(x, [0, 1, 6])
    """
    y = np.maximum(x, 0, out=np.empty_like(x))
    return np.square(y, out=y)


@relu2.gradient
def relu2_backward(dy: Array, x: Array) -> Array:
    """Return the gradient of x: ``2 * max(x, 0) * dy``."""
    dx = np.maximum(x, 0, out=np.empty_like(x))
    dx *= 2
    dx *= dy
    return dx


by_element(relu2, "relu2.cu")
by_element(relu2_backward, "relu2.cu")
relu2_backward_over_ = by_element(written_over(relu2_backward, "x"), "relu2.cu")
relu2_backward_ = in_place(relu2_backward_over_)
