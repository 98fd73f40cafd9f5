"""Properties of each model family that its config.json does not state, and default values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import OWN_NAMES, Names, Norms
from .mixtures import (
    DEEPSEEK2,
    ERNIE,
    GPT_OSS,
    GRANITE,
    KEYS,
    LISTED,
    MINIMAX,
    MIXTRAL,
    NOISE,
    OLMOE,
    PHIMOE,
    QWEN2,
    QWEN3,
    QWEN35,
    STEPPED,
    Mixture,
)
from .mixtures import (
    GLM4 as GLM4_EXPERTS,
)

BEFORE = Norms()
AROUND = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
LAYER = Norms(kind="layer", biases=True)
COHERE = Norms("input_layernorm", None, None, None, kind="layer")
GLM4 = Norms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)
PHI = Names("dense", "fc1", "fc2", "q_layernorm", "k_layernorm")


@dataclass(frozen=True)
class Family:
    """One model type.  ``defaults`` are the values of keys that a config.json may leave out.

    A property that a string names is the value of that key.  ``windows`` says which layers see
    only a window of keys: none, all, flagged (all if use_sliding_window), the late ones (from
    max_window_layers on), every second one of the early ones, or most (all but every
    sliding_window_pattern-th); with linear all but every full_attention_interval-th have no
    attention.  ``rotates`` says which layers rotate queries and keys: all, those that
    no_rope_layers lists with 1, the sliding ones, or these where there is a window.  ``facts`` are
    keys that say what the family has anyway; ... stands for any value.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"  # none, all, flagged, late, early or most
    norms: Norms = BEFORE
    norm_offset: float = 0.0
    eps: str | float = "rms_norm_eps"
    scaled_embedding: bool = False
    query_key_norm: str | None = None
    query_key_if: str | bool = True
    query_key_biases: bool = False
    rotated_first: bool = False
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    head_bias: str | bool = False
    fused: tuple[str, ...] = ()
    sub_norms: bool = False
    names: Names = OWN_NAMES
    gate: bool = True
    interleaved: str | bool = False
    local: bool = False  # sliding layers keep their positions where rope_scaling stretches others
    of_rope: tuple[str, ...] = ()  # keys of rope_parameters that it alone reads
    partial: bool = False  # partial_rotary_factor also counts where rope_type is default
    rotates: str = "all"  # all, listed, sliding or windowed
    parallel: str | bool = False
    obeys: tuple[str, ...] = ()  # keys that scale, cap or clip, if it reads them
    facts: Mapping[str, Any] = field(default_factory=dict)
    sinks: bool = False
    experts: Mixture | None = None
    left_out: str = ""  # of the names of tensors in files: a pattern
    delta: str | None = None  # fused or split: the projections of layers with a delta rule
    gated: bool = False  # the output of attention
    latent: bool = False  # attention with short vectors of keys and values


COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
}
# Keys that some family reads; a family whose class in transformers ignores one ignores it too.
READ = {
    *COMMON,
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_activation"),
    *("layer_types", "sliding_window", "sliding_window_pattern", "use_sliding_window"),
    *("max_window_layers", "rope_parameters", "rope_scaling", "rope_local_base_freq"),
    *("partial_rotary_factor", "original_max_position_embeddings", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    *("eos_token_id", "pad_token_id", "quantization_config"),
}
# Keys that do not change what a model computes from tokens: facts about the file, other tokens,
# what calls return, generation, the heads of classifiers.
NEUTRAL = {
    *(
        "architectures",
        "auto_map",
        "cache_implementation",
        "dtype",
        "finetuning_task",
        "is_llama_config",
    ),
    *(
        "name_or_path",
        "model_max_length",
        "max_sequence_length",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
    ),
    *("transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
    *("begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "sep_token_id", "suppress_tokens", "unk_token_id"),
    *("attn_implementation", "chunk_size_feed_forward", "gradient_checkpointing", "is_decoder"),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pretraining_tp",
        "return_dict",
    ),
    *("return_dict_in_generate", "tf_legacy_loss", "use_bfloat16", "use_cache"),
    *("bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "length_penalty"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "max_length"),
    *("max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
    *("num_return_sequences", "remove_invalid_values", "repetition_penalty", "temperature"),
    *("top_k", "top_p", "typical_p", "prefix", "task_specific_params"),
    *("classifier_dropout", "id2label", "label2id", "num_labels", "problem_type"),
}
# Values of other keys with which they change nothing; None, False, [] and {} are such for any key.
WITHOUT_EFFECT = {
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "embd_pdrop"), 0),
    **dict.fromkeys(("hidden_dropout", "hidden_dropout_prob", "resid_pdrop"), 0),
    **dict.fromkeys(("embedding_multiplier", "logit_scale", "logits_scaling"), 1),
    **dict.fromkeys(("lm_head_multiplier", "residual_multiplier"), 1),
}
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
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = {
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
# Dropout of these is that of their pretraining, which released checkpoints name.
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
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
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
    "of_rope": ("mrope_section", "mrope_interleaved"),  # of an image: those of a text are equal
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
HEAD_DIM: Mapping[str, Any] = {"qk_head_dim": ...}  # the sum of two that are read
ROUTER: Mapping[str, Any] = {"aux_loss_alpha": ..., "seq_aux": ..., "moe_layer_freq": 1, **HEAD_DIM}
FURTHER = dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "ep_size"), ...)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "mistral": Family(MISTRAL, "all", qkv_bias=False, output_bias=False),
    "qwen2": Family(QWEN, "late", qkv_bias=True, output_bias=False),
    "qwen3": Family({**QWEN, "head_dim": 128}, "late", query_key_norm="head"),
    "gemma": Family({**GEMMA, "num_key_value_heads": 16}, norm_offset=1.0, scaled_embedding=True),
    "gemma2": Family(
        {**GEMMA, **GEMMA2},
        "most",
        AROUND,
        norm_offset=1.0,
        scaled_embedding=True,
        obeys=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": Family(
        {**GEMMA, **GEMMA3},
        "most",
        AROUND,
        norm_offset=1.0,
        scaled_embedding=True,
        query_key_norm="head",
        obeys=("query_pre_attn_scalar", "final_logit_softcapping"),
    ),
    "vaultgemma": Family(
        {**GEMMA, **GEMMA2},
        "most",
        Norms("input_layernorm", None, "pre_feedforward_layernorm"),
        norm_offset=1.0,
        scaled_embedding=True,
        obeys=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
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
    "olmo3": Family(OLMO3, "most", AFTER, query_key_norm="projection", local=True),
    "olmo": Family(norms=Norms(kind="layer", weights=False), eps=1e-5, obeys=("clip_qkv",)),
    "granite": Family(GRANITE_FACTORS, mlp_bias="mlp_bias", obeys=tuple(GRANITE_FACTORS)),
    "cohere": Family(
        {**COHERE_KEYS, "rope_theta": 500_000.0, "use_qk_norm": False},
        norms=COHERE,
        eps="layer_norm_eps",
        query_key_norm="heads",
        query_key_if="use_qk_norm",
        interleaved=True,
        parallel=True,
        obeys=("logit_scale",),
        facts={"pretraining_tp": ..., "model_max_length": ...},
    ),
    "cohere2": Family(
        {**COHERE_KEYS, "sliding_window": 4096, "sliding_window_pattern": 4},
        "most",
        COHERE,
        eps="layer_norm_eps",
        interleaved=True,
        rotates="sliding",
        parallel=True,
        obeys=("logit_scale",),
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
        names=Names(query_norm="query_layernorm", key_norm="key_layernorm"),
        rotated_first=True,
        of_rope=("alpha",),
        facts={
            **dict.fromkeys(("eod_token_id", "org_vocab_size", "cla_share_factor"), ...),
            **dict.fromkeys(("pad_id", "eod_id", "im_start_id", "im_end_id"), ...),
            **dict.fromkeys(("mask_init_id", "text_start_id", "text_end_id"), ...),
            **{"use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms"},
            "num_experts": 1,
        },
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
        AFTER,
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
        LAYER,
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
        obeys=("llama_4_scaling_beta",),
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
    "mixtral": Family(
        {
            **MISTRAL,
            **KEYS,
            **NOISE,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
        },
        "all",
        qkv_bias=False,
        output_bias=False,
        experts=MIXTRAL,
    ),
    "qwen3_moe": Family(
        {**QWEN, **STEPPED, "num_key_value_heads": 4},
        "flagged",
        query_key_norm="head",
        experts=QWEN3,
    ),
    "qwen2_moe": Family(
        {
            **QWEN,
            **STEPPED,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "qkv_bias": True,
        },
        "early",
        qkv_bias="qkv_bias",
        output_bias=False,
        experts=QWEN2,
    ),
    "gpt_oss": Family(
        {
            **KEYS,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "max_position_embeddings": 131_072,
            "rope_theta": 150_000.0,
            "rope_parameters": GPT_OSS_ROPE,
        },
        "most",
        facts=dict.fromkeys(("experts_per_token", "initial_context_length"), ...),
        sinks=True,
        experts=GPT_OSS,
    ),
    "olmoe": Family(
        {
            **KEYS,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
            "max_position_embeddings": 4096,
        },
        query_key_norm="projection",
        obeys=("clip_qkv",),
        experts=OLMOE,
    ),
    "granitemoe": Family(
        {**GRANITE_FACTORS, **KEYS}, obeys=tuple(GRANITE_FACTORS), experts=GRANITE
    ),
    "phimoe": Family(
        {
            **KEYS,
            "router_jitter_noise": 0.01,
            "input_jitter_noise": 0.0,
            "num_local_experts": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "lm_head_bias": False,
            "max_position_embeddings": 131_072,
        },
        "all",
        LAYER,
        of_rope=("short_mscale", "long_mscale"),
        head_bias="lm_head_bias",
        experts=PHIMOE,
    ),
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
            "intermediate_size": 512,  # of dense layers, which it has none of
        },
        delta="split",
        experts=QWEN35,
        **HYBRID,
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
        experts=GLM4_EXPERTS,
        left_out=r"model\.layers\.61\.",
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
        obeys=("scale_emb", "scale_depth", "dim_model_base"),
        facts=HEAD_DIM,
        latent=True,
    ),
    "glm4_moe": Family(
        {
            **GLM,
            **KEYS,
            "attention_bias": False,
            "head_dim": None,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
        },
        query_key_norm="head",
        query_key_if="use_qk_norm",
        output_bias=False,
        partial=True,
        facts=dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), ...),
        experts=GLM4_EXPERTS,
        left_out=r"model\.layers\.(46|92)\.",
    ),
    "ernie4_5_moe": Family(
        {
            **KEYS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "use_bias": False,
            "moe_intermediate_size": 1536,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        head_bias="use_bias",
        interleaved=True,
        facts={
            **dict.fromkeys(("moe_capacity", "num_nextn_predict_layers"), ...),
            **{"moe_gate": "topk", "moe_use_aux_free": True, "use_rmsnorm": True},
        },
        experts=ERNIE,
        left_out=r".*\bmtp",
    ),
    "minimax_m2": Family(
        {
            **KEYS,
            **NOISE,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5_000_000.0,
            "rotary_dim": None,
            "max_position_embeddings": 196_608,
        },
        query_key_norm="projection",
        qkv_bias=False,
        output_bias=False,
        partial=True,
        facts={
            **dict.fromkeys(("mlp_intermediate_size", "num_mtp_modules"), ...),
            **dict.fromkeys(("mtp_transformer_layers", "use_mtp"), ...),
            **dict.fromkeys(("attn_type_list", "shared_moe_mode"), ...),
            **dict.fromkeys(("layernorm_full_attention_beta", "layernorm_mlp_beta"), 1.0),
            **{"layernorm_linear_attention_beta": 1.0, "swa_rope_theta": -1.0},
            **dict.fromkeys(("use_qk_norm", "use_routing_bias"), True),
            **{"qk_norm_type": "per_layer", "scoring_func": "sigmoid"},
            "shared_intermediate_size": 0,
        },
        experts=MINIMAX,
    ),
}
