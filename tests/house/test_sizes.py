"""What must not grow: folders, functions with many branches, what all blocks of a call share."""

import ast
from collections import Counter
from pathlib import PurePosixPath

from unsloth_cupy.models.layers.call import Attention, Call, Mixtures, Recurrence

from .sizes import lines_of_code, modules

FOLDER = 30  # modules of a folder
BRANCHES = 30  # of a function
TANGLED = {  # functions with more; this list may only shrink
    "ops/attention/_backward.py:launch_backward": 32,
}
SHARED, OF_A_BRANCH = 10, 6  # fields of `Call`, and of each tuple in it
DECISIONS = (
    *(ast.If, ast.For, ast.While, ast.IfExp, ast.BoolOp),
    *(ast.comprehension, ast.Try, ast.With, ast.match_case),
)

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


def test_folders_can_be_read_at_a_glance() -> None:
    counts = Counter(str(PurePosixPath(name).parent) for name in modules())
    assert {n: c for n, c in counts.items() if c > FOLDER} == {}


def test_functions_do_not_tangle_further() -> None:
    tangled = {}
    for name, source in modules().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                count = sum(isinstance(each, DECISIONS) for each in ast.walk(node))
                place = f"{name}:{node.name}"
                if count > TANGLED.get(place, BRANCHES):
                    tangled[place] = count
    assert tangled == {}


def test_what_blocks_share_does_not_grow() -> None:
    assert len(Call._fields) <= SHARED
    for branch in (Attention, Mixtures, Recurrence):
        assert len(branch._fields) <= OF_A_BRANCH
