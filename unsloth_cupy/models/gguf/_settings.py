"""The config.json of a GGUF file, from its keys and tensors: the inverse of ``_metadata.py``."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...ops.position.rope_tables import RULES, frequencies
from ..configs.class_keys import keys_of
from ..configs.config import CONV, FULL, LINEAR, SLIDING
from ..configs.family import Family
from ..configs.heads import NONE, class_of
from ..folders.quantized_weights import GGUF, KEY
from ..quantizer import LEAST
from . import MODULES
from ._families import ARCHITECTURES, BOTH_WAYS, EVERY, MIXED, Architecture
from ._keys import Keys, shortest
from ._metadata import EPSILON, GATING, LOG, ORIGINAL
from ._mixture_settings import (
    chunked_settings,
    conv_settings,
    delta_settings,
    indexer_settings,
    kimi_settings,
    latent_settings,
    layer_settings,
    mamba_settings,
    mixture_settings,
    periodic,
    sized_settings,
    space_settings,
)
from ._tensors import STILL
from .packed import CLASSES
from .reading import GgufFile

ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # names in config.json that differ
SAME = {  # keys that may repeat another key
    "attention.value_length": "attention.key_length",
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.key_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CLOSE = 2e-6  # relative difference of float32 numbers that are computed in another order


def settings(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a file.

    Raises
    ------
    ConfigError
        The architecture is unknown, or a key is missing or not supported.
    """
    keys = Keys(file)
    window = keys.left.get("attention.sliding_window") or None
    pattern = keys.left.pop("attention.sliding_window_pattern", None)
    kind, known = _model_type(keys, window, pattern)
    family = EVERY[kind]
    layers = keys.need("block_count") - (keys.take("nextn_predict_layers") or 0)
    types = _of_layers(keys, family, known, layers, pattern)
    heads, hidden = keys.need("attention.head_count") or 1, keys.need("embedding_length")
    latent = latent_settings(keys, known, heads, hidden) if known.latent else {}
    for key, other in SAME.items():
        if (value := keys.take(key)) is not None and value != keys.left.get(other, value):
            keys.refuse(f"{keys.name}.{key} is {value}, unlike {other}")
    dim = keys.take("attention.key_length") or hidden // heads
    values: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": _rows(file),
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length") or 1,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": (latent and heads) or keys.take("attention.head_count_kv") or heads,
        "max_position_embeddings": keys.need("context_length"),
        family.activation: ACTIVATIONS.get(known.activation, known.activation),
        "tie_word_embeddings": tied(file),
        **types,
    }
    if family.activation not in (keys_of(kind) or values):  # the class has no such key
        del values[family.activation]
    values[family.inner] = values["intermediate_size"]
    if family.scaled_embedding:
        values["hidden_activation"] = values[family.activation]
    if latent:
        dim = latent["qk_rope_head_dim"]  # only this part of a head is rotated
        values |= latent
    elif dim * heads != hidden or "head_dim" in family.defaults:
        values["head_dim"] = dim
    values |= _of_branches(keys, family, known, layers, heads, hidden)
    values |= _epsilon(keys, family)
    values |= _flags(file, family) | _windows(keys, family, layers, window, pattern)
    values |= _scales(keys, family, known, dim, hidden // heads if layers == known.deep else dim)
    values |= _rope(keys, family, known, values, dim)
    if family.encoder or known in BOTH_WAYS.values():
        values |= _of_encoder(keys, family, kind)
    keys.check_rest()
    return values | _packed(file) | _tokens(file)


def _of_layers(
    keys: Keys, family: Family, known: Architecture, layers: int, pattern: Any
) -> dict[str, Any]:
    """Return the keys of the types of layers, and of sizes that differ among them."""
    types: dict[str, Any] = {}
    if known.listed:
        other = CONV if family.conv else LINEAR
        types = layer_settings(keys, layers, single=family.single, other=other)
        if family.mamba is not None:
            chosen = [n for n, kind in enumerate(types["layer_types"]) if kind == FULL]
            types = periodic(keys, "attn", chosen, layers)
    elif known.sized:
        types = sized_settings(keys, layers, pattern)
    elif known.rotates == "chunked":
        types = chunked_settings(keys, layers)
    keys.left.pop("attention.sliding_window", None)
    return types


def _of_branches(
    keys: Keys, family: Family, known: Architecture, layers: int, heads: int, hidden: int
) -> dict[str, Any]:
    """Return the keys of indexers, recurrences, convolutions and experts."""
    values: dict[str, Any] = {}
    if known.indexer:
        values |= indexer_settings(keys, layers, "indexer_types" in family.defaults)
    if family.space is not None:
        values |= space_settings(keys, family.space, hidden)
    if family.mamba is not None:
        values |= mamba_settings(keys, family.mamba, hidden)
    if family.conv:
        values |= conv_settings(keys, family.defaults)
    if known.delta:
        values |= kimi_settings(keys, heads) if known.listed else delta_settings(keys, layers)
    if family.experts is not None and not keys.left.get("expert_count"):
        values[family.experts.count[0]] = 0
    elif family.experts is not None and known.experts is not None:
        values |= mixture_settings(keys, family.experts, known.experts)
    return values


def _of_encoder(keys: Keys, family: Family, kind: str) -> dict[str, Any]:
    """Return the keys of a model without a causal mask, and without a head."""
    sizes = (f"{name}_feat_{end}" for name in MODULES.values() for end in ("in", "out"))
    for key in ("pooling_type", *sizes):  # of the folder's other files
        keys.left.pop(key, None)
    own: dict[str, Any] = {"architectures": [class_of({"model_type": kind}, NONE)]}
    if not family.encoder:
        return {**own, "use_bidirectional_attention": True}
    if family.learned:
        table = keys.file.tensors.get("token_types.weight")
        own["type_vocab_size"] = table.shape[0] if table else 0
    return own


def _epsilon(keys: Keys, family: Family) -> dict[str, float]:
    """Return the key of the epsilon of norms; a file has one for RMS norms, LayerNorms or both.

    For the LayerNorms of a Phi-MoE, llama.cpp reads the one of RMS norms.
    """
    numbers = {key: keys.take(key) for key in EPSILON.values()}
    own = EPSILON[family.norms.kind]
    known = {each for each in numbers.values() if each is not None}
    if len(known) > 1:
        keys.refuse(f"{keys.name}.{own} is {numbers[own]}, and the other epsilon differs")
    if isinstance(family.eps, str):
        return {family.eps: shortest(known.pop() if known else keys.need(own))}
    if known and not math.isclose(epsilon := known.pop(), family.eps, rel_tol=1e-6):
        keys.refuse(f"{keys.name}.{own} is {epsilon}, not {family.eps}")
    return {}


def _model_type(keys: Keys, window: Any, pattern: Any) -> tuple[str, Architecture]:
    """Return the model type of a file, which has its architecture, experts and windows."""
    every = (*ARCHITECTURES.items(), *MIXED.items(), *BOTH_WAYS.items())
    mixed = bool(keys.left.get("expert_count"))
    named = {kind: known for kind, known in every if known.name == keys.name}
    types = [
        kind
        for kind, known in named.items()
        if (known.experts is not None) == mixed or (known.experts and known.experts.optional)
    ]
    scaled = "embedding_scale" in keys.left
    types = [kind for kind in types if named[kind].scales == scaled] or types
    shared = any(keys.left.get(f"expert_shared_{n}") for n in ("feed_forward_length", "count"))
    same = [t for t in types if bool((mix := named[t].experts) and mix.shared) == shared]
    types = same or types
    if mixed and types and named[types[0]].latent:
        gating = keys.left.get("expert_gating_func") or 1
        types = [t for t in types if (mix := named[t].experts) and GATING[mix.scores] == gating]
    if not types:
        listed = ", ".join(sorted({known.name for _, known in every}))
        keys.refuse(f"its architecture is {keys.name!r}, which is none of {listed}")
    some = isinstance(pattern, list) and len({*pattern}) > 1
    windows = ("none",) if window is None else ("named", "most") if some else ("all", "most")
    kind = next((kind for kind in types if EVERY[kind].windows in windows), types[0])
    return kind, named[kind]


def _rows(file: GgufFile) -> int:
    """Return the number of rows of the embedding table."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ConfigError(f"{file.path} has no token_embd.weight; it is not a language model")
    return table.shape[0]


def tied(file: GgufFile) -> bool:
    """Return whether the head of a file is its embedding table."""
    head, table = file.tensors.get("output.weight"), file.tensors["token_embd.weight"]
    if head is None:
        return True
    same = head.type == table.type and head.shape == table.shape
    return same and all(np.array_equal(head.data[n], table.data[n]) for n in range(len(head.data)))


def _flags(file: GgufFile, family: Family) -> dict[str, bool]:
    """Return the flags of config.json that follow from the tensors of a file."""
    first = {name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")}
    facts = (
        (family.qkv_bias, "attn_q.bias" in first or "attn_qkv.bias" in first),
        (family.output_bias, "attn_output.bias" in first),
        (family.mlp_bias, "ffn_down.bias" in first),
        (
            family.query_key_if if family.query_key_norm != "ones" else None,
            "attn_q_norm.weight" in first,
        ),
        (family.parallel, "ffn_norm.weight" not in first),
        (family.head_bias, "output.bias" in file.tensors),
        ("mamba_rms_norm" if family.space_beside else None, "ssm_norm.weight" in first),
        ("mamba_norm_before_gate" if family.space_beside else None, False),
    )
    return {key: there for key, there in facts if isinstance(key, str)}


def _windows(
    keys: Keys, family: Family, layers: int, window: int | None, pattern: Any
) -> dict[str, Any]:
    """Return the keys of layers with a window."""
    if "local_attention" in family.defaults:
        slides = pattern[:layers] if isinstance(pattern, list) else None
        if slides is None:
            slides = [layer % int(pattern or 3) != 0 for layer in range(layers)]
        types = [SLIDING if each and window else FULL for each in slides]
        return {"layer_types": types, **({"local_attention": window} if window else {})}
    if window is None:
        return {"sliding_window": None} if "sliding_window" in family.defaults else {}
    values: dict[str, Any] = {"sliding_window": window}
    if "use_sliding_window" in family.defaults:
        values["use_sliding_window"] = True
    if family.windows == "all":
        return values
    if isinstance(pattern, list):
        values["layer_types"] = [SLIDING if slides else FULL for slides in pattern[:layers]]
    elif pattern is not None:
        values["sliding_window_pattern"] = int(pattern)
    elif family.windows in ("late", "named"):
        keys.refuse(f"{keys.name}.attention.sliding_window_pattern is missing")
    return values


def _scales(
    keys: Keys, family: Family, known: Architecture, dim: int, length: int
) -> dict[str, Any]:
    """Return the keys that scale, cap or clip."""
    values: dict[str, Any] = {}
    named = {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "clip_qkv": "attention.clamp_kqv",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
        "logit_scale": "logit_scale",
    }
    for key, theirs in named.items():
        if key in family.factors and (value := keys.take(theirs)):
            values[key] = shortest(value)
        elif key in family.factors and key in ("attn_logit_softcapping", "final_logit_softcapping"):
            values[key] = None
    if "query_pre_attn_scalar" in family.factors:
        values["query_pre_attn_scalar"] = length
    if values.get("attention_multiplier") is None and "attention_multiplier" in family.factors:
        values["attention_multiplier"] = dim**-0.5
    return values


def _rope(
    keys: Keys, family: Family, known: Architecture, values: Mapping[str, Any], dim: int
) -> dict[str, Any]:
    """Return the keys of rotary positions."""
    rotated, rotates = keys.take("rope.dimension_count") or dim, keys.take(FINETUNED)
    base = shortest(keys.take("rope.freq_base") or 10_000.0)
    local = keys.take("rope.freq_base_swa")
    if family.learned:  # there is no rotation
        return {}
    if known.sized or "local_rope_theta" in family.defaults:
        kind = _proportional(keys) if known.sized else {"rope_type": "default"}
        of_sliding = {"rope_type": "default", "rope_theta": shortest(local or 10_000.0)}
        return {"rope_parameters": {FULL: {**kind, "rope_theta": base}, SLIDING: of_sliding}}
    result: dict[str, Any] = {"rope_theta": base}
    if family.rotates == "by_type":
        result["position_embedding_type"] = "nope" if rotates is False else "rope"
    elif rotates is False and known.rotates == "either":
        keys.refuse(f"{keys.name}.{FINETUNED} is false")
    if "rope_local_base_freq" in family.defaults:
        result["rope_local_base_freq"] = shortest(local or 10_000.0)
    elif local is not None and not math.isclose(local, base, rel_tol=1e-6):
        keys.refuse(f"{keys.name}.rope.freq_base_swa is {local}, not {base}")
    if rotated != dim or (family.partial and "partial_rotary_factor" in family.defaults):
        result["partial_rotary_factor"] = rotated / dim
    scaling = _scaling(keys, known, rotated, base, values["max_position_embeddings"])
    if ORIGINAL in keys.left and "original_max_position_embeddings" in family.defaults:
        result["original_max_position_embeddings"] = keys.left[ORIGINAL]
    if "llama_4_scaling_beta" in family.factors:
        beta = keys.take("attention.temperature_scale")
        length = keys.take("attention.temperature_length") or keys.left.pop(ORIGINAL, None)
        scaling |= {"llama_4_scaling_beta": shortest(beta)} if beta else {}
        scaling |= {"original_max_position_embeddings": length} if length else {}
    keys.left.pop(ORIGINAL, None)
    if "rope_parameters" in family.defaults:  # override the family's default
        both = {"rope_type": "default", "rope_theta": base, **scaling}
        return {**result, "rope_parameters": both}
    return {**result, "rope_scaling": scaling} if scaling else result


def _proportional(keys: Keys) -> dict[str, Any]:
    """Return the rotation of the first pairs of a head, from the factors of all pairs."""
    name = "rope_freqs.weight"
    factors = keys.file.get_tensor(name) if name in keys.file.tensors else np.empty(0, FLOAT32)
    half, still = len(factors), factors >= STILL
    rotated = half - int(still.sum())
    if not rotated or still[:rotated].any() or len({*factors[:rotated].tolist()}) > 1:
        keys.refuse(f"{name} is not one factor of the first pairs of a head")
    shares = ((rotated + more) / half for more in (0, 0.5))  # a quotient may be rounded down
    share = next(each for each in shares if int(each * 2 * half // 2) == rotated)
    scaling = {"rope_type": "proportional", "partial_rotary_factor": share}
    return scaling if factors[0] == 1 else {**scaling, "factor": shortest(factors[0])}


FINETUNED = "rope.scaling.finetuned"


def _scaling(
    keys: Keys, known: Architecture, rotated: int, base: float, positions: int
) -> dict[str, Any]:
    """Return rope_scaling."""
    tensors, latent = keys.file.tensors, known.latent and known.absorbed
    kind, original = keys.take("rope.scaling.type", "none"), keys.left.get(ORIGINAL)
    factor = keys.take("rope.scaling.factor") or keys.take("rope.scale_linear")
    attention = keys.take("rope.scaling.attn_factor") or keys.take("rope.scaling.yarn_attn_factor")
    betas = {key: keys.take(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    log = keys.take("rope.scaling.yarn_log_multiplier") or 0.0
    if "rope_factors_long.weight" in tensors:
        names = {"long_factor": "rope_factors_long", "short_factor": "rope_factors_short"}
        factors = {k: keys.file.get_tensor(f"{each}.weight") for k, each in names.items()}
        return {
            "rope_type": "longrope",
            **{key: [shortest(each) for each in array] for key, array in factors.items()},
            "original_max_position_embeddings": original or positions,
            "attention_factor": 1.0 if attention is None else shortest(attention),
        }
    if "rope_freqs.weight" in tensors:
        factors_of = np.asarray(keys.file.get_tensor("rope_freqs.weight"), np.float64)
        return _stretched(factors_of, rotated, base, positions)
    if kind == "linear" or (kind == "none" and factor not in (None, 1.0)):
        return {"rope_type": "linear", "factor": shortest(factor or 1.0)}
    if kind == "yarn" and factor:
        both = ("mscale", "mscale_all_dim") if log and latent else ()
        mscale = dict.fromkeys(both, shortest(log / LOG))
        grown = 1 + 0.1 * math.log(max(factor, 1))  # llama.cpp multiplies attn_factor by it
        own = 1 + 0.1 * log * math.log(max(factor, 1)) if log else 1.0
        attention_factor = shortest((1.0 if attention is None else attention) * grown / own)
        return {
            "rope_type": "yarn",
            "factor": shortest(factor),
            "original_max_position_embeddings": original or positions,
            **({} if known.latent else {"attention_factor": attention_factor}),
            **({} if known.truncates else {"truncate": False}),
            **{key: shortest(value) for key, value in betas.items() if value is not None},
            **mscale,
        }
    if kind not in ("none", "default"):
        keys.refuse(f"{keys.name}.rope.scaling.type is {kind!r}")
    return {}


def _stretched(factors: Array, rotated: int, base: float, positions: int) -> dict[str, Any]:
    """Return the llama3 scaling with these factors by wavelength, or longrope with the factors.

    Between the ends, 1 / factor is linear in the frequency: two points determine llama3's numbers.
    """
    angles, most = frequencies(rotated, base).astype(np.float64), float(factors.max())
    between = (factors > 1 + 1e-6) & (factors < most - 1e-6 * most)
    turns, tries = angles[between] / (2 * np.pi), [dict(LLAMA3)]
    smooth = (1 / factors[between] - 1 / most) / (1 - 1 / most)
    if len(turns):
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        length = float(((low + smooth * (high - low)) / turns).mean())
        tries.append({**LLAMA3, "original_max_position_embeddings": round(length)})
    if len(turns) > 1:  # low_freq_factor is 1: it only sets the unit of the other numbers
        slope, start = np.polyfit(turns, smooth, 1)
        high = 1 - 1 / start if start else 4.0
        tries.append({**LLAMA3, "high_freq_factor": round(float(high), 3)})
        tries[-1]["original_max_position_embeddings"] = round(float(slope * (high - 1)))
    for each in tries:
        scaling: dict[str, Any] = {"rope_type": "llama3", "factor": shortest(most), **each}
        if scaling["original_max_position_embeddings"] < 1 or scaling["high_freq_factor"] <= 1:
            continue
        ratios = frequencies(rotated, base) / RULES["llama3"](scaling, 1, rotated, base)[0]
        if np.allclose(ratios, factors, rtol=CLOSE, atol=0):
            return scaling
    plain = [shortest(each) for each in factors]
    return {
        "rope_type": "longrope",
        "long_factor": plain,
        "short_factor": plain,
        "original_max_position_embeddings": positions,
        "attention_factor": 1.0,
    }


def _packed(file: GgufFile) -> dict[str, Any]:
    """Return quantization_config with the most common packed kind; {} if none is packed."""
    kinds = Counter[str]()
    for name, each in file.tensors.items():
        matrix = len(each.shape) > 1 and math.prod(each.shape) >= LEAST
        if matrix and name.startswith("blk.") and each.type.name in CLASSES:
            kinds[each.type.name.lower()] += each.data.nbytes
    common = kinds.most_common(1)
    return {KEY: {"quant_method": GGUF, "kind": common[0][0]}} if common else {}


def _tokens(file: GgufFile) -> dict[str, Any]:
    """Return the keys of the tokens that begin, end and pad texts."""
    names = {**{role: role for role in ("bos", "eos", "eot", "eom")}, "pad": "padding"}
    ids = {r: file.values.get(f"tokenizer.ggml.{name}_token_id") for r, name in names.items()}
    rows = _rows(file)
    ids = {role: each for role, each in ids.items() if each is not None and 0 <= each < rows}
    ends = [*dict.fromkeys(ids[role] for role in ("eos", "eot", "eom") if role in ids)]
    values: dict[str, Any] = {"bos_token_id": ids.get("bos"), "pad_token_id": ids.get("pad")}
    return {**values, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
