"""The one launch of schedule-free AdamW's step, beside the definition."""

from unsloth_cupy import ScheduleFreeAdamW

from ..harness.parity import KernelAlone
from .optimizer_steps import CASES, Steps


class TestScheduleFreeStep(Steps, KernelAlone):
    op, kind, cases = "adamw_", ScheduleFreeAdamW, CASES
