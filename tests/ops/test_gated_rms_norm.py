"""The norm of a hybrid model's heads: transformers' numbers, the parity of kernels."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, ShapeError

from ..code.programs.variants import ROWS
from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, KernelParity, on_schedules
from .golden_cases import agree, both_dtypes, cast

# The public names, as other people's programs call them.
PUBLIC = ("gated_rms_norm(x, gate, weight, *, eps=1e-06)",)


class TestGatedRMSNorm(KernelParity):
    op = "gated_rms_norm_forward"
    sizes = tuple({"hidden": n} for n in ROWS)
    cases = (
        Case("heads of tokens", rows=[3, 5], hidden=128),
        Case("one row", rows=[], hidden=32),
        Case("no rows", rows=[0], hidden=8),
        Case("no columns", rows=[2], hidden=0),
        Case("odd width", rows=[2, 3], hidden=201, eps=0.1),
        Case("seven columns", rows=[90], hidden=7),
        Case("a block a row", rows=[9], hidden=1032),
        Case("slices", rows=[3, 4], hidden=16, gaps=True),
    )


class TestGatedRMSNormLongRows(KernelParity):
    op = "gated_rms_norm_forward"
    machine = {"clusters": False, "shared_memory": 48 << 10}  # noqa: RUF012
    cases = (
        Case("backward reads twice", rows=[3], hidden=8184),
        Case("both read twice", rows=[1], hidden=16392),
    )
    test_any_strides = None  # NumPy adds pairwise along contiguous axes only: 4 eps do not hold


@both_dtypes
@pytest.mark.parametrize(
    "golden", [*op_cases(FOLDER / "ops_next", "gated_norm")], ids=lambda c: c.name
)
def test_golden(golden: OpCase, dtype: Any) -> None:
    inputs = cast(golden, dtype)
    x, gate, weight = inputs["x"], inputs["gate"], inputs["weight"]
    y, rstd = uc.gated_rms_norm_forward(x, gate, weight, **golden.params)
    agree(y, golden.outputs["y"])
    gradients = uc.gated_rms_norm_backward(inputs["cotangent"], x, gate, weight, rstd)
    for name, gradient in zip(("x", "gate", "weight"), gradients, strict=True):
        agree(gradient, golden.grads[name])


def test_gates_far_from_zero() -> None:
    """Where exp(-gate) overflows, the gate is 0, and so are gradients."""
    gate = np.array([[-1e4, -200, 200, 1e4]], np.float32)
    x, weight = np.ones((1, 4), np.float32), np.ones(4, np.float32)
    tape = uc.Tape()
    operands = [tape.watch(a) for a in (x, gate, weight)]
    y = uc.gated_rms_norm(*operands)
    np.testing.assert_allclose(y.value, [[0, 0, 200, 1e4]], rtol=1e-5)
    gradients = tape.gradients(y, operands, np.ones_like(x))
    assert all(np.isfinite(g).all() for g in gradients)


def test_any_schedule() -> None:
    """Blocks in any order give equal bits."""
    rng = np.random.default_rng(0)
    x, gate, dy = rng.standard_normal((3, 300, 128)).astype(np.float16)
    weight, rstd = np.ones(128, np.float32), np.ones(300, np.float32)
    first, *others = (
        on_schedules(seed, processors=20, together=together)(
            lambda: uc.gated_rms_norm_backward(dy, x, gate, weight, rstd)  # type: ignore[arg-type,return-value]
        )
        for seed, together in ((0, 1), (1, 8), (2, 3))
    )
    for other in others:
        for actual, expected in zip(other, first, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_wrong_calls() -> None:
    x = np.ones((2, 8), np.float32)
    with pytest.raises(ShapeError, match="gate has hidden=7; it must be 8"):
        uc.gated_rms_norm(x, np.ones((2, 7), np.float32), np.ones(8, np.float32))
    with pytest.raises(ConfigError, match="eps must be 0 or more"):
        uc.gated_rms_norm(x, x, np.ones(8, np.float32), eps=-1e-6)
