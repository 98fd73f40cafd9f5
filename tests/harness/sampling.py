"""Choose which of the long lists of test cases a run takes: a sample, or all of them.

    pytest --sample all      all cases
    pytest --day 17          the sample with this number; the default is the number of commits

A sample has one slow test in seven, and some emulated cases of each op.  Whether a test is in it
depends on the test and the number alone: a run of one file takes what a run of all files takes of
it.  The header of pytest's report names the sample, so that another run can repeat it.
"""

import functools
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

TURNS = 24  # days in which the samples contain every case of emulated kernels
SLOW = 7  # days in which they contain every test with the marker ``slow``


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


class Emulated(NamedTuple):
    """The test ``test_emulated_kernels`` of a Parity class, for a case in a dtype."""

    proof: type[Any]
    case: Any
    dtype: Any

    def __str__(self) -> str:
        return f"{self.proof.__module__}.{self.proof.__name__}[{self.case.label}-{self.dtype}]"


def in_sample(nodeid: str, emulated: Emulated | None, slow: bool, day: int) -> bool:
    """Return whether the sample of a day has a test, which may be an emulated case or slow."""
    if emulated is not None:
        return str(emulated) in chosen(emulated.proof.op, day)
    return not slow or zlib.crc32(nodeid.encode()) % SLOW == day % SLOW


@functools.cache
def chosen(op: str, day: int) -> frozenset[str]:
    """Return the names of the emulated cases of an op that the sample of a day has."""
    return frozenset(map(str, sampled(emulated_cases(op), day)))


def emulated_cases(op: str) -> list[Emulated]:
    """Return every emulated case of an op, be it in one file of ``tests/ops`` or in several."""
    from .parity import KernelParity, dtypes, proofs  # it imports NumPy

    kinds = [p for p in proofs() if p.op == op and issubclass(p, KernelParity)]
    tests = {p for p in kinds if p.__name__.startswith("Test") and p.test_emulated_kernels}
    return [Emulated(p, case, dtype) for p in tests for case in p.cases for dtype in dtypes(p)]


def features_of(test: Emulated) -> set[object]:
    """Return a test's class and, unless an axis is empty, its dtype, operands and options."""
    from unsloth_cupy.core.op import OPS  # it imports NumPy

    case, known = test.case, OPS[test.proof.op].options
    options = {repr((name, value)) for name, value in case.both.items() if name in known}
    sizes = [size for name, size in case.both.items() if name not in known]
    if any(0 in (size if isinstance(size, list | tuple) else [size]) for size in sizes):
        return {test.proof, "empty"}  # it launches nothing
    return {test.proof, str(test.dtype), case.gaps, *case.given, *case.arrays, *options}


def sampled(tests: Sequence[Emulated], day: int) -> list[Emulated]:
    """Return few of an op's tests which together have every feature that any of them has.

    One in ``TURNS`` is among them in any case, another one on the next day, so that each has its
    turn; the others depend on the day too, and none on the order of the tests.
    """
    first, end = (at * len(tests) // TURNS for at in (day, day + 1))
    start = first % max(len(tests), 1)
    ordered = sorted(tests, key=str)
    order = [(test, features_of(test)) for test in ordered[start:] + ordered[:start]]
    missing = set().union(*(features for _, features in order))
    turn, taken = order[: end - first], list[Emulated]()
    while turn or missing:
        best = turn.pop() if turn else max(order, key=lambda pair: len(pair[1] & missing))
        missing -= best[1]
        taken.append(best[0])
    return taken
