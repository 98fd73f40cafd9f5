"""The table of kernels and the list of what is not yet timed: see ``programs.performance``."""

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unsloth_cupy.bench import report, timing
from unsloth_cupy.bench.model_shapes import SHAPES
from unsloth_cupy.core import source
from unsloth_cupy.core.op import OPS

from ..harness.sampling import Sample
from .programs import performance

TURNS = 3  # days in which every op has its turn
CONFIRMED = report.confirmed(performance.PAGE)
CURE = "python -m tests.code.programs.performance --write renews the page"


@pytest.mark.parametrize("name", Sample.one_in(TURNS, CONFIRMED))
def test_a_row_has_the_counts_of_its_call(name: str) -> None:
    """Bytes, operations and fractions are those that the library counts now, of the row's time."""
    each = CONFIRMED[name]
    rows = [*performance.recounted(name, each["rows"], each["facts"])]
    assert len(rows) == len(each["rows"]), f"bench makes other calls; {CURE}"
    for actual, expected in zip(rows, each["rows"], strict=True):
        for key in performance.COUNTED:
            assert actual[key] == pytest.approx(expected[key], rel=1e-12), (key, CURE)


def test_the_list_of_what_is_not_yet_timed_is_current() -> None:
    text = performance.PAGE.read_text(encoding="utf-8")
    block = text.partition(f"{performance.BEGIN}\n")[2].partition(f"\n{performance.END}")[0]
    assert block == performance.block(CONFIRMED), CURE


def marked(table: str) -> dict[tuple[str, str], bool]:
    """Return whether the rows of an op in a dtype are marked as changed, by op and dtype."""
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (\w+) \|.*\| (.*) \|$", table, re.M)
    return {(name, dtype): report.CHANGED in run for name, dtype, run in rows}


def stale(confirmed: Any = CONFIRMED) -> dict[tuple[str, str], bool]:
    """Return whether a kernel of the largest call of an op in a dtype has changed since."""
    result = {}
    for name, each in confirmed.items():
        for row in each["rows"]:
            digests = row["sources"].items()
            result[name, row["dtype"]] = any(source.code_digest(f) != d for f, d in digests)
    return {key: value for key, value in result.items() if key[1] != "float16"}


def test_a_stale_row_is_marked_on_the_page() -> None:
    actual = marked(performance.PAGE.read_text(encoding="utf-8"))
    assert actual.items() >= stale().items(), CURE


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels, which the digests are computed from."""
    folder = tmp_path / "kernels_cu"
    shutil.copytree(source.source_root(), folder)
    monkeypatch.setattr(source, "source_root", lambda: folder)
    for cached in (source.with_headers, source.code_digest):
        cached.cache_clear()
    yield folder
    for cached in (source.with_headers, source.code_digest):
        cached.cache_clear()


@pytest.mark.parametrize("file", ["causal_conv.cu", "common/device.cuh"])
def test_a_change_of_a_kernel_marks_its_rows(file: str, kernels: Path) -> None:
    """And lists its ops; a comment changes nothing.  Before, all rows are those of today's code."""
    confirmed = copy.deepcopy(CONFIRMED)
    for row in (row for each in confirmed.values() for row in each["rows"]):
        row["sources"] = {name: source.code_digest(name) for name in row["sources"]}
    before = report.block(confirmed), performance.untimed(confirmed)
    text = (kernels / file).read_text()
    for change, expected in (("// a note\n", False), ("struct Changed {};\n", True)):
        (kernels / file).write_text(text + change)
        source.with_headers.cache_clear()
        source.code_digest.cache_clear()
        now = report.block(confirmed), performance.untimed(confirmed)
        assert (now != before) == expected
    others = marked(now[0])
    assert others.items() >= stale(confirmed).items()
    new = {name for (name, _), mark in others.items() if mark} - {
        name for (name, _), mark in marked(before[0]).items() if mark
    }
    convolutions = {"causal_conv", "causal_conv_backward"}
    assert new == convolutions if file == "causal_conv.cu" else new >= convolutions
    assert new <= {*now[1].changed}
    assert new <= {name for name in CONFIRMED if performance.owner(name) in now[1].ops()}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_of_a_model_is_a_call_with_a_kernel(name: str) -> None:
    backward = getattr(OPS[name].backward, "__name__", None)
    for each in filter(None, (name, backward)):
        for _, _, call in performance.calls(each):
            assert call.launches()
    names = [shape.name for shape in SHAPES[name]]
    assert len({*names}) == len(names)


def test_what_has_no_time_is_listed() -> None:
    """An op without rows, a shape without a row, and a dtype without a row."""
    numbers: dict[str, Any] = dict(CONFIRMED)
    scale = numbers["scale"]["rows"]
    half = [row for row in scale if row["dtype"] == "float32"]
    numbers |= {"scale": {**numbers["scale"], "rows": half}}
    del numbers["add"]
    never, _, lacking = performance.untimed(numbers)
    assert "add" in never
    assert "add" not in lacking
    assert lacking["scale"] == ["its own sizes in float16 and bfloat16"]
    assert lacking["nf4_product_"] == [shape.name for shape in SHAPES["nf4_product_"]]
    assert "`add`" in performance.block(numbers)
    timed = {
        "facts": {},
        "rows": [
            {"case": s.name, "dtype": "bfloat16", "sources": {}}
            for s in timing.shapes_of("nf4_product_", on_gpu=True)
        ],
    }
    rest = performance.untimed(numbers | {"nf4_product_": timed})
    assert rest.shapes["nf4_product_"] == ["its own sizes in float16 and float32"]
