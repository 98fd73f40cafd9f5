"""The keys of config.json of mixtures, latent attention and delta rules, from a file's."""

from typing import Any

from ..configs.config import FULL, LINEAR
from ..configs.mixtures import Mixture
from ._families import Architecture, Mixtures
from ._keys import Keys, shortest
from ._metadata import GATING


def latent_settings(keys: Keys, known: Architecture, heads: int, hidden: int) -> dict[str, Any]:
    """Return the keys of latent attention; a file may also have the lengths of a cache's heads."""
    rank, rotated = keys.need("attention.kv_lora_rank"), keys.left.get("rope.dimension_count", 0)
    if known.absorbed:
        lengths = {"key_length": rank + rotated, "value_length": rank, "head_count_kv": 1}
        length, value = (keys.need(f"attention.{name}_length_mla") for name in ("key", "value"))
    else:
        length = keys.need("attention.key_length")
        value = keys.take("attention.value_length") or hidden // heads
        lengths = {"head_count_kv": heads}
    for key, size in lengths.items():
        if (found := keys.take(f"attention.{key}")) not in (None, size):
            keys.refuse(f"{keys.name}.attention.{key} is {found}, not {size}")
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": keys.take("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": length - rotated,
        "v_head_dim": value,
    }


def delta_settings(keys: Keys, layers: int) -> dict[str, Any]:
    """Return the keys of layers with a delta rule."""
    heads, size = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size")
    linear = keys.left.pop("attention.recurrent_layers", None)
    every = keys.take("full_attention_interval") or 4
    if not isinstance(linear, list):
        linear = [(layer + 1) % every != 0 for layer in range(layers)]
    keys.left.pop("rope.dimension_sections", None)  # of an image
    return {
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": size // heads,
        "layer_types": [LINEAR if each else FULL for each in linear[:layers]],
    }


def space_settings(keys: Keys, hidden: int) -> dict[str, Any]:
    """Return the keys of layers with the recurrence of Mamba2; there are no others."""
    heads, inner = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size")
    return {
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // hidden,
        "n_groups": keys.need("ssm.group_count"),
        "state_size": keys.need("ssm.state_size"),
        "conv_kernel": keys.need("ssm.conv_kernel"),
        **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), 1),
    }


def mixture_settings(keys: Keys, rules: Mixture, known: Mixtures) -> dict[str, Any]:
    """Return the keys of a mixture of experts."""
    count, k = keys.need("expert_count"), keys.need("expert_used_count")
    values: dict[str, Any] = {rules.count[0]: count, rules.k[0]: k}
    size = keys.take("expert_feed_forward_length")
    if rules.inner != "intermediate_size":
        size = size or keys.refuse(f"{keys.name}.expert_feed_forward_length is missing")
        values[rules.inner] = size
    whole, number = (keys.take(f"expert_shared_{n}") for n in ("feed_forward_length", "count"))
    if known.shared is not None and len(rules.shared) == 1:
        values[rules.shared[0]] = whole or 0
    elif known.shared is not None:
        values[rules.shared[1]] = whole // size if whole else number or 0
    return values | _layers(keys, rules) | _scores(keys, rules, known)


def _layers(keys: Keys, rules: Mixture) -> dict[str, Any]:
    """Return the keys that say which layers have experts."""
    leading = keys.take("leading_dense_block_count") or 0
    if rules.layers == "late":
        return {"first_k_dense_replace": leading}
    if rules.layers == "between":
        step = keys.take("interleave_moe_layer_step") or 1
        ends = {"moe_layer_start_index": leading, "moe_layer_end_index": -1}
        return {**ends, "moe_layer_interval": step}
    if leading:
        keys.refuse(f"{keys.name}.leading_dense_block_count is {leading}")
    return {}


def _scores(keys: Keys, rules: Mixture, known: Mixtures) -> dict[str, Any]:
    """Return the keys of a router."""
    values: dict[str, Any] = {}
    groups = [keys.take(f"expert_group_{name}") or 1 for name in ("count", "used_count")]
    if rules.grouped is True:
        values |= dict(zip(("n_group", "topk_group"), groups, strict=True))
    elif groups[0] != 1:
        keys.refuse(f"{keys.name}.expert_group_count is {groups[0]}")
    scores = keys.take("expert_gating_func") or GATING.get(known.scores)
    if scores != GATING.get(known.scores):
        keys.refuse(f"{keys.name}.expert_gating_func is {scores}, not {known.scores}")
    normalized = keys.take("expert_weights_norm")
    if isinstance(rules.normalize, str):
        own = known.normalize
        values[rules.normalize] = bool(normalized) if own is None else own
    elif normalized is not None and bool(normalized) != rules.normalize:
        keys.refuse(f"{keys.name}.expert_weights_norm is {normalized}")
    factor = shortest(keys.take("expert_weights_scale") or 1.0)
    if rules.scale is not None:
        values[rules.scale] = factor
    elif factor != 1:
        keys.refuse(f"{keys.name}.expert_weights_scale is {factor}")
    return values
