"""What ops that write over their arguments ask of them."""

from typing import Any

import numpy as np

from ...core.op import Traced
from ...errors import ConfigError, GradientError


def check_changeable(call: str, otherwise: str, **arrays: Any) -> None:
    """Raise for an array that a tape remembers, or that is read-only; otherwise: what to call."""
    for name, array in arrays.items():
        if isinstance(array, Traced):
            raise GradientError(f"{call}: {name} is on a tape; {otherwise}, which leaves it")
        never = type(array).__module__.partition(".")[0] in ("jax", "jaxlib")
        if isinstance(array, np.ndarray):
            never = not array.flags.writeable
        if never or not hasattr(array, "__setitem__"):
            raise ConfigError(f"{call}: {name} is read-only; {otherwise}, or pass a copy")


def in_one_piece(*arrays: Any) -> bool:
    """Say whether a kernel can write over all arrays from end to end."""
    return all(array.flags.c_contiguous for array in arrays)
