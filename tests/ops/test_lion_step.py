"""The one launch of Lion's step, beside the definition."""

import numpy as np

from unsloth_cupy import Lion

from ..harness.parity import EPS, KernelAlone
from .optimizer_steps import CASES, LARGEST_RATE, Steps


class TestLionStep(Steps, KernelAlone):
    op, kind, cases = "adamw_", Lion, CASES  # a step is not an op

    def judge(self, plain: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> None:
        """As of other steps; a sum beside 0 may have the other sign, which is 2 lr apart."""
        moved = {**actual}
        for name, expected in plain.items():
            if name == "steps" or name.startswith("mean") or not expected.size:
                continue
            wide, array = (each.astype(np.float64) for each in (expected, actual[name]))
            apart = np.abs(array - wide)
            other = apart > 4 * EPS[expected.dtype.name] * np.abs(wide).max()
            assert other.sum() <= 1 + other.size // 10_000, name
            assert apart[other].max(initial=0) <= 2.1 * LARGEST_RATE, name
            moved[name] = np.where(other, expected, actual[name])
        super().judge(plain, moved)
