from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, ShapeError

from ..golden.golden import OpCase
from .golden_cases import agree, golden

# The public names, as other people's programs call them.
PUBLIC = ("rope_tables(length, dim, *, base=10000.0, scaling=None, like=None)",)

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32, **FACTORS}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    YARN | {"factor": None},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    YARN | {"attention_factor": 1.7, "truncate": False, "beta_fast": 8, "beta_slow": 2},
    YARN | {"beta_fast": 1000.0, "beta_slow": 900.0},
    LLAMA3,
    LONGROPE,
    LONGROPE | {"factor": 16.0, "attention_factor": 1.2},
    {"rope_type": "proportional", "partial_rotary_factor": 0.6},
    {"rope_type": "proportional", "factor": 2.0, "rope_theta": 900.0},
]


@golden("rotary", "table")
def test_golden(golden: OpCase) -> None:
    length, half = golden.inputs["positions"].shape[1], golden.params["head_dim"] // 2
    cos, sin = uc.rope_tables(length, 2 * half, scaling=golden.params)
    for table, name in ((cos, "cos"), (sin, "sin")):
        assert table.dtype == np.float32
        agree(table, golden.outputs[name][0, :, :half])


@pytest.mark.parametrize("length", [20, 300, 5000])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{len(s)}")
def test_equals_transformers(scaling: dict[str, Any], length: int) -> None:
    """Every rule and option, at 300 positions where the model was trained on 64 or 32."""
    torch = pytest.importorskip("torch", reason="transformers computes with it")
    transformers = pytest.importorskip("transformers", reason="the peer of rope_tables")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=8,
        num_attention_heads=1,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0} | scaling,
    )
    theirs = LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(length)[None])
    settings = {"max_position_embeddings": 64} | scaling
    for mine, table in zip(uc.rope_tables(length, 8, scaling=settings), theirs, strict=True):
        np.testing.assert_allclose(mine, table[0, :, :4], atol=1e-5)


def test_older_names_of_the_type() -> None:
    newer = uc.rope_tables(5, 8, scaling={"rope_type": "linear", "factor": 2.0})
    older = uc.rope_tables(5, 8, scaling={"type": "linear", "factor": 2})
    np.testing.assert_array_equal(newer, older)


def test_theta_inside_wins_over_base() -> None:
    np.testing.assert_array_equal(
        uc.rope_tables(5, 8, base=3.0, scaling={"rope_theta": 77.0}),
        uc.rope_tables(5, 8, base=77.0),
    )


def test_short_original_lengths_of_longrope() -> None:
    """One position beyond the context trained on changes the angles of all positions."""
    scaling = LONGROPE | {"factor": 4.0}
    inside, beyond = (uc.rope_tables(n, 8, scaling=scaling)[0] for n in (32, 33))
    assert np.abs(inside[1:] - beyond[1:32]).max() > 0.01


def test_empty_tables() -> None:
    assert uc.rope_tables(0, 8)[0].shape == (0, 4)
    for scaling in SCALINGS:
        if "short_factor" not in scaling:
            settings = {"max_position_embeddings": 64} | scaling
            assert uc.rope_tables(3, 0, scaling=settings)[1].shape == (3, 0)
            assert np.isfinite(uc.rope_tables(300, 2, scaling=settings)).all()


def test_like_chooses_the_library() -> None:
    torch = pytest.importorskip("torch", reason="a library to choose")
    cos, sin = uc.rope_tables(3, 4, like=torch.ones(1, dtype=torch.bfloat16))
    assert type(cos) is type(sin) is torch.Tensor
    np.testing.assert_array_equal(cos.numpy(), uc.rope_tables(3, 4, like=np.ones(1))[0])


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "spiral"},
            "one of default, linear, dynamic, yarn, longrope, llama3, proportional",
        ),
        ({"rope_type": ["yarn"]}, "one of default"),
        ({"full_attention": {"rope_type": "yarn"}}, "the dict of one layer type"),
        ("yarn", "the dict of one layer type"),
        ({"rope_type": "linear"}, "factor is None; it must be a number above 0"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings is None"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": 1.0}, "must be above 1"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor must exceed low_freq_factor"),
        (LONGROPE | {"factor": 2.0, "short_factor": [1.0]}, "short_factor must list 4"),
        (LONGROPE | {"factor": 2.0, "short_factor": "1"}, "short_factor must list 4"),
        (LONGROPE | {"factor": 2.0, "short_factor": None}, "short_factor must list 4"),
    ],
)
def test_senseless_scalings(scaling: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        uc.rope_tables(3, 8, scaling=scaling)


@pytest.mark.parametrize(("length", "dim"), [(3, 7), (-1, 8), (3, -2)])
def test_senseless_sizes(length: int, dim: int) -> None:
    with pytest.raises(ShapeError, match="dim even"):
        uc.rope_tables(length, dim)


@pytest.mark.parametrize(("length", "dim"), [("4", 8), (None, 8), (4.5, 8), (4, 8.0), (4, [8])])
def test_sizes_are_integers(length: object, dim: object) -> None:
    with pytest.raises(ShapeError, match="length must be 0 or more, and dim even"):
        uc.rope_tables(length, dim)
