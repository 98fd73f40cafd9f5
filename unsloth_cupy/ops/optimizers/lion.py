"""Lion: steps of equal size in the direction of the sign of an average of gradients.

parameter = parameter * (1 - lr * weight_decay) - lr * sign(beta1 * mean + (1 - beta1) * gradient)
mean = beta2 * mean + (1 - beta2) * gradient

Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.

Only the device knows whether a step is skipped, so it counts the steps.
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
    # the average divided by 1 - beta1: equal sign, and one temporary array is enough
    change = mean * (beta1 / (1 - beta1))
    change += gradient
    np.sign(change, out=change)
    change *= lr
    parameter *= 1 - lr * weight_decay
    parameter -= change
    np.multiply(gradient, 1 - beta2, out=change)
    mean *= beta2
    mean += change


class LionLauncher(Launch):
    """A step of all parameters in one launch; ``counts`` has the number of steps."""

    def __init__(
        self, tensors: Mapping[str, Any], betas: tuple[float, float], numbers: Mapping[str, float]
    ) -> None:
        super().__init__(tensors)
        self.betas = betas
        self.counts = to_device_of(np.array([numbers["steps"]], np.uint32), self.lead)
        synchronize_stream(self.lead)  # the first step may run on another stream

    def numbers(self) -> dict[str, float]:
        """Return the number of steps; wait for the device."""
        with device_of(self.counts):
            return {"steps": int(self.counts[0])}

    def launch(self, table: many.Table, factor: Any, finite: Any, rates: Rates) -> None:
        """Launch the step of all tensors."""
        beta1, beta2 = self.betas
        kernel = load("lion_step.cu", "lion_step", self.lead, self.constants(table))
        kernel[table.chunks, many.THREADS](
            table.tensors, table.owners, factor, finite, self.counts,
            beta1, 1 - beta1, beta2, 1 - beta2,
            rates.lr, 1 - rates.lr * rates.weight_decay,
        )  # fmt: skip
