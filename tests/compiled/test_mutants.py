"""A sample of the mutants of the inline assembly: each is noticed, or harmless for a reason."""

import re

import pytest

from ..sample import Sample
from . import mutants
from .mutants import HARMLESS, Mutant, accepted, architecture, judged

SHARE = 3  # mutants of a run
ALL = mutants.mutants()


def sampled(day: int = Sample.day) -> list[Mutant]:
    several = -(-len(ALL) // SHARE)
    return ALL if Sample.all else ALL[day * 7 % several :: several]


@pytest.mark.parametrize("mutant", sampled(), ids=str)
def test_a_mutant_is_noticed(mutant: Mutant) -> None:
    said = judged(mutant, architecture(mutant))
    assert accepted(mutant, said), f"{mutant}: {said}"


def test_harmless_mutants_exist() -> None:
    names = {str(mutant) for mutant in ALL}
    assert all(any(re.fullmatch(p, name) for name in names) for p in HARMLESS)
    assert all(len(why.split()) > 4 for why in HARMLESS.values())
