"""The keys of Kimi Linear and Ling: the released form in terms of transformers' form."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.call import check_entries
from ...errors import ConfigError
from .config import FULL, LINEAR
from .reading import MOST_OF

KEYS = {
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
    "layer_group_size": "full_attention_interval",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
OF_LINEAR = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
TYPES = {"full_attn_layers": FULL, "kda_layers": LINEAR}  # lists of layers, counted from 1


def of_kimi(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the keys of transformers' form.

    In Ling, head_dim is the size of linear heads; in folders that transformers saved, this is
    linear_head_dim, and head_dim is the rotated part of other heads.

    Raises
    ------
    ConfigError
        linear_attn_config has an unknown key, or does not list each layer once.
    """
    read = {KEYS[key]: value for key, value in values.items() if key in KEYS}
    read |= {key: value for key, value in values.items() if key not in KEYS}
    if defaults["linear_num_heads"] is None:  # as many as other heads
        read.setdefault("linear_num_heads", read.get("num_attention_heads"))
        dim = read.pop("head_dim", defaults["linear_head_dim"])
        read.setdefault("linear_head_dim", dim)
    layers = read.get("num_hidden_layers")
    first = read.pop("first_k_dense_replace", defaults["first_k_dense_replace"])
    if type(layers) is not int or layers > MOST_OF["num_hidden_layers"]:
        return read  # invalid: the caller raises
    if read.get("mlp_layer_types") is None and type(first) is int:
        read["mlp_layer_types"] = ["dense" if n < first else "sparse" for n in range(layers)]
    check_entries("config", read, {"linear_attn_config": Mapping | None})
    linear = read.pop("linear_attn_config", None) or {}
    check_entries("config: linear_attn_config", linear, dict.fromkeys(TYPES, Sequence[int]))
    if unread := sorted(linear.keys() - OF_LINEAR.keys() - TYPES.keys()):
        raise ConfigError(f"config: linear_attn_config.{unread[0]} is not read; remove it")
    read |= {OF_LINEAR[key]: value for key, value in linear.items() if key in OF_LINEAR}
    if read.get("layer_types") is None and TYPES.keys() <= linear.keys():
        types = {layer: kind for key, kind in TYPES.items() for layer in linear[key]}
        if sorted(types) != [*range(1, layers + 1)]:
            problem = f"linear_attn_config lists {len(types)} of {layers} layers"
            raise ConfigError(f"config: {problem}; it must list each once, counted from 1")
        read["layer_types"] = [types[layer] for layer in range(1, layers + 1)]
    return read
