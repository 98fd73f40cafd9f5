"""Properties of each model family that its config.json does not state, and default values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import Norms

BEFORE = Norms()
AROUND = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    """One model type.  ``defaults`` are the values of keys that a config.json may leave out.

    ``windows`` says which layers see only a window of keys: none, all, the late ones (from
    max_window_layers on), or most (all but every sliding_window_pattern-th).
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"  # none, all, late or most
    norms: Norms = BEFORE
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    query_key_norm: str | None = None
    qkv_bias: bool | None = None  # None: the value of attention_bias
    output_bias: bool | None = None
    fused: bool = False
    sub_norms: bool = False
    obeys: tuple[str, ...] = ()  # keys that scale or cap scores and logits, if it reads them


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
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(MISTRAL, "all"),
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
    "phi3": Family(PHI3, "all", qkv_bias=False, output_bias=False, fused=True),
    "olmo2": Family({"rms_norm_eps": 1e-5}, norms=AFTER, query_key_norm="projection"),
    "bitnet": Family(BITNET, sub_norms=True),
}
