"""The kernel of adamw_; tests/training/test_optimizer.py judges its definition."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy.ops.optimizers.adamw import adamw_

from ..harness.parity import Case, KernelInPlace, emulator

OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.99),
    "eps": 1e-3,
    "weight_decay": 0.1,
    "step": 3,
}


def squares(size: int) -> dict[str, Any]:
    """Draw what is never negative."""
    return {"square": lambda rng: rng.standard_normal(size) ** 2}


class TestAdamW(KernelInPlace):
    op = "adamw_"
    cases = (
        Case("odd", axes=[77], arrays=squares(77), **OPTIONS),
        Case("one element", axes=[1], arrays=squares(1), **OPTIONS),
        Case("two blocks", axes=[2100], arrays=squares(2100), **OPTIONS | {"step": 1}),
    )


@pytest.mark.parametrize("layout", ["strided", "off alignment"])
@pytest.mark.parametrize("gradient", [np.float16, np.float32])
def test_emulated_kernel_of_arrays_as_they_lie(layout: str, gradient: Any) -> None:
    rng = np.random.default_rng(0)
    values, grad, mean = rng.standard_normal((3, 80)).astype(np.float16)
    room = np.empty(162, np.float16)
    there = room[:160:2] if layout == "strided" else room[1:81]
    there[...] = values
    rest = [grad.astype(gradient), mean.astype(np.float32), np.abs(mean).astype(np.float32)]
    expected = adamw_(values.copy(), *[a.copy() for a in rest], **OPTIONS)
    with emulator():
        actual = adamw_(there, *rest, **OPTIONS)
    assert actual is there
    np.testing.assert_array_equal(there, expected)
