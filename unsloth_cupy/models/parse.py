"""Parse a Hugging Face config.json, in its older and newer forms, into a ``Config``."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from ..errors import ConfigError
from ..ops.position.rope_tables import LARGEST
from .configs.config import (
    CHUNKED,
    FULL,
    SLIDING,
    WITHOUT_ATTENTION,
    Config,
    Delta,
    Experts,
    Indexer,
    Latent,
    Rope,
    Structure,
)
from .configs.draft_heads import count_of, pattern_of
from .configs.families import ENCODERS, FAMILIES
from .configs.family import Family
from .configs.gemma4_config import of_gemma4
from .configs.heads import CAUSAL, NONE, SEQUENCE, head_of, labels_of
from .configs.kimi_config import of_kimi
from .configs.longcat_config import of_longcat
from .configs.names import BARE, IMAGES
from .configs.parse_experts import experts_of
from .configs.parse_layers import activation_of, by_layer_of, layers_of
from .configs.parse_rope import rope_of
from .configs.parse_states import (
    inner_of,
    lightning_of,
    mamba_of,
    multipliers_of,
    of_lfm,
    short_conv_of,
    state_space_of,
    with_types,
)
from .configs.reading import CUT, Reader, check_keys, token_ids, without_ignored
from .configs.recognition import recognised
from .configs.text_configs import body_of, text_config
from .folders.other_weights import KEYS, check_quantization
from .folders.quantized_weights import GGUF, inverse_scales
from .quantizer import OF_STACKS

QUANTIZED = ("bitsandbytes", "bitnet", GGUF, *KEYS)  # supported values of quant_method
# properties of a family that are true, false, or the name of a key with that value
FLAGS = ("qkv_bias", "output_bias", "mlp_bias", "head_bias", "interleaved", "parallel")
CAUSALITY = {"use_bidirectional_attention": (None, False), "is_causal": (True,)}
BOTH_WAYS = ("gemma3_text",)  # types whose class reads use_bidirectional_attention


def parse(values: Mapping[str, Any], stored: Callable[[], Collection[str]] = tuple) -> Config:
    """Return the ``Config`` of a config.json.

    ``stored`` returns the names of the tensors in the model's files; an error about an unknown
    type compares them with those of known families.

    Raises
    ------
    ConfigError
        The model type is unknown; a key is missing or invalid; a key is not read, but may change
        what the model computes; or sizes contradict each other.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"config: is {type(values).__name__}; it must be a dict of a config.json")
    body, values = body_of(values), text_config(values)
    if head_of(values) == NONE:
        body = BARE[body == IMAGES]
    elif values.get("model_type") == "bert":
        body = "bert."
    own = values.get("quantization")
    if isinstance(own, Mapping) and {"group_size", "bits"} <= own.keys():
        problem = f"mlx-lm wrote weights of {own['bits']} bits, which are not supported"
        cure = "write plain ones with mlx_lm.convert --dequantize --hf-path THIS --mlx-path NEW"
        raise ConfigError(f"config: {problem}; {cure}")
    kind = values.get("model_type")
    row = {**FAMILIES, **ENCODERS}.get(kind) if isinstance(kind, str) else None
    if row is None:
        family, values = recognised(values, parse_as, stored)
    else:
        family, values = row, without_ignored(values, str(kind), row)
    return replace(parse_as(values, family), body=body)


def parse_as(values: Mapping[str, Any], family: Family) -> Config:
    """Return the ``Config`` of a text model's config.json, read by the rules of a family."""
    channels = family.delta in ("short", "whole")
    values = with_types(of_kimi(values, family.defaults) if channels else values)
    values = of_gemma4(values, family.defaults) if family.by_layer else values
    values = of_lfm(values) if family.conv else values
    values = of_longcat(values) if family.paired else values
    check_keys(values, family)
    read = Reader(values, family)
    hidden, heads, layers = (
        read.size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    experts = experts_of(read, layers)
    facts = _quantization_of(values, family, experts)
    head = head_of(values)
    causal = _causal(read, head)
    latent = latent_of(read, hidden, heads) if family.latent else None
    read, kv_heads = _with_heads(read, hidden, heads, latent)
    dim = read.size("head_dim")
    rotated, layer_types = layers_of(read, layers)
    by_layer = by_layer_of(read, layer_types, kv_heads, dim) if family.by_layer else {}
    full, turned = by_layer.get("full_heads"), dim if latent is None else latent.rotated
    lengths = {FULL: turned if full is None else full[1]}
    ropes = {
        kind: rope_of(read, kind, lengths.get(kind, turned))
        for kind in sorted({*layer_types} - {*WITHOUT_ATTENTION})
    }
    activation = activation_of(read)
    normed = read.resolve(family.query_key_if)
    read.flag("attention_bias")
    return Config(
        **_structure_of(read, layers),
        model_type=values["model_type"],
        vocab=read.size("vocab_size"),
        hidden=hidden,
        inner=inner_of(read),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads if full is None else max(kv_heads, full[0]),
        dim=dim if full is None else max(dim, full[1]),
        eps=read.number(family.eps) if isinstance(family.eps, str) else family.eps,
        activation=activation,
        layer_types=layer_types,
        window=_window_of(read, causal) if SLIDING in layer_types else None,
        chunk=read.size("attention_chunk_size") if CHUNKED in layer_types else None,
        ropes=ropes,
        **_scales_of(read, hidden, layers),
        scale=_scale_of(read, dim, latent, ropes),
        softcap=read.factor("attn_logit_softcapping"),
        logit_softcap=read.factor("final_logit_softcapping"),
        query_key_norm=family.query_key_norm if normed else None,
        query_key_biases=normed and family.query_key_biases,
        experts=experts,
        bit_layers=_bit_layers(facts),
        inverse_scales=inverse_scales(values),
        tied=read.flag("tie_word_embeddings") and head == CAUSAL,
        initializer_range=read.number("initializer_range"),
        positions=read.size("max_position_embeddings"),
        end_tokens=token_ids("eos_token_id", values),
        pad_token=next(iter(token_ids("pad_token_id", values)), None),
        rotated=() if all(rotated) else rotated,
        clip=read.factor("clip_qkv"),
        latent=latent,
        indexer=None if latent is None else indexer_of(read, latent, layers),
        delta=None if family.delta is None else delta_of(read),
        space=state_space_of(read),
        conv=short_conv_of(read) if family.conv else None,
        lightning=lightning_of(read) if family.lightning else None,
        mamba=mamba_of(read),
        **multipliers_of(read),
        causal=causal,
        token_types=read.size("type_vocab_size") if family.learned else 0,
        classifier=family.classifier,
        **_classifier_of(read, head),
        head=head,
        labels=labels_of(values, head),
        draft_heads=_draft_heads(read),
        **by_layer,
        projected=read.size(family.projected) if family.projected else 0,
    )


def _causal(read: Reader, head: str) -> bool:
    """Return whether queries attend to no later keys; raise if the head does not fit."""
    values, encoder = read.values, read.family.encoder
    causal = not encoder
    if values["model_type"] in BOTH_WAYS and read.get("use_bidirectional_attention") is not None:
        causal = not read.flag("use_bidirectional_attention")
    for key, known_values in CAUSALITY.items() if causal else ():
        if key in values and values[key] not in known_values:
            problem = f"{key} is {str(values[key])[:CUT]}"
            raise ConfigError(f"config: {problem}; only causal models are supported")
    if encoder and read.get("is_decoder"):
        raise ConfigError("config: is_decoder is true; only encoders of this type are supported")
    if head == CAUSAL and not causal:
        cure = "load it with head='none' or a classifier's head"
        raise ConfigError(
            f"config: a {values['model_type']} without a causal mask is an encoder, "
            f"and architectures names the head of a language model; {cure}"
        )
    return causal


def _structure_of(read: Reader, layers: int) -> dict[str, Any]:
    """Return the fields of ``Structure``: from the family, or from the keys that it names."""
    family = read.family
    values = {each.name: getattr(family, each.name) for each in fields(Structure)}
    values |= {name: read.resolve(getattr(family, name)) for name in FLAGS}
    if family.gate_if is not None:
        values["head_gate"] = read.flag(family.gate_if)
    if family.around_if is not None and not read.flag(family.around_if):
        values["norms"] = replace(family.norms, after_attention=None, after_mlp=None)
    if family.norm_bias_if is not None:
        values["norms"] = replace(family.norms, biases=read.flag(family.norm_bias_if))
    if family.encoder and head_of(read.values) == NONE:  # what other heads compute
        values["left_out"] = "|".join(filter(None, (family.left_out, r"head\.", r"score\.")))
    if values["parallel"]:
        values["norms"] = replace(family.norms, before_mlp=None)
    if family.draft and not _draft_heads(read):
        values["left_out"] = pattern_of(layers, family.draft)
    if (own := family.experts) and own.zero and read.get(own.zero):  # gate and up of zero experts
        first, more = read.size(own.count[0]), read.size(own.zero)
        every = "|".join(map(str, range(first, first + more)))
        values["left_out"] += rf"|model\.layers\.\d+\.mlp\.experts\.({every})\."
    if shared := read.get("num_kv_shared_layers") if family.by_layer else 0:
        every = "|".join(map(str, range(layers - shared, layers)))
        values["left_out"] = rf"model\.layers\.({every})\.self_attn\.[kv]_(proj|norm)\."
    return values | ({"qkv_bias": False} if family.latent else {})


def _draft_heads(read: Reader) -> int:
    """Return the number of draft heads, which only a language model has."""
    return count_of(read.values, read.family.draft) if head_of(read.values) == CAUSAL else 0


def _window_of(read: Reader, causal: bool) -> int:
    """Return the window of sliding layers: keys with the query's own, or the distance both ways."""
    if "local_attention" in read.defaults:
        return read.size("local_attention") // 2
    return read.size("sliding_window") // (1 if causal or read.family.radius else 2)


def _classifier_of(read: Reader, head: str) -> dict[str, Any]:
    """Return the settings of an encoder's classifier."""
    if read.family.classifier != "head" or head != SEQUENCE:
        return {
            "classifier_bias": read.family.classifier == "head" and read.flag("classifier_bias")
        }
    pooling = read.get("classifier_pooling")
    if pooling not in ("cls", "mean") or read.get("classifier_activation") != "gelu":
        problem = f"classifier_pooling={pooling!r}, {read.get('classifier_activation')!r}"
        raise ConfigError(
            f"config: {problem}; a classifier has cls or mean, and the activation gelu"
        )
    return {"classifier_pooling": pooling, "classifier_bias": read.flag("classifier_bias")}


def _quantization_of(
    values: Mapping[str, Any], family: Family, experts: Experts | None
) -> Mapping[str, Any]:
    """Return the quantization_config of a config.json, {} without one; raise if not supported."""
    facts = values.get("quantization_config")
    if not facts:
        return {}
    methods: tuple[str, ...] = QUANTIZED
    if family.experts is not None and experts is not None:
        packed = OF_STACKS if family.experts.transposed else ()
        methods = ("bitsandbytes", GGUF, *packed, *KEYS)
    if not (isinstance(facts, Mapping) and facts.get("quant_method") in methods):
        cure = "load the plain weights (float16, bfloat16 or float32) instead"
        known = " or ".join(method for method in methods if method != GGUF)
        kind = facts.get("quant_method") if isinstance(facts, Mapping) else facts
        problem = f"quantization_config has quant_method {str(kind)[:60]}, which is not {known}"
        raise ConfigError(f"config: {problem}; {cure}")
    check_quantization(facts)
    return facts


def _with_heads(read: Reader, hidden: int, heads: int, latent: Latent | None) -> tuple[Reader, int]:
    """Return a reader whose values include head_dim, and the number of key/value heads."""
    shared = read.get("num_key_value_heads") is not None
    kv_heads = read.size("num_key_value_heads") if shared else heads
    dim = read.get("head_dim")
    if latent is not None:
        if kv_heads != heads:
            problem = f"num_key_value_heads={kv_heads} is not num_attention_heads={heads}"
            raise ConfigError(f"config: {problem}; in latent attention every head has its own keys")
        dim = max(latent.dim, latent.value)
    if dim is None and hidden % heads:
        raise ConfigError(
            f"config: hidden_size={hidden} is not a multiple of num_attention_heads={heads};"
            " change one of them or add head_dim"
        )
    read = Reader({**read.values, "head_dim": hidden // heads if dim is None else dim}, read.family)
    read.size("head_dim")
    if heads % kv_heads:
        raise ConfigError(
            f"config: num_attention_heads={heads} is not a multiple of"
            f" num_key_value_heads={kv_heads}"
        )
    return read, kv_heads


def _scale_of(read: Reader, dim: int, latent: Latent | None, ropes: Mapping[str, Rope]) -> float:
    """Return the factor of attention scores."""
    if not read.family.scaled_scores:
        return 1.0
    scale = (
        latent_scale(latent, {} if read.family.rotates == "none" else ropes)
        or read.factor("attention_multiplier")
        or (read.factor("query_pre_attn_scalar") or dim) ** -0.5
    )
    return scale * (read.factor("key_multiplier") or 1)


def _scales_of(read: Reader, hidden: int, layers: int) -> dict[str, Any]:
    """Return the factors of embedding, branches and logits, by their names in ``Config``."""
    embedding = read.factor("embedding_multiplier") or read.factor("scale_emb")
    depth, base = read.factor("scale_depth"), read.factor("dim_model_base")
    logits = read.factor("logit_scale") or read.factor("lm_head_multiplier")
    return {
        "embedding_scale": hidden**0.5 if read.family.scaled_embedding else embedding or 1.0,
        "residual_scale": read.factor("residual_multiplier")
        or (depth or layers**0.5) / layers**0.5,
        "logit_scale": base / hidden
        if base
        else logits or 1 / (read.factor("logits_scaling") or 1),
    }


def delta_of(read: Reader) -> Delta:
    """Return the sizes of the layers with a gated delta rule."""
    stored, heads = read.family.delta or "", read.size("num_attention_heads")
    if stored == "apart":  # OLMo's class in transformers derives absent sizes from others
        sizes = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads)
        known = {name: _size_or(read, name, size) for name, size in sizes.items()}
        dim = int(0.75 * read.size("hidden_size") / known["linear_num_key_heads"])
        known["linear_key_head_dim"] = dim = _size_or(read, "linear_key_head_dim", dim)
        known["linear_value_head_dim"] = _size_or(read, "linear_value_head_dim", 2 * dim)
        read = Reader({**read.values, **known}, read.family)
    if stored in ("short", "whole"):
        heads, dim = read.size("linear_num_heads"), read.size("linear_head_dim")
        known = {f"linear_num_{name}_heads": heads for name in ("key", "value")}
        known |= {f"linear_{name}_head_dim": dim for name in ("key", "value")}
        read = Reader({**read.values, **known}, read.family)
    keys, values = (read.size(f"linear_num_{name}_heads") for name in ("key", "value"))
    if values % keys:
        problem = f"linear_num_value_heads={values} is not a multiple"
        raise ConfigError(f"config: {problem} of linear_num_key_heads={keys}")
    if read.values.get("attn_output_gate") is False:
        raise ConfigError("config: attn_output_gate is false; only attention with it is supported")
    if read.get("hidden_act") not in ("silu", "swish"):
        raise ConfigError("config: hidden_act also applies to convolutions; it must be silu")
    return Delta(
        key_heads=keys,
        value_heads=values,
        key_dim=read.size("linear_key_head_dim"),
        value_dim=read.size("linear_value_head_dim"),
        taps=read.size("linear_conv_kernel_dim"),
        stored=stored,
        most=2.0 if stored == "apart" and read.flag("linear_allow_neg_eigval") else 1.0,
        eps=1e-5 if stored == "apart" else None,
        bound=_bound(read) if stored == "whole" and read.flag("kda_safe_gate") else None,
    )


def _bound(read: Reader) -> float:
    """Return the bound of the logarithms of decays."""
    bound = read.not_null("kda_lower_bound")
    if type(bound) not in (int, float) or not -LARGEST <= bound < 0:
        raise ConfigError(f"config: kda_lower_bound is {bound!r}; it must be a number below 0")
    return float(bound)


def _size_or(read: Reader, key: str, other: int) -> int:
    """Return the size of a key, or ``other`` if the key is absent or null."""
    return other if read.get(key) is None else read.size(key)


def latent_of(read: Reader, hidden: int, heads: int) -> Latent:
    """Return the sizes of latent attention."""
    value = read.get("v_head_dim")
    rotated = read.size("qk_rope_head_dim")
    if rotated % 2:
        raise ConfigError(f"config: qk_rope_head_dim is {rotated}; it must be even")
    queries = None if read.get("q_lora_rank") is None else read.size("q_lora_rank")
    rank, scales = read.size("kv_lora_rank"), (1.0, 1.0)
    if read.family.scaled_latents:
        scales = ((hidden / read.size("q_lora_rank")) ** 0.5, (hidden / rank) ** 0.5)
    return Latent(
        queries=queries,
        rank=rank,
        plain=read.size("qk_nope_head_dim"),
        rotated=rotated,
        value=hidden // heads if value is None else read.size("v_head_dim"),
        biases=read.flag("attention_bias"),
        scales=scales,
    )


def indexer_of(read: Reader, latent: Latent, layers: int) -> Indexer | None:
    """Return the sizes of sparse attention's indexer; None for a family without one."""
    if read.family.indexer is None:
        return None
    dim, rotated = read.size("index_head_dim"), latent.rotated
    if latent.queries is None or dim < rotated:
        problem = "the indexer needs q_lora_rank, and index_head_dim of at least qk_rope_head_dim"
        raise ConfigError(f"config: {problem}: {latent.queries}, {dim} and {rotated}")
    types, pattern = read.get("indexer_types"), read.get("index_topk_pattern")
    if types is None and pattern is not None:
        letters = {"F": "full", "S": "shared"}
        types = [letters.get(each, each) for each in pattern]
    if types is None:
        period, first = read.get("index_topk_freq") or 1, read.get("index_skip_topk_offset")
        first = 2 if first is None else first
        if type(period) is not int or type(first) is not int:
            raise ConfigError("config: index_topk_freq and index_skip_topk_offset must be integers")
        kinds = (max(n - first + 1, 0) % max(period, 1) for n in range(layers))
        types = ["shared" if kind else "full" for kind in kinds]
    listed = isinstance(types, list) and len(types) == layers and types[:1] == ["full"]
    if not listed or any(each not in ("full", "shared") for each in types):
        problem = f"indexer_types is {types!r}"
        raise ConfigError(f"config: {problem}; it must list full, then full or shared: {layers}")
    return Indexer(
        heads=read.size("index_n_heads"),
        dim=dim,
        keys=read.size("index_topk"),
        interleaved=read.family.indexer == "pairs",
        shared=tuple(each == "shared" for each in types),
    )


def latent_scale(latent: Latent | None, ropes: Mapping[str, Rope]) -> float | None:
    """Return the factor of latent attention's scores, which yarn scales; None: not latent."""
    if latent is None:
        return None
    scaling = next((rope.scaling for rope in ropes.values()), None) or {}
    factor, weight = scaling.get("factor") or 1, scaling.get("mscale_all_dim") or 0
    stretched = 1 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0
    return latent.dim**-0.5 * stretched * stretched * latent.scales[0]


def _bit_layers(quantization: Mapping[str, Any]) -> bool:
    """Return whether every call rounds dense layers, as in BitNet; raise for unknown settings."""
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
            raise ConfigError(f"config: {problem}; only {listed} is supported")
    return online and dense_modules in (None, [], ["lm_head"])
