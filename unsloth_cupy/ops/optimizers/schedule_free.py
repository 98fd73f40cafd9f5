"""Schedule-free AdamW: gradients are computed at a point between a base and its average.

square = beta2 * square + (1 - beta2) * gradient**2
change = gradient / (sqrt(square / (1 - beta2**step)) + eps) + weight_decay * parameter
parameter = (1 - share) * parameter + share * base - lr * (1 - beta1 * (1 - share)) * change
base = base - lr * change

Here ``share = weight / (sum of weights so far)``, the weight of a step is the square of the largest
lr so far, and lr grows in the warm-up.  The parameter is the point; the average, the trained model,
is

average = parameter + (1 - 1 / beta1) * (base - parameter)

Defazio et al., The Road Less Scheduled, 2024.

Only the device knows whether a step is skipped, so the numbers that a step changes are there.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.gpu import device_of
from ...core.kernel import load
from ...placement import synchronize_stream, to_device_of
from ..common import many
from .launch import Launch, Rates


class Tensor(NamedTuple):
    """A parameter and the other arrays that a step of schedule-free AdamW changes."""

    parameter: Any
    copy: Any | None  # the parameter rounded to 16 bits
    base: Any
    square: Any


def weighted(numbers: dict[str, float], lr: float, warmup: int) -> tuple[float, float]:
    """Return the factor of lr in the warm-up and the share of the base; update ``numbers``.

    ``numbers`` has the number of steps, the largest lr and the sum of weights.
    """
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
    """Return the average, the trained model, in the dtype of the base."""
    result = base - parameter
    result *= 1 - 1 / beta1
    result += parameter
    return result


class ScheduleFreeLauncher(Launch):
    """A step of all parameters in one launch.

    Arrays on the device: ``held`` has the numbers that steps change, and beta2**steps; ``arrived``
    counts the blocks that have finished.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        betas: tuple[float, float],
        eps: float,
        warmup: int,
        numbers: Mapping[str, float],
    ) -> None:
        super().__init__(tensors)
        self.names, self.rest, self.eps, self.warmup = [*numbers], 1 - betas[1], eps, warmup
        # multiplied factor by factor, as in the kernel: a resumed run has equal bits
        power = np.cumprod([1.0] + [betas[1]] * int(numbers["steps"]))[-1]
        held = np.array([*numbers.values(), power])
        self.held, self.betas = (to_device_of(each, self.lead) for each in (held, np.array(betas)))
        self.arrived = to_device_of(np.zeros(1, np.uint32), self.lead)
        synchronize_stream(self.lead)  # the first step may run on another stream

    def numbers(self) -> dict[str, float]:
        """Return the steps, the largest lr and the sum of weights; wait for the device."""
        with device_of(self.held):
            held = {name: float(self.held[place]) for place, name in enumerate(self.names)}
        return held | {"steps": int(held["steps"])}

    def launch(self, table: many.Table, factor: Any, finite: Any, rates: Rates) -> None:
        """Launch the step of all tensors."""
        kernel = load(
            "schedule_free_step.cu", "schedule_free_step", self.lead, self.constants(table)
        )
        kernel[table.chunks, many.THREADS](
            table.tensors, table.owners, factor, finite, self.held, self.arrived, self.betas,
            self.rest, rates.lr, self.eps, rates.weight_decay, rates.of_step, max(1, self.warmup),
        )  # fmt: skip
