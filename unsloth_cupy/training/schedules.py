"""Learning rates by step: warm up linearly from 0, then decay.

The first step is step 0 and has rate 0 unless warmup is 0; step ``warmup`` has the full rate.
From step ``steps`` on, or from the one after ``warmup`` if that is later, the rate stays at
``minimum * lr``.
"""

import math

from ..core.call import check_options, is_number
from ..errors import ConfigError


@check_options
def cosine_schedule(
    step: int, *, lr: float, warmup: int, steps: int, minimum: float = 0.0
) -> float:
    """Return ``lr * (minimum + (1 - minimum) * (1 + cos(pi * t)) / 2)`` after the warm-up.

    Parameters
    ----------
    step : int
        Steps taken before this one.
    lr : float
        Rate at the end of the warm-up.
    warmup : int
        Steps over which the rate grows from 0 to lr.
    steps : int
        Steps in all; ``t`` runs from 0 at step warmup to 1 at step steps, and stays.
    minimum : float
        Share of lr that is left at the end.

    Returns
    -------
    rate : float

    Raises
    ------
    ConfigError
        A number is outside its range.

    Notes
    -----
    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.
    """
    growth, t = _progress("cosine_schedule", step, lr, warmup, steps, minimum)
    return lr * growth * (minimum + (1 - minimum) * (1 + math.cos(math.pi * t)) / 2)


@check_options
def linear_schedule(
    step: int, *, lr: float, warmup: int, steps: int, minimum: float = 0.0
) -> float:
    """Return ``lr * (minimum + (1 - minimum) * (1 - t))`` after the warm-up.

    Parameters, ``t`` and errors are those of ``cosine_schedule``.
    """
    growth, t = _progress("linear_schedule", step, lr, warmup, steps, minimum)
    return lr * growth * (minimum + (1 - minimum) * (1 - t))


@check_options
def constant_schedule(
    step: int, *, lr: float, warmup: int, steps: int, minimum: float = 0.0
) -> float:
    """Return lr after the warm-up.

    Parameters and errors are those of ``cosine_schedule``, so that one can stand in for the
    other; steps and minimum change nothing.
    """
    growth, _ = _progress("constant_schedule", step, lr, warmup, steps, minimum)
    return lr * growth


def _progress(
    call: str, step: int, lr: float, warmup: int, steps: int, minimum: float
) -> tuple[float, float]:
    """Return the progress of the warm-up and of the decay, each from 0 to 1."""
    for name, value, limit in (
        ("step", step, math.inf),
        ("lr", lr, math.inf),
        ("warmup", warmup, math.inf),
        ("steps", steps, math.inf),
        ("minimum", minimum, 1.0),
    ):
        if not is_number(value) or not 0 <= value <= limit or value == math.inf:
            top = "finite" if limit == math.inf else f"at most {limit}"
            raise ConfigError(f"{call}: {name}={value}; pass a number from 0, {top}")
    if step < warmup:
        return step / warmup, 0.0
    return 1.0, min(1.0, (step - warmup) / max(1, steps - warmup))
