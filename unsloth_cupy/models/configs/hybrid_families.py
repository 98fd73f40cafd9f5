"""Families with recurrent layers (delta rule, Mamba, Mamba2), or with latent attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import BEFORE, Names, Norms
from .dense_families import GRANITE_FACTORS, MINISTRAL3_ROPE
from .family import AFTER, Family
from .mamba import JAMBA_DEFAULTS, JAMBA_FACTS, OF_JAMBA, OF_MAMBA
from .mixtures import (
    DEEPSEEK2,
    DSA,
    GLM4,
    GRANITE_HYBRID,
    JAMBA,
    KEYS,
    KIMI,
    LFM2,
    LISTED,
    MISTRAL4,
    MIXTRAL,
    NEMOTRON_H,
    NOISE,
    QWEN2,
    QWEN35,
    STEPPED,
)
from .short_conv import LFM, LFM_FACTS
from .state_space import MAMBA, MAMBA2, MAMBA_DEFAULTS, MAMBA_FACTS, NEMOTRON

DELTA = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32_768,
}
HYBRID: dict[str, Any] = {
    "windows": "linear",
    "norm_offset": 1.0,
    "query_key_norm": "head",
    "of_rope": ("mrope_section", "mrope_interleaved"),  # no effect: positions of a text are equal
    "partial": True,
    "facts": {
        "attn_output_gate": True,
        **dict.fromkeys(("mamba_ssm_dtype", "mtp_num_hidden_layers"), ...),
        "mtp_use_dedicated_embeddings": ...,
    },
    "left_out": r"mtp\.",
    "gated": True,
}
LATENT = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEEPSEEK = {
    **LATENT,
    **KEYS,
    "num_experts": None,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 4096,
}
SPARSE_KEYS = {
    **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64, "mlp_layer_types": None}
}
BAMBA = Norms(before_mlp="pre_ff_layernorm", last="final_layernorm")
OPERATOR = Norms("operator_norm", before_mlp="ffn_norm", last="embedding_norm")
OPERATOR_NAMES = Names(
    **{"output": "out_proj", "gate": "w1", "up": "w3", "down": "w2", "mlp": "feed_forward"},
    **{"query_norm": "q_layernorm", "key_norm": "k_layernorm", "recurrent": "conv"},
)
SINGLE = Norms("norm", before_mlp=None, last="norm_f")
MIXER_FACTS: Mapping[str, Any] = {  # keys about rounding, initial weights and other programs
    **dict.fromkeys(("residual_in_fp32", "rescale_prenorm_residual", "chunk_size"), ...),
    **dict.fromkeys(("time_step_max", "time_step_floor"), ...),
}
MAMBA1_FACTS: Mapping[str, Any] = {
    **dict.fromkeys(("time_step_min", "time_step_scale", "time_step_init_scheme"), ...),
    **dict.fromkeys(("use_mambapy", "use_associative_scan"), ...),
}
LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        **{"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}
BOTH = ("alpha", "beta")  # factors of stream and branch
FACTORS = {  # of Falcon-H1: the defaults multiply by 1
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    **dict.fromkeys(("mlp_multipliers", "ssm_multipliers"), None),
}
HEAD_DIM: Mapping[str, Any] = {"qk_head_dim": ...}  # the sum of two keys that are read
ROUTER: Mapping[str, Any] = {"aux_loss_alpha": ..., "seq_aux": ..., "moe_layer_freq": 1, **HEAD_DIM}
FURTHER = dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "ep_size"), ...)
MISTRAL4_ROPE = {
    **MINISTRAL3_ROPE,
    **{"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
}
HYBRIDS: Mapping[str, Family] = {
    "qwen3_next": Family(
        {
            **STEPPED,
            **DELTA,
            "moe_intermediate_size": 512,
            "num_local_experts": None,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 512,
        },
        delta="fused",
        experts=QWEN2,
        **HYBRID,
    ),
    "qwen3_5_text": Family({**DELTA, "num_key_value_heads": 4}, delta="split", **HYBRID),
    "qwen3_5_moe_text": Family(
        {
            **KEYS,
            **DELTA,
            "moe_intermediate_size": 512,
            "num_local_experts": None,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 512,
            "intermediate_size": 512,  # unused: it is for dense layers, and there are none
        },
        delta="split",
        experts=QWEN35,
        **{**HYBRID, "facts": {**HYBRID["facts"], "intermediate_size": ...}},
    ),
    "olmo_hybrid": Family(
        {
            "full_attention_interval": 4,
            "linear_allow_neg_eigval": True,
            "linear_conv_kernel_dim": 4,
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), None),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), None),
            "max_position_embeddings": 65_536,
        },
        "linear",
        norms=AFTER,
        query_key_norm="projection",
        rotates="by_theta",
        facts={
            **dict.fromkeys(("linear_a_log_min", "linear_a_log_max", "linear_dt_min"), ...),
            **dict.fromkeys(("linear_dt_max", "linear_dt_init_floor"), ...),
        },
        delta="apart",
        delta_norms=BEFORE,
        wide=("linear_attn.A_log",),
    ),
    "kimi_linear": Family(
        {
            **LATENT,
            **KEYS,
            **{"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
            **{"q_lora_rank": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 1_048_576},
            **{"num_experts": 256, "num_local_experts": None, "n_shared_experts": 1},
            **{"num_experts_per_tok": 8, "moe_intermediate_size": 1024, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1},
            "mlp_layer_types": None,
        },
        "linear",
        names=Names(recurrent="self_attn"),
        rotates="none",
        facts={
            **{**FURTHER, **ROUTER, "mla_use_nope": True},
            **{"moe_router_activation_func": "sigmoid", "use_grouped_topk": ...},
        },
        experts=KIMI,
        delta="short",
        latent=True,
        wide=(".dt_bias",),
    ),
    "lfm2": Family(
        {
            **LFM,
            **{"block_auto_adjust_ff_dim": True, "block_multiple_of": 256},
            **{"block_ffn_dim_multiplier": 1.0, "intermediate_size": 12_288},
        },
        "typed",
        norms=OPERATOR,
        eps="norm_eps",
        query_key_norm="head",
        qkv_bias=False,
        output_bias=False,
        names=OPERATOR_NAMES,
        facts=LFM_FACTS,
        conv=True,
    ),
    "lfm2_moe": Family(
        {
            **LFM,
            **{"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4},
            **{"moe_intermediate_size": 1792, "norm_topk_prob": True, "use_expert_bias": True},
            **{"routed_scaling_factor": 1.0, "output_router_logits": False},
        },
        "typed",
        norms=OPERATOR,
        eps="norm_eps",
        query_key_norm="head",
        qkv_bias=False,
        output_bias=False,
        names=OPERATOR_NAMES,
        facts={**LFM_FACTS, "output_router_logits": ...},
        experts=LFM2,
        conv=True,
    ),
    "lfm3": Family(
        {
            **LFM,
            **{"conv_L_cache": 7, "num_key_value_heads": 4, "head_dim": 128},
            **{"sliding_window": 256, "use_sandwich_norm": True, "use_attention_gate": True},
            "rope_parameters": LFM3_ROPE,
        },
        "typed",
        norms=replace(OPERATOR, after_attention="post_operator_norm", after_mlp="post_ffn_norm"),
        eps="norm_eps",
        query_key_norm="head",
        names=replace(OPERATOR_NAMES, output="o_proj", query_norm="q_norm", key_norm="k_norm"),
        local=True,
        gate_if="use_attention_gate",
        around_if="use_sandwich_norm",
        conv=True,
    ),
    "minimax": Family(
        {
            **KEYS,
            **NOISE,
            **{f"{kind}_attn_{name}_factor": 1 for kind in ("full", "linear") for name in BOTH},
            **{f"mlp_{name}_factor": 1 for name in BOTH},
            **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
            **{"sliding_window": None, "max_position_embeddings": 131_072},
        },
        "linear",
        qkv_bias=False,
        output_bias=False,
        names=Names(recurrent="self_attn"),
        facts={"block_size": ...},
        experts=MIXTRAL,
        lightning=True,
        left_out=r".*\.(slope_rate|query_decay|key_decay|diagonal_decay)$",
    ),
    "jamba": Family(
        {
            **KEYS,
            **JAMBA_DEFAULTS,
            **{"num_experts": 16, "num_local_experts": None, "num_key_value_heads": 8},
            "max_position_embeddings": 262_144,
        },
        "linear",
        norms=BAMBA,
        qkv_bias=False,
        output_bias=False,
        names=Names(mlp="feed_forward", recurrent="mamba"),
        rotates="none",
        facts=JAMBA_FACTS,
        experts=JAMBA,
        mamba=OF_JAMBA,
        mamba_norms=True,
    ),
    "mamba": Family(
        {
            **{"state_size": 16, "expand": 2, "conv_kernel": 4, "time_step_rank": "auto"},
            **{"use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True},
            **{"num_attention_heads": 1, "intermediate_size": None},  # unused: no attention
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.1,
            "max_position_embeddings": 2**20,  # a recurrence has no limit; a Config needs one
        },
        "linear",
        norms=SINGLE,
        eps="layer_norm_epsilon",
        names=Names(recurrent="mixer"),
        facts={**MIXER_FACTS, **MAMBA1_FACTS},
        mamba=OF_MAMBA,
        inner="expand",  # unused: no MLP
        single=True,
    ),
    "bamba": Family(
        {
            **MAMBA_DEFAULTS,
            "attn_layer_indices": None,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 262_144,
        },
        "linear",
        norms=BAMBA,
        mlp_bias="mlp_bias",
        names=Names(mlp="feed_forward", recurrent="mamba"),
        partial=True,
        facts={**MAMBA_FACTS, "z_loss_coefficient": 0.0},
        space=MAMBA,
    ),
    "granitemoehybrid": Family(
        {
            **GRANITE_FACTORS,
            **KEYS,
            **MAMBA_DEFAULTS,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
        },
        "linear",
        names=Names(
            mlp="shared_mlp", gate_up="input_linear", down="output_linear", recurrent="mamba"
        ),
        fused=("mlp",),
        rotates="by_type",
        factors=tuple(GRANITE_FACTORS),
        facts=MAMBA_FACTS,
        experts=GRANITE_HYBRID,
        space=MAMBA,
        inner="shared_intermediate_size",
    ),
    "falcon_h1": Family(
        {
            **MAMBA_DEFAULTS,
            **FACTORS,
            "mamba_d_ssm": 1024,
            **{"mamba_norm_before_gate": True, "mamba_rms_norm": False, "projectors_bias": False},
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
        },
        norms=BAMBA,
        mlp_bias="mlp_bias",
        names=Names(mlp="feed_forward", recurrent="mamba"),
        factors=("embedding_multiplier", "lm_head_multiplier", "key_multiplier"),
        facts=MAMBA_FACTS,
        space={**MAMBA, "inner": "mamba_d_ssm"},
        space_beside=True,
    ),
    "mamba2": Family(
        {
            **{"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2},
            **{"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_limit": None},
            **{"num_attention_heads": 1, "intermediate_size": 1},  # unused: no attention, no MLP
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.1,
            "max_position_embeddings": 2**20,  # a recurrence has no limit; a Config needs one
        },
        "linear",
        norms=SINGLE,
        eps="layer_norm_epsilon",
        names=Names(recurrent="mixer"),
        facts={
            **MIXER_FACTS,
            **dict.fromkeys(("time_step_rank", "time_step_min", "intermediate_size"), ...),
        },
        space=MAMBA2,
        single=True,
    ),
    "nemotron_h": Family(
        {
            **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8},
            **{"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_min": 1e-3},
            **{"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5},
            **{"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 4096},
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            **{"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688},
            **{"moe_latent_size": None, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
            "mlp_layer_types": None,
        },
        "linear",
        norms=SINGLE,
        eps="layer_norm_epsilon",
        qkv_bias=False,
        output_bias=False,
        mlp_bias="mlp_bias",
        names=Names(attention="mixer", mlp="mixer", recurrent="mixer"),
        gate=False,
        rotates="none",
        facts={
            **MIXER_FACTS,
            **dict.fromkeys(("expand", "time_step_limit", "num_logits_to_keep"), ...),
            **dict.fromkeys(("use_mamba_kernels", "mamba_ssm_cache_dtype"), ...),
            **dict.fromkeys(("num_nextn_predict_layers", "mtp_layers_block_type"), ...),
            **dict.fromkeys(("moe_shared_expert_overlap", "output_router_logits"), ...),
            "mtp_hybrid_override_pattern": ...,
            "n_shared_experts": ...,  # transformers always has one
            "mamba_proj_bias": ...,  # transformers reads use_bias
        },
        activation="mlp_hidden_act",
        space=NEMOTRON,
        single=True,
        experts=NEMOTRON_H,
        left_out=r".*\bmtp",
    ),
    "deepseek_v2": Family(
        {
            **DEEPSEEK,
            "topk_method": "greedy",
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "n_group": None,
            "topk_group": None,
            "max_position_embeddings": 2048,
        },
        mlp_bias="mlp_bias",
        interleaved=True,
        facts={**FURTHER, **ROUTER, "scoring_func": "softmax"},
        experts=DEEPSEEK2,
        latent=True,
    ),
    "deepseek_v3": Family(
        {**DEEPSEEK, "norm_topk_prob": True, "rope_interleave": True},
        interleaved="rope_interleave",
        facts={**FURTHER, **ROUTER, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        experts=GLM4,
        left_out=r"model\.layers\.61\.",
        latent=True,
    ),
    "deepseek_v32": Family(
        {
            **DEEPSEEK,
            **SPARSE_KEYS,
            "norm_topk_prob": True,
            "max_position_embeddings": 163_840,
        },
        interleaved=True,
        facts={**FURTHER, **ROUTER, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        experts=DSA,
        left_out=r"model\.layers\.61\.",
        latent=True,
        indexer="halves",
        wide_in_float16=("indexer.weights_proj.weight",),
    ),
    "glm_moe_dsa": Family(
        {
            **DEEPSEEK,
            **SPARSE_KEYS,
            **{"index_n_heads": 32, "indexer_types": None, "index_topk_pattern": None},
            **{"index_topk_freq": 1, "index_skip_topk_offset": 2},
            **{"norm_topk_prob": True, "q_lora_rank": 2048, "qk_nope_head_dim": 192},
            **{"v_head_dim": 256, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
            "max_position_embeddings": 202_752,
        },
        interleaved=True,
        facts={
            **{**FURTHER, **ROUTER, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
            **{"rope_interleave": True, "indexer_rope_interleave": True},
        },
        experts=DSA,
        left_out=r"model\.layers\.78\.",
        latent=True,
        indexer="pairs",
        wide_in_float16=("indexer.weights_proj.weight",),
    ),
    "mistral4": Family(
        {
            **DEEPSEEK,
            "norm_topk_prob": True,
            "rope_interleave": True,
            **{"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64},
            **{"n_routed_experts": 128, "num_experts_per_tok": 4, "first_k_dense_replace": 0},
            **{"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
            "max_position_embeddings": 1_048_576,
            "rope_parameters": MISTRAL4_ROPE,
        },
        interleaved="rope_interleave",
        factors=("llama_4_scaling_beta",),
        facts={**FURTHER, **ROUTER},
        experts=MISTRAL4,
        latent=True,
    ),
    "glm4_moe_lite": Family(
        {
            **DEEPSEEK,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-5,
            "mlp_layer_types": None,
            "max_position_embeddings": 202_752,
        },
        interleaved="rope_interleave",
        facts={**FURTHER, **ROUTER, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        experts=LISTED,
        left_out=r"model\.layers\.47\.",
        latent=True,
    ),
    "youtu": Family(
        {
            **LATENT,
            "rope_interleave": True,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131_072,
        },
        interleaved="rope_interleave",
        facts={"embedding_initializer_range": ..., **HEAD_DIM},
        latent=True,
    ),
    "minicpm3": Family(
        {
            **LATENT,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": None,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32_768,
        },
        factors=("scale_emb", "scale_depth", "dim_model_base"),
        facts=HEAD_DIM,
        latent=True,
    ),
}
