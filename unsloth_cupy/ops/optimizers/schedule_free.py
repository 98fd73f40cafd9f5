"""Schedule-free AdamW: gradients are taken between a base and its average.

square = beta2 * square + (1 - beta2) * gradient**2
change = gradient / (sqrt(square / (1 - beta2**step)) + eps) + weight_decay * parameter
parameter = (1 - share) * parameter + share * base - lr * (1 - beta1 * (1 - share)) * change
base = base - lr * change

Here ``share = weight / (sum of weights so far)``, the weight of a step is the square of the largest
lr so far, and lr grows in the warm-up.  The average, which the parameter is made of, is

average = parameter + (1 - 1 / beta1) * (base - parameter)

Defazio et al., The Road Less Scheduled, 2024.
"""

from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """A parameter and the other arrays that a step of schedule-free AdamW changes."""

    parameter: Any
    copy: Any | None  # the parameter rounded to 16 bits
    base: Any
    square: Any


def weighted(numbers: dict[str, float], lr: float, warmup: int) -> tuple[float, float]:
    """Return the share of lr in the warm-up, and that of the base; add the weight to numbers."""
    growth = min(1.0, numbers["steps"] / max(1, warmup))
    numbers["largest_lr"] = max(numbers["largest_lr"], lr * growth)
    weight = numbers["largest_lr"] ** 2
    numbers["weight_sum"] += weight
    return growth, weight / numbers["weight_sum"] if weight else 0.0


def schedule_free(
    parameter: Any,
    gradient: Any,
    base: Any,
    square: Any,
    *,
    lr: float,
    growth: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    share: float,
    step: int,
) -> None:
    """Update parameter, base and square in place; all are float32, or float64."""
    beta1, beta2 = betas
    unbiased = np.sqrt(1 - beta2**step)
    change = gradient * gradient
    change *= 1 - beta2
    square *= beta2
    square += change
    np.sqrt(square, out=change)
    change += eps * unbiased
    np.divide(gradient, change, out=change)
    change *= unbiased
    other = parameter * weight_decay
    change += other
    change *= lr * growth
    np.subtract(base, parameter, out=other)
    other *= share
    parameter += other
    base -= change
    change *= 1 - beta1 * (1 - share)
    parameter -= change


def average(parameter: Any, base: Any, *, beta1: float) -> Any:
    """Return the average that a parameter is made of, in the dtype of the base."""
    result = base - parameter
    result *= 1 - 1 / beta1
    result += parameter
    return result
