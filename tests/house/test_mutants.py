"""Mutants: every kind of change, and a list of harmless ones that names changes of today."""

import ast

from ..harness.tracked import ROOT
from .mutants import HARMLESS, places

SOURCE = '''
LIMIT = 2

def area(x, *others):
    """Return an area."""
    if x < LIMIT and not others:
        x.stop()
    x.size = -x % 0.5
    x.last = -1
    raise ValueError(f"{x[0]}", True)
'''


def test_each_kind_of_change_is_drawn() -> None:
    assert [*map(str, places(ast.parse(SOURCE)))] == [
        "LIMIT: LIMIT = 2 -> LIMIT = 3",
        "area: x.size = -x % 0.5 is removed",
        "area: x.last = -1 is removed",
        "area: raise ValueError(f'{x[0]}', True) is removed",
        "area: x < LIMIT and (not others) -> not (x < LIMIT and (not others))",
        "area: x.stop() is removed",
        "area: x < LIMIT and (not others) -> x < LIMIT or not others",
        "area: x < LIMIT -> x <= LIMIT",
        "area: not others -> not not others",
        "area: -x % 0.5 -> -x * 0.5",
        "area: -x % 0.5 -> -x % 1.0",
        "area: -x -> +x",
        "area: -1 -> +1",
        "area: -1 -> -0",
        "area: ValueError(f'{x[0]}', True) -> ValueError(f'{x[0]}', False)",
    ]


def test_harmless_mutants_exist() -> None:
    """A line that was changed since has another mutant, or none."""
    for file in {mutant.split()[0] for mutant in HARMLESS}:
        changes = places(ast.parse((ROOT / file).read_text()))
        drawn = {f"{file} {each}" for each in changes}
        assert {mutant for mutant in HARMLESS if mutant.startswith(f"{file} ")} <= drawn
