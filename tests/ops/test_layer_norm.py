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
PUBLIC = ("layer_norm(x, weight, bias=None, *, eps=1e-05, residual=None)",)


class TestLayerNorm(KernelParity):
    op = "layer_norm_forward"
    sizes = tuple({"hidden": n} for n in ROWS)
    cases = (
        Case("one row", rows=[], hidden=64),
        Case("no rows", rows=[0], hidden=8, given=["bias"]),
        Case("no columns", rows=[2], hidden=0, given=["bias"]),
        Case("odd width", rows=[2, 3], hidden=201, given=["bias"]),
        Case("one column", rows=[3], hidden=1, given=["bias"]),
        *(  # 2 to 32 threads share a row
            Case(f"{n} columns", rows=[9], hidden=n, given=["bias"]) for n in (18, 68, 264)
        ),
        Case("large eps", rows=[5], hidden=64, eps=1.0),
        Case("all", rows=[2, 5], hidden=64, given=["residual", "bias"]),
        Case("blocks that walk rows", rows=[2, 70], hidden=64, given=["residual", "bias"]),
    )


class TestLayerNormBetweenGaps(KernelParity):
    """Slices of wider arrays: the kernel steps over what is not theirs."""

    op = "layer_norm_forward"
    cases = (Case("heads of tokens", rows=[3, 4], hidden=16, given=["residual"], gaps=True),)


class TestLayerNormLongRows(KernelParity):
    op = "layer_norm_forward"
    cases = (
        Case("a ragged block a row", rows=[3], hidden=4104, given=["residual", "bias"]),
        Case("a short block a row", rows=[3], hidden=1032),
        Case("two blocks share a row", rows=[3], hidden=8200, given=["residual", "bias"]),
        Case("four blocks share a row", rows=[1], hidden=16392),
        Case("eight blocks share a row", rows=[1], hidden=32776),
    )
    test_any_strides = None  # NumPy adds pairwise along contiguous axes only: 4 eps do not hold


class TestLayerNormWithoutClusters(KernelParity):
    op = "layer_norm_forward"
    machine = {"clusters": False, "shared_memory": 48 << 10}  # noqa: RUF012
    cases = (
        Case("backward reads twice", rows=[3], hidden=8184, given=["residual", "bias"]),
        Case(
            "both read twice",
            rows=[1],
            hidden=16392,
            given=["residual"],
            arrays={"x": lambda rng: rng.standard_normal((1, 16392)) + 1},  # a mean far from 0
        ),
    )
    test_any_strides = None


@both_dtypes
@golden("layers", "layer_norm")
def test_golden(golden: OpCase, dtype: Any) -> None:
    inputs, eps = cast(golden, dtype), golden.params["eps"]
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    agree(uc.layer_norm(x, weight, bias, eps=eps), golden.outputs["y"])
    _, h, mean, rstd = uc.layer_norm_forward(x, weight, bias, eps=eps)
    grads = uc.layer_norm_backward(inputs["cotangent"], None, h, weight, bias, None, mean, rstd)
    for actual, name in zip(grads, ("x", "weight", "bias"), strict=False):
        agree(actual, golden.grads[name])
    assert grads[3] is None


def test_residual_is_added_first() -> None:
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 3, 8)).astype(np.float32)
    weight = np.ones(8, np.float32)
    y, h, *_ = uc.layer_norm_forward(x, weight, residual=residual)
    np.testing.assert_array_equal(h, x + residual)
    np.testing.assert_array_equal(y, uc.layer_norm(x, weight, residual=residual))
    np.testing.assert_array_equal(y, uc.layer_norm(h, weight))


def test_rows_far_from_zero_keep_their_digits() -> None:
    """The mean leaves before anything is squared."""
    row = np.array([1, 2, 3, 4], np.float32)
    weight = np.ones(4, np.float32)
    np.testing.assert_array_equal(uc.layer_norm(row + 2**20, weight), uc.layer_norm(row, weight))


def test_wrong_calls() -> None:
    x = np.ones((2, 8), np.float32)
    with pytest.raises(ShapeError, match="bias has hidden=7; it must be 8"):
        uc.layer_norm(x, np.ones(8, np.float32), np.ones(7, np.float32))
    with pytest.raises(ConfigError, match="eps must be 0 or more"):
        uc.layer_norm(x, np.ones(8, np.float32), eps=-1.0)
