"""Families whose blocks consist of attention and a dense MLP."""

from collections.abc import Mapping
from typing import Any

from .config import Names, Norms
from .family import AFTER, AROUND, LAYER, Family

COHERE = Norms("input_layernorm", None, None, None, kind="layer")
GLM4 = Norms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)
PHI = Names("dense", "fc1", "fc2", "q_layernorm", "k_layernorm")
QWEN = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "max_position_embeddings": 32_768,
}
GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
GEMMA2 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
PHI3 = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
BITNET = {
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 5,
    "rope_theta": 500_000.0,
}
MISTRAL = {
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}
# Released checkpoints name the dropout of pretraining, which is not applied here.
DROPOUT = dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.0)
GLM = {
    "attention_bias": True,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
}
OLMO3 = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
COHERE_KEYS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GRANITE_FACTORS = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), 1.0),
    **dict.fromkeys(("attention_multiplier", "logits_scaling"), 1.0),
}
HUNYUAN_NAMES = Names(query_norm="query_layernorm", key_norm="key_layernorm")
HUNYUAN_FACTS: Mapping[str, Any] = {
    **dict.fromkeys(("eod_token_id", "org_vocab_size", "cla_share_factor"), ...),
    **dict.fromkeys(("pad_id", "eod_id", "im_start_id", "im_end_id"), ...),
    **dict.fromkeys(("mask_init_id", "text_start_id", "text_end_id"), ...),
    **{"use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms"},
}
DENSE: Mapping[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "mistral": Family(MISTRAL, "all", qkv_bias=False, output_bias=False),
    "qwen2": Family(QWEN, "late", qkv_bias=True, output_bias=False),
    "qwen3": Family({**QWEN, "head_dim": 128}, "late", query_key_norm="head"),
    "gemma": Family(
        {**GEMMA, "num_key_value_heads": 16},
        norm_offset=1.0,
        scaled_embedding=True,
        facts={"hidden_activation": ...},
    ),
    "gemma2": Family(
        {**GEMMA, **GEMMA2},
        "most",
        norms=AROUND,
        activation="hidden_activation",
        norm_offset=1.0,
        scaled_embedding=True,
        factors=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": Family(
        {**GEMMA, **GEMMA3},
        "most",
        norms=AROUND,
        activation="hidden_activation",
        norm_offset=1.0,
        scaled_embedding=True,
        query_key_norm="head",
        factors=("query_pre_attn_scalar", "final_logit_softcapping"),
    ),
    "vaultgemma": Family(
        {**GEMMA, **GEMMA2},
        "most",
        norms=Norms("input_layernorm", None, "pre_feedforward_layernorm"),
        activation="hidden_activation",
        norm_offset=1.0,
        scaled_embedding=True,
        factors=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "phi3": Family(
        PHI3, "all", qkv_bias=False, output_bias=False, fused=("qkv", "mlp"), partial=True
    ),
    "olmo2": Family({"rms_norm_eps": 1e-5}, norms=AFTER, query_key_norm="projection"),
    "bitnet": Family(BITNET, sub_norms=True),
    "smollm3": Family(
        {
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        "unrotated",
        mlp_bias="mlp_bias",
        rotates="listed",
    ),
    "olmo3": Family(OLMO3, "most", norms=AFTER, query_key_norm="projection", local=True),
    "olmo": Family(norms=Norms(kind="layer", weights=False), eps=1e-5, factors=("clip_qkv",)),
    "granite": Family(GRANITE_FACTORS, mlp_bias="mlp_bias", factors=tuple(GRANITE_FACTORS)),
    "cohere": Family(
        {**COHERE_KEYS, "rope_theta": 500_000.0, "use_qk_norm": False},
        norms=COHERE,
        eps="layer_norm_eps",
        query_key_norm="heads",
        query_key_if="use_qk_norm",
        interleaved=True,
        parallel=True,
        factors=("logit_scale",),
        facts={"pretraining_tp": ..., "model_max_length": ...},
    ),
    "cohere2": Family(
        {**COHERE_KEYS, "sliding_window": 4096, "sliding_window_pattern": 4},
        "most",
        norms=COHERE,
        eps="layer_norm_eps",
        interleaved=True,
        rotates="sliding",
        parallel=True,
        factors=("logit_scale",),
        facts={
            "layer_switch": ...,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            **dict.fromkeys(("use_embedding_sharing", "use_gated_activation"), True),
            "use_parallel_block": True,
        },
    ),
    "glm": Family(GLM, output_bias=False, fused=("mlp",), interleaved=True, partial=True),
    "glm4": Family(
        GLM, norms=GLM4, output_bias=False, fused=("mlp",), interleaved=True, partial=True
    ),
    "ernie4_5": Family(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        interleaved=True,
        facts={"use_rmsnorm": True},
    ),
    "hunyuan_v1_dense": Family(
        {"rms_norm_eps": 1e-5},
        query_key_norm="head",
        names=HUNYUAN_NAMES,
        rotated_first=True,
        of_rope=("alpha",),
        facts={**HUNYUAN_FACTS, "num_experts": 1},
    ),
    "seed_oss": Family(
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "attention_out_bias": False,
            "max_position_embeddings": 524_288,
            **DROPOUT,
        },
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "exaone4": Family(
        {
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        "most",
        norms=AFTER,
        query_key_norm="head",
        qkv_bias=False,
        output_bias=False,
        rotates="windowed",
    ),
    "arcee": Family(
        {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        mlp_bias="mlp_bias",
        gate=False,
    ),
    "jais2": Family(
        {
            "hidden_act": "relu2",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "max_position_embeddings": 8192,
        },
        norms=LAYER,
        eps="layer_norm_eps",
        mlp_bias="mlp_bias",
        gate=False,
    ),
    "starcoder2": Family(
        {
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "initializer_range": 0.018042,
            "num_key_value_heads": 2,
            "use_bias": True,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
            **DROPOUT,
        },
        "all",
        norms=LAYER,
        eps="norm_epsilon",
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        names=Names(up="c_fc", down="c_proj"),
        gate=False,
    ),
    "stablelm": Family(
        {
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "max_position_embeddings": 4096,
            **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
        },
        norms=LAYER,
        eps="layer_norm_eps",
        query_key_norm="modules",
        query_key_if="qk_layernorm",
        qkv_bias="use_qkv_bias",
        output_bias=False,
        names=Names(query_norm="q_layernorm", key_norm="k_layernorm"),
        partial=True,
        parallel="use_parallel_residual",
    ),
    "helium": Family(
        {
            "rms_norm_eps": 1e-8,
            "rope_theta": 100_000.0,
            "head_dim": 128,
            "num_key_value_heads": 20,
            "max_position_embeddings": 4096,
        },
        output_bias=False,
        mlp_bias="mlp_bias",
        interleaved=True,
    ),
    "nemotron": Family(
        {
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 4096,
            "initializer_range": 0.0134,
        },
        norms=LAYER,
        norm_offset=1.0,
        eps="norm_eps",
        mlp_bias="mlp_bias",
        gate=False,
        partial=True,
    ),
    "ministral": Family(MISTRAL, "named", qkv_bias=False, output_bias=False),
    "ministral3": Family(
        {
            **MISTRAL,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "max_position_embeddings": 262_144,
            "rope_parameters": MINISTRAL3_ROPE,
        },
        "all",
        qkv_bias=False,
        output_bias=False,
        factors=("llama_4_scaling_beta",),
    ),
    "apertus": Family(
        {
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 65_536,
            "rope_theta": 12_000_000.0,
            "rope_parameters": APERTUS_ROPE,
        },
        norms=Norms("attention_layernorm", None, "feedforward_layernorm"),
        query_key_norm="head",
        gate=False,
        facts={"qk_norm": True},
    ),
    "phi": Family(
        {
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "qk_layernorm": False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0),
        },
        norms=Norms("input_layernorm", None, None, None, "final_layernorm", "layer", biases=True),
        eps="layer_norm_eps",
        query_key_norm="head",
        query_key_if="qk_layernorm",
        query_key_biases=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        names=PHI,
        gate=False,
        partial=True,
        parallel=True,
    ),
}
