"""GGUF files of mixtures of experts and of latent attention, both ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models

from .exported import make, read
from .peers import BALANCED, SIZES

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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "mixtral", "num_local_experts": 4, "head_dim": 16, **BALANCED},
    "qwen2moe": {
        "model_type": "qwen2_moe",
        **FEW,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3moe": {"model_type": "qwen3_moe", **FEW, "norm_topk_prob": True, "head_dim": 16},
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": False},
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
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 4,
        "lm_head_bias": True,
        "attention_bias": True,
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
    "deepseek2 of softmax": {
        "model_type": "deepseek_v2",
        **ROUTED,
        **LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
    },
}
ROUNDED = {"q8_0": 0.02, "q4_0": 0.25}  # of the largest logit


@pytest.mark.parametrize("name", MIXTURES)
def test_what_was_exported_comes_back(name: str, tmp_path: Path) -> None:
    """All parameters, logits and greedy tokens; names and keys are those of the package."""
    model = make(tmp_path / "m", MIXTURES[name])
    report = models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    loaded = models.load(tmp_path / "m.gguf")
    assert loaded.parameters.keys() == model.parameters.keys()
    for key, array in model.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[key], array, err_msg=key)
    close = 2e-6 if "yarn" in str(MIXTURES[name]) or name == "gpt-oss" else 0
    expected = model.logits(TOKENS)
    most = close * np.abs(expected).max()
    np.testing.assert_allclose(loaded.logits(TOKENS), expected, rtol=0, atol=most)
    values, dense, _ = read(tmp_path / "m.gguf")
    arch = values["general.architecture"]
    assert arch == name.split()[0]
    number = {each: n for n, each in gguf.MODEL_ARCH_NAMES.items()}[arch]
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[number]} | {"rope_freqs"}
    assert {each.rpartition(".")[0].replace("blk.0.", "blk.{bid}.") for each in dense
            if "blk." not in each or "blk.0." in each} <= known  # fmt: skip
    assert report.types.keys() == {"f32"}
