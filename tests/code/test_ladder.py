"""The tables of docs/ladders.md equal the output of its command."""

import pytest

from ..harness.sampling import Sample
from ..machines import cuda_on_cpu
from . import budget
from .ladder import LADDERS, PAGE, Ladder, row
from .sass import nvdisasm

if (reason := budget.missing() or cuda_on_cpu.missing()) is not None:
    pytest.skip(reason, allow_module_level=True)
try:
    nvdisasm()
except LookupError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.name)
def test_the_page_says_what_a_step_buys(ladder: Ladder) -> None:
    """One step in each run; all steps with ``--sample all``."""
    if budget.read()[0]["compiler"] != budget.compiler_version():
        pytest.skip("another compiler than the page speaks of")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    steps = [*ladder.rungs]
    mine = [x for x in lines if x.count(" | ") == len(ladder.columns)]
    shown = {step: next(x for x in mine if x.startswith(f"| {step} |")) for step in steps}
    at = Sample.day % len(steps)
    for step in steps if Sample.all else steps[at : at + 1]:
        actual, written = (
            dict(zip(("step", *ladder.columns), line.strip("| ").split(" | "), strict=True))
            for line in (row(ladder, step), shown[step])
        )
        cure = f"{actual}: python -m tests.code.ladder --write"
        apart = int(actual.pop("registers")) - int(written.pop("registers"))
        assert abs(apart) <= budget.REGISTER_UNIT, cure
        del actual["occupancy"], written["occupancy"]  # which follows from registers
        assert actual == written, cure
