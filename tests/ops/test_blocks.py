"""Q4_0 and Q8_0: numbers and bytes of the package gguf, products by kernels."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.models.gguf.packed import CLASSES, blocks_of, weight_of
from unsloth_cupy.ops.quantized.blocks import Q40, Q80, Blocks
from unsloth_cupy.ops.quantized.mxfp4 import Mxfp4

from ..harness.parity import EPS, emulator

MADE = pytest.mark.parametrize("kind", [Q40, Q80], ids=["q4_0", "q8_0"])


@pytest.fixture
def gguf() -> Any:
    """The package; where it is missing, other modules can import this one."""
    return pytest.importorskip("gguf", reason="needs the extra `gguf`")


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", CLASSES)
def test_blocks_of_files(name: str, gguf: Any) -> None:
    """All codes with scales of either sign: the numbers of gguf; and the same bytes again."""
    kind, number = CLASSES[name], getattr(gguf.GGMLQuantizationType, name)
    values, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (3, 40, 96 // values * size), np.uint8)
    blocks = data.reshape(-1, size)
    if kind is Mxfp4:
        blocks[:, 0] = rng.integers(0, 250, len(blocks))
    else:
        blocks[:, :2] = rng.standard_normal(len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    weight = weight_of(kind, lambda state: state["weight"], {"weight": data})
    expected = gguf.quants.dequantize(data, number)
    np.testing.assert_array_equal(weight.dequantize(), expected)  # of MXFP4, 0 may be -0
    assert kind is Mxfp4 or weight.dequantize().tobytes() == expected.tobytes()
    actual = blocks_of(weight, name)
    assert actual is not None
    assert actual.tobytes() == data.tobytes()
    assert blocks_of(weight, "Q5_0") is None
    assert weight.nbytes == data.nbytes


@MADE
def test_quantization_is_that_of_gguf(kind: type[Any], gguf: Any) -> None:
    w = drawn(40, 96)
    w[3], w[4, ::2], w[5, :32] = 0, 0.5, np.arange(-16, 16) / 127  # zeros, ties
    number = gguf.GGMLQuantizationType[kind.KIND.upper()]
    actual = blocks_of(kind.quantized(w), kind.KIND.upper())
    np.testing.assert_array_equal(actual, gguf.quants.quantize(w, number))


@MADE
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_products_of_kernels(kind: type[Any], dtype: Any) -> None:
    """Parts are the dense weight's to the bit; few rows and many are within a rounding or two."""
    weight: Blocks = kind.quantized(drawn(40, 96))
    dense = weight.dequantize(dtype)
    exact = weight.dequantize(np.float64).T
    for rows, columns in ((slice(0, 40), slice(0, 96)), (slice(3, 9), slice(5, 41))):
        with emulator():
            part = weight._dense(rows, columns, np.dtype(dtype))
        assert part.tobytes() == dense[rows, columns].tobytes()
    for rows in (1, 5, 16, 17):
        x = drawn(rows, 96).astype(dtype)
        with emulator():
            actual = uc.linear(x, weight)
        expected = x.astype(np.float64) @ exact
        most = 3 * EPS[np.dtype(dtype).name] * np.abs(expected).max()
        np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=0, atol=most)
