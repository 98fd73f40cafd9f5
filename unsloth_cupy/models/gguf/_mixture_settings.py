"""Keys of config.json for experts, latent attention and recurrent layers, from a file's keys."""

from collections.abc import Mapping
from typing import Any

from ..configs.config import FULL, LINEAR, MLP
from ..configs.mixtures import Mixture
from ._families import CHUNK, GROWTH, UNNORMED, Architecture, Mixtures
from ._keys import Keys, shortest
from ._metadata import GATING


def latent_settings(keys: Keys, known: Architecture, heads: int, hidden: int) -> dict[str, Any]:
    """Return the keys of latent attention; raise if other keys of the file contradict them."""
    rank, rotated = keys.need("attention.kv_lora_rank"), keys.left.get("rope.dimension_count", 0)
    if known.absorbed:
        lengths = {"key_length": rank + rotated, "value_length": rank, "head_count_kv": 1}
        length, value = (keys.need(f"attention.{name}_length_mla") for name in ("key", "value"))
    else:
        length = keys.need("attention.key_length")
        value = keys.take("attention.value_length") or hidden // heads
        lengths = {"head_count_kv": heads}
    for key, size in lengths.items():
        if (actual := keys.take(f"attention.{key}")) not in (None, size):
            keys.refuse(f"{keys.name}.attention.{key} is {actual}, not {size}")
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": keys.take("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": length - rotated,
        "v_head_dim": value,
    }


def indexer_settings(keys: Keys, layers: int, listed: bool) -> dict[str, Any]:
    """Return the keys of the indexer of sparse attention, which some layers may not have."""
    names = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k"}
    values = {ours: keys.need(f"attention.indexer.{name}") for ours, name in names.items()}
    types = keys.left.pop("attention.indexer.types", None)
    if listed:
        full = types[:layers] if isinstance(types, list) else [True] * layers
        values["indexer_types"] = ["full" if each else "shared" for each in full]
    return values


def layer_settings(keys: Keys, layers: int, *, single: bool, other: str = LINEAR) -> dict[str, Any]:
    """Return the types of layers, from the number of KV heads in each layer of the file.

    Lists in ``keys`` that are 0 in some layers are replaced by the value of the other layers.
    ``other`` is the type of layers without attention.
    """
    lists = {}
    for key in ("attention.head_count_kv", "feed_forward_length"):
        value = keys.left.get(key) or 0
        lists[key] = value[:layers] if isinstance(value, list) else [value] * layers
        keys.left[key] = max(lists[key])
    mlp = "moe" if keys.left.get("expert_count") else MLP
    types = [
        FULL if heads else mlp if size and single else other
        for heads, size in zip(*lists.values(), strict=False)
    ]
    return {"layers_block_type" if single else "layer_types": types}


def sized_settings(keys: Keys, layers: int, pattern: Any) -> dict[str, Any]:
    """Return the keys of sizes that differ among types of layers, or among layers.

    In ``keys``, the sizes of layers with a window replace the sizes of all layers.
    """
    slides = pattern[:layers] if isinstance(pattern, list) else []
    if len(slides) < layers:
        keys.refuse(f"{keys.name}.attention.sliding_window_pattern must list {layers} layers")
    shared = keys.take("attention.shared_kv_layers") or 0
    heads, inner = (
        keys.of_layers(key, layers) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    wide = bool(shared) and inner == [*inner[:1] * (layers - shared), *[2 * inner[0]] * shared]
    if not wide and len({*inner}) > 1:
        keys.refuse(f"{keys.name}.feed_forward_length is {inner}")
    full, sliding = (_head_dim(keys, suffix) for suffix in ("", "_swa"))
    both = [{n for n, own in zip(heads, slides, strict=True) if own == kind} for kind in (0, 1)]
    if max(map(len, both)) > 1:
        keys.refuse(f"{keys.name}.attention.head_count_kv differs among layers of one type")
    own = {"head_dim": full, "num_key_value_heads": max(both[0], default=heads[0])}
    keys.left |= {"attention.key_length": sliding, "feed_forward_length": inner[0]}
    keys.left["attention.head_count_kv"] = max(both[1], default=heads[0])
    whole = [n for n, slide in enumerate(slides) if not slide]
    return {
        "per_layer_config": {str(layer): own for layer in whole},
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in keys.file.tensors
            for layer in whole
            if layer < layers - shared
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": keys.take("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": keys.file.tensors["token_embd.weight"].shape[0],
        "enable_moe_block": bool(keys.left.get("expert_count")),
    }


def _head_dim(keys: Keys, suffix: str) -> int:
    """Return the head dimension of layers of one type; values and rotation must have the same."""
    length: int = keys.need(f"attention.key_length{suffix}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.take(key + suffix)) not in (None, length):
            keys.refuse(f"{keys.name}.{key}{suffix} is {other}, not {length}")
    return length


def chunked_settings(keys: Keys, layers: int) -> dict[str, Any]:
    """Return the keys of layers with chunks, which llama.cpp does not read from a file."""
    if keys.left.pop("attention.sliding_window", None) == 0:
        keys.refuse(f"{keys.name}.attention.sliding_window is 0: a model without chunks")
    scale, length = GROWTH
    return {
        "attention_chunk_size": CHUNK,
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        **{"attn_temperature_tuning": True, "attn_scale": scale, "floor_scale": length},
        "use_qk_norm": keys.left.get("expert_count") != UNNORMED,
    }


def conv_settings(keys: Keys, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of layers with a short convolution; a file has the inner size as it is."""
    sizes: dict[str, Any] = {"conv_L_cache": keys.need("shortconv.l_cache")}
    adjusts = "block_auto_adjust_ff_dim"
    return {**sizes, adjusts: False} if adjusts in defaults else sizes


def kimi_settings(keys: Keys, heads: int) -> dict[str, Any]:
    """Return the keys of layers with a delta rule that has a decay for each channel."""
    taps, dim = keys.need("ssm.conv_kernel"), keys.need("kda.head_dim")
    sizes = {"linear_conv_kernel_dim": taps, "linear_head_dim": dim}
    return {**sizes, "linear_num_heads": heads}


def delta_settings(keys: Keys, layers: int) -> dict[str, Any]:
    """Return the keys of layers with a delta rule."""
    heads, size = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size")
    linear = keys.left.pop("attention.recurrent_layers", None)
    every = keys.take("full_attention_interval") or 4
    if not isinstance(linear, list):
        linear = [(layer + 1) % every != 0 for layer in range(layers)]
    keys.left.pop("rope.dimension_sections", None)  # for images only
    return {
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": size // heads,
        "layer_types": [LINEAR if each else FULL for each in linear[:layers]],
    }


def space_settings(keys: Keys, names: Mapping[str, str], hidden: int) -> dict[str, Any]:
    """Return the keys of layers with the recurrence of Mamba2, named as in a family."""
    heads, inner = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size")
    sizes = {
        **{"heads": heads, "dim": inner // heads, "expand": inner / hidden, "inner": inner},
        "groups": keys.need("ssm.group_count"),
        "state": keys.need("ssm.state_size"),
        "taps": keys.need("ssm.conv_kernel"),
    }
    return {names[size]: value for size, value in sizes.items() if size in names}


def mamba_settings(keys: Keys, names: Mapping[str, str], hidden: int) -> dict[str, Any]:
    """Return the keys of layers with the recurrence of Mamba, named as in a family."""
    inner = keys.need("ssm.inner_size")
    sizes = {
        **{"expand": inner // hidden, "inner": inner, "rank": keys.need("ssm.time_step_rank")},
        **{"state": keys.need("ssm.state_size"), "taps": keys.need("ssm.conv_kernel")},
    }
    return {names[size]: value for size, value in sizes.items() if size in names}


def periodic(keys: Keys, kind: str, chosen: list[int], layers: int) -> dict[str, int]:
    """Return the keys for the chosen layers: every n-th from one on; raise for other layers."""
    first = chosen[0] if chosen else layers
    period = chosen[1] - first if len(chosen) > 1 else max(layers, first + 1)
    if first >= period or chosen != [*range(first, layers, period)]:
        keys.refuse(f"its layers with {kind} are {chosen}, not every n-th")
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": first}


def mixture_settings(keys: Keys, rules: Mixture, known: Mixtures) -> dict[str, Any]:
    """Return the keys of a mixture of experts."""
    count, k = keys.need("expert_count"), keys.need("expert_used_count")
    values: dict[str, Any] = {rules.count[0]: count, rules.k[0]: k}
    size = keys.take("expert_feed_forward_length")
    if rules.inner != "intermediate_size":
        size = size or keys.refuse(f"{keys.name}.expert_feed_forward_length is missing")
    if size:
        values[rules.inner] = size
    whole, number = (keys.take(f"expert_shared_{n}") for n in ("feed_forward_length", "count"))
    if known.shared not in (None, "same") and len(rules.shared) == 1:
        values[rules.shared[0]] = whole or 0
    elif known.shared not in (None, "same"):
        values[rules.shared[1]] = whole // size if whole else number or 0
    if rules.latent and (latent := keys.take("moe_latent_size")):
        values[rules.latent] = latent
    return values | _layers(keys, rules, known) | _scores(keys, rules, known)


def _layers(keys: Keys, rules: Mixture, known: Mixtures) -> dict[str, Any]:
    """Return the keys that choose the layers with experts."""
    leading = keys.take("leading_dense_block_count") or 0
    if known.dense == "periodic":
        names = [name.split(".") for name in keys.file.tensors if name.startswith("blk.")]
        chosen = sorted(int(number) for _, number, part, *_ in names if part == "ffn_gate_inp")
        return periodic(keys, "expert", chosen, 1 + max(int(name[1]) for name in names))
    if known.dense == "leading":
        return {rules.first: leading}
    if known.dense == "every":
        return {"interleave_moe_layer_step": keys.need("interleave_moe_layer_step")}
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
