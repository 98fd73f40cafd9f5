"""Loops over parts of an array, of which planned arrays need one."""

import itertools
from collections.abc import Iterable
from typing import Any

from ...core.stand_in import is_planned


def representative_steps(like: Any, steps: Iterable[Any]) -> Iterable[Any]:
    """Return the steps of a loop; for a planned array the first, as all of them take alike."""
    return itertools.islice(steps, 1) if is_planned(like) else steps
