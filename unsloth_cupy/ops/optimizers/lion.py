"""Lion: steps of equal size, whose direction is the sign of an average of gradients.

parameter = parameter * (1 - lr * weight_decay) - lr * sign(beta1 * mean + (1 - beta1) * gradient)
mean = beta2 * mean + (1 - beta2) * gradient

Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
"""

from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """A parameter and the other arrays that a step of Lion changes."""

    parameter: Any
    copy: Any | None  # the parameter rounded to 16 bits
    mean: Any


def lion(
    parameter: Any,
    gradient: Any,
    mean: Any,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Update parameter and mean in place; all are float32, or float64."""
    beta1, beta2 = betas
    change = mean * (beta1 / (1 - beta1))  # the same sign, with one temporary array
    change += gradient
    np.sign(change, out=change)
    change *= lr
    parameter *= 1 - lr * weight_decay
    parameter -= change
    np.multiply(gradient, 1 - beta2, out=change)
    mean *= beta2
    mean += change
