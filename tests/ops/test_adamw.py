"""The kernel of adamw_; tests/test_optimizer.py judges its definition."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy._jit import KERNEL_DTYPES
from unsloth_cupy.ops.adamw import adamw_

from ..parity import _within_rule, emulator

OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.99),
    "eps": 1e-3,
    "weight_decay": 0.1,
    "step": 3,
}
Arrays = dict[str, np.ndarray]


def drawn(size: int, dtype: Any, gradient: Any) -> Arrays:
    rng = np.random.default_rng(0)
    parameter, grad, mean, square = rng.standard_normal((4, size)).astype(np.float16)
    return {
        "parameter": parameter.astype(dtype),
        "gradient": grad.astype(gradient),
        "mean": mean.astype(np.float32),
        "square": np.square(square).astype(np.float32),
    }


def stepped(arrays: Arrays, wide: bool = False) -> Arrays:
    """Return what a step leaves in copies of these arrays."""
    copies = {n: a.astype(np.float64) if wide else a.copy() for n, a in arrays.items()}
    assert adamw_(**copies, **OPTIONS) is copies["parameter"]
    del copies["gradient"]
    return copies


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 77, 2100])
def test_emulated_kernel(size: int, dtype: Any) -> None:
    arrays = drawn(size, dtype, dtype if size == 77 else np.float32)
    with emulator():
        found = stepped(arrays)
    _within_rule(stepped(arrays), stepped(arrays, wide=True), found, dtype)


@pytest.mark.parametrize("layout", ["strided", "off alignment"])
def test_emulated_kernel_of_arrays_as_they_lie(layout: str) -> None:
    arrays = drawn(80, np.float16, np.float16)
    room = np.empty(162, np.float16)
    there = room[:160:2] if layout == "strided" else room[1:81]
    there[...] = arrays["parameter"]
    wanted = stepped(arrays)["parameter"]
    with emulator():
        found = adamw_(there, *[arrays[n] for n in ("gradient", "mean", "square")], **OPTIONS)
    assert found is there
    np.testing.assert_array_equal(there, wanted)
