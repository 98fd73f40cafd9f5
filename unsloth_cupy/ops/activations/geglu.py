"""GEGLU, the gated activation of Gemma's feed-forward layer.

y = gelu(gate) * up        gelu(x) = x * (1 + erf(x / sqrt(2))) / 2
                           approximately x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x**3))) / 2

Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.  Shazeer, GLU Variants, 2020.
"""

import math

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ...placement import scipy_of
from ..common.elementwise import by_element
from ..common.in_place import in_place, written_over
from .swiglu import sigmoid

CUBIC = 0.044715  # this and STEEPNESS from the paper's approximation
STEEPNESS = math.sqrt(2 / math.pi)
FAR = 40.0  # beyond |x| = 40 gelu(x) / x is 0 or 1 even in float64; clipping avoids x**3 = inf


@op("gate(*axes), up(*axes) -> y(*axes)", torch=lambda nn, t, o: nn.gelu(t["gate"]) * t["up"])
def geglu(gate: Array, up: Array, *, approximate: bool = False) -> Array:
    """Multiply up by the Gaussian error linear unit of gate: ``y = gelu(gate) * up``.

    Parameters
    ----------
    gate, up : (*axes) float
        Both have the same shape and dtype.
    approximate : bool
        True for the formula with tanh (Hugging Face's ``gelu_pytorch_tanh``), False for erf.

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
    >>> from unsloth_cupy import geglu, geglu_backward, geglu_backward_
    >>> gate, up = np.random.default_rng(0).standard_normal((2, 4, 64), np.float32)
    >>> y = geglu(gate, up, approximate=True)
    >>> dgate, dup = geglu_backward(np.ones_like(y), gate, up, approximate=True)
    >>> _ = geglu_backward_(np.ones_like(y), gate, up, approximate=True)
    >>> np.testing.assert_array_equal(up, dup)
    """
    y = _factor(gate, approximate)
    y *= gate
    y *= up
    return y


@geglu.gradient
def geglu_backward(
    dy: Array, gate: Array, up: Array, *, approximate: bool = False
) -> tuple[Array, Array]:
    """Return the gradients of gate and up."""
    factor = _factor(gate, approximate)
    slope = _slope_term(gate, factor, approximate)
    slope += factor  # gelu'(gate): gelu is gate * factor
    slope *= up
    slope *= dy
    factor *= gate
    factor *= dy
    return slope, factor


geglu_backward_over_ = written_over(geglu_backward, "gate", "up")
geglu_backward_ = in_place(geglu_backward_over_)
by_element(geglu, "geglu.cu", APPROXIMATE="approximate")
by_element(geglu_backward, "geglu.cu", APPROXIMATE="approximate")
by_element(geglu_backward_over_, "geglu.cu", APPROXIMATE="approximate")


def _factor(x: Array, approximate: bool) -> Array:
    """Return ``gelu(x) / x``, between 0 and 1, in a new array."""
    # sigmoid and erfc, because 1 + tanh and 1 + erf lose all digits where x is far below 0
    if approximate:
        clipped = np.clip(x, -FAR, FAR)
        return sigmoid(_polynomial_(clipped, CUBIC))
    factor = np.multiply(x, -math.sqrt(0.5), out=np.empty_like(x))
    scipy_of("special", x).erfc(factor, out=factor)
    factor /= 2
    return factor


def _slope_term(x: Array, factor: Array, approximate: bool) -> Array:
    """Return x times the derivative of ``_factor(x)``; 0 where x is far from 0."""
    clipped = np.clip(x, -FAR, FAR)
    if approximate:
        slope = _polynomial_(clipped, 3 * CUBIC)  # x times the derivative of the polynomial
        slope *= factor
        slope *= 1 - factor  # sigmoid' = s (1 - s)
        return slope
    # x exp(-x**2 / 2) / sqrt(2 pi)
    gaussian = np.multiply(clipped, clipped, out=np.empty_like(clipped))
    gaussian /= -2
    clipped *= np.exp(gaussian, out=gaussian)
    clipped /= math.sqrt(2 * math.pi)
    return clipped


def _polynomial_(x: Array, cubic: float) -> Array:
    """Overwrite x with ``2 * STEEPNESS * x * (1 + cubic * x**2)`` and return it."""
    bracket = cubic * x
    bracket *= x
    bracket += 1
    x *= 2 * STEEPNESS
    x *= bracket
    return x
