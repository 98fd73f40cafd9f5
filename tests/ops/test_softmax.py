from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, ShapeError

from ..code.programs.variants import ROWS
from ..golden.golden import OpCase
from ..harness.parity import Case, KernelParity
from .golden_cases import agree, both_dtypes, cast, golden

# The public names, as other people's programs call them.
PUBLIC = ("softmax(x, *, scale=1.0)",)

HIDDEN = np.array([[0.5, -np.inf, 2], [-np.inf, -np.inf, -np.inf], [1, 2, 3]])

TOWERS = 100.0 * np.isin(np.arange(1000), (123, 700))  # exp overflows in float32


def hidden_but_one(rng: np.random.Generator) -> Any:
    """Draw a row of -inf, but for what one thread sees."""
    x = np.full((1, 33000), -np.inf)
    x[:, :3] = rng.standard_normal(3)
    return x


@pytest.mark.parametrize("axis", [0, 2, -2])
def test_another_axis_is_refused(axis: int) -> None:
    with pytest.raises(ConfigError, match=r"the last axis; call softmax\(np.moveaxis\(x, "):
        uc.softmax(HIDDEN, axis=axis)
    np.testing.assert_array_equal(uc.softmax(HIDDEN, axis=1), uc.softmax(HIDDEN))


class TestSoftmax(KernelParity):
    op = "softmax"
    sizes = tuple({"columns": n} for n in (*ROWS, 32768, 262144, 524296))
    cases = (
        Case("odd", rows=[2, 3], columns=13),
        Case("scaled", rows=[3], columns=13, scale=-0.3),
        Case("one row", rows=[], columns=13),
        Case("one column", rows=[3], columns=1),
        Case("slices", rows=[2, 3], columns=24, gaps=True),
        *(  # 4 to 32 threads share a row
            Case(f"{n} columns", rows=[3], columns=n) for n in (34, 68, 136, 264)
        ),
        Case("no rows", rows=[0], columns=4),
        Case("no columns", rows=[3], columns=0),
        Case("hidden columns and a hidden row", arrays={"x": HIDDEN}, scale=2.0),
    )


class TestSoftmaxLongRows(KernelParity):
    op = "softmax"
    cases = (
        Case("a block a row", rows=[2], columns=1000),
        Case("a ragged block a row", rows=[2], columns=4104, scale=3.0),
        Case("two blocks, backward", rows=[2], columns=8200),
        Case("two blocks, in slices", rows=[1, 2], columns=16392, gaps=True),
        Case("four blocks, one by one", rows=[1], columns=32771),
        Case("eight blocks share a row", rows=[1], columns=131072),
        Case(
            "two columns tower", arrays={"x": lambda rng: rng.standard_normal((2, 1000)) + TOWERS}
        ),
        Case("one thread sees values", arrays={"x": hidden_but_one}),
        Case("no thread sees any", arrays={"x": lambda rng: np.full((1, 33000), -np.inf)}),
    )
    test_any_strides = None  # NumPy adds pairwise along contiguous axes only: 4 eps do not hold


class TestSoftmaxOfRowsReadTwice(KernelParity):
    op = "softmax"
    cases = (Case("in L2 maybe", rows=[1], columns=262152, scale=0.5),)
    test_any_strides = None


class TestSoftmaxWithoutClusters(KernelParity):
    op = "softmax"
    machine = {"clusters": False}  # noqa: RUF012
    cases = (
        Case("all threads of a block", rows=[1], columns=32768),
        Case("read twice", rows=[1], columns=32776),
        Case("read twice, one by one", rows=[1, 2], columns=32771, gaps=True),
        Case("read twice, by one thread that sees values", arrays={"x": hidden_but_one}),
    )
    test_any_strides = None


@both_dtypes
@golden("layers", "softmax")
def test_golden(golden: OpCase, dtype: Any) -> None:
    inputs = cast(golden, dtype)
    y = uc.softmax(inputs["x"])
    agree(y, golden.outputs["y"])
    agree(uc.softmax_backward(inputs["cotangent"], y), golden.grads["x"])


def test_hidden_rows_are_zero_and_huge_rows_finite() -> None:
    y = uc.softmax(HIDDEN)
    assert not y[1].any()
    assert y[0, 1] == 0
    np.testing.assert_allclose(uc.softmax(HIDDEN[2] + 1e6), y[2], rtol=1e-9)


def test_wrong_calls() -> None:
    with pytest.raises(ConfigError, match="scale must be a finite number"):
        uc.softmax(np.ones(3), scale=float("inf"))
    with pytest.raises(ShapeError, match="x has 0 axes"):
        uc.softmax(np.ones(()))
