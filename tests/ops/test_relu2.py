import contextlib
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, DTypeError, GradientError
from unsloth_cupy.ops.activations.relu2 import relu2_backward_over_

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelInPlace, KernelParity, emulator
from .golden_cases import agree, both_dtypes, cast, golden

# The public names, as other people's programs call them.
PUBLIC = (
    "relu2(x)",
    "relu2_backward_(dy, x)",
)


class TestRelu2(KernelParity):
    op = "relu2"
    cases = (
        Case("odd", axes=[2, 3, 13]),
        Case("slices", axes=[2, 3, 40], gaps=True),
        Case("scalar", axes=[]),
        Case("empty", axes=[0, 4]),
    )


class TestRelu2InPlace(KernelInPlace):
    op = "relu2_backward_over_"
    cases = (TestRelu2.cases[0], TestRelu2.cases[1], TestRelu2.cases[-1])


@both_dtypes
@golden("layers", "relu2_glu")
def test_golden(golden: OpCase, dtype: Any) -> None:
    inputs = cast(golden, dtype)
    tape = uc.Tape()
    gate, up = tape.watch(inputs["gate"]), tape.watch(inputs["up"])
    y = uc.multiply(uc.relu2(gate), up)
    agree(y.value, golden.outputs["y"])
    dgate, dup = tape.gradients(y, [gate, up], inputs["cotangent"])
    agree(dgate, golden.grads["gate"])
    agree(dup, golden.grads["up"])


def test_integers_are_refused() -> None:
    with pytest.raises(DTypeError, match="x is int64; it must be float16"):
        uc.relu2(np.arange(3))


@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("kernel", [False, True], ids=["definition", "kernel"])
def test_in_place(kernel: bool, strided: bool) -> None:
    """The bits of relu2_backward, over x."""
    x, dy = np.random.default_rng(0).standard_normal((2, 5, 7), np.float32)
    with emulator() if kernel else contextlib.nullcontext():
        expected = uc.relu2_backward(dy, x)
        inputs = np.asfortranarray(x) if strided else x.copy()
        assert uc.relu2_backward_(dy, inputs) is inputs
    np.testing.assert_array_equal(inputs, expected)


def test_in_place_returns_what_it_was_given() -> None:
    x = np.ones(3, np.float32)
    assert relu2_backward_over_(x.copy(), x) is x


def test_in_place_needs_an_array_that_may_change() -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(GradientError, match="x is on a tape; call relu2_backward"):
        uc.relu2_backward_(x, uc.Tape().watch(x))
    x.flags.writeable = False
    with pytest.raises(ConfigError, match="x is read-only; call relu2_backward"):
        uc.relu2_backward_(x, x)
