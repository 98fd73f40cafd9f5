"""Recount the rows of docs/performance.json, and write what depends on them to the page.

    python -m tests.code.programs.performance --write

A row has the time that a run measured.  Its size, bytes and operations are those of its call, as
the library counts them now, and the fractions of a copy and of the roofline follow.  The page gets
the table of kernels, and the list of what is not yet timed.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unsloth_cupy.bench import report, timing
from unsloth_cupy.bench.cases import Call, draw, forward_ops
from unsloth_cupy.core.op import OPS
from unsloth_cupy.files import atomic_path
from unsloth_cupy.memory.planned import Planned
from unsloth_cupy.profiling.cards import card_named

from ...harness.tracked import ROOT
from .beside_peers import report as beside_report

PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- untimed: begin -->", "<!-- untimed: end -->"
COUNTED = ("size", "bytes", "operations", "gb_per_s", "of_copy", "of_roofline")


def owner(name: str) -> str:
    """Return the forward op of an op or of a backward op."""
    return next(
        (each for each in forward_ops() if getattr(OPS[each].backward, "__name__", "") == name),
        name,
    )


def timed_shapes(name: str) -> list[timing.Shape]:
    """Return the shapes in which bench times an op or a backward op on a GPU."""
    every = timing.shapes_of(owner(name), on_gpu=True)
    return [shape for shape in every if owner(name) == name or timing.has_backward(shape)]


def calls(name: str) -> Iterator[tuple[str, Any, Call]]:
    """Yield the name, the dtype and the call of each of these shapes; arrays are planned."""
    forward_name = owner(name)
    for shape in timed_shapes(name):
        drawn = draw(OPS[forward_name], shape.scale, options=shape.options, random=False)
        planned = drawn.mapped(lambda array: Planned.of(array.shape, array.dtype))
        for dtype in shape.dtypes:
            forward = planned.cast(dtype, constants=True)
            if forward_name == name:
                yield shape.name, dtype, forward
                continue
            outputs = forward.run()
            accepted = {o.name for o in OPS[name].contract.inputs if not o.optional}
            seeds = {
                f"d{key}": Planned.of(array.shape, array.dtype)
                for key, array in outputs.items()
                if f"d{key}" in accepted
            }
            yield shape.name, dtype, forward.backward(outputs, seeds)


def recounted(name: str, rows: list[dict[str, Any]], facts: dict[str, Any]) -> Iterator[Any]:
    """Yield each row whose call bench makes, with what follows from the call and its time."""
    known = [(case, dtype.name, timing.shapes(call), call) for case, dtype, call in calls(name)]
    for row in rows:
        for case, dtype, shapes, call in known:
            if (case, dtype, shapes) == (row.get("case", ""), row["dtype"], row["shapes"]):
                new = row | timing.counted(call)
                new["gb_per_s"] = new["bytes"] / row["microseconds"] / 1e3 if new["bytes"] else None
                yield new | timing.shares(new, facts, None)


def recount(confirmed: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of the page as the library counts them now."""
    result = {}
    for name, each in confirmed.items():
        rate = card_named(each["facts"]["machine"]["gpu"]).rate("int8", "quantized")
        facts = each["facts"] | {"int8_top_per_s": rate}
        if rows := [*recounted(name, each["rows"], facts)]:
            result[name] = {"facts": facts, "rows": rows}
    return result


class Untimed(NamedTuple):
    """What has no time of the current code: ops by name, and shapes of models by op."""

    never: list[str]
    changed: list[str]
    shapes: dict[str, list[str]]

    def ops(self) -> set[str]:
        """Return the forward ops that bench times for them."""
        return {owner(name) for name in (*self.never, *self.changed, *self.shapes)}


def untimed(confirmed: dict[str, Any]) -> Untimed:
    """Return what has no time, or a time of kernels that changed since."""
    kernels = sorted(name for name, op in OPS.items() if op.launch is not None)
    never = [name for name in kernels if name not in confirmed]
    timed = [name for name in kernels if name in confirmed]
    changed = [
        name
        for name in timed
        if any(report.changed(row.get("sources")) for row in confirmed[name]["rows"])
    ]
    lacking: dict[str, list[str]] = {}
    for name in kernels:
        rows = confirmed.get(name, {"rows": []})["rows"]
        known = {(row.get("case", ""), row["dtype"]) for row in rows}
        for shape in timed_shapes(name):
            without = [d.name for d in shape.dtypes if (shape.name, d.name) not in known]
            own = f"its own sizes in {' and '.join(without)}"
            if without and (shape.name or rows) and own not in lacking.get(name, ()):
                lacking.setdefault(name, []).append(shape.name or own)
    return Untimed(never, changed, lacking)


def block(confirmed: dict[str, Any]) -> str:
    """Return the lines of the list."""
    never, changed, lacking = untimed(confirmed)
    lines = [f"{len(never)} ops have no time: {_names(never)}.", ""]
    lines += [f"The kernels of {len(changed)} of {len(confirmed)} ops that have one changed since:"]
    lines += [f"{_names(changed)}.", "", "Sizes without a time, in bfloat16 unless noted:", ""]
    lines += [f"- `{name}`: {'; '.join(cases)}." for name, cases in lacking.items()]
    if cases := beside_report.untimed():
        lines += ["", "Comparisons that `python -m tests.code.programs.beside_peers` has not made:"]
        lines += [f"{_names(cases)}."]
    return "\n".join(lines)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def renew(page: Path = PAGE) -> None:
    """Write the table and the list of a page from the numbers beside it."""
    report.renew(page)
    text = page.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    with atomic_path(page) as partial:
        own = block(report.confirmed(page))
        partial.write_text(f"{head}{BEGIN}\n{own}\n{tail}", encoding="utf-8")


def write(page: Path = PAGE) -> None:
    """Recount the numbers beside a page, and renew the page."""
    numbers = json.dumps(recount(report.confirmed(page)), indent=1, sort_keys=True)
    with atomic_path(page.with_suffix(".json")) as partial:
        partial.write_text(numbers + "\n", encoding="utf-8")
    renew(page)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
