"""Rooms stay within their limits, which count lines of code."""

from .sizes import lines_of_code, too_large

SOURCE = '''"""A module."""

import math
from math import (
    pi,
)

AREA = pi  # counted


@property
def area(
    radius: float,
) -> float:
    """Return

    an area."""
    # not counted
    import os

    if radius:
        return math.prod([
            AREA,
            radius**2,
        ])
    return """
a text"""


class Empty:
    """Only a docstring."""
'''


def test_lines_of_bodies_count() -> None:
    assert lines_of_code(SOURCE) == len(["AREA", "if", *["return"] * 4, *["return"] * 2])


def test_rooms_keep_their_limits() -> None:
    assert too_large() == []
