"""The learning rate of each step of a run: a warm-up, then one of several decays."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...training.schedules import (
    constant_schedule,
    cosine_schedule,
    inverse_sqrt_schedule,
    linear_schedule,
    polynomial_schedule,
    warmup_stable_decay_schedule,
)

LAST_RATE = 0.1  # final learning rate, as a fraction of the peak
DECAY_SHARE = 0.2  # fraction of the steps in which wsd decays
DECAYS: Mapping[str, Callable[..., float]] = {
    "cosine": cosine_schedule,
    "linear": linear_schedule,
    "constant": constant_schedule,
    "wsd": warmup_stable_decay_schedule,
    "polynomial": partial(polynomial_schedule, power=2.0),
    "inverse_sqrt": inverse_sqrt_schedule,
}


def rate_of(step: int, plan: Any) -> float:
    """Return the learning rate of a step; steps count from 1, because step 0 has the rate 0."""
    steps, warmup = plan.steps, plan.warmup
    first = math.ceil(steps * warmup) if warmup < 1 else int(warmup)
    more = {}
    if plan.decay == "wsd":
        more["decay"] = min(math.ceil(steps * DECAY_SHARE), max(0, steps - first))
    return DECAYS[plan.decay](
        step, lr=plan.lr, warmup=first, steps=steps, minimum=LAST_RATE, **more
    )
