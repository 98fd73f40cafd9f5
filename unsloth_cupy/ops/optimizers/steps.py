"""Steps of Lion and of schedule-free AdamW over all parameters of an optimizer: one launch each.

``lion.py`` and ``schedule_free.py`` have the formulas.  Whether a step is skipped is known only on
the device, which therefore has the numbers that steps change.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.gpu import device_of
from ...core.kernel import load
from ...placement import synchronize_stream, to_device_of
from ..common import many
from .launch import Launch, Rates


class LionLauncher(Launch):
    """The step of Lion; ``counts`` holds the steps done."""

    def __init__(
        self, tensors: Mapping[str, Any], betas: tuple[float, float], numbers: Mapping[str, float]
    ) -> None:
        super().__init__(tensors)
        self.betas = betas
        self.counts = to_device_of(np.array([numbers["steps"]], np.uint32), self.lead)
        synchronize_stream(self.lead)  # any stream may launch the first step

    def numbers(self) -> dict[str, float]:
        """Return the number of steps; reading it waits for the device."""
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


class ScheduleFreeLauncher(Launch):
    """The step of schedule-free AdamW.

    Arrays on the device: ``held`` has the numbers, and beta2**steps; ``arrived`` counts blocks.
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
        # a product of factors, as in the kernel: a resumed run gets the same bits
        power = np.cumprod([1.0] + [betas[1]] * int(numbers["steps"]))[-1]
        held = np.array([*numbers.values(), power])
        self.held, self.betas = (to_device_of(each, self.lead) for each in (held, np.array(betas)))
        self.arrived = to_device_of(np.zeros(1, np.uint32), self.lead)
        synchronize_stream(self.lead)  # any stream may launch the first step

    def numbers(self) -> dict[str, float]:
        """Return the steps, the largest rate and the sum of weights; reading them waits."""
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
