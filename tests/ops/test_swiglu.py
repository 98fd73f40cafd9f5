from typing import Any

import numpy as np

import unsloth_cupy as uc
from unsloth_cupy.ops.activations.swiglu import swiglu_backward_over_
from unsloth_cupy.ops.linear.linears import columns_of_one

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelInPlace, KernelParity, emulator
from .golden_cases import agree, both_dtypes, cast, golden

# The public names, as other people's programs call them.
PUBLIC = (
    "swiglu(gate, up)",
    "swiglu_backward_(dy, gate, up)",
)


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


class TestSwigluInPlace(KernelInPlace):
    op = "swiglu_backward_over_"
    cases = (TestSwiglu.cases[0], TestSwiglu.cases[1], TestSwiglu.cases[-1])


@both_dtypes
@golden("layers", "swiglu", without=("swiglu_mlp",))
def test_golden(golden: OpCase, dtype: Any) -> None:
    inputs = cast(golden, dtype)
    gate, up = inputs["gate"], inputs["up"]
    agree(uc.swiglu(gate, up), golden.outputs["y"])
    dgate, dup = uc.swiglu_backward(inputs["cotangent"], gate, up)
    agree(dgate, golden.grads["gate"])
    agree(dup, golden.grads["up"])


def test_in_place_returns_what_it_was_given() -> None:
    gate, up = np.ones((2, 3), np.float32)
    actual = swiglu_backward_over_(up.copy(), gate, up)
    assert actual[0] is gate
    assert actual[1] is up


def test_gradients_of_halves_are_halves() -> None:
    """One product then takes both; also where the launch is replayed."""
    rng = np.random.default_rng(0)
    dy = rng.standard_normal((2, 3, 24), np.float32)
    both = rng.standard_normal((2, 3, 48), np.float32)
    gate, up = both[..., :24], both[..., 24:]
    expected = uc.swiglu_backward(dy, gate, up)
    with emulator():
        for _ in range(4):
            actual = uc.swiglu_backward(dy, gate, up)
            assert columns_of_one(actual) is not None
            for one, other in zip(actual, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert columns_of_one(expected) is None
