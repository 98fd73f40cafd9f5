"""The costs of a call of every op are at most those in ``costs.toml``."""

import re
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import softmax
from unsloth_cupy.core.op import OPS

from ..harness.sampling import Sample
from ..harness.tracked import tracked
from ..machines.cuda_on_cpu import missing
from .programs import budget, costs, costs_file, sass
from .programs.budget import compiler_version
from .programs.sass import nvdisasm

NAMES = costs.with_kernels()
HEAD, LINES = costs.read()
CURE = 'renew it with a word why: python -m tests.code.programs.costs --write "why it changed" '


def check(name: str, key: str, actual: Any) -> None:
    """Assert that a cost of an op is at most that of the table."""
    text = f"{key} of {name}: {actual} in place of {LINES[name][key]}; {CURE}{name}"
    assert not costs.rises(actual, LINES[name][key]), text


def test_every_op_with_a_kernel_has_a_line() -> None:
    assert sorted(LINES) == NAMES, CURE + "OP"
    assert HEAD["reasons"].keys() <= LINES.keys()
    assert all(isinstance(why, str) and why for why in HEAD["reasons"].values())


def test_the_table_is_as_it_is_written() -> None:
    assert costs_file.texts()["calls"] == "\n".join(costs.text(HEAD, LINES))


def test_there_is_no_other_table_of_ops() -> None:
    """A new op needs lines in one file: no other TOML file has lines or tables named after ops."""
    word = re.compile(rf"^\[?(?:\w+\.)*\"?(?:{'|'.join(NAMES)})\"?(?:\]| =)", re.M)
    files = tracked("tests/**/*.toml")
    assert [path for path in files if word.search(path.read_text())] == [costs_file.FILE]


@pytest.mark.parametrize("name", NAMES)
def test_launches_and_allocations(name: str) -> None:
    for arch in costs.ARCHITECTURES:
        check(name, arch, costs.planned(name, arch))


def test_a_cost_may_fall_and_a_rise_names_the_command() -> None:
    entry = LINES["softmax"]["moved"]
    for first in (0, entry[0], int(1.02 * entry[0])):
        check("softmax", "moved", [first, *entry[1:]])
    for wrong in ([int(1.02 * entry[0]) + 1, *entry[1:]], [*entry, 0], entry[1:]):
        with pytest.raises(AssertionError, match=r"--write \"why it changed\" softmax"):
            check("softmax", "moved", wrong)


@pytest.mark.skipif(HEAD["python"] != costs.PYTHON, reason="another Python has other opcodes")
@pytest.mark.parametrize("name", NAMES)
def test_opcodes_of_a_replayed_call(name: str) -> None:
    check(name, "opcodes", costs.opcodes(name))


@pytest.mark.skipif(HEAD["python"] != costs.PYTHON, reason="another Python has other opcodes")
@pytest.mark.parametrize(
    ("name", "most"), [("linear", 350), ("linear_backward", 541), ("linears", 619)]
)
def test_opcodes_of_replayed_products(name: str, most: int) -> None:
    """With two products, one, and two; 350 take 5.8 us (``overhead.PythonAloneWithoutGpu``)."""
    assert not costs.rises(costs.opcodes(name), most)


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("name", NAMES)
def test_what_kernels_move(name: str) -> None:
    check(name, "moved", costs.moved(name))


def compared() -> list[tuple[str, str]]:
    """Return a few ops, each with one architecture, and others after each commit."""
    every = 1 if Sample.all else 16
    return [
        (name, costs.ARCHITECTURES[Sample.day % 2]) for name in NAMES[Sample.day % every :: every]
    ]


@pytest.mark.parametrize(("name", "arch"), compared())
def test_hot_loops(name: str, arch: str) -> None:
    """For the compiler in the table; another one emits other instructions."""
    try:
        nvdisasm()
        here = compiler_version()
    except (LookupError, ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    if here != HEAD["compiler"]:
        pytest.skip(f"NVRTC {here} makes other loops than {HEAD['compiler']}")
    check(name, f"loops {arch}", costs.loops(name, arch))


def test_one_opcode_more_is_seen() -> None:
    """Only the library's own opcodes are counted, each once."""
    x = np.ones((4, 8), np.float32)
    for _ in range(3):
        softmax(x)
    once = costs.traced(lambda: softmax(x))
    assert once > 20
    assert costs.traced(lambda: (softmax(x), softmax(x))) == 2 * once
    assert costs.traced(lambda: sum(range(1000))) == 0


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the table, to which the tests write instead."""
    made = tmp_path / "costs.toml"
    made.write_bytes(costs_file.FILE.read_bytes())
    monkeypatch.setattr(costs_file, "FILE", made)
    return made


def test_a_change_needs_a_word(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = costs_file.texts()["kernels"]
    monkeypatch.setattr(costs, "measured", lambda name: LINES[name] | {"opcodes": 1})
    costs.write("one opcode is enough", ["softmax"])
    head, lines = costs.read()
    assert head["reasons"] == HEAD["reasons"] | {"softmax": "one opcode is enough"}
    assert lines == LINES | {"softmax": LINES["softmax"] | {"opcodes": 1}}
    assert costs_file.texts()["kernels"] == others
    with pytest.raises(SystemExit, match=r"no op \{'linear'\} with a kernel"):
        costs.write("why", ["linear"])
    assert OPS["linear"].launch is None


@pytest.mark.parametrize("part", costs_file.PARTS)
def test_a_part_is_written_and_the_other_stays(part: str, copy: Path) -> None:
    before = copy.read_bytes()
    costs_file.replace(part, costs_file.texts()[part].splitlines())
    assert copy.read_bytes() == before, "every byte of the table is of a part"
    (other,) = {*costs_file.PARTS} - {part}
    kept = costs_file.texts()[other]
    costs_file.replace(part, ["x = 1"])
    assert costs_file.texts() == {part: "x = 1", other: kept}
    assert costs_file.read(part) == {"x": 1}


def test_a_write_that_stops_leaves_the_table(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    before = copy.read_bytes()
    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        costs_file.replace("calls", ["x = 1"])
    assert copy.read_bytes() == before
    assert [*copy.parent.iterdir()] == [copy]


def test_a_new_line_without_a_disassembler(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named before anything is written."""

    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    sass.wheel.cache_clear()
    monkeypatch.setattr("importlib.metadata.distribution", none)
    costs_file.replace("calls", costs.text(HEAD, {n: x for n, x in LINES.items() if n != "relu2"}))
    before = copy.read_bytes()
    with pytest.raises(LookupError, match="needs nvidia-cuda-nvdisasm, of the extra `test`"):
        costs.add()
    assert copy.read_bytes() == before


@pytest.mark.slow
@pytest.mark.skipif(budget.missing() is not None, reason=str(budget.missing()))
def test_a_new_op_gets_its_lines_by_one_command(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, kernels = budget.read()
    kept = budget.PAGE.read_text()
    page = tmp_path / "performance.md"
    page.write_text(kept.replace("| `relu2` |", "| `forgotten` |"))
    shutil.copy(budget.PAGE.with_suffix(".json"), tmp_path)  # results of GPUs, which it shows
    monkeypatch.setattr(budget, "PAGE", page)
    every = [
        SimpleNamespace(kernel=kernel, label=label, arch=arch, launch=None)
        for kernel, several in kernels.items()
        for label, by in several.items()
        for arch in by
    ]  # as ``variants`` finds them, in a minute
    monkeypatch.setattr(budget, "variants", lambda arch: [v for v in every if v.arch == arch])
    monkeypatch.setattr(budget, "kept", lambda variant: True)
    monkeypatch.setattr(budget, "numbers", lambda v: kernels[v.kernel][v.label][v.arch])
    monkeypatch.setattr(budget, "resources", lambda *_: budget.Resources(0, 0, 0, 0, ()))
    monkeypatch.setattr(costs, "measured", LINES.__getitem__)
    costs_file.replace("calls", costs.text(HEAD, {n: x for n, x in LINES.items() if n != "relu2"}))
    costs_file.replace(
        "kernels", budget.text(head, {k: x for k, x in kernels.items() if k != "relu2"})
    )
    costs.add()
    assert costs.read()[1] == LINES
    assert costs.read()[0]["reasons"] == HEAD["reasons"]
    assert budget.read()[1] == kernels
    assert page.read_text() == kept
