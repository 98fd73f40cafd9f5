"""Learning rate schedules: a linear warm-up from 0, then decay.

The first step is step 0; its rate is 0 unless warmup is 0.  Step ``warmup`` has the full rate.
From step ``max(steps, warmup + 1)`` on, the rate is ``minimum * lr``.
"""

import math
from collections.abc import Callable, Mapping

from ..core.call import check_options, is_integer, is_number
from ..errors import ConfigError
from ..ops.common.checks import check_choice


@check_options
def cosine_schedule(
    step: int, *, lr: float, warmup: int, steps: int, minimum: float = 0.0, cycles: int = 1
) -> float:
    """Return ``lr * (minimum + (1 - minimum) * (1 + cos(pi * u)) / 2)`` after the warm-up.

    ``u`` is the fractional part of ``cycles * t``, and 1 from step ``steps`` on.

    Parameters
    ----------
    step : int
        Number of earlier steps.
    lr : float
        Rate at the end of the warm-up.
    warmup : int
        Steps over which the rate grows from 0 to lr.
    steps : int
        Total number of steps; ``t`` grows from 0 at step ``warmup`` to 1 at step ``steps``, and
        stays 1.
    minimum : float
        Final rate, as a fraction of lr.
    cycles : int
        Number of times that the rate decays from lr; in between it jumps back (warm restarts).

    Returns
    -------
    rate : float

    Raises
    ------
    ConfigError
        A number is out of range.

    Notes
    -----
    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.
    """
    growth, t = _progress("cosine_schedule", step, lr, warmup, steps, minimum)
    if not is_integer(cycles, 1):
        raise ConfigError(f"cosine_schedule: cycles={cycles}; pass a whole number, 1 or more")
    u = cycles * t % 1 if t < 1 else 1.0
    return lr * growth * (minimum + (1 - minimum) * (1 + math.cos(math.pi * u)) / 2)


@check_options
def linear_schedule(
    step: int, *, lr: float, warmup: int, steps: int, minimum: float = 0.0
) -> float:
    """Return ``lr * (minimum + (1 - minimum) * (1 - t))`` after the warm-up.

    Parameters, ``t`` and errors are as in ``cosine_schedule``.
    """
    growth, t = _progress("linear_schedule", step, lr, warmup, steps, minimum)
    return lr * growth * (minimum + (1 - minimum) * (1 - t))


@check_options
def constant_schedule(
    step: int, *, lr: float, warmup: int, steps: int, minimum: float = 0.0
) -> float:
    """Return lr after the warm-up.

    Parameters and errors are as in ``cosine_schedule``; steps and minimum have no effect.
    """
    growth, _ = _progress("constant_schedule", step, lr, warmup, steps, minimum)
    return lr * growth


@check_options
def polynomial_schedule(
    step: int, *, lr: float, warmup: int, steps: int, minimum: float = 0.0, power: float = 1.0
) -> float:
    """Return ``lr * (minimum + (1 - minimum) * (1 - t)**power)`` after the warm-up.

    Other parameters, ``t`` and errors are as in ``cosine_schedule``; power is above 0.
    """
    growth, t = _progress("polynomial_schedule", step, lr, warmup, steps, minimum)
    if not is_number(power) or power <= 0:
        raise ConfigError(f"polynomial_schedule: power={power}; pass a number above 0")
    return lr * growth * (minimum + (1 - minimum) * (1 - t) ** power)


@check_options
def inverse_sqrt_schedule(
    step: int,
    *,
    lr: float,
    warmup: int,
    steps: int,
    minimum: float = 0.0,
    timescale: float | None = None,
) -> float:
    """Return ``lr / sqrt((step - warmup + timescale) / timescale)``, at least minimum * lr.

    Parameters
    ----------
    timescale : float, optional
        Steps after the warm-up in which the rate falls to lr / sqrt(2); None: warmup, or 10,000
        if warmup is 0.

    Other parameters and errors are as in ``cosine_schedule``; steps has no effect.

    Notes
    -----
    Source: Zhai et al., Scaling Vision Transformers, 2022.
    """
    growth, _ = _progress("inverse_sqrt_schedule", step, lr, warmup, steps, minimum)
    scale = (warmup or 10_000) if timescale is None else timescale
    if not is_number(scale) or scale <= 0:
        raise ConfigError(f"inverse_sqrt_schedule: timescale={scale}; pass a number above 0")
    if step < warmup:
        return lr * growth
    return lr * max(minimum, 1 / math.sqrt((step - warmup + scale) / scale))


@check_options
def warmup_stable_decay_schedule(
    step: int,
    *,
    lr: float,
    warmup: int,
    steps: int,
    minimum: float = 0.0,
    decay: int,
    shape: str = "cosine",
) -> float:
    """Return ``lr * (minimum + (1 - minimum) * f)``: f grows to 1, stays 1, and decays to 0.

    Parameters
    ----------
    decay : int
        Number of last steps in which f decays; u grows from 0 to 1 in these steps.
    shape : str
        f is ``(1 + cos(pi * u)) / 2`` for "cosine", ``1 - u`` for "linear", ``1 - sqrt(u)`` for
        "1-sqrt".

    Other parameters and errors are as in ``cosine_schedule``, except that the warm-up begins at
    minimum * lr.

    Notes
    -----
    Source: Hu et al., MiniCPM, 2024; the shapes, Haegele et al., Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations, 2024.
    """
    call = "warmup_stable_decay_schedule"
    growth, _ = _progress(call, step, lr, warmup, steps, minimum)
    check_choice(call, "shape", shape, tuple(SHAPES))
    if not is_integer(decay, 0) or decay > max(0, steps - warmup):
        most = max(0, steps - warmup)
        raise ConfigError(f"{call}: decay={decay}; pass a whole number from 0 to {most}")
    u = min(1.0, max(0, step - (steps - decay)) / max(1, decay))
    return lr * (minimum + (1 - minimum) * (growth * SHAPES[shape](u)))


SHAPES: Mapping[str, Callable[[float], float]] = {  # of warmup_stable_decay_schedule
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "linear": lambda u: 1 - u,
    "1-sqrt": lambda u: 1 - math.sqrt(u),
}


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
