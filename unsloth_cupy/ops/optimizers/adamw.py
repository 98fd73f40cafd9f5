"""Adam with decoupled weight decay: the update of one parameter.

mean   = beta1 * mean + (1 - beta1) * gradient
square = beta2 * square + (1 - beta2) * gradient**2
parameter = parameter * (1 - lr * weight_decay)
            - lr * mean / (1 - beta1**step) / (sqrt(square / (1 - beta2**step)) + eps)

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
"""

import math
from typing import Any

import numpy as np

from ...core.arrays import lanes
from ...core.call import is_number
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import op
from ...errors import ConfigError
from ..common.elementwise import constants
from ..common.no_kernel import no_kernel
from .host import blocks


@op(
    "parameter(*axes), gradient(*axes): param, mean(*axes): stat, square(*axes): stat"
    " -> updated(*axes)",
    widen=False,  # a widened copy would receive the update, and the parameter would stay as it is
    no_gradient="it updates parameters with gradients",
    traffic=lambda a: (
        a["gradient"].nbytes + 2 * sum(a[n].nbytes for n in ("parameter", "mean", "square"))
    ),
)
def adamw_(
    parameter: Array,
    gradient: Array,
    mean: Array,
    square: Array,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> Array:
    """Update parameter, mean and square in place, and return the parameter.

    Parameters
    ----------
    parameter : (*axes) float
        The parameter; a 16-bit one is updated in float32 and rounded once.
    gradient : (*axes) dtype of parameter or float32
        The gradient of the parameter.
    mean, square : (*axes) float32, or float64 for a float64 parameter
        Exponential moving averages of the gradient and of its square; zeros before step 1.
    lr : float
        Learning rate: the change of an element per step if all its gradients are equal.
    betas : (float, float)
        Factors by which mean and square decay at each step.
    eps : float
        Added to the root of square, in units of the gradient.
    weight_decay : float
        Each step reduces the parameter by the share ``lr * weight_decay``.
    step : int
        Number of this step; the first is 1.

    Returns
    -------
    updated : (*axes) float
        The parameter itself.
    """
    beta1, beta2 = betas
    # sqrt(square / (1 - beta2**step)) + eps is (sqrt(square) + eps * unbiased) / unbiased
    unbiased = math.sqrt(1 - beta2**step)
    for arrays in blocks([parameter, gradient, mean, square]):
        p, g, m, s = arrays
        x, g = p.astype(m.dtype, copy=False), g.astype(m.dtype, copy=False)
        m *= beta1
        change = g * (1 - beta1)
        m += change
        s *= beta2
        np.multiply(g, g, out=change)
        change *= 1 - beta2
        s += change
        np.sqrt(s, out=change)
        change += eps * unbiased
        np.divide(m, change, out=change)
        change *= lr * unbiased / (1 - beta1**step)
        x *= 1 - lr * weight_decay
        x -= change
        if x is not p:
            p[...] = x
    return parameter


@adamw_.require
def _check(call: str, betas: Any, step: int) -> None:
    """Raise ConfigError unless betas are two numbers in [0, 1) and step is at least 1."""
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not (pair and all(is_number(beta) and 0 <= beta < 1 for beta in betas)):
        raise ConfigError(f"{call}(betas={betas!r}): pass two numbers in [0, 1), as (0.9, 0.999)")
    if step < 1:
        raise ConfigError(f"{call}(step={step}): the first step is 1")


@adamw_.kernel
def _launch(
    parameter: Array,
    gradient: Array,
    mean: Array,
    square: Array,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> Array:
    """Launch adamw_; return the parameter, or NotImplemented if an array is not contiguous."""
    arrays = parameter, gradient, mean, square
    if not all(array.flags.c_contiguous for array in arrays):
        return no_kernel("an array is not contiguous")
    beta1, beta2 = betas
    unbiased = math.sqrt(1 - beta2**step)
    width = lanes(16 // parameter.dtype.itemsize, *arrays)
    chosen = constants(parameter.dtype, width, G=gradient.dtype)
    kernel = load("adamw.cu", "adamw_", parameter, chosen)
    kernel[-(-parameter.size // (chosen["THREADS"] * width)), chosen["THREADS"]](
        *arrays,
        parameter.size,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lr * unbiased / (1 - beta1**step),
        eps * unbiased,
        1 - lr * weight_decay,
    )
    return parameter
