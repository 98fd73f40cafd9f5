"""GGUF files of hybrids with Mamba2 or KDA, both ways: what is folded, listed by layer, refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError

from ..harness.whole_models import widened
from .exported import make, read
from .peers import RELATIVES, SIZES
from .test_gguf_load import copied
from .test_gguf_mixtures import MIXTURES, TOKENS

pytest.importorskip("gguf", reason="needs the extra `gguf`")
FACTORS = RELATIVES["falcon_h1 factors"] | {"projectors_bias": False, "attention_bias": False}
FACTORS |= {"mamba_rms_norm": False}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "mamba_d_ssm": 64, "mamba_d_head": 8}
ATTENTION = (0, 2, 0)  # heads of keys


def changed(model: Any) -> Any:
    """Return a model whose adapter is not zero."""
    for index, (_, array) in enumerate(sorted(model.adapter.parameters.items())):
        array[...] = np.random.default_rng(index).normal(0, 0.1, array.shape)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_factors_of_falcon_h1_are_in_its_weights(kind: str, tied: bool, tmp_path: Path) -> None:
    """A tied head whose factor is not that of the embedding becomes a tensor of its own."""
    own = FACTORS | WIDE | {"tie_word_embeddings": tied}
    model = make(tmp_path / "m", own)
    model.add_adapter(2, seed=0)
    expected = changed(model).logits(TOKENS)
    report = models.export_gguf(model, tmp_path / "m.gguf", kind=kind)
    loaded = models.load(tmp_path / "m.gguf")
    actual, most = loaded.logits(TOKENS), {"f32": 1e-5, "q8_0": 0.2}[kind]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=most * np.abs(expected).max())
    assert kind in report.types
    _, dense, _ = read(tmp_path / "m.gguf")
    assert "output.weight" in dense
    assert not loaded.config.tied
    scales = np.repeat(own["ssm_multipliers"], model.config.space.sizes) * own["ssm_in_multiplier"]
    model.merge_adapter()
    for name, stored, factor in (
        ("ssm_in.weight", "mamba.in_proj.weight", scales[:, None]),
        ("ssm_out.weight", "mamba.out_proj.weight", own["ssm_out_multiplier"]),
        ("attn_q.weight", "self_attn.q_proj.weight", 1.3 * 0.7),  # of keys, too
        ("attn_k.weight", "self_attn.k_proj.weight", own["attention_in_multiplier"]),
        ("attn_v.weight", "self_attn.v_proj.weight", own["attention_in_multiplier"]),
        ("attn_output.weight", "self_attn.o_proj.weight", own["attention_out_multiplier"]),
        ("ffn_gate.weight", "feed_forward.gate_proj.weight", own["mlp_multipliers"][0]),
        ("ffn_down.weight", "feed_forward.down_proj.weight", own["mlp_multipliers"][1]),
    ):
        weight = model.parameters[f"model.layers.1.{stored}"] * factor
        most = {"f32": 1e-6, "q8_0": 0.01}[kind] * np.abs(weight).max()
        np.testing.assert_allclose(dense[f"blk.1.{name}"], weight, atol=most, err_msg=name)


def test_an_adapter_of_falcon_h1_alone_has_its_factors(tmp_path: Path) -> None:
    model = make(tmp_path / "m", FACTORS)
    model.add_adapter(2, alpha=2, seed=0, targets=["in_proj", "q_proj", "down_proj"])
    changed(model)
    models.export_adapter_gguf(model, tmp_path / "a.gguf", kind="f32")
    _, low, _ = read(tmp_path / "a.gguf")
    dense = {}
    for name, base in (("merged", model), ("plain", model.base)):
        models.export_gguf(base, tmp_path / f"{name}.gguf", kind="f32", tokenizer=tmp_path / "m")
        dense[name] = read(tmp_path / f"{name}.gguf")[1]
    for name in ("blk.0.ssm_in.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
        actual = dense["plain"][name] + low[f"{name}.lora_b"] @ low[f"{name}.lora_a"]
        np.testing.assert_allclose(actual, dense["merged"][name], rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match=r"has model\.embed_tokens\.weight times a factor"):
        model.base.add_adapter(2, merge_into="q8_0")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (
            "granitehybrid",
            {
                "attention.head_count_kv": [*ATTENTION],
                "rope.scaling.finetuned": False,
                "feed_forward_length": 48,
                "expert_shared_feed_forward_length": 40,
                "ssm.inner_size": 64,
                "ssm.time_step_rank": 8,
            },
        ),
        ("granitehybrid that rotates", {"rope.scaling.finetuned": True, "feed_forward_length": 40}),
        (
            "granitehybrid of bamba",
            {"rope.scaling.finetuned": True, "rope.dimension_count": 4, "embedding_scale": None},
        ),
        (
            "nemotron_h",
            {"feed_forward_length": [0, 48, 0, 0], "attention.head_count_kv": [0, 0, 2, 0]},
        ),
        (
            "nemotron_h_moe",
            {"feed_forward_length": [24, 0, 24, 0], "expert_shared_feed_forward_length": 20},
        ),
        ("nemotron_h_moe of short vectors", {"moe_latent_size": 16, "expert_weights_norm": True}),
        ("lfm2", {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3}),
        (
            "lfm2moe",
            {
                "attention.head_count_kv": [0, 2, 0],
                "leading_dense_block_count": 1,
                "expert_gating_func": 2,
                "expert_weights_scale": None,
            },
        ),
        (
            "kimi-linear",
            {
                "attention.head_count_kv": [0, 1, 0],
                "attention.key_length_mla": 20,
                "kda.head_dim": 6,
                "ssm.conv_kernel": 3,
                "leading_dense_block_count": 1,
                "expert_gating_func": 2,
            },
        ),
    ],
)
def test_keys(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """They are those of llama.cpp's converter: 0 heads of keys in layers without attention."""
    make(tmp_path / "m", MIXTURES[name])
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    values, dense, types = read(tmp_path / "m.gguf")
    arch = values["general.architecture"]
    assert {key: values.get(f"{arch}.{key}") for key in keys} == keys
    wide = {n for n in types if n.endswith((".ssm_a", ".ssm_d")) or "conv1d" in n or "norm" in n}
    assert {types[each] for each in wide} == {"f32"}
    if arch == "kimi-linear":
        assert dense["blk.0.ssm_conv1d_k.weight"].shape[-3:] == (24, 1, 3)
        assert dense["blk.0.ssm_a"].shape[-2:] == (4, 1)


def test_granite_of_attention_alone_is_plain_granite(tmp_path: Path) -> None:
    """With keys of layers that it lacks, as llama.cpp's converter writes them."""
    own = MIXTURES["granitehybrid that rotates"] | {"layer_types": ["full_attention"] * 3}
    model, converted = make(tmp_path / "m", own), tmp_path / "n.gguf"
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    values, tensors, _ = read(tmp_path / "m.gguf")
    assert values["general.architecture"] == "granite"
    assert values["granite.ssm.state_size"] == 16
    assert not any("shexp" in name or "ssm" in name for name in tensors)
    copied(tmp_path / "m.gguf", converted, {"granite.expert_shared_feed_forward_length": 40})
    loaded = models.load(converted)
    assert loaded.config.model_type == "granite"
    actual, expected = (widened(each).logits(TOKENS) for each in (loaded, model))
    np.testing.assert_allclose(
        actual, expected, rtol=1e-11, atol=1e-11
    )  # gate and up are one there
    make(tmp_path / "u", own | {"position_embedding_type": "nope"})
    models.export_gguf(tmp_path / "u", tmp_path / "u.gguf")
    with pytest.raises(ConfigError, match=r"granite\.rope\.scaling\.finetuned is false"):
        models.load(tmp_path / "u.gguf")


def test_rows_of_a_half_rotated_head_are_paired_within_it(tmp_path: Path) -> None:
    """Bamba: of 8 rows of a head 4 rotate; the others stay where they are."""
    model = make(tmp_path / "m", MIXTURES["granitehybrid of bamba"])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    expected = model.parameters["model.layers.1.self_attn.k_proj.weight"].reshape(2, 8, -1)
    actual = read(tmp_path / "m.gguf")[1]["blk.1.attn_k.weight"].reshape(2, 8, -1)
    np.testing.assert_array_equal(actual, expected[:, [0, 2, 1, 3, 4, 5, 6, 7]])


@pytest.mark.parametrize("name", ["granitehybrid", "granitehybrid that rotates", "kimi-linear"])
def test_layers_stay_packed(name: str, tmp_path: Path) -> None:
    """Gate and up of Granite are two tensors of a file and one matrix of blocks."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "shared_intermediate_size": 64}
    wide |= {"mamba_n_heads": 16, "moe_intermediate_size": 32}
    keys = MIXTURES[name].keys() | SIZES.keys()
    model = make(tmp_path / "m", MIXTURES[name] | {k: v for k, v in wide.items() if k in keys})
    models.export_gguf(model, tmp_path / "m.gguf", kind="q8_0")
    loaded = models.load(tmp_path / "m.gguf")
    packed = {n for n, value in loaded.parameters.items() if hasattr(value, "KIND")}
    own = "self_attn.q_proj" if name == "kimi-linear" else "shared_mlp.input_linear"
    assert f"model.layers.{0 if name == 'kimi-linear' else 1}.{own}.weight" in packed
    again = models.export_gguf(loaded, tmp_path / "n.gguf", kind="q8_0")
    assert again.types.keys() == {"q8_0", "f16", "f32"} or again.types.keys() == {"q8_0", "f32"}
    expected, actual = (models.load(tmp_path / f"{each}.gguf") for each in "mn")
    np.testing.assert_allclose(actual.logits(TOKENS), expected.logits(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("falcon-h1", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ("falcon-h1", {"attention_bias": True}, "has no bias in its output projection"),
        ("granitehybrid", {"mamba_expand": 1, "mamba_d_head": 4}, "has 64 channels in its layers"),
        ("granitehybrid", {"mamba_conv_bias": False}, "has a bias in its convolution"),
        ("granitehybrid", {"layer_types": ["full_attention"] * 3}, "in place of attention"),
        ("nemotron_h", {"time_step_min": 0.01}, "time_step_min=0.01; it is read as 0.001"),
        ("nemotron_h", {"use_bias": True}, "none in its projections"),
        (
            "nemotron_h_moe",
            {"layers_block_type": ["moe", "mlp", "linear_attention"]},
            "has experts in all MLP layers",
        ),
        ("nemotron_h_moe", {"mlp_bias": True}, "has no biases in an MLP or in experts"),
        ("lfm2", {"conv_bias": True}, r"has no bias in its short convolutions \(conv_bias\)"),
        ("lfm2moe", {"routed_scaling_factor": 1.7}, "does not scale the sum of experts"),
        ("lfm2moe", {"use_expert_bias": False}, "has a bias for the choice of experts"),
        ("kimi-linear", {"linear_num_heads": 2}, "has 4 heads in all layers, not 2"),
        ("kimi-linear", {"norm_topk_prob": False}, "with weights that sum to 1"),
        (
            "kimi-linear",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "has experts in every n-th layer|has experts in all layers after the leading",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise(
    name: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    own = {key: value for key, value in MIXTURES[name].items() if key != "first_k_dense_replace"}
    model = models.create(SIZES | own | change, seed=0)
    with pytest.raises(ConfigError, match=problem):
        models.export_gguf(model, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_notes_and_files_that_do_not_rotate(tmp_path: Path) -> None:
    make(tmp_path / "m", MIXTURES["nemotron_h"])
    report = models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert any("at least 0.001" in each for each in report.notes), report
    make(tmp_path / "b", MIXTURES["granitehybrid of bamba"])
    models.export_gguf(tmp_path / "b", tmp_path / "b.gguf")
    copied(
        tmp_path / "b.gguf", tmp_path / "n.gguf", {"granitehybrid.rope.scaling.finetuned": False}
    )
    with pytest.raises(ConfigError, match=r"rope\.scaling\.finetuned is false"):
        models.load(tmp_path / "n.gguf")
