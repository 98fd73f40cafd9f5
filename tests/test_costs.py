"""A call of every op costs what ``op_costs.toml`` says, to the last sector."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import softmax
from unsloth_cupy.core.op import OPS

from . import costs
from .budget import compiler_version
from .cuda_on_cpu import missing
from .sample import Sample
from .sass import nvdisasm

NAMES = costs.with_kernels()
HEAD, LINES = costs.read()
CURE = 'renew it with a word why: python -m tests.costs --write "why it changed" OP'


def test_every_op_with_a_kernel_has_a_line() -> None:
    assert sorted(LINES) == NAMES, CURE
    assert HEAD["reasons"].keys() <= LINES.keys()
    assert all(isinstance(why, str) and why for why in HEAD["reasons"].values())


def test_the_file_is_as_it_is_written() -> None:
    assert costs.FILE.read_text() == "\n".join(costs.text(HEAD, LINES)) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_launches_and_allocations(name: str) -> None:
    found = {arch: costs.planned(name, arch) for arch in costs.ARCHITECTURES}
    assert found == {arch: LINES[name][arch] for arch in costs.ARCHITECTURES}, CURE


@pytest.mark.skipif(HEAD["python"] != costs.PYTHON, reason="another Python has other opcodes")
@pytest.mark.parametrize("name", NAMES)
def test_opcodes_of_a_replayed_call(name: str) -> None:
    assert costs.opcodes(name) == LINES[name]["opcodes"], CURE


def chosen() -> list[str]:
    """Return a third of the ops, another one after each commit; all of them if it is asked for."""
    return Sample.one_in(3, NAMES)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("name", chosen())
def test_what_kernels_move(name: str) -> None:
    assert costs.moved(name) == LINES[name]["moved"], CURE


def compared() -> list[tuple[str, str]]:
    """Return a few ops, each with an architecture: others after each commit."""
    every = 1 if Sample.all else 16
    return [
        (name, costs.ARCHITECTURES[Sample.day % 2]) for name in NAMES[Sample.day % every :: every]
    ]


@pytest.mark.parametrize(("name", "arch"), compared())
def test_hot_loops(name: str, arch: str) -> None:
    """As one compiler makes them: another one has instructions of its own."""
    try:
        nvdisasm()
        here = compiler_version()
    except (LookupError, ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    if here != HEAD["compiler"]:
        pytest.skip(f"NVRTC {here} makes other loops than {HEAD['compiler']}")
    assert costs.loops(name, arch) == LINES[name][f"loops {arch}"], CURE


def test_one_opcode_more_is_seen() -> None:
    """What is counted is the library's own, each instruction once."""
    x = np.ones((4, 8), np.float32)
    for _ in range(3):
        softmax(x)
    once = costs.traced(lambda: softmax(x))
    assert once > 20
    assert costs.traced(lambda: (softmax(x), softmax(x))) == 2 * once
    assert costs.traced(lambda: sum(range(1000))) == 0


def test_a_change_needs_a_word(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "op_costs.toml"
    copy.write_text(costs.FILE.read_text())
    monkeypatch.setattr(costs, "FILE", copy)
    monkeypatch.setattr(costs, "measured", lambda name: LINES[name] | {"opcodes": 1})
    costs.write("one opcode is enough", ["softmax"])
    head, lines = costs.read()
    assert head["reasons"] == HEAD["reasons"] | {"softmax": "one opcode is enough"}
    assert lines == LINES | {"softmax": LINES["softmax"] | {"opcodes": 1}}
    with pytest.raises(SystemExit, match=r"no op \{'linear'\} with a kernel"):
        costs.write("why", ["linear"])
    assert OPS["linear"].launch is None
