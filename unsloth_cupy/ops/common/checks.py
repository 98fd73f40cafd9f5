"""Checks of arguments that several ops share."""

from collections.abc import Iterable, Set
from typing import Any

from ...core.dtypes import Stored
from ...errors import ConfigError, DTypeError, GradientError, ShapeError


def refuse_number(call: str, name: str, value: Any) -> None:
    """Raise DTypeError for a Python int: a kernel and a backward op need an array with a shape."""
    if isinstance(value, int):
        raise DTypeError(f"{call}: {name} is the number {value}; pass np.array({value})")


def check_choice(call: str, name: str, value: Any, known: Iterable[str]) -> None:
    """Raise ConfigError unless the value of an option is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{call}: {name}={value!r}; choose from {', '.join(known)}")


def check_shape(call: str, name: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ShapeError unless an array has the shape that the options of the call determine."""
    if actual != expected:
        problem = f"{call}: {name} is {actual}; it must be {expected}, the shape of the result"
        raise ShapeError(problem, expected=expected, actual=actual)


def check_eps(call: str, eps: float) -> None:
    """Raise ConfigError for a negative eps, whose sum with a square may have no square root."""
    if eps < 0:
        raise ConfigError(f"{call}(eps={eps}): eps must be 0 or more")


def requested_gradients(call: str, wanted: Set[str] | None, **operands: Any) -> set[str]:
    """Return the names of the operands whose gradients a call must compute.

    ``wanted`` has these names; None stands for all operands that are present and not frozen, as
    quantized weights are.

    Raises
    ------
    GradientError
        ``wanted`` names a frozen quantized weight.
    """
    stored = {name: o for name, o in operands.items() if isinstance(o, Stored)}
    frozen = {name for name, operand in stored.items() if not operand.trained}
    if wanted is None:
        return {name for name, operand in operands.items() if operand is not None} - frozen
    if names := sorted(frozen & wanted):
        cure = "train an adapter (lora_linear), or the dense weight"
        which = " and ".join(names)
        raise GradientError(f"{call}: {which}: a quantized weight is frozen; {cure}")
    return {name for name in wanted if operands.get(name) is not None}
