"""Which calls run on warpgroups: the table of the guide says it of every option and every pair."""

import inspect
from typing import Any

import pytest

from unsloth_cupy import AttentionConfig, attention_backward, attention_forward
from unsloth_cupy.ops.attention._options import Options

from ..machines.stand_in import gpu
from . import warpgroup_table as table

NUMBERS = {"scale", "seed"}  # change no kernel, but for scales below 1e-30
ALONE = [name for name in table.OPTIONS if name != "packed"]


def test_the_table_is_complete_and_as_calls_go() -> None:
    named = {each for options in table.OPTIONS.values() for each in options} - NUMBERS
    assert named == {*Options._fields} - NUMBERS
    assert named - {"offsets"} <= {*inspect.signature(attention_forward).parameters}
    page = table.PAGE.read_text(encoding="utf-8").splitlines()
    lines = [f"| {table.columns()} |", *table.rows()]
    cure = "python -m tests.code.warpgroup_table --write"
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
