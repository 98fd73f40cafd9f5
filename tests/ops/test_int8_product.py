"""Parts of a weight of eight bits as floats, and few rows by it."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.ops.quantized.int8_product import (
    int8_dequantize_,
    int8_few_rows_,
    launch_dequantize,
)

from ..harness.parity import Case, KernelInPlace, emulator, within_rule

INPUTS = (7, 4096, 4104)


class TestInt8Dequantize(KernelInPlace):
    op = "int8_dequantize_"
    sizes = tuple({"rows": 64, "inputs": n, "scales": 64} for n in INPUTS)
    cases = (
        Case("odd", rows=3, scales=3, inputs=13),
        Case("one row", rows=1, scales=1, inputs=4096),
        Case("a tail", rows=2, scales=2, inputs=4104),
        Case("several tiles", rows=2, scales=2, inputs=8208),
        Case("blocks", rows=3, inputs=96, scales=9, block=32),
        Case("blocks of several tiles", rows=2, inputs=8224, scales=514, block=32),
        Case("no rows", rows=0, scales=0, inputs=4),
        Case("no inputs", rows=3, scales=3, inputs=0),
        Case(
            "a row of zeros", rows=2, scales=2, inputs=16, arrays={"absmax": np.array([0.0, 3.0])}
        ),
    )


class TestInt8FewRows(KernelInPlace):
    op = "int8_few_rows_"
    sizes = tuple(
        {"few": rows, "inputs": n, "outputs": 512, "scales": 512}
        for rows, n in ((1, 4096), (2, 4104), (3, 7), (5, 4096), (16, 4096), (1, 7), (16, 7))
    )
    cases = (
        Case("one row", few=1, inputs=13, outputs=9, scales=9),
        Case("two rows, added", few=2, inputs=24, outputs=5, scales=5, add=True),
        Case("three rows", few=3, inputs=48, outputs=4, scales=4),
        Case("five rows, long", few=5, inputs=4112, outputs=3, scales=3),
        Case("sixteen rows", few=16, inputs=64, outputs=7, scales=7, add=True),
        Case("eleven rows, one by one", few=11, inputs=31, outputs=2, scales=2),
        Case("blocks", few=3, inputs=96, outputs=7, scales=21, block=32),
        Case(
            "blocks, long, added", few=9, inputs=1120, outputs=37, scales=1295, block=32, add=True
        ),
        Case("nothing", few=2, inputs=8, outputs=0, scales=0),
        Case(
            "four rows, blocks with several tiles of outputs",
            few=4,
            inputs=2128,
            outputs=70,
            scales=70,
        ),
        Case("nine rows, likewise, added", few=9, inputs=1104, outputs=60, scales=60, add=True),
    )
    test_rounds_once = None  # below: y is rounded where it lies


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_parts_of_a_weight(dtype: Any) -> None:
    """Rows and columns of a wider one, whose codes are read where they lie, at any address.

    Codes in another order are copied; the kernel runs for them too.
    """
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (40, 100), np.int8)
    absmax = rng.random(40).astype(np.float32)
    for part, rows in (
        (codes[3:17], slice(3, 17)),
        (codes[:, 5:69], slice(0, 40)),
        (codes[4:8, ::-1], slice(4, 8)),
        (codes.T[:40], slice(0, 40)),
    ):
        expected = part * (absmax[rows, None] / np.float32(127))
        w = np.empty(expected.shape, dtype)
        with emulator():
            int8_dequantize_(w, part, absmax[rows])
            assert launch_dequantize(w.copy(), part, absmax[rows], 0) is not NotImplemented
        np.testing.assert_array_equal(w, expected.astype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("off", ["x", "codes", "y"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_one_array_off_alignment(dtype: Any, off: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 64)).astype(np.float16).astype(dtype)
    codes, absmax = rng.integers(-127, 128, (6, 64), np.int8), rng.random(6).astype(np.float32)
    arrays = {"x": x, "codes": codes, "absmax": absmax, "y": np.zeros((3, 6), dtype)}
    room = np.zeros(arrays[off].size + 1, arrays[off].dtype)
    shifted = room[1:].reshape(arrays[off].shape)
    shifted[...] = arrays[off]
    by_dtype = {}
    for kind in (np.float64, dtype):
        inputs = {n: a.astype(kind) if n in ("x", "y") else a for n, a in arrays.items()}
        int8_few_rows_(**inputs)
        by_dtype[kind] = inputs["y"]
    with emulator():
        int8_few_rows_(**arrays | {off: shifted})
    made = shifted if off == "y" else arrays["y"]
    within_rule({"y": by_dtype[dtype]}, {"y": by_dtype[np.float64]}, {"y": made})


def test_float32_sums_of_16_bit_rows() -> None:
    """As gemm may ask: y is float32 where x is not."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 32)).astype(np.float16)
    codes, absmax = rng.integers(-127, 128, (5, 32), np.int8), np.ones(5, np.float32)
    start = rng.standard_normal((2, 5)).astype(np.float32)
    expected = start + x.astype(np.float64) @ codes.T / 127
    for context in (emulator, None):
        y = start.copy()
        if context:
            with context():
                int8_few_rows_(x, codes, absmax, y, add=True)
        else:
            int8_few_rows_(x, codes, absmax, y, add=True)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
