"""GGUF files of mixtures of experts and of latent attention, both ways."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.adapters.into import kind_of
from unsloth_cupy.models.gguf import _families
from unsloth_cupy.models.gguf._families import LIKE
from unsloth_cupy.parallel import SingleCommunicator

from .exported import byte_level, make, read, write_tokenizer
from .peers import BALANCED, LLAMA3, MULTIPLIERS, SIZES, STATES
from .test_gguf_load import copied

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
TOKENS = np.arange(3, 15)[None]
FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
RULE = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
OF_GEMMA4 = {"model_type": "gemma4_text", "head_dim": 16, "sliding_window": 5}
BOTH = ["sliding_attention", "full_attention"]
ONES = {"mscale": 1.0, "mscale_all_dim": 1.0}
MIXTURES: dict[str, dict[str, Any]] = {
    "gemma4": {
        **OF_GEMMA4,
        **{"attention_k_eq_v": True, "num_key_value_heads": 4, "hidden_size_per_layer_input": 0},
        "per_layer_config": {"2": {"head_dim": 12, "num_key_value_heads": 2}},
        "layer_types": ["sliding_attention", *BOTH],
    },
    "gemma4 of shared keys": {
        **OF_GEMMA4,
        **{"global_head_dim": 20, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97},
        **{"num_hidden_layers": 5, "final_logit_softcapping": 3.0, "initializer_range": 0.1},
        "layer_types": [*BOTH, *BOTH, "full_attention"],
    },
    "gemma4 of experts": {
        **OF_GEMMA4,
        **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3},
        **{"moe_intermediate_size": 12, "hidden_size_per_layer_input": 0, "num_hidden_layers": 2},
        **{"global_head_dim": 8, "layer_types": BOTH},
    },
    "llama": {"model_type": "mixtral", "num_local_experts": 4, "head_dim": 16, **BALANCED},
    "qwen2moe": {
        "model_type": "qwen2_moe",
        **FEW,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3moe": {"model_type": "qwen3_moe", **FEW, "norm_topk_prob": True, "head_dim": 16},
    "olmoe": {
        "model_type": "olmoe",
        **{"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "sliding_window": 5,
        "max_position_embeddings": 64,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
    "granitemoe with a shared expert": {
        "model_type": "granitemoeshared",
        **MULTIPLIERS,
        **{"num_local_experts": 4, "shared_intermediate_size": 40},
    },
    "dots1": {
        "model_type": "dots1",
        **ROUTED,
        **{"n_shared_experts": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
        **{
            "first_k_dense_replace": 1,
            "head_dim": 16,
            "sliding_window": None,
            "num_key_value_heads": 4,
        },
    },
    "exaone-moe": {
        "model_type": "exaone_moe",
        **FEW,
        **{"num_shared_experts": 2, "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 5},
    },
    "hunyuan-moe": {
        "model_type": "hunyuan_v1_moe",
        **{"num_experts": 5, "moe_topk": 2, "head_dim": 16},
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "alpha": 50.0},
    },
    "glm4moe": {
        "model_type": "glm4_moe",
        **ROUTED,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "head_dim": 16,
    },
    "llama4": {
        "model_type": "llama4_text",
        **{"head_dim": 12, "intermediate_size_mlp": 40, "num_hidden_layers": 5},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2},
        "rope_parameters": LLAMA3,
    },
    "llama4 of 128 experts": {
        "model_type": "llama4_text",
        **{"head_dim": 8, "intermediate_size_mlp": 40, "intermediate_size": 8},
        **{"num_local_experts": 128, "use_qk_norm": False, "num_hidden_layers": 4},
    },
    "ernie4_5-moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rotary_dim": 8,
    },
    "deepseek2": {
        "model_type": "deepseek_v3",
        **ROUTED,
        **LATENT,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "rope_parameters": YARN,
    },
    "mistral4": {
        "model_type": "mistral4",
        **ROUTED,
        **LATENT,
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        "rope_parameters": YARN | ONES | {"llama_4_scaling_beta": 0.3},
    },
    "deepseek32": {
        "model_type": "deepseek_v32",
        **ROUTED,
        **LATENT,
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        **{
            "index_n_heads": 8,
            "index_head_dim": 64,
            "index_topk": 5,
            "rope_parameters": YARN | ONES,
        },
    },
    "glm-dsa": {
        "model_type": "glm_moe_dsa",
        **ROUTED,
        **LATENT,
        **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
        **{"index_n_heads": 8, "index_head_dim": 64, "index_topk": 5},
        "indexer_types": ["full", "shared", "full"],
    },
    "lfm2": {"model_type": "lfm2", "full_attn_idxs": [1], "norm_eps": 1e-3},
    "lfm2moe": {
        "model_type": "lfm2_moe",
        **FEW,
        **{"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    },
    "qwen3next": {
        "model_type": "qwen3_next",
        **RULE,
        **FEW,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
    },
    "qwen35": {
        "model_type": "qwen3_5_text",
        **RULE,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen35moe": {"model_type": "qwen3_5_moe_text", **RULE, **FEW, "num_hidden_layers": 4},
    "mamba": {"model_type": "mamba", "intermediate_size": 64, "state_size": 16},
    "jamba": {
        "model_type": "jamba",
        **{"num_hidden_layers": 5, "mamba_d_state": 16, "mamba_dt_rank": 4},
        **{"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4},
    },
    "mamba2": {
        "model_type": "mamba2",
        **{"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "conv_kernel": 3},
    },
    "granitehybrid": {
        "model_type": "granitemoehybrid",
        **STATES,
        **MULTIPLIERS,
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "granitehybrid that rotates": {
        "model_type": "granitemoehybrid",
        **STATES,
        **MULTIPLIERS,
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    },
    "granitehybrid of bamba": {
        "model_type": "bamba",
        **STATES,
        "attn_layer_indices": [1],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "falcon-h1": {
        "model_type": "falcon_h1",
        **STATES,
        **{"mamba_d_head": 4, "mamba_d_ssm": 32, "mamba_n_groups": 1},
        **{"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **{"mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 2},
        **{"head_dim": 16, "mlp_bias": True, "attention_bias": True},
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "nemotron_h_moe": {
        "model_type": "nemotron_h",
        **{"mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 2},
        **{**ROUTED, "head_dim": 16, "moe_shared_expert_intermediate_size": 20},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1},
        "layers_block_type": ["moe", "linear_attention", "moe", "full_attention"],
    },
    "nemotron_h_moe of short vectors": {
        "model_type": "nemotron_h",
        **{"mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 2},
        **{**ROUTED, "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 16},
        "layers_block_type": ["moe", "linear_attention", "full_attention"],
    },
    "kimi-linear": {
        "model_type": "kimi_linear",
        **LATENT,
        **{"q_lora_rank": None, "rms_norm_eps": 1e-6},
        **{key: value for key, value in ROUTED.items() if key != "n_routed_experts"},
        **{"num_experts": 6, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
        **{"linear_num_heads": 4, "linear_head_dim": 6, "linear_conv_kernel_dim": 3},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "kimi-linear of listed layers": {
        "model_type": "kimi_linear",
        **LATENT,
        **{"q_lora_rank": None, "rms_norm_eps": 1e-6},
        **{"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_token": 2},
        **{"num_key_value_heads": 4, "first_k_dense_replace": 2},
        "linear_attn_config": {
            **{"num_heads": 4, "head_dim": 6, "short_conv_kernel_size": 4},
            **{"kda_layers": [1, 2], "full_attn_layers": [3]},
        },
    },
    "minicpm3": {"model_type": "minicpm3", **LATENT, "num_key_value_heads": 4},
    "minicpm3 of longrope": {
        "model_type": "minicpm3",
        **LATENT,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "long_factor": [1.0, 1.5, 2.0, 3.0],
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek2 of softmax": {
        "model_type": "deepseek_v2",
        **ROUTED,
        **LATENT,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
    },
    "deepseek2 of 26 layers": {
        "model_type": "deepseek_v3",
        **ROUTED,
        **LATENT,
        **{"q_lora_rank": None, "num_hidden_layers": 26, "num_key_value_heads": 4},
        **{"n_group": 2, "topk_group": 1},
    },
}
PHIMOE = {
    "model_type": "phimoe",
    **{"num_local_experts": 4, "lm_head_bias": True, "attention_bias": True},
}
OTHER_EPSILON = r"rms_norm_eps=1e-05, where this model always uses 1e-06"
WIDE = {  # of whole blocks, and large enough to stay packed
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
}
ENDS = (".weight", ".bias", ".scale")
FOLDER = Path(__file__).parents[1] / "golden" / "models" / "gpt_oss_mxfp4"


def test_the_router_loss_of_a_file_is_off(tmp_path: Path) -> None:
    """The export and the load say so; of DeepSeek transformers has none anyway."""
    label = "router loss"
    model = make(tmp_path / "m", MIXTURES["llama"])
    assert label in str(models.export_gguf(model, tmp_path / "m.gguf", kind="f32"))
    loaded = models.load(tmp_path / "m.gguf")
    assert label in str(loaded.origin)
    assert label not in str(model.origin)
    off = make(tmp_path / "off", MIXTURES["llama"] | {"output_router_logits": False})
    losses = [float(each.loss(TOKENS, TOKENS)) for each in (loaded, off, model)]
    assert losses[0] == losses[1] < losses[2]
    assert label not in str(models.export_gguf(off, tmp_path / "off.gguf", kind="f32"))
    other = make(tmp_path / "other", MIXTURES["deepseek2"])
    models.export_gguf(other, tmp_path / "other.gguf", kind="f32")
    assert label not in str(models.load(tmp_path / "other.gguf").origin)


@pytest.mark.parametrize("name", MIXTURES)
def test_what_was_exported_comes_back(name: str, tmp_path: Path) -> None:
    """All parameters, logits and greedy tokens; names and keys are those of the package."""
    model = make(tmp_path / "m", MIXTURES[name])
    report = models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    loaded = models.load(tmp_path / "m.gguf")
    assert loaded.parameters.keys() == model.parameters.keys()
    for key, array in model.parameters.items():
        most = 1e-6 if key.endswith("A_log") else 2e-7 if model.config.norm_offset else 0
        np.testing.assert_allclose(loaded.parameters[key], array, rtol=most, atol=most, err_msg=key)
    close = (
        4e-6
        if model.config.recurrent
        else 2e-6
        if "yarn" in str(MIXTURES[name]) or name == "gpt-oss"
        else 0
    )
    expected = model.logits(TOKENS)
    most = close * np.abs(expected).max()
    np.testing.assert_allclose(loaded.logits(TOKENS), expected, rtol=0, atol=most)
    values, dense, _ = read(tmp_path / "m.gguf")
    arch = values["general.architecture"]
    assert arch == name.partition(" ")[0]
    number = {each: n for n, each in gguf.MODEL_ARCH_NAMES.items()}[LIKE.get(arch, arch)]
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[number]}
    first = {n.rpartition(".")[0] if n.endswith(ENDS) else n for n in dense if "blk.0." in n}
    assert {each.replace("blk.0", "blk.{bid}") for each in first} <= known
    assert report.types.keys() == {"f32"}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "glm4moe", "deepseek2"])
def test_sixteen_bits_are_kept(name: str, kind: str, tmp_path: Path) -> None:
    """Routers that compute in float32 keep it."""
    dtype = {"f16": "float16", "bf16": "bfloat16"}[kind]
    model = make(tmp_path / "m", MIXTURES[name], dtype=dtype)
    models.export_gguf(model, tmp_path / "m.gguf", kind=kind)
    loaded = models.load(tmp_path / "m.gguf")
    for key, array in model.parameters.items():
        assert loaded.parameters[key].dtype == array.dtype, key
        np.testing.assert_array_equal(loaded.parameters[key], array, err_msg=key)


@pytest.mark.parametrize(("kind", "most"), [("q8_0", 0.01), ("q4_0", 0.1)])
@pytest.mark.parametrize("name", ["qwen2moe", "ernie4_5-moe"])
def test_stacks_stay_packed(name: str, kind: str, most: float, tmp_path: Path) -> None:
    """With the numbers of the file; they are trained beside, and exported as the same bytes."""
    model = make(tmp_path / "m", MIXTURES[name] | WIDE)
    models.export_gguf(model, tmp_path / "m.gguf", kind=kind)
    loaded = models.load(tmp_path / "m.gguf")
    _, dense, types = read(tmp_path / "m.gguf")
    stacks = {n: each for n, each in loaded.parameters.items() if n.endswith("experts.down_proj")}
    assert stacks
    for key, stack in stacks.items():
        stored = f"blk.{key.split('.')[2]}.ffn_down_exps.weight"
        assert types[stored] == stack.KIND == kind
        np.testing.assert_array_equal(stack.dequantize(), dense[stored])
        expected = model.parameters[key]
        assert np.abs(stack.dequantize() - expected).max() < most * np.abs(expected).max()
    assert all(kind_of(each) in (None, kind) for each in loaded.parameters.values())
    again = models.export_gguf(loaded, tmp_path / "again.gguf", kind=kind)
    first, second = (gguf.GGUFReader(tmp_path / f"{n}.gguf").tensors for n in ("m", "again"))
    for expected, actual in zip(first, second, strict=True):
        if "_exps" in expected.name or "attn_" in expected.name:
            assert actual.data.tobytes() == expected.data.tobytes(), expected.name
    assert again.types.keys() == {kind, "f32"}
    loaded.add_adapter(2, seed=0)
    loss, gradients = loaded.loss_and_gradients(TOKENS, TOKENS)
    assert np.isfinite(loss)
    assert gradients.keys() == {*loaded.adapter.parameters}


def test_what_is_trained_through_a_file_is_in_it(tmp_path: Path) -> None:
    """Adapters of a mixture: the file computes the loss that the model computes."""
    model = make(tmp_path / "m", MIXTURES["qwen2moe"] | WIDE)
    plain = model.loss(TOKENS, TOKENS)
    model.add_adapter(2, seed=0, merge_into="q8_0")
    for index, (name, array) in enumerate(sorted(model.adapter.parameters.items())):
        if "lora_B" in name:
            array[...] = np.random.default_rng(index).normal(0, 0.1, array.shape)
    expected = model.loss(TOKENS, TOKENS)
    assert abs(expected - plain) > 1e-3
    report = models.export_gguf(model, tmp_path / "m.gguf")
    assert {"q8_0", "f32"} == report.types.keys()
    actual = models.load(tmp_path / "m.gguf").loss(TOKENS, TOKENS)
    assert actual == pytest.approx(expected, rel=1e-5)


def test_other_types_are_as_wide_beside_experts_in_16_bits(tmp_path: Path) -> None:
    """Experts whose rows are not whole blocks are f16; that is not the dtype of the other types."""
    make(tmp_path / "m", MIXTURES["qwen2moe"])
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="q4_0")
    tensors = {each.name: each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert "F16" in {each.tensor_type.name for name, each in tensors.items() if "_exps" in name}
    table = tensors["token_embd.weight"]
    expected = gguf.quants.dequantize(table.data, table.tensor_type)
    actual = models.load(tmp_path / "m.gguf", dtype="float32").table
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_k_m"])
def test_experts_in_tensors_of_their_own(kind: str, tmp_path: Path) -> None:
    """As in files of early 2024, in any order; they stay packed, and ranks read their own."""
    whole, apart = tmp_path / "m.gguf", tmp_path / "n.gguf"
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    make(tmp_path / "m", MIXTURES["llama"] | wide)
    models.export_gguf(tmp_path / "m", whole, kind=kind)
    copied(whole, apart, {}, experts=(2, 0, 3, 1))
    expected, actual = models.load(whole), models.load(apart)
    for name, array in expected.parameters.items():
        assert kind_of(actual.parameters[name]) == kind_of(array), name
    np.testing.assert_array_equal(actual.logits(TOKENS), expected.logits(TOKENS))
    part = models.load(apart, experts=SingleCommunicator())
    np.testing.assert_array_equal(part.logits(TOKENS), expected.logits(TOKENS))
    for number, experts in enumerate(((0, 1, 3), (1, 2, 3))):
        copied(whole, tmp_path / f"{number}.gguf", {}, experts=experts)
        with pytest.raises(ConfigError, match=r"the experts of blk\.0\.ffn_"):
            models.load(tmp_path / f"{number}.gguf")


def test_the_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    """From a folder to a file, whatever its type, and back: the same bytes."""
    shutil.copytree(FOLDER, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    write_tokenizer(tmp_path / "m", byte_level(config["vocab_size"]))
    config |= {"swiglu_limit": 7.0, "bos_token_id": None, "pad_token_id": None, "eos_token_id": 2}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    model = models.load(tmp_path / "m")
    report = models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="bf16")
    assert report.types["mxfp4"] == 3 * model.config.layers
    loaded = models.load(tmp_path / "m.gguf")
    packed = {n for n, each in model.parameters.items() if kind_of(each) == "mxfp4"}
    assert packed
    for name in packed:
        for part, array in model.parameters[name].held().items():
            actual = loaded.parameters[name].held()[part]
            np.testing.assert_array_equal(actual, array, err_msg=f"{name} {part}")
    np.testing.assert_array_equal(loaded.logits(TOKENS), model.logits(TOKENS))
    loaded.save(tmp_path / "again")
    np.testing.assert_array_equal(
        models.load(tmp_path / "again").logits(TOKENS), loaded.logits(TOKENS)
    )


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("gemma4", {"layer_types": ["full_attention"] * 3}, "always has windows"),
        ("gemma4", {"attention_bias": True}, "no bias in its output projection"),
        (
            "gemma4",
            {"rope_parameters": {BOTH[0]: {"rope_type": "linear", "factor": 2.0}}},
            "does not stretch the rotary positions of sliding layers",
        ),
        *(
            ("gemma4 of shared keys", {"layer_types": types, **shared}, "shares the keys and val")
            for types, shared in (
                ([*BOTH[::-1], *BOTH[::-1], BOTH[1]], {}),
                ([*BOTH, BOTH[0], *BOTH], {"num_kv_shared_layers": 2}),
            )
        ),
        (
            "gemma4 of shared keys",
            {"vocab_size_per_layer_input": 200},
            "has 97 rows in the table of layers",
        ),
        ("llama4", {"attention_chunk_size": 64}, "has chunks of 8192 positions"),
        ("mistral4", {"rope_parameters": YARN}, "has mscale=1 and mscale_all_dim=1"),
        ("llama4", {"num_hidden_layers": 3}, "has 4 layers or more"),
        ("llama4", {"attn_scale": 0.2}, r"attn_scale=0\.1 and floor_scale=8192"),
        ("llama4", {"attn_temperature_tuning": False}, "attn_temperature_tuning"),
        ("llama4", {"use_qk_norm": False}, "norms of queries and keys unless there are 128"),
        ("llama4", {"moe_layers": [0, 1]}, "has experts in every n-th layer"),
        ("llama4", {"no_rope_layers": [1] * 5}, "rotates all layers but every fourth"),
        ("llama4", {"attention_chunk_size": None}, "has chunks of 8192 positions"),
        ("deepseek32", {"index_head_dim": 16}, "indexer heads of a multiple of 64 elements"),
        ("glm-dsa", {"index_head_dim": 16}, "indexer heads of a multiple of 64 elements"),
        ("qwen2moe", {"norm_topk_prob": True}, "with weights that are not normalized"),
        ("qwen2moe", {"mlp_only_layers": [0]}, "has experts in all layers"),
        ("qwen3moe", {"norm_topk_prob": False}, "with weights that sum to 1"),
        ("olmoe", {"clip_qkv": 0.6}, "does not clip"),
        ("gpt-oss", {"swiglu_limit": 0.5}, "limits gates at 7"),
        ("gpt-oss", {"attention_bias": False}, "has biases in its attention"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads=4"),
        ("olmoe", PHIMOE, "where this model has LayerNorm"),
        *(
            (name, {"rms_norm_eps": 1e-5}, OTHER_EPSILON)
            for name in ("qwen3next", "qwen35", "qwen35moe", "kimi-linear")
        ),
        ("kimi-linear", {"q_lora_rank": 24}, "has no low-rank queries"),
        *(
            (name, {"layer_types": [kind] * 3}, "has layers with attention, and layers with a rec")
            for name in ("kimi-linear", "qwen35", "granitehybrid")
            for kind in ("linear_attention", "full_attention")
        ),
        ("qwen3next", {"num_hidden_layers": 1}, "in place of attention"),
        ("granitehybrid of bamba", {"attn_layer_indices": []}, "in place of attention"),
        *(
            ("nemotron_h", {"layers_block_type": [kind, "mlp"] * 2}, "in place of attention")
            for kind in ("linear_attention", "full_attention")
        ),
        ("deepseek2", {"q_lora_rank": None}, "has low-rank queries .* of 3 layers and 97"),
        ("deepseek2", {"num_hidden_layers": 27}, "has no low-rank queries"),
        ("deepseek2 of 26 layers", {"num_hidden_layers": 48}, "of 48 layers and 97 tokens"),
        ("glm4moe", {"n_shared_experts": 0}, "has a shared expert"),
        ("ernie4_5-moe", {"moe_layer_end_index": 1}, "in every n-th layer, up to the last"),
        ("deepseek2", {"rope_interleave": False}, "rotates adjacent pairs"),
        ("deepseek2", {"rope_parameters": YARN | {"mscale": 1.0}}, "the same mscale"),
        ("minicpm3", {"scale_emb": 3}, "has scale_emb=12"),
        ("minicpm3", {"scale_depth": 1.5}, "has scale_depth=1.4"),
        ("minicpm3", {"dim_model_base": 64}, "has dim_model_base=256"),
        ("minicpm3", {"q_lora_rank": None}, "low-rank queries"),
        ("mamba2", {"expand": 1, "head_dim": 4}, "has 64 channels in its layers, not 32"),
        ("mamba2", {"use_conv_bias": False}, "has a bias in its convolution"),
        ("mamba2", {"use_bias": True}, "none in its projections"),
        ("mamba2", {"time_step_limit": [0.1, 0.5]}, "does not bound time steps"),
        (
            "deepseek2 of softmax",
            {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
            "does not choose groups of experts",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise(
    name: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """It is refused before a file is written, and before an adapter is trained through one."""
    own = {} if change is PHIMOE else MIXTURES[name]
    model = models.create(SIZES | own | change, seed=0)
    with pytest.raises(ConfigError, match=problem):
        models.export_gguf(model, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    with pytest.raises(ConfigError, match=problem):
        model.add_adapter(2, merge_into="q4_0")


def test_notes(tmp_path: Path) -> None:
    other = MIXTURES["minicpm3"] | {"rms_norm_eps": 1e-5}
    notes = {
        "gpt-oss": "rounds yarn's columns",
        "minicpm3": "rms_norm_eps=1e-05 in llama.cpp, and 1e-06",
    }
    for name, note in notes.items():
        make(tmp_path / name, other if name == "minicpm3" else MIXTURES[name])
        report = models.export_gguf(tmp_path / name, tmp_path / f"{name}.gguf")
        assert any(note in each for each in report.notes), report


def test_files_of_phimoe_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which llama.cpp's converter writes with the epsilon of RMS norms."""
    model = make(tmp_path / "m", PHIMOE)
    with monkeypatch.context() as patch:
        patch.setattr(_families, "_problems", lambda *_: ())
        models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    epsilons = {"layer_norm_epsilon": None, "layer_norm_rms_epsilon": 1e-3}
    for name, keys in (("n", epsilons), ("o", {"layer_norm_rms_epsilon": 1e-3})):
        changes = {f"phimoe.attention.{key}": value for key, value in keys.items()}
        copied(tmp_path / "m.gguf", tmp_path / f"{name}.gguf", changes)
    loaded = models.load(tmp_path / "n.gguf")
    assert loaded.config.eps == 1e-3
    for key, array in model.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[key], array, err_msg=key)
    with pytest.raises(ConfigError, match="the other epsilon differs"):
        models.load(tmp_path / "o.gguf")


def test_layers_that_only_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    make(tmp_path / "m", MIXTURES["glm4moe"])
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    copied(tmp_path / "m.gguf", tmp_path / "n.gguf", {"glm4moe.nextn_predict_layers": 1})
    whole, less = (models.load(tmp_path / f"{name}.gguf") for name in "mn")
    assert less.config.layers == whole.config.layers - 1
    for name, array in less.parameters.items():
        np.testing.assert_array_equal(array, whole.parameters[name])


@pytest.mark.parametrize("name", ["glm4moe", "deepseek2"])
def test_draft_heads_are_not_written_and_the_report_says_so(name: str, tmp_path: Path) -> None:
    make(tmp_path / "m", MIXTURES[name] | {"num_nextn_predict_layers": 1})
    assert models.load(tmp_path / "m").config.draft_heads == 1
    report = models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    assert "draft heads (multi-token prediction) are not in the file" in str(report)
    loaded, model = models.load(tmp_path / "m.gguf"), models.load(tmp_path / "m")
    assert loaded.config.draft_heads == 0
    tokens = np.arange(3, 12)[None]
    assert np.abs(loaded.logits(tokens) - model.logits(tokens)).max() < 1e-5
    if name == "glm4moe":  # a deepseek2 has kv_b_proj in two tensors, which is refused
        model.add_adapter(rank=2, seed=0)
        model.train_through("q8_0")
        assert model.loss(tokens, tokens) > 0
    copied(tmp_path / "m.gguf", tmp_path / "n.gguf", {f"{name}.nextn_predict_layers": 1})
    origin = str(models.load(tmp_path / "n.gguf").origin)
    assert "draft heads (nextn_predict_layers=1): not loaded from GGUF" in origin


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"glm4moe.expert_gating_func": 3}, "expert_gating_func is 3, not sigmoid"),
        ({"glm4moe.expert_count": None}, "which is none of"),
        ({"glm4moe.expert_used_count": None}, "expert_used_count is missing"),
    ],
)
def test_keys_that_are_wrong(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make(tmp_path / "m", MIXTURES["glm4moe"])
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    copied(tmp_path / "m.gguf", tmp_path / "n.gguf", changes)
    with pytest.raises(ConfigError, match=problem):
        models.load(tmp_path / "n.gguf")


def test_adapters_alone_have_the_rows_of_the_file(tmp_path: Path) -> None:
    """W + B A is in the merged file what both files make of it; experts are refused by name."""
    model = make(tmp_path / "m", MIXTURES["qwen35"])
    model.add_adapter(2, alpha=2, seed=0, targets=["in_proj_qkv", "in_proj_z"])
    for array in model.adapter.parameters.values():
        array[...] = np.random.default_rng(1).normal(0, 0.1, array.shape)
    models.export_adapter_gguf(model, tmp_path / "a.gguf", kind="f32")
    _, low, _ = read(tmp_path / "a.gguf")
    dense = {}
    for name, base in (("merged", model), ("plain", model.base)):
        models.export_gguf(base, tmp_path / f"{name}.gguf", kind="f32", tokenizer=tmp_path / "m")
        dense[name] = read(tmp_path / f"{name}.gguf")[1]
    for name in ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"):
        actual = dense["plain"][name] + low[f"{name}.lora_b"] @ low[f"{name}.lora_a"]
        np.testing.assert_allclose(actual, dense["merged"][name], rtol=0, atol=1e-6)
    mixture = make(tmp_path / "x", MIXTURES["qwen3moe"])
    mixture.add_adapter(2, seed=0, targets=["experts.down_proj"])
    with pytest.raises(
        ConfigError, match=r"adapters of experts, such as .* cannot be written alone"
    ):
        models.export_adapter_gguf(mixture, tmp_path / "b.gguf")
