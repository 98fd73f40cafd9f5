"""Tiny random Hugging Face models, and the results of transformers for them."""

from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 3.0, 7.0],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama one kv head": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 12},
    "llama llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    },
    "llama yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    },
    "llama ignores a share": {"model_type": "llama", "partial_rotary_factor": 0.5},
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": 16},
    "mistral full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma gelu": {"model_type": "gemma", "head_dim": 16, "hidden_act": "gelu"},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 4,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 4,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "phi3": {"model_type": "phi3", "original_max_position_embeddings": 64},
    "phi3 longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 16,
        "sliding_window": 9,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo2 tied": {"model_type": "olmo2", "tie_word_embeddings": True, "attention_bias": True},
    "bitnet": {"model_type": "bitnet"},
}
# Each has values that no default hides; a norm of its own, a factor, a layer without rotation.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
RELATIVES: dict[str, dict[str, Any]] = {
    "smollm3": {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": 5,
        "no_rope_layers": [1, 0, 1],
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
        },
    },
    "olmo": {"model_type": "olmo", "clip_qkv": 0.7, "attention_bias": True},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.7,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.11,
        "logits_scaling": 5.3,
        "mlp_bias": True,
    },
    "cohere": {
        "model_type": "cohere",
        "logit_scale": 0.3,
        "use_qk_norm": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "cohere2": {
        "model_type": "cohere2",
        "logit_scale": 0.3,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm": {
        "model_type": "glm",
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "glm4": {"model_type": "glm4", "head_dim": 8, "attention_bias": False},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16, "use_bias": True},
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1000.0,
            "factor": 1.0,
            "alpha": 50.0,
        },
    },
    "seed_oss": {
        "model_type": "seed_oss",
        "head_dim": 16,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "exaone4": {
        "model_type": "exaone4",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "arcee": {"model_type": "arcee", "attention_bias": True, "mlp_bias": True},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 5},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True},
    "stablelm parallel": {
        "model_type": "stablelm",
        "use_parallel_residual": True,
        "qk_layernorm": True,
    },
    "helium": {"model_type": "helium", "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "nemotron": {"model_type": "nemotron", "attention_bias": True, "mlp_bias": True},
    "ministral": {
        "model_type": "ministral",
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 8,
        "rope_parameters": YARN
        | {"mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3},
    },
    "apertus": {"model_type": "apertus", "attention_bias": True},
    "phi": {"model_type": "phi", "qk_layernorm": True},
    "vaultgemma": {
        "model_type": "vaultgemma",
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "jais2": {"model_type": "jais2"},
}


def make(folder: Path, config: dict[str, Any], seed: int = 0) -> Any:
    """Save a random model with this config, and return it in float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    known = transformers.AutoConfig.for_model(**SIZES | config)
    model = transformers.AutoModelForCausalLM.from_config(
        known, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                parameter.ndim == 1 or "norm" in name
            ):  # norms and biases begin as ones and zeros: too easy
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" in name:
                parameter[0] = 0.2 * torch.randn_like(parameter[0])
        for name, buffer in model.named_buffers():
            if name.endswith(("act_fn.beta", "act_fn.eps")):
                buffer.fill_(0.37 if name.endswith("beta") else -0.2)
    model.save_pretrained(folder)
    return model


def batch(seed: int, tokens: int, vocab: int = 97) -> dict[str, np.ndarray]:
    """Return two rows, one of them padded on the left, and the same with padding on the right."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, vocab, (2, tokens))
    pad = max(1, tokens // 3)
    left, right = np.ones((2, tokens), np.int64), np.ones((2, tokens), np.int64)
    left[1, :pad], right[1, -pad:] = 0, 0
    labels = {
        "none": np.where(rng.random(ids.shape) < 0.2, -100, ids),
        "left": np.where(left == 1, ids, -100),
        "right": np.where(right == 1, ids, -100),
    }
    labels["left"][1, pad : pad + 1] = -100  # no real token comes before the first one
    return {"ids": ids, "left": left, "right": right} | {
        f"labels {k}": v for k, v in labels.items()
    }
