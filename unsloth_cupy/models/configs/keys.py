"""Keys of config.json: keys that are read, keys without effect, and default values."""

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
# Keys that some family reads.  If a class in transformers ignores a key, its family does too.
READ = {
    *COMMON,
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_activation"),
    *("layer_types", "sliding_window", "sliding_window_pattern", "use_sliding_window"),
    *("max_window_layers", "rope_parameters", "rope_scaling", "rope_local_base_freq"),
    *("partial_rotary_factor", "original_max_position_embeddings", "is_causal"),
    "use_bidirectional_attention",
    *("eos_token_id", "pad_token_id", "quantization_config"),
}
# Keys that do not change the logits of a language model: metadata of the file, other tokens,
# outputs of calls, generation, heads of classifiers.
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
# Values with which other keys have no effect.  None, False, [] and {} have no effect for any key.
WITHOUT_EFFECT = {
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "embd_pdrop"), 0),
    **dict.fromkeys(("hidden_dropout", "hidden_dropout_prob", "resid_pdrop"), 0),
    **dict.fromkeys(("embedding_multiplier", "logit_scale", "logits_scaling"), 1),
    **dict.fromkeys(("lm_head_multiplier", "residual_multiplier"), 1),
}
