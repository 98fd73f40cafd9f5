"""Parse a Hugging Face config.json, in its older and newer forms, into a ``Config``."""

from collections.abc import Mapping
from typing import Any

from ..core.call import is_number
from ..errors import ConfigError
from ..ops.position.rope_tables import LARGEST, scaled_frequencies
from .config import FULL, SLIDING, Config, Rope
from .families import COMMON, FAMILIES, NEUTRAL, READ, WITHOUT_EFFECT, Family
from .heads import CAUSAL, LABELS, NONE, class_of, head_of, labels_of
from .names import IMAGES, TEXT
from .quantized_weights import inverse_scales

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
GROWING = ("dynamic", "longrope")  # their angles depend on the length of the sequence
# Keys of a multimodal config.json that override those of its text_config.
OUTER_KEYS = ("tie_word_embeddings", "eos_token_id", "pad_token_id", "quantization_config", *LABELS)
QUANTIZED = ("bitsandbytes", "bitnet")  # supported values of quantization_config's quant_method
UNSUPPORTED = {
    "use_bidirectional_attention": "only causal models are known",
}

# Larger numbers must be mistakes.
MOST = 2**31 - 1
MOST_OF = {
    "num_hidden_layers": 10_000,
    **dict.fromkeys(("head_dim", "num_attention_heads", "num_key_value_heads"), 2**16),
    **{"hidden_size": 2**20, "intermediate_size": 2**22, "vocab_size": 2**26},
}
SHOWN = 5  # keys that a message names


class Reader:
    """Reads typed values of a config.json; errors name the key that is missing or wrong."""

    def __init__(self, values: Mapping[str, Any], family: Family) -> None:
        self.values, self.family = values, family
        self.defaults = {**COMMON, **family.defaults}

    def get(self, key: str) -> Any:
        """Return the value, which may be null; if absent the family's default, or None."""
        return self.values.get(key, self.defaults.get(key))

    def not_null(self, key: str) -> Any:
        """Return the value; if absent or null the family's default."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def size(self, key: str) -> int:
        """Return a positive integer."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f'config: {key} is missing; add it, as in "{key}": 64')
        most = MOST_OF.get(key, MOST)
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"config: {key} is {value!r}; it must be an integer in 1 .. {most}")
        return value

    def number(self, key: str) -> float:
        """Return a finite number that is not negative."""
        value = self.not_null(key)
        if type(value) not in (int, float) or not 0 <= value <= LARGEST:
            raise ConfigError(f"config: {key} is {value!r}; it must be a number, 0 or more")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a bool."""
        value = self.not_null(key)
        if type(value) is not bool:
            raise ConfigError(f"config: {key} is {value!r}; it must be true or false")
        return value


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
    body = IMAGES if values.get("model_type") == "gemma3" and "text_config" in values else TEXT
    values = text_config(values)
    body = "" if head_of(values) == NONE else body
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted({*FAMILIES, "gemma3"}))
        raise ConfigError(f"config: model_type is {model_type!r}; choose from {known}")
    family = FAMILIES[model_type]
    _check_keys(values)
    read = Reader(values, family)
    facts = values.get("quantization_config")
    if facts and not (isinstance(facts, Mapping) and facts.get("quant_method") in QUANTIZED):
        cure = "load the plain weights (float16, bfloat16 or float32) instead"
        known = " or ".join(QUANTIZED)
        raise ConfigError(f"config: quantization_config is not one of {known}; {cure}")
    for key, cure in UNSUPPORTED.items():
        if values.get(key):
            raise ConfigError(f"config: {key} is set; {cure}")
    hidden, heads, layers = (
        read.size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    shared = read.get("num_key_value_heads") is not None
    kv_heads = read.size("num_key_value_heads") if shared else heads
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
    layer_types = _layer_types(read, layers)
    bias, head = read.flag("attention_bias"), head_of(values)
    return Config(
        model_type=model_type,
        vocab=read.size("vocab_size"),
        hidden=hidden,
        inner=read.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        eps=read.number("rms_norm_eps"),
        activation=_activation(read),
        layer_types=layer_types,
        window=read.size("sliding_window") if SLIDING in layer_types else None,
        ropes={kind: _rope(read, kind, dim) for kind in sorted(set(layer_types))},
        scale=(_obeyed(read, "query_pre_attn_scalar") or dim) ** -0.5,
        softcap=_obeyed(read, "attn_logit_softcapping"),
        logit_softcap=_obeyed(read, "final_logit_softcapping"),
        norms=family.norms,
        norm_offset=family.norm_offset,
        query_key_norm=family.query_key_norm,
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=model_type == "llama" and read.flag("mlp_bias"),
        fused=family.fused,
        bit_layers=_bit_layers(facts or {}),
        inverse_scales=inverse_scales(values),
        sub_norms=family.sub_norms,
        tied=read.flag("tie_word_embeddings") and head == CAUSAL,
        initializer_range=read.number("initializer_range"),
        positions=read.size("max_position_embeddings"),
        end_tokens=token_ids("eos_token_id", values),
        pad_token=next(iter(token_ids("pad_token_id", values)), None),
        body=body,
        head=head,
        labels=labels_of(values, head),
    )


def _check_keys(values: Mapping[str, Any]) -> None:
    """Raise for keys that nothing reads, unless they or their values change nothing.

    Values of keys that are read must be of JSON.
    """
    for key in READ & values.keys():
        if not isinstance(values[key], str | int | float | list | tuple | Mapping | None):
            problem = f"config: {key} is {type(values[key]).__name__}"
            raise ConfigError(f"{problem}; it must be a value of JSON, such as a number")
    unread = {
        key: value
        for key, value in values.items()
        if not (key in READ or key in NEUTRAL or str(key).startswith("_"))
        if not any(value is one for one in (None, False)) and value not in ([], {})
        if key not in WITHOUT_EFFECT or value != WITHOUT_EFFECT[key]
    }
    if unread:
        names = sorted(map(str, unread))
        listed = ", ".join(f"{key}={str(unread.get(key))[:40]}" for key in names[:SHOWN])
        listed += f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
        problem = f"config: {listed}: not read, and may change what the model computes"
        raise ConfigError(f"{problem}; remove what does not, other models are not known")


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config.json that may also describe a vision model."""
    if values.get("model_type") != "gemma3":
        return values
    inner = values.get("text_config", values)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config: text_config is {inner!r}; it must be a dict")
    outer = {key: values[key] for key in OUTER_KEYS if values.get(key) is not None}
    outer["model_type"] = "gemma3_text"
    if (head := head_of(values)) != CAUSAL:
        outer["architectures"] = [class_of({**values, **outer}, head)]
    return {**inner, **outer}


def _obeyed(read: Reader, key: str) -> float | None:
    """Return a positive number, or None where it is absent or the family ignores the key."""
    if key not in read.family.obeys or read.get(key) is None:
        return None
    number = read.number(key)
    if number == 0:
        raise ConfigError(f"config: {key} is 0; it must be positive, or null to leave it out")
    return number


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
            raise ConfigError(
                f"config: quantization_config of bitnet has {key}={value!r}; only {listed} is read"
            )
    return online and dense_modules in (None, [], ["lm_head"])


def _activation(read: Reader) -> str:
    """Return the activation's name; Gemma's early configs say gelu and mean its tanh form."""
    gemma = read.family.scaled_embedding
    named = read.get("hidden_activation") if gemma else None
    name = named or read.not_null("hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"config: the activation is {name!r}; choose from {known}")
    return "gelu_tanh" if gemma and not named and name == "gelu" else ACTIVATIONS[name]


def _layer_types(read: Reader, layers: int) -> tuple[str, ...]:
    """Return for each layer whether its queries see all keys or a window of them."""
    windows, window = read.family.windows, read.get("sliding_window")
    if windows == "none" or (windows == "late" and not read.flag("use_sliding_window")):
        return (FULL,) * layers
    if windows == "all":
        return (SLIDING if window else FULL,) * layers
    types = read.get("layer_types")
    if types is None and windows == "late":
        first = read.number("max_window_layers")
        return tuple(SLIDING if window and i >= first else FULL for i in range(layers))
    if types is None:
        period = read.size("sliding_window_pattern")
        return tuple(SLIDING if (i + 1) % period else FULL for i in range(layers))
    names = isinstance(types, list) and all(each in (FULL, SLIDING) for each in types)
    if not names or len(types) != layers:
        raise ConfigError(
            f"config: layer_types must be a list of num_hidden_layers={layers} names,"
            f" each {FULL!r} or {SLIDING!r}, not {types!r}"
        )
    return tuple(types)


def _rope(read: Reader, kind: str, dim: int) -> Rope:
    """Return the rotary positions of the layers of one type.

    The newer form is ``rope_parameters``, for all layers or by layer type; the older one is
    ``rope_theta``, ``rope_scaling`` and, in Gemma 3, ``rope_local_base_freq``.
    """
    local = kind == SLIDING and read.get("rope_local_base_freq") is not None
    newer = read.get("rope_parameters") or {}
    scaling = read.get("rope_scaling") or {}
    if not isinstance(newer, Mapping) or not isinstance(scaling, Mapping):
        raise ConfigError("config: rope_parameters and rope_scaling must be dicts")
    nested = FULL in newer or SLIDING in newer
    if nested and not all(isinstance(newer.get(name) or {}, Mapping) for name in (FULL, SLIDING)):
        raise ConfigError("config: rope_parameters must hold a dict for each type of layers")
    parameters = dict(newer.get(kind) or {}) if nested else {} if local else {**newer, **scaling}
    parameters.setdefault("rope_theta", read.get("rope_local_base_freq" if local else "rope_theta"))
    base = Reader(parameters, read.family).number("rope_theta")
    if base <= 0:
        raise ConfigError("config: rope_theta is 0; it must be positive")
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if read.family.fused and name in ("su", "yarn"):  # Phi-3's old names of longrope
        name = "longrope"
    if name not in ROPES:
        raise ConfigError(f"config: rope_type is {name!r}; choose from {', '.join(ROPES)}")
    share = parameters.pop("partial_rotary_factor", None) or read.get("partial_rotary_factor") or 1
    if name == "default" and not read.family.fused:
        share = 1  # only Phi-3's class in transformers reads it there
    if type(share) not in (int, float) or not 0 < share <= 1 or int(dim * share) % 2:
        raise ConfigError(
            f"config: partial_rotary_factor={share!r} of a head of {dim} must be an even number"
            " of elements; choose a share in (0, 1] and an even head_dim"
        )
    if name == "default":
        return _checked(Rope(int(dim * share), base))
    positions = read.size("max_position_embeddings")
    original = positions
    if name != "dynamic":
        reader = Reader({"original": read.get("original_max_position_embeddings")}, read.family)
        original = parameters.get("original_max_position_embeddings", positions)
        original = reader.size("original") if reader.get("original") else original
        if not is_number(original) or not 1 <= original <= MOST:
            problem = f"original_max_position_embeddings is {original!r}"
            raise ConfigError(f"config: {problem}; it must be a number in 1 .. {MOST}")
    parameters |= {"rope_type": name, "original_max_position_embeddings": original}
    if name in ("yarn", "longrope") and parameters.get("factor") is None:
        parameters["factor"] = positions / original
    return _checked(Rope(int(dim * share), base, parameters, original if name in GROWING else None))


def _checked(rope: Rope) -> Rope:
    """Return the rope; raise for invalid numbers, also those that only a long text would use."""
    try:
        for length in {1, (rope.original or 0) + 1}:
            scaled_frequencies(rope.scaling, length, rope.dim, rope.base)
    except ConfigError as error:
        raise ConfigError(f"config: {error}") from error
    return rope


def token_ids(key: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token ids of a key whose value is an id or a list; negative ids are left out."""
    value = values.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token > MOST for token in listed):
        raise ConfigError(f"config: {key} is {value!r}; it must be a token id or a list of them")
    return tuple(token for token in listed if token >= 0)
