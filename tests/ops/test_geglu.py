import math
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.ops.activations.geglu import geglu_backward_over_

from ..golden.golden import OpCase
from ..harness.parity import EPS, Case, KernelAlone, KernelInPlace, KernelParity, emulator
from .golden_cases import agree, both_dtypes, cast, golden

# The public names, as other people's programs call them.
PUBLIC = (
    "geglu(gate, up, *, approximate=False)",
    "geglu_backward_(dy, gate, up, *, approximate=False)",
)

EXTREMES = np.array([-3e38, -1e20, -1e4, -41, -13, -1e-30, 0, 1e-30, 13, 41, 1e4, 1e20, 3e38])


class TestGeglu(KernelParity):
    op = "geglu"
    cases = (
        Case("odd", axes=[2, 3, 13]),
        Case("odd, tanh", axes=[2, 3, 13], approximate=True),
        Case("slices", axes=[2, 3, 40], gaps=True),
        Case("scalar", axes=[]),
        Case("empty", axes=[0, 4], approximate=True),
    )


class TestGegluInPlace(KernelInPlace):
    op = "geglu_backward_over_"
    cases = (TestGeglu.cases[0], TestGeglu.cases[1], TestGeglu.cases[-1])


@both_dtypes
@golden("layers", "geglu")
def test_golden(golden: OpCase, dtype: Any) -> None:
    inputs, approximate = cast(golden, dtype), golden.name.endswith("tanh")
    gate, up = inputs["gate"], inputs["up"]
    agree(uc.geglu(gate, up, approximate=approximate), golden.outputs["y"])
    dgate, dup = uc.geglu_backward(inputs["cotangent"], gate, up, approximate=approximate)
    agree(dgate, golden.grads["gate"])
    agree(dup, golden.grads["up"])


@both_dtypes
@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.filterwarnings("error:overflow", "error:invalid")
def test_extremes(approximate: bool, dtype: Any) -> None:
    """Far from 0 the unit is 0 on the left and the identity on the right."""
    gate = EXTREMES.astype(dtype)
    one = np.ones_like(gate)
    far = np.abs(EXTREMES) > 40
    dgate, dup = uc.geglu_backward(one, gate, one, approximate=approximate)
    for value in (uc.geglu(gate, one, approximate=approximate), dup):
        np.testing.assert_array_equal(value[far], np.where(gate > 0, gate, 0)[far])
    np.testing.assert_array_equal(dgate[far], (gate > 0)[far])
    np.testing.assert_allclose(dgate[np.abs(EXTREMES) < 1e-20], 0.5)


@pytest.mark.parametrize("approximate", [False, True])
def test_small_values_keep_their_digits(approximate: bool) -> None:
    """Where the unit is almost 0 its relative error is small too: nothing cancels."""
    gate = np.linspace(-6, -1, 101, dtype=np.float32)
    x = gate.astype(np.float64)
    share = [math.erfc(-value / math.sqrt(2)) / 2 for value in x]
    if approximate:
        share = 1 / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x**2)))
    actual = uc.geglu(gate, np.ones_like(gate), approximate=approximate)
    np.testing.assert_allclose(actual, x * share, rtol=1e-5)  # exp(-40) multiplies eps by 40


class TestGegluFarFromZero(KernelAlone):
    """Kernels at the extremes, as the definition there."""

    op = "geglu"
    cases = (Case("erf", approximate=False), Case("tanh", approximate=True))

    def prove(self, case: Case, dtype: Any) -> None:
        with np.errstate(over="ignore"):
            gate = EXTREMES[np.isfinite(EXTREMES.astype(dtype).astype(float))].astype(dtype)
        one, options = np.ones_like(gate), case.both

        def results() -> list[np.ndarray]:
            actual = uc.geglu(gate, one, **options), *uc.geglu_backward(one, gate, one, **options)
            return [array.astype(np.float64) for array in actual]

        expected = results()
        with emulator():
            actual = results()
        eps = EPS[np.dtype(dtype).name]
        for array, exact in zip(actual, expected, strict=True):
            # a share below 2**-126 is 0 in a kernel; 64: what it may be multiplied by
            np.testing.assert_allclose(array, exact, rtol=4 * eps, atol=64 * 2.0**-126)


def test_in_place_returns_what_it_was_given() -> None:
    gate, up = np.ones((2, 3), np.float32)
    actual = geglu_backward_over_(up.copy(), gate, up)
    assert actual[0] is gate
    assert actual[1] is up
