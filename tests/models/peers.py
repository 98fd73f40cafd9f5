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
STATES = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16},
    "mamba_chunk_size": 8,
}
MIXER = {
    **{"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8},
}
NEMOTRON = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2},
    **{"chunk_size": 8, "head_dim": 8, "mlp_bias": True},
}
MULTIPLIERS = {
    **{"embedding_multiplier": 3.0, "logits_scaling": 2.5},
    **{"residual_multiplier": 0.6, "attention_multiplier": 0.3},
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
HEADS: dict[str, Any] = {  # of latent attention, each of another length
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
RULE: dict[str, Any] = {  # of layers with a delta rule
    "head_dim": 16,
    "rms_norm_eps": 1e-2,  # first tokens give the gated norm little: rounding would be all of it
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
}
OF_GEMMA4 = {"head_dim": 16, "sliding_window": 5, "rms_norm_eps": 1e-5}
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
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        **RULE,
        "attention_bias": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "olmo_hybrid": {"model_type": "olmo_hybrid"},
    "olmo_hybrid without rotation": {
        "model_type": "olmo_hybrid",
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 6,
        "linear_allow_neg_eigval": False,
        "attention_bias": True,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    },
    "lfm2": {
        "model_type": "lfm2",
        **{"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3},
        **{"tie_word_embeddings": False, "full_attn_idxs": [1], "norm_eps": 1e-3},
    },
    "lfm2 types": {
        "model_type": "lfm2",
        **{"block_auto_adjust_ff_dim": False, "conv_L_cache": 2},
        "layer_types": ["conv", "full_attention", "conv"],
        "rope_parameters": YARN,
    },
    "lfm3": {
        "model_type": "lfm3",
        **{"num_hidden_layers": 5, "sliding_window": 5, "head_dim": 16, "attention_bias": True},
        "conv_L_cache": 4,
    },
    "lfm3 without norms and gates": {
        "model_type": "lfm3",
        **{"sliding_window": 5, "head_dim": 8, "use_sandwich_norm": False},
        **{"use_attention_gate": False, "tie_word_embeddings": False},
        "layer_types": ["sliding_attention", "conv", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "proportional", "rope_theta": 500.0, "factor": 2.0},
                "partial_rotary_factor": 0.6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
        },
    },
    "bamba": {"model_type": "bamba", **STATES, "attn_layer_indices": [1]},
    "bamba biases": {
        "model_type": "bamba",
        **STATES,
        "mamba_n_groups": 1,
        "mamba_conv_bias": False,
        "attn_layer_indices": [0, 2],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "granitemoehybrid dense": {
        "model_type": "granitemoehybrid",
        **STATES,
        **MULTIPLIERS,
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "mamba": {"model_type": "mamba", "state_size": 6, "num_hidden_layers": 2},
    "mamba sizes": {
        "model_type": "mamba",
        **{"state_size": 20, "conv_kernel": 3, "expand": 3, "time_step_rank": 5},
        **{"num_hidden_layers": 2, "intermediate_size": 96, "use_conv_bias": False},
        "tie_word_embeddings": False,
    },
    "mamba2": {"model_type": "mamba2", **MIXER, "num_hidden_layers": 3},
    "mamba2 biases": {
        "model_type": "mamba2",
        **MIXER,
        **{"num_hidden_layers": 2, "n_groups": 1, "use_conv_bias": False},
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "falcon_h1": {"model_type": "falcon_h1", **STATES, "mamba_d_ssm": None},
    "falcon_h1 factors": {
        "model_type": "falcon_h1",
        **STATES,
        "mamba_d_head": 4,
        "mamba_d_ssm": 32,
        "mamba_rms_norm": True,
        "projectors_bias": True,
        "attention_bias": True,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 0.9,
        "ssm_out_multiplier": 1.2,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "mlp_multipliers": [0.6, 1.4],
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.7,
    },
    "falcon_h1 norm behind the gate": {
        "model_type": "falcon_h1",
        **STATES,
        "mamba_n_groups": 1,
        "mamba_d_ssm": None,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "minicpm3": {
        "model_type": "minicpm3",
        **HEADS,
        "v_head_dim": None,
        "scale_emb": 3,
        "scale_depth": 1.1,
        "dim_model_base": 24,
    },
    "minicpm3 plain": {
        "model_type": "minicpm3",
        **HEADS,
        "q_lora_rank": None,
        "attention_bias": True,
        "scale_depth": None,
        "dim_model_base": None,
        "tie_word_embeddings": False,
    },
    "gemma4_text": {
        "model_type": "gemma4_text",
        **OF_GEMMA4,
        **{"attention_k_eq_v": True, "num_key_value_heads": 4},
        "per_layer_config": {"2": {"head_dim": 12, "num_key_value_heads": 2}},
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma4_text shared": {
        "model_type": "gemma4_text",
        **OF_GEMMA4,
        **{"global_head_dim": 20, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 300},
        **{"num_hidden_layers": 5, "final_logit_softcapping": 3.0, "attention_bias": True},
        "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    },
    "youtu": {  # transformers sets the padding's embedding to 0 when it loads
        "model_type": "youtu",
        **HEADS,
        "v_head_dim": 24,
        "pad_token_id": None,
    },
}

# Every key that a mixture's class in transformers reads has a value that no default hides.
CHOICE = {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 8}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
MSCALES = {"short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": 32}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 3.0, 7.0, 9.0]}
NEXT = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
ROUTED = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
OF_DEEPSEEK = ("n_routed_experts", "n_shared_experts", "first_k_dense_replace")
TYPES = ["full_attention", "sliding_attention", "sliding_attention"]
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **BALANCED},
    "mixtral window": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "hidden_act": "gelu",
        "router_jitter_noise": 0.1,
        "sliding_window": 5,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **CHOICE,
        **BALANCED,
        "decoder_sparse_step": 2,
        "attention_bias": True,
    },
    "qwen3_moe window": {
        "model_type": "qwen3_moe",
        **CHOICE,
        "mlp_only_layers": [0, 2],
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **CHOICE,
        **BALANCED,
        "shared_expert_intermediate_size": 20,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen2_moe types": {
        "model_type": "qwen2_moe",
        **CHOICE,
        "shared_expert_intermediate_size": 20,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": TYPES,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "head_dim": 8,
        "sliding_window": 5,
        "swiglu_limit": 0.5,
        **BALANCED,
    },
    "gpt_oss types": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "head_dim": 8,
        "layer_types": TYPES,
        "sliding_window": 5,
        "swiglu_alpha": 1.1,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "clip_qkv": 0.6,
        "norm_topk_prob": True,
        "attention_bias": True,
        **BALANCED,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 3.7,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.11,
        "logits_scaling": 5.3,
        "attention_bias": True,
        **BALANCED,
    },
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 6,
        "router_jitter_noise": 0.15,
        "input_jitter_noise": 0.01,
        "lm_head_bias": True,
        "attention_bias": True,
        "sliding_window": 5,
        **BALANCED,
    },
    "phimoe longrope": {
        "model_type": "phimoe",
        "num_local_experts": 6,
        "router_jitter_noise": 0.6,
        "head_dim": 8,
        "rope_parameters": {**LONGROPE, **FACTORS, **MSCALES},
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "moe_intermediate_size": 12,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": False,
        "head_dim": 8,
        "attention_bias": True,
        "use_qk_norm": True,
        "output_router_logits": True,
    },
    "glm4_moe groups": {
        "model_type": "glm4_moe",
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **STATES,
        **MULTIPLIERS,
        **BALANCED,
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        **{"num_dense_layers": 1, "routed_scaling_factor": 1.7},
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "lfm2_moe without bias": {
        "model_type": "lfm2_moe",
        **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        **{"num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False},
        **{"tie_word_embeddings": False, "layer_types": ["full_attention", "conv", "conv"]},
    },
    "jamba": {
        "model_type": "jamba",
        **{"num_hidden_layers": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
        **{"attn_layer_period": 3, "attn_layer_offset": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2, **BALANCED},
    },
    "jamba one expert": {
        "model_type": "jamba",
        **{"mamba_d_conv": 3, "mamba_expand": 3, "mamba_conv_bias": False, "num_experts": 1},
        **{"num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 0},
        **{"mamba_d_state": 5, "tie_word_embeddings": True},
    },
    "minimax": {
        "model_type": "minimax",
        **{"num_local_experts": 4, "head_dim": 12, "block_size": 8, **BALANCED},
        **{"full_attn_alpha_factor": 1.2, "full_attn_beta_factor": 0.8},
        **{"linear_attn_alpha_factor": 0.9, "linear_attn_beta_factor": 1.3},
        **{"mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.7},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **RULE,
        **NEXT,
        **BALANCED,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
    },
    "qwen3_next types": {
        "model_type": "qwen3_next",
        **RULE,
        **NEXT,
        "linear_num_value_heads": 2,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "mlp_only_layers": [1],
        "attention_bias": True,
    },
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **RULE,
        **NEXT,
        **BALANCED,
        "num_hidden_layers": 4,
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        **HEADS,
        **{key: value for key, value in ROUTED.items() if key != "n_routed_experts"},
        **{"num_experts": 6, "rms_norm_eps": 1e-2, "linear_num_heads": 2, "linear_head_dim": 6},
        **{"linear_conv_kernel_dim": 3, "first_k_dense_replace": 2},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "kimi_linear released": {
        "model_type": "kimi_linear",
        **HEADS,
        **{"q_lora_rank": None, "moe_intermediate_size": 12, "num_experts": 6},
        **{"num_experts_per_token": 2, "num_shared_experts": 1, "moe_renormalize": False},
        "rms_norm_eps": 1e-2,
        "linear_attn_config": {
            **{"num_heads": 4, "head_dim": 6, "short_conv_kernel_size": 4},
            **{"kda_layers": [1, 2], "full_attn_layers": [3]},
        },
    },
    "longcat_flash": {
        "model_type": "longcat_flash",
        **{key: value for key, value in HEADS.items() if key != "num_key_value_heads"},
        **{"num_key_value_heads": None, "n_routed_experts": 5, "zero_expert_num": 3, "moe_topk": 3},
        **{"expert_ffn_hidden_size": 12, "ffn_hidden_size": 40, "routed_scaling_factor": 1.7},
        **{"num_hidden_layers": 4, "intermediate_size": 40, "head_dim": 6, "attention_bias": True},
    },
    "bailing_hybrid": {
        "model_type": "bailing_hybrid",
        **HEADS,
        **{key: value for key, value in ROUTED.items() if key != "n_routed_experts"},
        **{"num_experts": 6, "rms_norm_eps": 1e-2, "head_dim": 6, "short_conv_kernel_size": 3},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "bailing_hybrid released": {
        "model_type": "bailing_hybrid",
        **HEADS,
        **{"q_lora_rank": None, "moe_intermediate_size": 12, "num_experts": 6},
        **{"num_experts_per_token": 2, "num_shared_experts": 1, "moe_renormalize": False},
        **{"num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "head_dim": 8},
        **{"layer_group_size": 2, "kda_safe_gate": False, "rms_norm_eps": 1e-2},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **HEADS,
        **ROUTED,
        "rope_interleave": False,
        "attention_bias": True,
    },
    "deepseek_v3 yarn": {
        "model_type": "deepseek_v3",
        **HEADS,
        **ROUTED,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **HEADS,
        **ROUTED,
        "topk_method": "group_limited_greedy",
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.7},
    },
    "deepseek_v2 greedy": {
        "model_type": "deepseek_v2",
        **HEADS,
        **ROUTED,
        "q_lora_rank": None,
        "n_group": None,
        "topk_group": None,
        "mlp_bias": False,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **HEADS,
        **ROUTED,
        "v_head_dim": 20,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 12,
        "moe_num_experts": 6,
        "moe_k": 3,
        "use_bias": True,
        **BALANCED,
    },
    "ernie4_5_moe layers": {
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 4,
        "moe_intermediate_size": 12,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 2,
        "tie_word_embeddings": False,
    },
    "nemotron_h experts": {
        "model_type": "nemotron_h",
        **NEMOTRON,
        **{key: value for key, value in ROUTED.items() if key != "first_k_dense_replace"},
        "moe_shared_expert_intermediate_size": 20,
        "layers_block_type": ["moe", "linear_attention", "moe", "full_attention", "mlp"],
    },
    "nemotron_h latent": {
        "model_type": "nemotron_h",
        **NEMOTRON,
        **{"n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        **{"moe_shared_expert_intermediate_size": 8, "moe_latent_size": 20, "mlp_bias": False},
        "norm_topk_prob": False,
        "layers_block_type": ["full_attention", "moe", "linear_attention", "moe"],
    },
    "dots1": {
        "model_type": "dots1",
        **ROUTED,
        "norm_topk_prob": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "attention_bias": True,
    },
    "dots1 types": {
        "model_type": "dots1",
        **ROUTED,
        **{"n_group": 1, "topk_group": 1, "head_dim": 12, "n_shared_experts": 1},
        "sliding_window": 5,
        "layer_types": TYPES,
    },
    "exaone_moe": {
        "model_type": "exaone_moe",
        **{key: value for key, value in ROUTED.items() if key not in OF_DEEPSEEK},
        **{"num_experts": 6, "num_shared_experts": 2, "norm_topk_prob": False},
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "first_k_dense_replace": 2,
    },
    "exaone_moe types": {
        "model_type": "exaone_moe",
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        **{"head_dim": 12, "sliding_window": 5, "layer_types": TYPES},
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "hunyuan_v1_moe": {
        "model_type": "hunyuan_v1_moe",
        **{"num_experts": 4, "moe_topk": [2, 3, 2], "head_dim": 12, "attention_bias": True},
        "rope_parameters": {
            **{"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 1.0, "alpha": 50.0}
        },
    },
    "hunyuan_v1_moe of one": {
        "model_type": "hunyuan_v1_moe",
        **{"num_experts": 3, "moe_topk": 2, "head_dim": 8, "tie_word_embeddings": True},
    },
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        **MULTIPLIERS,
        **BALANCED,
        **{"num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 20},
        "attention_bias": True,
    },
    "granitemoeshared without": {"model_type": "granitemoeshared", "num_local_experts": 4},
    "gemma4_text experts": {
        "model_type": "gemma4_text",
        **OF_GEMMA4,
        **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3},
        **{"moe_intermediate_size": 12, "hidden_size_per_layer_input": 0, "num_hidden_layers": 2},
        **{"global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    },
    "llama4_text": {
        "model_type": "llama4_text",
        **{"head_dim": 12, "intermediate_size_mlp": 40, "attention_chunk_size": 6},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2},
        **{"no_rope_layer_interval": 2, "floor_scale": 4, "attn_scale": 0.3},
    },
    "llama4_text plain": {
        "model_type": "llama4_text",
        **{"head_dim": 8, "intermediate_size_mlp": 40, "attention_chunk_size": None},
        **{"num_local_experts": 3, "moe_layers": [0], "use_qk_norm": False},
        **{"attn_temperature_tuning": False, "no_rope_layers": [1, 0, 1]},
    },
    "mistral4": {
        "model_type": "mistral4",
        **HEADS,
        **ROUTED,
        "rope_parameters": YARN
        | {"mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3},
    },
    "mistral4 plain": {
        "model_type": "mistral4",
        **HEADS,
        **{**ROUTED, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": False},
        **{"rope_interleave": False, "attention_bias": True},
        "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0},
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **HEADS,
        **ROUTED,
        **{"index_n_heads": 9, "index_head_dim": 10, "index_topk": 5, "attention_bias": True},
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **HEADS,
        **ROUTED,
        **{"index_n_heads": 10, "index_head_dim": 12, "index_topk": 6},
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "flex_olmo": {
        "model_type": "flex_olmo",
        **{"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
        "attention_bias": True,
        **BALANCED,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 8,
        "rotary_dim": 4,
        **BALANCED,
    },
}


def class_of(known: Any) -> Any:
    """Return transformers' class of a language model; not all are in its registry."""
    import transformers

    named = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = f"{type(known).__name__.removesuffix('Config')}ForCausalLM"
    return getattr(transformers, named.get(known.model_type, kind))


def make(folder: Path, config: dict[str, Any], seed: int = 0) -> Any:
    """Save a random model with this config, and return it in float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    known = transformers.AutoConfig.for_model(**SIZES | config)
    model = (
        class_of(known)._from_config(known, attn_implementation="eager", dtype=torch.float32).eval()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # decays that leave something of a state
                parameter.copy_(0.3 * torch.randn_like(parameter) - 1)
            elif (
                parameter.ndim == 1 or "norm" in name
            ):  # norms and biases begin as ones and zeros: too easy
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith(("_bias", "correction_bias")):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif config.get("zero_expert_num") and name.endswith("experts.gate_up_proj"):
                parameter[config["n_routed_experts"] :] = 0  # of zero experts: they compute nothing
            elif "embed" in name:
                parameter[0] = 0.2 * torch.randn_like(parameter[0])
        for name, buffer in model.named_buffers():
            if name.endswith(("act_fn.beta", "act_fn.eps")):
                buffer.fill_(0.37 if name.endswith("beta") else -0.2)
            elif name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            elif name.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
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
