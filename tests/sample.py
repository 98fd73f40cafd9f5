"""Which part of its long lists of cases a run takes: a sample that the commit draws, or all.

    pytest --sample all      all of them
    pytest --day 17          the sample of this number

The head of a report names the sample, so that another run can take it again.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Sample:
    """What the options of pytest say; conftest.py sets it before a test module is imported."""

    day = 0
    all = False

    @classmethod
    def one_in(cls, runs: int, several: Iterable[T]) -> list[T]:
        """Return every so manieth of several, others in the next run; or all."""
        listed = list(several)
        return listed if cls.all else listed[cls.day % runs :: runs]


def commits() -> int:
    """Return the number of commits: the next one draws another sample; 0 where there is no git."""
    command = ["git", "-C", Path(__file__).parent, "rev-list", "--count", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0
