"""Choose which of the long lists of test cases a run takes: a sample, or all of them.

    pytest --sample all      all cases
    pytest --day 17          the sample with this number; the default is the number of commits

The header of pytest's report names the sample, so that another run can repeat it.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Sample:
    """The sample chosen by pytest's options; conftest.py sets it before it imports test modules."""

    day = 0
    all = False

    @classmethod
    def one_in(cls, runs: int, cases: Iterable[T]) -> list[T]:
        """Return one case in every ``runs``, others on the next day; or all cases."""
        listed = list(cases)
        return listed if cls.all else listed[cls.day % runs :: runs]


def commits() -> int:
    """Return the number of commits, which numbers the sample; 0 without a git repository."""
    command = ["git", "-C", Path(__file__).parent, "rev-list", "--count", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0
