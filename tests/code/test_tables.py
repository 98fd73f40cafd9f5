"""Tables of pages equal the output of their commands: ladders, a layer of experts, warpgroups."""

import inspect
from itertools import islice
from typing import Any

import pytest

from unsloth_cupy import AttentionConfig, attention_backward, attention_forward
from unsloth_cupy.ops.attention._options import Options

from ..harness.sampling import Sample
from ..machines import cuda_on_cpu
from ..machines.stand_in import gpu
from .programs import budget, mixture
from .programs import warpgroup_table as table
from .programs.ladder import LADDERS, PAGE, Ladder, row
from .programs.sass import nvdisasm

NUMBERS = {"scale", "seed"}  # change no kernel, but for scales below 1e-30
ALONE = [name for name in table.OPTIONS if name != "packed"]


def no_disassembler() -> str | None:
    """Return why SASS cannot be read here, or None."""
    try:
        nvdisasm()
    except LookupError as error:
        return str(error)
    return None


EMULATOR = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason="needs the emulator")


@pytest.mark.slow
@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.name)
def test_the_page_says_what_a_step_buys(ladder: Ladder) -> None:
    """One step in each run; all steps with ``--sample all``."""
    if (reason := budget.missing() or cuda_on_cpu.missing() or no_disassembler()) is not None:
        pytest.skip(reason)
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
        cure = f"{actual}: python -m tests.code.programs.ladder --write"
        apart = int(actual.pop("registers per thread"))
        apart -= int(written.pop("registers per thread"))
        assert abs(apart) <= budget.REGISTER_UNIT, cure
        del actual["occupancy"], written["occupancy"]  # which follows from registers
        assert actual == written, cure


@EMULATOR
def test_the_page_says_what_a_dense_product_costs() -> None:
    """Forward; the others with the whole table."""
    shown = mixture.PAGE.read_text(encoding="utf-8")
    for line in islice(mixture.lines("grouped_linear"), 2):
        assert line in shown, f"{line}: python -m tests.code.programs.mixture --write"


@EMULATOR
@pytest.mark.slow
def test_the_page_says_what_a_layer_costs() -> None:
    shown = mixture.PAGE.read_text(encoding="utf-8")
    for line in mixture.lines():
        assert line in shown, f"{line}: python -m tests.code.programs.mixture --write"


def test_the_table_is_complete_and_as_calls_go() -> None:
    named = {each for options in table.OPTIONS.values() for each in options} - NUMBERS
    assert named == {*Options._fields} - NUMBERS
    assert named - {"offsets"} <= {*inspect.signature(attention_forward).parameters}
    page = table.PAGE.read_text(encoding="utf-8").splitlines()
    lines = [f"| {table.columns()} |", *table.rows()]
    cure = "python -m tests.code.programs.warpgroup_table --write"
    assert [line for line in lines if line not in page] == [], cure
    assert len(lines) == 2 + len(table.OPTIONS)


@pytest.mark.parametrize("name", ALONE)
def test_launches_are_what_the_table_says(name: str) -> None:
    with AttentionConfig(warpgroups=True, one_pass=True).use():
        with gpu("90") as machine:
            widths = table.widest(machine, name)
        for dim in {width + more for width in (*widths, 64) if width for more in (0, 8)}:
            forward, back = launched(name, dim)
            assert (forward == {"attention_forward_sm90"}) == (dim <= widths[0])
            assert ("attention_backward_sm90" in back) == (dim <= widths[1])
            assert "attention_backward" not in back or dim > widths[1]
            assert ("attention_dq_sm90" in back) == (dim <= widths[2])


def launched(name: str, dim: int) -> tuple[set[str], set[str]]:
    """Return the kernels that a call with an option launches, forward and backward."""
    with gpu("90") as machine:
        q = machine.array((1, table.ROWS, 2, dim), "bfloat16")
        options: dict[str, Any] = table.call_options(machine, name)
        out, lse = attention_forward(q, q, q, **options)
        forward = {launch.kernel for launch in machine.launches}
        machine.launches.clear()
        attention_backward(out, q, q, q, out, lse, **options)
        return forward, {launch.kernel for launch in machine.launches}
