"""Encoders: models without a causal mask, whose states are pooled or classified."""

from collections.abc import Mapping

from .config import Names, Norms
from .family import AROUND, Family

ENCODERS: Mapping[str, Family] = {
    "bert": Family(
        {
            **{"layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2},
            **{"max_position_embeddings": 512, "tie_word_embeddings": True},
        },
        norms=Norms(
            None,
            "attention.output.LayerNorm",
            None,
            "output.LayerNorm",
            last=None,
            kind="layer",
            biases=True,
        ),
        post_norm=True,
        embedding_norm="embeddings.LayerNorm",
        eps="layer_norm_eps",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        names=Names(
            **{"attention": "attention", "output": "output.dense", "query": "self.query"},
            **{"key": "self.key", "value": "self.value", "up": "intermediate.dense"},
            **{"mlp": "", "down": "output.dense"},
            embeddings="embeddings.word_embeddings.weight",
        ),
        gate=False,
        rotates="none",
        facts={
            **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), ...),
            **{"position_embedding_type": "absolute", "gradient_checkpointing": ...},
            **dict.fromkeys(("pooler_fc_size", "pooler_num_attention_heads", "pooler_type"), ...),
            **dict.fromkeys(
                ("pooler_num_fc_layers", "pooler_size_per_head", "directionality"), ...
            ),
        },
        left_out=r"cls\.|model\.embeddings\.position_ids$",
        encoder=True,
        classifier="pooler",
        learned=True,
    ),
    "modernbert": Family(
        {
            **{"norm_eps": 1e-5, "norm_bias": False, "hidden_activation": "gelu"},
            **{"local_attention": 128, "global_attn_every_n_layers": 3, "layer_types": None},
            **{"rope_theta": 160_000.0, "rope_local_base_freq": 10_000.0},
            **{"classifier_pooling": "cls", "classifier_bias": False},
            **{"classifier_activation": "gelu", "max_position_embeddings": 8192},
            **{"global_rope_theta": None, "local_rope_theta": None, "tie_word_embeddings": True},
        },
        "typed",
        norms=Norms("attn_norm", before_mlp="mlp_norm", last="final_norm", kind="layer"),
        embedding_norm="embeddings.norm",
        first_norm=False,
        norm_bias_if="norm_bias",
        eps="norm_eps",
        mlp_bias="mlp_bias",
        names=Names(
            **{"attention": "attn", "qkv": "Wqkv", "output": "Wo", "gate_up": "Wi", "down": "Wo"},
            embeddings="embeddings.tok_embeddings.weight",
        ),
        fused=("qkv", "mlp"),
        activation="hidden_activation",
        facts={
            **dict.fromkeys(("attention_dropout", "embedding_dropout", "mlp_dropout"), ...),
            **dict.fromkeys(("decoder_bias", "deterministic_flash_attn", "layer_norm_eps"), ...),
            **dict.fromkeys(("sparse_prediction", "sparse_pred_ignore_index"), ...),
            **dict.fromkeys(
                ("initializer_cutoff_factor", "cls_token_id", "classifier_dropout"), ...
            ),
            **dict.fromkeys(("reference_compile", "repad_logits_with_grad"), ...),
            "position_embedding_type": ...,
        },
        left_out=r"decoder\.|lm_head\.",
        encoder=True,
        classifier="head",
    ),
    "embedding_gemma2_text": Family(
        {
            **{"head_dim": 256, "num_key_value_heads": 2, "num_attention_heads": 4},
            **{"global_head_dim": 512, "num_global_key_value_heads": 1, "sliding_window": 512},
            **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262_144},
            **{"hidden_size_per_layer_input": 512, "embedding_dim": 768},
            **{"attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False},
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            },
        },
        "typed",
        norms=AROUND,
        activation="hidden_activation",
        names=Names(inputs="ple.", own_input="ple_block."),
        scaled_embedding=True,
        query_key_norm="head",
        local=True,
        value_norm=True,
        layer_scalar=True,
        scaled_scores=False,
        by_layer=True,
        encoder=True,
        radius=True,
        projected="embedding_dim",
    ),
}
