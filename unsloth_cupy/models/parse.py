"""Parse a Hugging Face config.json, in its older and newer forms, into a ``Config``."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from .configs.config import LINEAR, MLP, SLIDING, Config, Delta, Latent, Rope
from .configs.families import FAMILIES
from .configs.family import Family
from .configs.heads import CAUSAL, NONE, head_of, labels_of
from .configs.kimi_config import of_kimi
from .configs.parse_experts import experts_of
from .configs.parse_layers import activation_of, layers_of
from .configs.parse_rope import rope_of
from .configs.parse_states import multipliers_of, state_space_of, with_types
from .configs.reading import CUT, Reader, check_keys, token_ids, without_ignored
from .configs.recognition import recognised
from .configs.text_configs import body_of, text_config
from .folders.other_weights import KEYS, check_quantization
from .folders.quantized_weights import GGUF, inverse_scales

QUANTIZED = ("bitsandbytes", "bitnet", GGUF, *KEYS)  # supported values of quant_method
CAUSALITY = {"use_bidirectional_attention": (None, False), "is_causal": (True,)}


def parse(values: Mapping[str, Any]) -> Config:
    """Return the ``Config`` of a config.json.

    Raises
    ------
    ConfigError
        The model type is unknown, a key is missing, invalid or not read, though its value may
        change what the model computes, or sizes contradict each other.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"config: is {type(values).__name__}; it must be a dict of a config.json")
    body, values = body_of(values), text_config(values)
    body = "" if head_of(values) == NONE else body
    kind = values.get("model_type")
    row = FAMILIES.get(kind) if isinstance(kind, str) else None
    if row is None:
        family, values = recognised(values, parse_as)
    else:
        family, values = row, without_ignored(values, str(kind), row)
    return replace(parse_as(values, family), body=body)


def parse_as(values: Mapping[str, Any], family: Family) -> Config:
    """Return the ``Config`` of a text model's config.json, read as that of a family."""
    values = with_types(of_kimi(values) if family.delta == "short" else values)
    check_keys(values, family)
    read = Reader(values, family)
    facts = values.get("quantization_config")
    quantized: tuple[str, ...] = QUANTIZED
    hidden, heads, layers = (
        read.size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    experts = experts_of(read, layers)
    if family.experts is not None and experts is not None:  # stacks of gpt-oss are in MXFP4
        packed = ["mxfp4"] if family.experts.transposed else []
        quantized = ("bitsandbytes", GGUF, *packed, *KEYS)
    if facts and not (isinstance(facts, Mapping) and facts.get("quant_method") in quantized):
        cure = "load the plain weights (float16, bfloat16 or float32) instead"
        known = " or ".join(method for method in quantized if method != GGUF)
        given = facts.get("quant_method") if isinstance(facts, Mapping) else facts
        problem = f"quantization_config is of {str(given)[:60]}, which is not one of {known}"
        raise ConfigError(f"config: {problem}; {cure}")
    if facts:
        check_quantization(facts)
    for key, known_values in CAUSALITY.items():
        if key in values and values[key] not in known_values:
            problem = f"{key} is {str(values[key])[:CUT]}"
            raise ConfigError(f"config: {problem}; only causal models are known")
    shared = read.get("num_key_value_heads") is not None
    kv_heads = read.size("num_key_value_heads") if shared else heads
    latent = latent_of(read, hidden, heads) if family.latent else None
    if latent is not None:
        if kv_heads != heads:
            problem = f"num_key_value_heads={kv_heads} is not num_attention_heads={heads}"
            raise ConfigError(f"config: {problem}, and all heads have keys of their own here")
        read = Reader({**values, "head_dim": max(latent.dim, latent.value)}, family)
    if read.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"config: hidden_size={hidden} is not a multiple of num_attention_heads={heads};"
            " change one of them or add head_dim"
        )
    if read.get("head_dim") is None:
        read = Reader({**values, "head_dim": hidden // heads}, family)
    dim = read.size("head_dim")
    if heads % kv_heads:
        raise ConfigError(
            f"config: num_attention_heads={heads} is not a multiple of"
            f" num_key_value_heads={kv_heads}"
        )
    rotated, layer_types = layers_of(read, layers)
    turned = dim if latent is None else latent.rotated
    ropes = {kind: rope_of(read, kind, turned) for kind in sorted({*layer_types} - {LINEAR, MLP})}
    activation = activation_of(read)
    parallel, norms = read.says(family.parallel), family.norms
    embedding = read.obeyed("embedding_multiplier") or read.obeyed("scale_emb")
    depth, base = read.obeyed("scale_depth"), read.obeyed("dim_model_base")
    residual = read.obeyed("residual_multiplier") or (depth or layers**0.5) / layers**0.5
    logit_scale = read.obeyed("logit_scale") or read.obeyed("lm_head_multiplier")
    logit_scale = logit_scale or 1 / (read.obeyed("logits_scaling") or 1)
    normed = read.says(family.query_key_if)
    head = head_of(values)
    read.flag("attention_bias")
    return Config(
        model_type=values["model_type"],
        vocab=read.size("vocab_size"),
        hidden=hidden,
        inner=read.size(family.inner),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        eps=read.number(family.eps) if isinstance(family.eps, str) else family.eps,
        activation=activation,
        layer_types=layer_types,
        window=read.size("sliding_window") if SLIDING in layer_types else None,
        ropes=ropes,
        scale=(
            latent_scale(latent, {} if family.rotates == "none" else ropes)
            or read.obeyed("attention_multiplier")
            or (read.obeyed("query_pre_attn_scalar") or dim) ** -0.5
        )
        * (read.obeyed("key_multiplier") or 1),
        softcap=read.obeyed("attn_logit_softcapping"),
        logit_softcap=read.obeyed("final_logit_softcapping"),
        norms=replace(norms, before_mlp=None) if parallel else norms,
        norm_offset=family.norm_offset,
        query_key_norm=family.query_key_norm if normed else None,
        query_key_biases=normed and family.query_key_biases,
        rotated_first=family.rotated_first,
        embedding_scale=hidden**0.5 if family.scaled_embedding else embedding or 1.0,
        qkv_bias=latent is None and read.says(family.qkv_bias),
        output_bias=read.says(family.output_bias),
        mlp_bias=read.says(family.mlp_bias),
        head_bias=read.says(family.head_bias),
        sinks=family.sinks,
        experts=experts,
        left_out=family.left_out,
        fused=family.fused,
        bit_layers=_bit_layers(facts or {}),
        inverse_scales=inverse_scales(values),
        sub_norms=family.sub_norms,
        tied=read.flag("tie_word_embeddings") and head == CAUSAL,
        initializer_range=read.number("initializer_range"),
        positions=read.size("max_position_embeddings"),
        end_tokens=token_ids("eos_token_id", values),
        pad_token=next(iter(token_ids("pad_token_id", values)), None),
        names=family.names,
        rotated=() if all(rotated) else rotated,
        interleaved=read.says(family.interleaved),
        clip=read.obeyed("clip_qkv"),
        parallel=parallel,
        residual_scale=residual,
        logit_scale=base / hidden if base else logit_scale,
        latent=latent,
        delta=None if family.delta is None else delta_of(read),
        delta_norms=family.delta_norms,
        space=state_space_of(read),
        single=family.single,
        gated=family.gated,
        wide=family.wide,
        wide_in_float16=family.wide_in_float16,
        **multipliers_of(read),
        gate=family.gate,
        head=head,
        labels=labels_of(values, head),
    )


def delta_of(read: Reader) -> Delta:
    """Return the sizes of the layers with a gated delta rule."""
    stored, heads = read.family.delta or "", read.size("num_attention_heads")
    if stored == "apart":  # sizes that follow from others
        sizes = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads)
        known = {name: _size_or(read, name, size) for name, size in sizes.items()}
        dim = int(0.75 * read.size("hidden_size") / known["linear_num_key_heads"])
        known["linear_key_head_dim"] = dim = _size_or(read, "linear_key_head_dim", dim)
        known["linear_value_head_dim"] = _size_or(read, "linear_value_head_dim", 2 * dim)
        read = Reader({**read.values, **known}, read.family)
    if stored == "short":
        heads, dim = read.size("linear_num_heads"), read.size("linear_head_dim")
        known = {f"linear_num_{name}_heads": heads for name in ("key", "value")}
        known |= {f"linear_{name}_head_dim": dim for name in ("key", "value")}
        read = Reader({**read.values, **known}, read.family)
    keys, values = (read.size(f"linear_num_{name}_heads") for name in ("key", "value"))
    if values % keys:
        problem = f"linear_num_value_heads={values} is not a multiple"
        raise ConfigError(f"config: {problem} of linear_num_key_heads={keys}")
    if read.values.get("attn_output_gate") is False:
        raise ConfigError("config: attn_output_gate is false; attention without it is not known")
    if read.get("hidden_act") not in ("silu", "swish"):
        raise ConfigError("config: hidden_act is that of the convolutions, too; it must be silu")
    return Delta(
        key_heads=keys,
        value_heads=values,
        key_dim=read.size("linear_key_head_dim"),
        value_dim=read.size("linear_value_head_dim"),
        taps=read.size("linear_conv_kernel_dim"),
        stored=stored,
        most=2.0 if stored == "apart" and read.flag("linear_allow_neg_eigval") else 1.0,
        eps=1e-5 if stored == "apart" else None,
    )


def _size_or(read: Reader, key: str, other: int) -> int:
    """Return a size, or another one where it is absent or null."""
    return other if read.get(key) is None else read.size(key)


def latent_of(read: Reader, hidden: int, heads: int) -> Latent:
    """Return the sizes of latent attention."""
    value = read.get("v_head_dim")
    rotated = read.size("qk_rope_head_dim")
    if rotated % 2:
        raise ConfigError(f"config: qk_rope_head_dim is {rotated}; it must be even")
    return Latent(
        queries=None if read.get("q_lora_rank") is None else read.size("q_lora_rank"),
        rank=read.size("kv_lora_rank"),
        plain=read.size("qk_nope_head_dim"),
        rotated=rotated,
        value=hidden // heads if value is None else read.size("v_head_dim"),
        biases=read.flag("attention_bias"),
    )


def latent_scale(latent: Latent | None, ropes: Mapping[str, Rope]) -> float | None:
    """Return the factor of scores, in which yarn's stretched positions count; None: not latent."""
    if latent is None:
        return None
    scaling = next((rope.scaling for rope in ropes.values()), None) or {}
    factor, weight = scaling.get("factor") or 1, scaling.get("mscale_all_dim") or 0
    stretched = 1 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0
    return latent.dim**-0.5 * stretched * stretched


def _bit_layers(quantization: Mapping[str, Any]) -> bool:
    """Return whether dense layers are rounded at every call; raise for unknown settings."""
    if quantization.get("quant_method") != "bitnet":
        return False
    online = quantization.get("quantization_mode", "offline") == "online"
    dense_modules = quantization.get("modules_to_not_convert")
    known: Mapping[str, Any] = {
        "linear_class": ("autobitlinear",) if online else ("autobitlinear", "bitlinear"),
        "quantization_mode": ("offline", "online"),
        "use_rms_norm": (False, None),
        **({"modules_to_not_convert": (None, [], ["lm_head"])} if online else {}),
    }
    default = {"linear_class": "bitlinear", "quantization_mode": "offline"}
    for key, values in known.items():
        if (value := quantization.get(key, default.get(key))) not in values:
            listed = " or ".join(map(repr, values))
            problem = f"quantization_config of bitnet has {key}={str(value)[:CUT]}"
            raise ConfigError(f"config: {problem}; only {listed} is read")
    return online and dense_modules in (None, [], ["lm_head"])
