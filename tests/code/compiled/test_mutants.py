"""A sample of the mutants of the inline assembly: each is noticed, or harmless for a reason."""

import re

import pytest

from ...harness.sampling import Sample
from ..programs.compilers import supported
from . import mutants
from .mutants import HARMLESS, Mutant, accepted, architecture, judged

# A mutant is judged by a fork, which runs no thread of JAX or of others that a test imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]
SHARE = 1  # mutants of a run
ALL = mutants.mutants()


def sampled(day: int = Sample.day) -> list[Mutant]:
    several = -(-len(ALL) // SHARE)
    return ALL if Sample.all else ALL[day * 7 % several :: several]


@pytest.mark.parametrize("mutant", sampled(), ids=str)
def test_a_mutant_is_noticed(mutant: Mutant) -> None:
    said = judged(mutant, architecture(mutant))
    assert accepted(mutant, said), f"{mutant}: {said}"


@pytest.mark.slow
def test_each_statement_has_a_judge() -> None:
    """Or a reason why none can notice; NVRTC 12.0 has a statement that no other compiles."""
    left = [m for m in ALL if mutants.reason(m) is None]
    for arch in {"90", "100"}.intersection(supported()):
        left = [m for m in left if not mutants.shown(m, int(arch))]
    assert {m.function for m in left} == {"store_async_b32"}
    assert len({m.number for m in left}) == 1


def test_a_judge_that_fails_notices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "verdict", lambda mutant, arch: 1 / 0)
    with pytest.raises(AssertionError, match="no signal ends its judge"):
        judged(ALL[0], 100)


def test_harmless_mutants_exist() -> None:
    names = {str(mutant) for mutant in ALL}
    assert all(any(re.fullmatch(p, name) for name in names) for p in HARMLESS)
    assert all(len(why.split()) > 4 for why in HARMLESS.values())
