"""Loops over parts of an array; a planned array, which has no data, needs one step of a loop."""

import itertools
from collections.abc import Iterable
from typing import Any

from ...core.stand_in import is_planned


def representative_steps(like: Any, steps: Iterable[Any]) -> Iterable[Any]:
    """Return the steps of a loop; for a planned array only the first, as all use equal memory."""
    return itertools.islice(steps, 1) if is_planned(like) else steps
