"""The sum of a weight and its adapter, in one order; gradients straight through its rounding."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import nf4_quantize
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.ops.linear.lora_merge import lora_add_, lora_sum
from unsloth_cupy.ops.linear.lora_straight import straight_gradients

from ..harness.parity import Case, KernelInPlace, emulator


class TestLoraAdd(KernelInPlace):
    op = "lora_add_"
    sizes = (
        {"outputs": 64, "inputs": 4096, "rank": 16},
        {"outputs": 64, "inputs": 77, "rank": 3},
    )
    cases = (
        Case("whole accesses", outputs=9, inputs=64, rank=4, scale=0.5),
        Case("single values", outputs=6, inputs=13, rank=3, scale=-2.0),
        Case("rank 1", outputs=4, inputs=8, rank=1),
        Case("several tiles", outputs=2, inputs=2052, rank=2, scale=0.3),
        Case("rank 0", outputs=4, inputs=8, rank=0),
        Case("no rows", outputs=0, inputs=8, rank=2),
        Case("no columns", outputs=3, inputs=0, rank=2),
    )


def by_hand(w: Any, a: Any, b: Any, scale: float) -> Any:
    """Add rank after rank, in float32."""
    total = np.zeros(w.shape, np.float32)
    for rank in range(len(a)):
        column = b[:, rank].astype(np.float32) * np.float32(scale)
        total += column[:, None] * a[rank].astype(np.float32)
    return total + w.astype(np.float32)


def drawn(outputs: int, inputs: int, rank: int) -> list[Any]:
    draw = np.random.default_rng(0)
    shapes = (outputs, inputs), (rank, inputs), (outputs, rank)
    return [draw.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_bits_do_not_depend_on_what_computes_them(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel, NumPy in parts of any size, and by hand; factors may be narrow."""
    w, a, b = drawn(9, 40, 5)
    a, b = a.astype(dtype), b.astype(dtype)
    expected = by_hand(w, a, b, 0.3)
    np.testing.assert_array_equal(lora_sum(w, a, b, 0.3), expected)
    for values in (40, 80, 10**6):
        monkeypatch.setitem(lora_add_.definition.__globals__, "AT_ONCE", values)
        np.testing.assert_array_equal(lora_sum(w, a, b, 0.3), expected)
    with emulator():
        np.testing.assert_array_equal(lora_sum(w, a, b, 0.3), expected)
        if dtype == BFLOAT16:
            narrow = w.astype(dtype)
            total = by_hand(narrow, a, b, 0.3)
            np.testing.assert_array_equal(lora_sum(narrow, a, b, 0.3), total)
            np.testing.assert_array_equal(lora_add_(narrow, a, b, scale=0.3), total.astype(dtype))


def test_a_quantized_weight_is_summed_in_float32() -> None:
    w, a, b = drawn(8, 64, 3)
    weight = nf4_quantize(w).computed_in("bfloat16")
    expected = by_hand(weight.dequantize("float32"), a, b, 2.0)
    np.testing.assert_array_equal(lora_sum(weight, a, b, 2.0), expected)


def test_gradients_are_those_of_the_sum() -> None:
    _, a, b = drawn(8, 12, 3)
    draw = np.random.default_rng(1)
    dy, x = draw.standard_normal((2, 5, 8)), draw.standard_normal((10, 12))
    a, b = a.astype("f8"), b.astype("f8")
    da, db, up = straight_gradients(dy, x, a, b, 0.5)
    dw = dy.reshape(10, 8).T @ x
    np.testing.assert_allclose(da, 0.5 * b.T @ dw)
    np.testing.assert_allclose(db, 0.5 * dw @ a.T)
    np.testing.assert_allclose(up, 0.5 * dy.reshape(10, 8) @ b)
