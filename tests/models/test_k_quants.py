"""K quants, read back by the package gguf: their errors, their edges, the types of a file."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .peers import SIZES

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
from unsloth_cupy.models.gguf import _k_quants as k_quants  # noqa: E402
from unsloth_cupy.models.gguf._types import KINDS, dividing  # noqa: E402
from unsloth_cupy.models.parse import parse  # noqa: E402

TYPES = [type_.name for type_ in k_quants.FORMATS]
DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "student t": lambda rng, shape: rng.standard_t(3, shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "shifted": lambda rng, shape: rng.standard_normal(shape) + 1.5,
    "outliers": lambda rng, shape: (
        rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 20, 1)
    ),
    "sparse": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.1),
    "gamma": lambda rng, shape: rng.gamma(2, size=shape),
}
# Root mean square errors of llama.cpp's own quantizer (ggml 0.25.3, quantize_q4_K and its
# relatives without an importance matrix) on these draws, as a share of the standard deviation.
LLAMA_CPP = {
    "Q2_K": (0.29699, 0.34365, 0.34904, 0.23263, 0.29614, 0.26653, 0.45023, 0.34723),
    "Q3_K": (0.15092, 0.17631, 0.19009, 0.12514, 0.22437, 0.15302, 0.07189, 0.26799),
    "Q4_K": (0.07155, 0.08456, 0.09279, 0.05471, 0.07139, 0.09886, 0.04931, 0.07720),
    "Q5_K": (0.03625, 0.04286, 0.04700, 0.02768, 0.03580, 0.05077, 0.03666, 0.03785),
    "Q6_K": (0.01777, 0.02167, 0.02557, 0.01353, 0.02701, 0.03190, 0.00819, 0.03190),
}


def read_back(rows: Any, kind: str) -> Any:
    type_ = gguf.GGMLQuantizationType[kind]
    packed = k_quants.quantize(rows, type_)
    _, size = gguf.GGML_QUANT_SIZES[type_]
    assert packed.shape == (len(rows), rows.shape[1] // 256 * size)
    assert packed.dtype == np.uint8
    return gguf.quants.dequantize(packed, type_)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("draw", DRAWS)
def test_errors_are_below_those_of_llama_cpp(kind: str, draw: str) -> None:
    rows = (0.02 * DRAWS[draw](np.random.default_rng(0), (128, 1024))).astype(np.float32)
    actual = np.sqrt(np.mean((read_back(rows, kind) - rows) ** 2)) / rows.std()
    expected = LLAMA_CPP[kind][[*DRAWS].index(draw)]
    assert 0.3 * expected < actual < expected


@pytest.mark.parametrize(
    ("kind", "apart"),
    [*((kind, 1.0) for kind in TYPES), *(("Q2_K", apart) for apart in (0.0, 0.5, 1.5, 2.5, 3.0))],
)
def test_products_are_within_the_bounds_of_llama_cpp(kind: str, apart: float) -> None:
    """Those of its test-quantize-fns.cpp, for its waves, which are so many radians apart."""
    steps, bound = np.arange(4096), 0.04 if kind == "Q2_K" else 0.02
    for first in (0.0, 1.0, 4.0):
        x, y = (0.1 + 2 * np.cos(steps + first + more) for more in (0.0, apart))
        actual = read_back(x[None].astype(np.float32), kind)[0].astype(np.float64) @ y
        assert abs(actual - x @ y) / 4096 < bound


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_independent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are quantized at a time, and in whatever order threads finish."""
    rows = np.random.default_rng(1).standard_normal((6, 512)).astype(np.float32)
    expected = read_back(rows, kind)
    monkeypatch.setattr(k_quants, "MOST", 5)
    np.testing.assert_array_equal(read_back(rows, kind), expected)
    np.testing.assert_array_equal(read_back(rows[::-1].copy(), kind), expected[::-1])


@pytest.mark.parametrize("kind", TYPES)
def test_edges(kind: str) -> None:
    """Zeros stay zeros, and no block of extreme values loses its size or becomes NaN."""
    zero = np.zeros((1, 256), np.float32)
    np.testing.assert_array_equal(read_back(zero, kind), zero)
    one = zero.copy()
    one[0, 77] = -3
    assert np.abs(read_back(one, kind) - one).max() < 0.01
    normal = np.random.default_rng(2).standard_normal((1, 256)).astype(np.float32)
    for size in (1e-42, 1e-30, 1e-9, 1e-3, 1e3, 6e4):
        for rows in (normal * size, np.full_like(normal, size), np.full_like(normal, -size)):
            actual = read_back(rows.astype(np.float32), kind)
            assert np.isfinite(actual).all()
            assert np.abs(actual - rows).max() <= max(0.5 * np.abs(rows).max(), 1e-6)
    tiny = (1e-7 * normal).astype(np.float32)  # below the scales of float16: no worse than zeros
    assert np.square(read_back(tiny, kind) - tiny).mean() <= 1.01 * np.square(tiny).mean()


def types_of(kind: str, part: str, layers: int = 16, **changes: Any) -> str:
    sizes = {"num_hidden_layers": layers, "model_type": "llama"}
    config = parse(SIZES | sizes | changes)
    names = (f"blk.{layer}.{part}.weight" for layer in range(layers))
    return "".join(KINDS[kind].of(name, (256, 256), config, False).name[1] for name in names)


@pytest.mark.parametrize(
    ("kind", "part", "expected"),
    [
        ("q4_k_m", "attn_v", "6644644644644666"),
        ("q4_k_m", "ffn_down", "6644644644644666"),
        ("q4_k_m", "attn_q", "4444444444444444"),
        ("q4_k_m", "attn_qkv", "5555555555555555"),
        ("q5_k_m", "attn_v", "6655655655655666"),
        ("q5_k_m", "attn_qkv", "6666666666666666"),
        ("q4_k_s", "attn_v", "5555444444444444"),
        ("q4_k_s", "ffn_down", "5544444444444444"),
        ("q3_k_m", "attn_v", "5544444444444444"),
        ("q3_k_m", "ffn_down", "5444444444444444"),
        ("q3_k_m", "attn_output", "4444444444444444"),
        ("q3_k_l", "ffn_down", "5555555555555555"),
        ("q3_k_s", "ffn_down", "3333333333333333"),
        ("q2_k", "attn_output", "3333333333333333"),
        ("q2_k", "ffn_gate", "2222222222222222"),
    ],
)  # fmt: skip
def test_layers_of_a_mixture(kind: str, part: str, expected: str) -> None:
    assert types_of(kind, part) == expected


def test_the_values_of_q2_k_follow_the_groups_of_heads() -> None:
    heads = {"num_attention_heads": 8, "head_dim": 16}
    assert types_of("q2_k", "attn_v", 2, num_key_value_heads=2, **heads) == "44"
    assert types_of("q2_k", "attn_v", 2, num_key_value_heads=4, **heads) == "33"


def test_rows_of_other_lengths_have_smaller_blocks() -> None:
    types = gguf.GGMLQuantizationType
    stand_ins = [(types.Q2_K, types.Q4_0), (types.Q3_K, types.Q4_0), (types.Q4_K, types.Q5_0),
                 (types.Q5_K, types.Q5_1), (types.Q6_K, types.Q8_0)]  # fmt: skip
    for wanted, expected in stand_ins:
        assert dividing((4, 512), wanted) == wanted
        assert dividing((4, 96), wanted) == expected
        assert dividing((4, 40), wanted) == types.F16
