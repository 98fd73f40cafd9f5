"""The hyperparameters of a model under the keys of llama.cpp."""

import math
from collections.abc import Iterable
from typing import Any

from ...core.dtypes import FLOAT32
from ...ops.position.rope_tables import RULES
from ..configs.config import (
    BUFFERS,
    MLP,
    SLIDING,
    Config,
    Delta,
    Experts,
    Indexer,
    Latent,
    Rope,
)
from ..configs.mamba import Mamba
from ..configs.state_space import StateSpace
from . import MODULES
from ._families import (
    BETAS,
    Architecture,
    Mixtures,
    dense_layers,
    file_window,
    full_heads,
    ropes,
    scaling_of,
    step_of,
)
from ._types import Read

EPSILON = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}
ORIGINAL = "rope.scaling.original_context_length"
LOG = 0.1  # llama.cpp divides latent attention's yarn_log_multiplier by it
GATING = {"softmax": 1, "sigmoid": 2}  # numbers of llama.cpp's gating functions
Values = dict[str, Any]  # types in the file: int is uint32, float is float32, others are unchanged


def metadata(config: Config, known: Architecture, read: Read) -> Values:
    """Return the hyperparameters by their full keys; ``read`` returns parameters that are keys."""
    rope, local = ropes(config)
    both = config.model_type == "nemotron_h"  # llama.cpp requires both, and computes RMS norms only
    epsilons = EPSILON.values() if both else [EPSILON[config.norms.kind]]
    values: Values = {
        "vocab_size": config.vocab,
        "context_length": config.positions,
        "embedding_length": config.hidden,
        "block_count": config.layers,
        **dict.fromkeys(epsilons, float(config.eps)),
    }
    if known.listed or any(map(config.attends, range(config.layers))):
        values |= _of_attention(config, rope)
    else:  # llama.cpp requires both
        values |= dict.fromkeys(("feed_forward_length", "attention.head_count"), 0)
    values |= _of_blocks(config, known)
    values |= _of_layers(config, known, values)
    values |= _of_types(config, local) if known.sized else {}
    values |= _of_windows(config, known, local)
    if known.softcap:
        values["attn_logit_softcapping"] = config.softcap
    if config.logit_softcap is not None or known.sized:  # without the key, llama.cpp caps at 30
        values["final_logit_softcapping"] = config.logit_softcap or 0.0
    if known.scales:
        values["embedding_scale"] = float(config.embedding_scale)
        values["residual_scale"] = float(config.residual_scale)
        values["attention.scale"] = float(config.scale)
    if known.logit_scale:  # Granite's is a divisor
        values["logit_scale"] = float(
            1 / config.logit_scale if known.scales else config.logit_scale
        )
    if config.clip is not None:
        values["attention.clamp_kqv"] = float(config.clip)
    if rope.growth is not None and known.temperature:
        values["attention.temperature_scale"] = float(rope.growth[0])
        length = "attention.temperature_length" if known.latent else ORIGINAL
        values[length] = int(rope.growth[1])
    values |= _scaling(rope, known)
    values |= {} if config.causal else {"attention.causal": False}
    for module in config.modules:
        values[f"{MODULES[module.path]}_feat_in"] = module.inputs
        values[f"{MODULES[module.path]}_feat_out"] = module.outputs
    named = {f"{known.name}.{key}": value for key, value in values.items()}
    for part in ("alpha_p", "alpha_n", *BUFFERS) if known.xielu else ():
        names = (f"model.layers.{layer}.mlp.act_fn.{part}" for layer in range(config.layers))
        named[f"xielu.{part}"] = [float(read(name).astype(FLOAT32).item()) for name in names]
    if config.token_types:
        named["tokenizer.ggml.token_type_count"] = config.token_types
    return named


def _of_windows(config: Config, known: Architecture, local: Rope) -> Values:
    """Return the keys of layers with a window."""
    values: Values = {}
    if config.window is not None or known.name == "phi3":  # 0 distinguishes it from older files
        values["attention.sliding_window"] = file_window(config) or 0
    sliding = [kind == SLIDING for kind in config.layer_types]
    if known.windows or len({*sliding}) > 1:  # llama.cpp reads it if the architecture has windows
        values["attention.sliding_window_pattern"] = sliding
    if known.windows:
        values["rope.freq_base_swa"] = float(local.base)
    return values


def _of_blocks(config: Config, known: Architecture) -> Values:
    """Return the keys of recurrent layers, latent attention and experts."""
    values: Values = {}
    if config.delta is not None:
        values |= _delta(config, config.delta, known)
    if config.space is not None:
        values |= _of_states(config.space)
    if config.mamba is not None:
        values |= _of_mamba(config.mamba)
    if config.conv is not None:
        values["shortconv.l_cache"] = config.conv.taps
    if config.latent is not None:
        values |= _latent(config, config.latent, known)
    if config.indexer is not None:
        values |= _indexer(config.indexer)
    if config.experts is not None and known.experts is not None:
        values |= _experts(config.experts, known.experts)
    return values


def _of_attention(config: Config, rope: Rope) -> Values:
    """Return the keys of attention with a dense MLP."""
    return {
        "feed_forward_length": config.inner,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.dim,
        "attention.value_length": config.dim,
        "rope.dimension_count": rope.dim,
        "rope.freq_base": float(rope.base),
    }


def _of_layers(config: Config, known: Architecture, values: Values) -> Values:
    """Return the keys with a value for each layer, and whether layers rotate."""
    keys: Values = {}
    if known.listed:
        heads = values["attention.head_count_kv"]
        attends = map(config.attends, range(config.layers))
        keys["attention.head_count_kv"] = [heads * each for each in attends]
    if known.listed and config.single:
        size = config.inner if config.experts is None else config.experts.inner
        mlps = [size * (kind == MLP) for kind in config.layer_types]
        keys["feed_forward_length"] = mlps
    if known.rotates == "either":
        keys["rope.scaling.finetuned"] = any(map(config.rotates, range(config.layers)))
    return keys


def _of_types(config: Config, local: Rope) -> Values:
    """Return the keys of sizes that differ among types of layers, or among layers."""
    layers, full = range(config.layers), full_heads(config)[1]
    sliding = config.other_heads[1] or config.dim
    return {
        "feed_forward_length": _of_each(map(config.inner_of, layers)),
        "attention.head_count_kv": _of_each(config.heads_of(layer)[0] for layer in layers),
        **dict.fromkeys(("attention.key_length", "attention.value_length"), full),
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), sliding),
        "rope.dimension_count_swa": local.dim,
        "attention.shared_kv_layers": config.shared_layers,
        "embedding_length_per_layer_input": config.layer_inputs[1],
    }


def _of_each(sizes: Iterable[int]) -> int | list[int]:
    """Return the sizes of layers, or one number if they are equal."""
    first, *others = sizes
    return [first, *others] if {*others} - {first} else first


def _of_states(space: StateSpace) -> Values:
    """Return the keys of layers with the recurrence of Mamba2."""
    return {
        "ssm.conv_kernel": space.taps,
        "ssm.state_size": space.state,
        "ssm.group_count": space.groups,
        "ssm.time_step_rank": space.heads,
        "ssm.inner_size": space.inner,
    }


def _of_mamba(rule: Mamba) -> Values:
    """Return the keys of layers with the recurrence of Mamba."""
    return {
        "ssm.conv_kernel": rule.taps,
        "ssm.state_size": rule.state,
        "ssm.time_step_rank": rule.rank,
        "ssm.inner_size": rule.inner,
    }


def _delta(config: Config, delta: Delta, known: Architecture) -> Values:
    """Return the keys of layers with a delta rule."""
    if known.listed:
        return {"ssm.conv_kernel": delta.taps, "kda.head_dim": delta.key_dim}
    linear = [not config.attends(layer) for layer in range(config.layers)]
    keys: Values = {
        "ssm.conv_kernel": delta.taps,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.value_heads * delta.value_dim,
        "attention.recurrent_layers": linear,
    }
    for every in range(1, config.layers + 1):
        if linear == [(layer + 1) % every != 0 for layer in range(config.layers)]:
            keys["full_attention_interval"] = every  # older programs read only this key
    if known.tiled:  # pairs for each of an image's three positions, which are equal in a text
        pairs = ropes(config)[0].dim // 2
        keys["rope.dimension_sections"] = [*((pairs + 2 - n) // 3 for n in range(3)), 0]
    return keys


def _latent(config: Config, latent: Latent, known: Architecture) -> Values:
    """Return the keys of latent attention; with one KV head if it is absorbed."""
    keys: Values = {"attention.kv_lora_rank": latent.rank}
    rope = ropes(config)[0]
    if known.absorbed:
        keys |= {
            "attention.head_count_kv": 1,
            "attention.key_length": latent.rank + latent.rotated,
            "attention.value_length": latent.rank,
            "attention.key_length_mla": latent.dim,
            "attention.value_length_mla": latent.value,
        }
    else:
        keys |= {"attention.key_length": latent.dim, "attention.value_length": latent.value}
    if latent.queries is not None:
        keys["attention.q_lora_rank"] = latent.queries
    if scaling_of(rope) == "yarn":
        mscale = float((rope.scaling or {})["mscale_all_dim"])
        keys["rope.scaling.yarn_log_multiplier"] = LOG * mscale
    return keys


def _indexer(indexer: Indexer) -> Values:
    """Return the keys of the indexer of sparse attention."""
    keys: Values = {"head_count": indexer.heads, "key_length": indexer.dim, "top_k": indexer.keys}
    if indexer.interleaved:  # only this family's layers may share a choice
        keys["types"] = [not shared for shared in indexer.shared]
    return {f"attention.indexer.{key}": value for key, value in keys.items()}


def _experts(experts: Experts, known: Mixtures) -> Values:
    """Return the keys of a mixture of experts."""
    keys: Values = {"expert_count": experts.count, "expert_used_count": experts.k}
    if not known.own_size:
        keys["feed_forward_length"] = experts.inner
    leading, step = dense_layers(experts)
    if known.own_size:
        keys["expert_feed_forward_length"] = experts.inner
    if known.shared == "sized":
        keys["expert_shared_feed_forward_length"] = experts.shared
    if known.shared == "counted":
        keys["expert_shared_count"] = experts.shared // experts.inner
    if known.dense == "every":
        keys["interleave_moe_layer_step"] = step_of(experts)
    elif known.dense not in (None, "periodic"):
        keys["leading_dense_block_count"] = leading
    if known.dense == "stepped":
        keys["interleave_moe_layer_step"] = step
    if known.groups and experts.groups is not None:
        keys["expert_group_count"] = experts.groups
        keys["expert_group_used_count"] = experts.top_groups
    if known.gating:
        keys["expert_gating_func"] = GATING[experts.scores]
    if known.scale:
        keys["expert_weights_scale"] = float(experts.scale)
    if experts.latent is not None:
        keys["moe_latent_size"] = experts.latent
    if known.normalize is None:
        keys["expert_weights_norm"] = experts.normalize
    return keys


def _scaling(rope: Rope, known: Architecture) -> Values:
    """Return the keys of rotary scaling; ``_rope_factors`` returns the factors by wavelength."""
    kind, scaling = scaling_of(rope), rope.scaling or {}
    keys: Values = {}
    if kind in ("yarn", "longrope"):
        keys["original_context_length"] = int(scaling["original_max_position_embeddings"])
    if kind in ("linear", "yarn", "longrope"):
        keys["type"] = kind
    if kind in ("linear", "yarn"):
        keys["factor"] = float(scaling["factor"])
    if kind in ("yarn", "longrope") and not (known.latent and known.absorbed):
        factor = RULES[kind](scaling, 1, rope.dim, rope.base)[1]
        builtin = 1 + 0.1 * math.log(max(keys["factor"], 1)) if kind == "yarn" else 1.0
        keys["attn_factor"] = factor / builtin  # llama.cpp multiplies yarn's own factor by it
    if kind == "yarn":
        keys |= {f"yarn_{key}": float(scaling[key]) for key in BETAS if scaling.get(key)}
    return {f"rope.scaling.{key}": value for key, value in keys.items()}
