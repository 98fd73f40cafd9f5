"""A layer of experts beside one dense product of the same operations: a table of performance.md.

    python -m tests.code.programs.mixture --write      rewrites it (needs the extra ``test``)

The dense product is one group of the grouped product, whose matrix has the rows of all three
matrices of an expert, of as many rows as the experts have in all: 2 rows k 3 inner hidden
operations.  Launches are those that ``explain`` lists; sectors are counted on the emulator.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_cupy import explain
from unsloth_cupy.core.dtypes import BFLOAT16, Array
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import using
from unsloth_cupy.files import atomic_path

from ...machines.cuda_on_cpu import Emulator
from ...machines.cuda_on_cpu.traffic import counted

PAGE = Path(__file__).parents[3] / "docs/performance.md"
BEGIN, END = "<!-- mixture: begin -->\n", "<!-- mixture: end -->"
ROWS, HIDDEN, INNER, EXPERTS, K = 512, 256, 128, 8, 2
HEAD = """\
| call | architecture | launches | sectors read | sectors written | beside the dense product |
|---|---|--:|--:|--:|--:|
"""


def routes(kind: str) -> Array:
    """Return the experts of each row: as many rows to each, or all rows to two."""
    first = np.arange(ROWS) % EXPERTS if kind == "even" else np.zeros(ROWS, int)
    return np.stack([first, (first + 1) % EXPERTS], axis=1).astype(np.int32)


def calls() -> Iterator[tuple[str, str, dict[str, Array], dict[str, Any]]]:
    """Yield name of the row, op, arrays and options: of the forward passes, then of backward."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(BFLOAT16)

    x, dy = normal(ROWS, HIDDEN), normal(ROWS, HIDDEN)
    stacks = {
        "gate_up": normal(EXPERTS, 2 * INNER, HIDDEN),
        "down": normal(EXPERTS, HIDDEN, INNER),
    }
    given = {}
    for kind in ("even", "two"):
        given[kind] = {"x": x, **stacks, "experts": routes(kind), "weights": normal(ROWS, K)}
    dense = {
        "x": normal(ROWS * K, HIDDEN),
        "weight": normal(1, 3 * INNER, HIDDEN),
        "offsets": np.array([0, ROWS * K], np.int32),
    }
    yield "one dense product", "grouped_linear", dense, {}
    names = {"even": "a layer, rows spread evenly", "two": "a layer, all rows to two experts"}
    for kind, name in names.items():
        yield name, "experts_mlp_forward", given[kind], {"activation": "swiglu"}
    dense |= {"dy": normal(ROWS * K, 3 * INNER)}
    yield "one dense product, backward", "grouped_linear_backward", dense, {}
    for kind, name in names.items():
        arrays, options = given[kind], {"activation": "swiglu"}
        forward = OPS["experts_mlp_forward"](**arrays, **options)
        kept = dict(zip(("order", "offsets", "places"), forward[1:], strict=True))
        yield f"{name}, backward", "experts_mlp_backward", arrays | kept | {"dy": dy}, options


def lines(kept: str = "") -> Iterator[str]:
    """Yield the rows of the table, or those of the calls of an op."""
    least: dict[int, int] = {}
    for name, op, arrays, options in calls():
        if not op.startswith(kept):
            continue
        for architecture in (80, 90):
            steps = explain(OPS[op], **arrays, **options, device=f"sm_{architecture}").steps
            launches = sum(len(step.launches) for step in steps)
            with counted() as traffic, using(Emulator(architecture=architecture)):
                OPS[op](**arrays, **options)
            read, written = (traffic.of("global", write=way).moved for way in (False, True))
            if op.startswith("grouped"):
                least[architecture] = read + written
            ratio = (read + written) / least[architecture]
            yield (
                f"| {name} | sm_{architecture} | {launches} | {read:,} | {written:,} "
                f"| {ratio:.2f} |\n"
            )


def write() -> None:
    """Rewrite the table of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    with atomic_path(PAGE) as partial:
        text = before + BEGIN + HEAD + "".join(lines()) + END + after
        partial.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
