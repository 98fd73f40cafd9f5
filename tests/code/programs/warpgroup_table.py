"""The attention calls that use the kernels on warpgroups, for every option and pair of options.

python -m tests.code.programs.warpgroup_table --write    rewrites docs/guide/attention.md's
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_cupy import AttentionConfig
from unsloth_cupy.ops.attention._backward_hopper import backward_tiles
from unsloth_cupy.ops.attention._hopper import forward_tiles
from unsloth_cupy.ops.attention._options import Options, kernel_options

from ...machines.stand_in import Machine, gpu
from . import warpgroups

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "attention.md"
WIDTHS = range(8, 265, 8)  # columns of a head
ROWS = 128  # queries, and keys
OPTIONS: dict[str, dict[str, Any]] = {
    "`causal`": {"causal": True},
    "`window=(n, None)`": {"window": (9, None)},
    "`window=(n, m)`": {"window": (9, 9)},
    "`key_lengths`": {"key_lengths": ((1,), "int32")},
    "`query_start`": {"query_start": ((1,), "int32")},
    "packed": {"offsets": ((2,), "int32")},
    "`sinks`": {"sinks": ((2,), "float32")},
    "`block_mask`": {"block_mask": ((1, 2, 1, 1), "bool")},
    "`mask`": {"mask": ((1, 2, ROWS, ROWS), "bool")},
    "`bias`": {"bias": ((1, 2, ROWS, ROWS), "float32")},
    "`alibi`": {"alibi": ((2,), "float32")},
    "`softcap`": {"softcap": 3.0},
    "`dropout`": {"dropout": 0.5, "seed": 1},
}
NO_PAIR = (  # options that one call cannot have together
    {"`window=(n, None)`", "`window=(n, m)`"},
    {"packed", "`key_lengths`"},
    {"packed", "`query_start`"},
)


def pairs() -> Iterator[tuple[str, str]]:
    """Yield every pair of options that a call can have, and each option paired with itself."""
    both = itertools.combinations_with_replacement(OPTIONS, 2)
    return (pair for pair in both if {*pair} not in NO_PAIR)


def call_options(machine: Machine, *names: str) -> dict[str, Any]:
    """Return the keyword arguments that these options add to a call."""
    options: dict[str, Any] = {}
    for name, value in ((n, v) for each in names for n, v in OPTIONS[each].items()):
        shaped = type(value) is tuple and type(value[0]) is tuple
        argument = machine.array(*value) if shaped else value
        options[name] = (argument, argument) if name == "offsets" else argument
    return options


def on_warpgroups(machine: Machine, dim: int, *names: str) -> tuple[bool, bool, bool]:
    """Return whether forward, backward, and backward in one launch run on warpgroups."""
    options = call_options(machine, *names)
    batch = () if "offsets" in options else (1,)
    q = machine.array((*batch, ROWS, 2, dim), "bfloat16")
    call = kernel_options(q, q, Options(**options))
    assert call is not None
    back = backward_tiles(q, q, call)
    return forward_tiles(q, q, call) is not None, back is not None, bool(back and back.one_pass)


def widest(machine: Machine, *names: str) -> tuple[int, ...]:
    """Return the largest head dim that each of the three takes, counted from 64; 0 for none."""
    answers = np.array([on_warpgroups(machine, dim, *names) for dim in WIDTHS]).T
    largest = []
    for each in answers:
        dims = [dim for dim, yes in zip(WIDTHS, each, strict=True) if yes]
        assert dims == [*range(64, max(dims, default=0) + 1, 8)], names
        largest.append(max(dims, default=0))
    return tuple(largest)


def rows() -> Iterator[str]:
    """Yield the lines of the table: each pair once, each option alone on the diagonal."""
    every = [*pairs()]
    with AttentionConfig(warpgroups=True, one_pass=True).use(), gpu("90") as machine:
        cells = {pair: " ".join(str(n or "-") for n in widest(machine, *{*pair})) for pair in every}
        yield f"| none | {' '.join(map(str, widest(machine)))} |{'  |' * (len(OPTIONS) - 1)}"
    for name in OPTIONS:
        line = (cells.get((other, name), "") for other in OPTIONS)
        yield f"| {' | '.join((name, *line))} |"


def columns() -> str:
    """Return the header of the table."""
    return " | ".join(("with", *OPTIONS))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    warpgroups.put("taken", columns(), rows(), PAGE)
