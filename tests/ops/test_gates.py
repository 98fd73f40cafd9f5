"""What swiglu and geglu have in common: two arrays in, gradients over both of them."""

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, GradientError, ShapeError
from unsloth_cupy.ops.common.in_place import check_overlap

from ..harness.parity import emulator
from ..machines.stand_in import gpu


class Gate(NamedTuple):
    """An op, its backward op and that in place, with their options."""

    name: str
    forward: Any
    backward: Any
    over: Any


SWIGLU = Gate("swiglu", uc.swiglu, uc.swiglu_backward, uc.swiglu_backward_)
GEGLU = Gate(
    "geglu",
    *(partial(f, approximate=True) for f in (uc.geglu, uc.geglu_backward, uc.geglu_backward_)),
)
each_gate = pytest.mark.parametrize("gate", [SWIGLU, GEGLU], ids=["swiglu", "geglu"])


@each_gate
def test_shapes_must_be_equal(gate: Gate) -> None:
    with pytest.raises(ShapeError, match="up has axes="):
        gate.forward(np.ones((2, 3), np.float32), np.ones((2, 4), np.float32))


@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("kernel", [False, True], ids=["definition", "kernel"])
@each_gate
def test_in_place(gate: Gate, kernel: bool, strided: bool) -> None:
    """The bits of the backward op, over both arrays."""
    *both, dy = np.random.default_rng(0).standard_normal((3, 5, 7), np.float32)
    with emulator() if kernel else contextlib.nullcontext():
        expected = gate.backward(dy, *both)
        inputs = [np.asfortranarray(x) if strided else x.copy() for x in both]
        actual = gate.over(dy, *inputs)
    for array, mine, wanted in zip(actual, inputs, expected, strict=True):
        assert array is mine
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("inner", [4, 2100])
@each_gate
def test_halves_of_one_array_stay_where_they_lie(gate: Gate, inner: int) -> None:
    """As where one projection makes both: no copy, and their gradients beside each other."""
    both, dy = np.random.default_rng(0).standard_normal((2, 2, 3, 2 * inner), np.float32)
    halves = both[..., :inner], both[..., inner:]
    apart = [half.copy() for half in halves]
    with emulator():
        np.testing.assert_array_equal(gate.forward(*halves), gate.forward(*apart))
        gate.over(dy[..., inner:], *halves)
        gate.over(dy[..., inner:].copy(), *apart)
    for half, alone in zip(halves, apart, strict=True):
        np.testing.assert_array_equal(half, alone)
    with gpu() as machine:
        there = machine.array((2, 3, 2 * inner), "float16")
        halves = there[..., :inner], there[..., inner:]
        gate.forward(*halves)
        gate.over(halves[0], *halves)
        assert [launch.kernel for launch in machine.launches] == [
            gate.name,
            f"{gate.name}_backward",
        ]
        assert machine.functions == []


@each_gate
def test_in_place_needs_arrays_that_may_change(gate: Gate) -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(GradientError, match=f"up is on a tape; call {gate.name}_backward"):
        gate.over(x, x.copy(), uc.Tape().watch(x))
    x.flags.writeable = False
    with pytest.raises(ConfigError, match=f"gate is read-only; call {gate.name}_backward"):
        gate.over(x, x, x.copy())
    y = x.copy()
    with pytest.raises(ConfigError, match="gate and up share memory; copy one"):
        gate.over(x, y, y)


@pytest.mark.parametrize("strides", [(0, 4), (4, 4), (16, 0)])
@pytest.mark.parametrize("place", [lambda x: x, lambda x: x[::-1]], ids=["forward", "backward"])
def test_in_place_needs_elements_apart(strides: tuple[int, int], place: Any) -> None:
    """Two threads would write one element of a view that overlaps itself."""
    memory = np.ones(64, np.float32)
    view = place(np.lib.stride_tricks.as_strided(memory, (4, 8), strides))
    heads, x = view[None, :, None], np.ones((4, 8), np.float32)
    for name, call in (
        ("gate", lambda: uc.swiglu_backward_(x, view, x.copy())),
        ("up", lambda: uc.geglu_backward_(x, x.copy(), view)),
        ("x", lambda: uc.relu2_backward_(x, view)),
        ("total", lambda: uc.accumulate_(view, x)),
        ("logits", lambda: uc.cross_entropy_(view, np.arange(4))),
        ("q", lambda: uc.rope_qk_(heads, x[None, :, None], *uc.rope_tables(4, 8))),
    ):
        with pytest.raises(ConfigError, match=f"elements of {name} share memory; call .* a copy"):
            call()
    assert (memory == 1).all()


def on_gpu(array: np.ndarray) -> Any:
    """Return what an array of CuPy says of where it lies."""
    facts = {name: getattr(array, name) for name in ("shape", "strides", "dtype", "size", "nbytes")}
    flags, data = array.flags, SimpleNamespace(ptr=array.ctypes.data)
    return SimpleNamespace(**facts, flags=flags, data=data)


@pytest.mark.parametrize("place", [np.asarray, on_gpu], ids=["host", "device"])
def test_what_is_read_lies_over_what_changes_wholly_or_not_at_all(place: Any) -> None:
    """A thread would read what another has written; what is read once may be the same array."""
    there, apart = np.ones((8, 8), np.float32), np.ones(32, np.float32)
    rows, halves = there.reshape(-1), (there[:, :4], there[:, 4:])
    for x, total in ((rows[:32], rows[4:36]), (rows[4:36], rows[:32]), (rows[:40], rows[:32])):
        with pytest.raises(ConfigError, match="f_: x partly overlaps total, which changes; copy"):
            check_overlap("f_", {"total": place(total)}, {"x": place(x)})
    for x, total in ((rows, rows), halves, (apart, rows[:32]), (rows[:32], rows[32:])):
        check_overlap("f_", {"total": place(total)}, {"x": place(x)})


def test_ops_in_place_ask_for_it() -> None:
    there, apart = np.ones(64, np.float32), np.ones(32, np.float32)
    early, late = there[:32], there[4:36]
    with pytest.raises(ConfigError, match="accumulate_: x partly overlaps total"):
        uc.accumulate_(late, early)
    for gate in (SWIGLU, GEGLU):
        with pytest.raises(ConfigError, match=f"{gate.name}_backward_: dy partly overlaps gate"):
            gate.over(early, late, apart)
    with pytest.raises(ConfigError, match="relu2_backward_: dy partly overlaps x"):
        uc.relu2_backward_(early, late)
    q, k, table = there[:32].reshape(1, 2, 1, 16), np.ones((1, 2, 1, 16), np.float32), there[8:24]
    with pytest.raises(ConfigError, match="rope_qk_: cos partly overlaps q"):
        uc.rope_qk_(q, k, table.reshape(2, 8), apart[:16].reshape(2, 8))
    assert (there == 1).all()
