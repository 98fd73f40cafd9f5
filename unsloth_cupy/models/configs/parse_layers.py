"""Parse the layers of a config.json: activation, layer types, windows and rotation."""

from typing import Any

from ...errors import ConfigError
from .config import CHUNKED, CONV, FULL, LINEAR, MLP, SLIDING
from .reading import Reader

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
    "xielu": "xielu",
}
UNGATED = ("gelu", "gelu_tanh", "relu2", "xielu")


def activation_of(read: Reader) -> str:
    """Return the name of the activation.

    The first configs of Gemma have gelu, but their models use its tanh form.  The version of
    transformers determines which of two keys has priority, so they must not contradict each other.
    """
    name = read.not_null(read.family.activation)
    if read.family.scaled_embedding and read.family.activation == "hidden_act":
        name = "gelu_pytorch_tanh" if name == "gelu" else name
        if read.values.get("hidden_activation") not in (None, name):
            both = f"hidden_activation is {read.values['hidden_activation']!r}"
            raise ConfigError(f"config: {both} and hidden_act {name!r}; remove one of them")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"config: the activation is {name!r}; choose from {known}")
    if (ACTIVATIONS[name] not in UNGATED) if not read.family.gate else name == "xielu":
        kind = "has a gate" if read.family.gate else "has no gate"
        cure = f"only {', '.join(UNGATED)}" if not read.family.gate else "not xielu"
        raise ConfigError(f"config: the activation is {name!r}; an MLP that {kind} has {cure}")
    return ACTIVATIONS[name]


def layers_of(read: Reader, layers: int) -> tuple[tuple[bool, ...], tuple[str, ...]]:
    """Return for each layer whether it rotates queries and keys, and for each layer its type."""
    match read.family.rotates:
        case "listed":
            rotated = _rotated(read, layers)
            return rotated, _types(read, layers, rotated)
        case "sliding":
            types = _types(read, layers)
            return tuple(kind == SLIDING for kind in types), types
        case "windowed":
            types, whole = _types(read, layers), read.get("sliding_window") is None
            return tuple(whole or kind == SLIDING for kind in types), types
        case "by_theta":
            parameters = read.values.get("rope_parameters")
            null = isinstance(parameters, dict) and parameters.get("rope_theta", 0) is None
            return (not null,) * layers, _types(read, layers)
        case "none" | "by_type" as kind:
            rotates = kind == "by_type" and read.get("position_embedding_type") == "rope"
            return (rotates,) * layers, _types(read, layers)
        case _:
            return (True,) * layers, _types(read, layers)


def by_layer_of(read: Reader, types: tuple[str, ...], kv_heads: int, dim: int) -> dict[str, Any]:
    """Return the fields of ``Config`` about head sizes, shared keys and inputs of layers."""
    full = read.get("num_global_key_value_heads")
    sizes = kv_heads if full is None else read.size("num_global_key_value_heads")
    sizes_of_full = sizes, read.size("global_head_dim")
    both, heads = (sizes_of_full, (kv_heads, dim)), read.size("num_attention_heads")
    if heads % sizes or max(kv_heads, sizes) % min(kv_heads, sizes):
        problem = f"num_global_key_value_heads is {sizes}"
        cure = f"it must divide {heads} heads, and {kv_heads} KV heads or be a multiple of them"
        raise ConfigError(f"config: {problem}; {cure}")
    shared, layers = read.number("num_kv_shared_layers"), len(types)
    first = layers - int(shared)
    if shared and (first < 1 or not {*types[first:]} <= {*types[:first]}):
        problem = f"num_kv_shared_layers is {int(shared)} of {layers}"
        raise ConfigError(f"config: {problem}; a layer of each type must have keys of its own")
    wide = read.flag("use_double_wide_mlp")
    inputs, table = read.get("hidden_size_per_layer_input"), "vocab_size_per_layer_input"
    return {
        "full_heads": None if both[0] == both[1] else both[0],
        "other_heads": both[1],
        "keys_as_values": read.flag("attention_k_eq_v"),
        "shared_layers": int(shared),
        "shared_inner": read.size("intermediate_size") * (1 + wide),
        "layer_inputs": (read.size(table) if table in read.defaults else 0, inputs)
        if inputs
        else (0, 0),
    }


def _rotated(read: Reader, layers: int) -> tuple[bool, ...]:
    """Return which layers have a 1 in no_rope_layers; by default all but every fourth."""
    listed = read.get("no_rope_layers")
    if listed is None or listed == []:
        period = read.size("no_rope_layer_interval")
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    whole = isinstance(listed, list | tuple) and len(listed) >= layers
    if not whole or not all(type(each) in (int, bool) and each in (0, 1) for each in listed):
        raise ConfigError(
            f"config: no_rope_layers must list num_hidden_layers={layers} numbers, 1 for a layer"
            f" with rotary positions and 0 for one without, not {listed!r}"
        )
    return tuple(bool(each) for each in listed[:layers])


def _types(read: Reader, layers: int, rotated: tuple[bool, ...] = ()) -> tuple[str, ...]:
    """Return the type of each layer: full attention, sliding attention, or no attention."""
    windows, window = read.family.windows, read.get("sliding_window")
    if windows == "linear":
        return _linear(read, layers)
    if windows == "chunked":
        return _chunked(read, layers, rotated)
    if windows == "typed":
        return _typed(read, layers)
    by_flag = windows in ("flagged", "late", "early", "unrotated")
    if windows == "none" or (by_flag and not read.flag("use_sliding_window")):
        return (FULL,) * layers
    types = None if windows in ("all", "flagged") else read.get("layer_types")
    if types is None:
        return tuple(SLIDING if slides else FULL for slides in _slides(read, layers, rotated))
    names = isinstance(types, list) and all(each in (FULL, SLIDING) for each in types)
    if not names or len(types) != layers:
        raise ConfigError(
            f"config: layer_types must be a list of num_hidden_layers={layers} names,"
            f" each {FULL!r} or {SLIDING!r}, not {types!r}"
        )
    if SLIDING in types and window is None:
        raise ConfigError("config: layer_types has sliding layers; add sliding_window")
    return tuple(types)


def _typed(read: Reader, layers: int) -> tuple[str, ...]:
    """Return the type of each layer of an encoder, or of a family with short convolutions."""
    if read.family.encoder:
        return _of_encoder(read, layers)
    sliding = {SLIDING} if "sliding_window" in read.defaults else set[str]()
    return _checked(read.get("layer_types"), {FULL, CONV} | sliding, layers)


def _chunked(read: Reader, layers: int, rotated: tuple[bool, ...]) -> tuple[str, ...]:
    """Return the type of each layer in a family whose layers have chunked or full attention."""
    types, size = read.get("layer_types"), read.get("attention_chunk_size")
    if types is None:
        return tuple(CHUNKED if each and size is not None else FULL for each in rotated)
    names = isinstance(types, list) and all(each in (FULL, CHUNKED) for each in types)
    if not names or len(types) != layers or (CHUNKED in types and size is None):
        raise ConfigError(
            f"config: layer_types must be a list of num_hidden_layers={layers} names, each {FULL!r}"
            f" or {CHUNKED!r}, which needs attention_chunk_size, not {types!r}"
        )
    return tuple(types)


def _linear(read: Reader, layers: int) -> tuple[str, ...]:
    """Return the type of each layer in a family whose layers have attention or a recurrence."""
    types = read.get("layer_types")
    if types is None and read.family.delta == "short":
        every = range(layers)
        return tuple(FULL if layer and layer % 4 == 0 else LINEAR for layer in every)
    if read.family.space is not None:
        types = _of_states(read, types, layers)
    if read.family.mamba is not None:
        return _of_mamba(read, layers)
    if types is None and read.family.lightning:
        return tuple(LINEAR if layer % 2 else FULL for layer in range(layers))
    if types is None:
        period = read.size("full_attention_interval")
        types = [FULL if (layer + 1) % period == 0 else LINEAR for layer in range(layers)]
        if read.family.delta == "apart" and FULL not in types:
            types[-1] = FULL  # at least one layer must have attention
        return tuple(types)
    return _checked(types, {FULL, LINEAR, MLP} if read.family.single else {FULL, LINEAR}, layers)


def _of_encoder(read: Reader, layers: int) -> tuple[str, ...]:
    """Return layer_types; if absent, every n-th layer has full attention, the others a window."""
    if (types := read.get("layer_types")) is None:
        every = read.size("global_attn_every_n_layers")
        types = [SLIDING if layer % every else FULL for layer in range(layers)]
    return _checked(types, {FULL, SLIDING}, layers)


def _checked(types: Any, known: set[str], layers: int) -> tuple[str, ...]:
    """Return layer_types; raise unless it lists a known type for each layer."""
    listed = isinstance(types, list) and len(types) == layers
    if not listed or any(each not in [*known] for each in types):  # a list: may not be hashable
        raise ConfigError(
            f"config: layer_types must be a list of num_hidden_layers={layers} names,"
            f" each {' or '.join(map(repr, sorted(known)))}, not {types!r}"
        )
    return tuple(types)


def _of_states(read: Reader, types: Any, layers: int) -> Any:
    """Return the types of layers in terms of layer_types, from older keys and names."""
    if types is None:
        chosen = read.get("attn_layer_indices") or []
        if not isinstance(chosen, list) or any(each not in range(layers) for each in chosen):
            problem = f"attn_layer_indices is {chosen!r}"
            raise ConfigError(f"config: {problem}; it must list indices of layers below {layers}")
        return [FULL if layer in chosen else LINEAR for layer in range(layers)]
    names = {"mamba": LINEAR, "attention": FULL}
    return [names.get(str(each), each) for each in types] if isinstance(types, list) else types


def _of_mamba(read: Reader, layers: int) -> tuple[str, ...]:
    """Return the types of layers in a family whose layers have attention or a selective scan."""
    if "attn_layer_period" not in read.defaults:
        return (LINEAR,) * layers
    period, first = period_of(read, "attn")
    return tuple(FULL if layer % period == first else LINEAR for layer in range(layers))


def period_of(read: Reader, kind: str) -> tuple[int, int]:
    """Return the distance of layers with attention or experts, and the number of the first."""
    period, first = read.size(f"{kind}_layer_period"), read.get(f"{kind}_layer_offset")
    if type(first) is not int or not 0 <= first < period:
        problem = f"{kind}_layer_offset is {first!r}"
        raise ConfigError(f"config: {problem}; it must be below {kind}_layer_period={period}")
    return period, first


def _slides(read: Reader, layers: int, rotated: tuple[bool, ...]) -> list[bool]:
    """Return which layers have a window, for a config.json without layer_types."""
    window, every = bool(read.get("sliding_window")), range(layers)
    match read.family.windows:
        case "late" | "early" as kind:
            bound = read.number("max_window_layers")
            early = [layer % 2 == 0 and layer < bound for layer in every]
            late = [layer >= bound for layer in every]
            return [window and each for each in (late if kind == "late" else early)]
        case "unrotated":
            return [window and not rotated[layer] for layer in every]
        case "most" if window or read.family.rotates != "windowed":
            pattern = read.get("sliding_window_pattern")
            if isinstance(pattern, str) and pattern and set(pattern) <= {*"LG"}:
                letters = [pattern[layer % len(pattern)] for layer in every]
                return [letter == "L" for letter in letters[:-1]] + [False]
            period = read.size("sliding_window_pattern")
            return [(layer + 1) % period != 0 for layer in every]
        case "most":
            return [False] * layers
        case _:
            return [window] * layers
