import contextlib
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, GradientError, ShapeError
from unsloth_cupy.ops.swiglu import swiglu_backward_over_

from ..golden.golden import OpCase
from ..parity import Case, KernelParity, emulator
from ..stand_in import gpu
from .golden_cases import agree, both_dtypes, cast, golden


class TestSwiglu(KernelParity):
    op = "swiglu"
    cases = (
        Case("odd", axes=[2, 3, 13]),
        Case("one element", axes=[1]),
        Case("two blocks", axes=[5, 431]),
        Case("slices", axes=[2, 3, 40], gaps=True),
        Case("scalar", axes=[]),
        Case("empty", axes=[0, 4]),
    )


class TestSwigluInPlace(KernelParity):
    op = "swiglu_backward_over_"
    cases = (TestSwiglu.cases[0], TestSwiglu.cases[1], TestSwiglu.cases[-1])
    test_gradient_matches_finite_differences = None  # it is a gradient itself
    test_any_strides = None  # test_in_place
    test_emulated_kernels_off_alignment = None


@both_dtypes
@golden("layers", "swiglu", without=("swiglu_mlp",))
def test_golden(golden: OpCase, dtype: Any) -> None:
    given = cast(golden, dtype)
    gate, up = given["gate"], given["up"]
    agree(uc.swiglu(gate, up), golden.outputs["y"])
    dgate, dup = uc.swiglu_backward(given["cotangent"], gate, up)
    agree(dgate, golden.grads["gate"])
    agree(dup, golden.grads["up"])


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ShapeError, match="up has axes="):
        uc.swiglu(np.ones((2, 3), np.float32), np.ones((2, 4), np.float32))


@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("kernel", [False, True], ids=["definition", "kernel"])
def test_in_place(kernel: bool, strided: bool) -> None:
    """The bits of swiglu_backward, over gate and up."""
    gate, up, dy = np.random.default_rng(0).standard_normal((3, 5, 7), np.float32)
    with emulator() if kernel else contextlib.nullcontext():
        expected = uc.swiglu_backward(dy, gate, up)
        given = [np.asfortranarray(x) if strided else x.copy() for x in (gate, up)]
        found = uc.swiglu_backward_(dy, *given)
    for array, mine, wanted in zip(found, given, expected, strict=True):
        assert array is mine
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize("inner", [4, 2100])
def test_halves_of_one_array_stay_where_they_lie(name: str, inner: int) -> None:
    """As where one projection makes both: no copy, and their gradients beside each other."""
    made, back = getattr(uc, name), getattr(uc, f"{name}_backward_")
    both, dy = np.random.default_rng(0).standard_normal((2, 2, 3, 2 * inner), np.float32)
    halves = both[..., :inner], both[..., inner:]
    apart = [half.copy() for half in halves]
    with emulator():
        np.testing.assert_array_equal(made(*halves), made(*apart))
        back(dy[..., inner:], *halves)
        back(dy[..., inner:].copy(), *apart)
    for half, alone in zip(halves, apart, strict=True):
        np.testing.assert_array_equal(half, alone)
    with gpu() as machine:
        there = machine.array((2, 3, 2 * inner), "float16")
        made(there[..., :inner], there[..., inner:])
        back(there[..., :inner], there[..., :inner], there[..., inner:])
        assert [launch.kernel for launch in machine.launches] == [name, f"{name}_backward"]
        assert machine.functions == []


def test_in_place_returns_what_it_was_given() -> None:
    gate, up = np.ones((2, 3), np.float32)
    found = swiglu_backward_over_(up.copy(), gate, up)
    assert found[0] is gate
    assert found[1] is up


def test_in_place_needs_arrays_that_may_change() -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(GradientError, match="up is on a tape; call swiglu_backward"):
        uc.swiglu_backward_(x, x.copy(), uc.Tape().watch(x))
    x.flags.writeable = False
    with pytest.raises(ConfigError, match="gate is read-only; call swiglu_backward"):
        uc.swiglu_backward_(x, x, x.copy())
