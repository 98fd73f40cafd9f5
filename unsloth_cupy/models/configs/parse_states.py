"""Parse the layers of a config.json that have a recurrence of Mamba, or a convolution."""

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .config import CONV, FULL, LINEAR, MLP, SLIDING
from .lightning import Lightning
from .mamba import Mamba
from .reading import MOST_OF, Reader
from .short_conv import RELEASED, ShortConv
from .state_space import StateSpace

OF_TYPES = ("hybrid_override_pattern", "layers_block_type")
MOE = "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}  # in hybrid_override_pattern
OF_PARTS = 5  # number of ssm_multipliers: gate, x, b, c and dt


def with_types(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json with layer_types; Nemotron-H has other keys for the types of layers.

    Layers with experts get the type MLP, and "sparse" in mlp_layer_types.
    """
    if values.get("model_type") != "nemotron_h":
        return values
    pattern, types = values.get("hybrid_override_pattern"), values.get("layers_block_type")
    if types is None and isinstance(pattern, str):
        types = [LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(types, list):
        problem = f"layers_block_type is {types!r}"
        raise ConfigError(f"config: {problem}; it must list the types of all layers")
    own = {key: value for key, value in values.items() if key not in OF_TYPES}
    kinds = ["sparse" if each == MOE else "dense" for each in types]
    types = [MLP if each == MOE else each for each in types]
    own |= {"layer_types": types, "mlp_layer_types": kinds, "num_hidden_layers": len(types)}
    return own


def of_lfm(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json of LFM with the keys of transformers' form."""
    read = {key: value for key, value in values.items() if key not in RELEASED}
    read |= {RELEASED[key]: value for key, value in values.items() if key in RELEASED}
    layers, chosen = read.get("num_hidden_layers"), read.pop("full_attn_idxs", None)
    if read.get("layer_types") is not None or type(layers) is not int:
        return read
    if layers > MOST_OF["num_hidden_layers"] or values.get("model_type") == "lfm2_moe":
        return read  # invalid: the caller raises
    every = range(layers)
    if values.get("model_type") == "lfm3":
        kinds = (CONV, CONV, FULL, CONV)  # of layer n by n % 4, but for layers 4, 8, ...
        return read | {
            "layer_types": [SLIDING if n and n % 4 == 0 else kinds[n % 4] for n in every]
        }
    chosen = [*every] if chosen is None else chosen
    if not isinstance(chosen, list) or any(each not in every for each in chosen):
        problem = f"full_attn_idxs is {chosen!r}"
        raise ConfigError(f"config: {problem}; it must list indices of layers below {layers}")
    return read | {"layer_types": [FULL if layer in chosen else CONV for layer in every]}


def lightning_of(read: Reader) -> Lightning:
    """Return the sizes of layers with lightning attention."""
    kinds = ("full_attn", "linear_attn", "mlp")
    scales = [
        (read.number(f"{kind}_alpha_factor"), read.number(f"{kind}_beta_factor")) for kind in kinds
    ]
    if read.get("hidden_act") not in ("silu", "swish"):
        raise ConfigError("config: hidden_act also applies to queries and keys; it must be silu")
    first, second, third = scales
    return Lightning(
        read.size("num_attention_heads"), read.size("head_dim"), (first, second, third)
    )


def mamba_of(read: Reader) -> Mamba | None:
    """Return the sizes of layers with the recurrence of Mamba; None for other families."""
    names = read.family.mamba
    if names is None:
        return None
    if read.get("hidden_act") not in ("silu", "swish"):
        raise ConfigError("config: hidden_act also applies to convolutions; it must be silu")
    hidden, rank = read.size("hidden_size"), read.get(names["rank"])
    return Mamba(
        inner=_inner(read, names),
        state=read.size(names["state"]),
        rank=-(-hidden // 16) if rank == "auto" else read.size(names["rank"]),
        taps=read.size(names["taps"]),
        conv_bias=read.flag(names["conv_bias"]),
        bias=read.flag(names["bias"]),
        normed=read.family.mamba_norms,
    )


def short_conv_of(read: Reader) -> ShortConv:
    """Return the sizes of layers with a short convolution."""
    return ShortConv(read.size("conv_L_cache"), read.flag("conv_bias"))


def inner_of(read: Reader) -> int:
    """Return the inner size of dense layers, which LFM2 derives from its key."""
    size = read.size(read.family.inner)
    if "block_auto_adjust_ff_dim" not in read.defaults or not read.flag("block_auto_adjust_ff_dim"):
        return size
    size, multiple = int(2 * size / 3), read.size("block_multiple_of")
    if read.get("block_ffn_dim_multiplier") is None:
        return size
    size = int(read.number("block_ffn_dim_multiplier") * size)
    return -(-size // multiple) * multiple


def state_space_of(read: Reader) -> StateSpace | None:
    """Return the sizes of layers with the recurrence of Mamba2; None for other families."""
    names = read.family.space
    if names is None:
        return None
    heads, groups = read.size(names["heads"]), read.size(names["groups"])
    dim, inner = read.get(names["dim"]), _inner(read, names)
    if dim in ("auto", None):
        dim = inner // heads
    elif type(dim) is not int or dim < 1:
        raise ConfigError(f"config: {names['dim']} is {dim!r}; it must be a positive integer")
    if dim * heads != inner:
        problem = f"{names['heads']}={heads} times {names['dim']}={dim} is not {inner}"
        raise ConfigError(f"config: {problem}, the inner size of the layers with states")
    if heads % groups:
        problem = f"{names['heads']}={heads} is not a multiple of {names['groups']}={groups}"
        raise ConfigError(f"config: {problem}")
    if read.get(names.get("activation", "hidden_act")) not in ("silu", "swish"):
        problem = f"{names.get('activation', 'hidden_act')} also applies to convolutions"
        raise ConfigError(f"config: {problem}; it must be silu")
    least, most = _limits(read)
    if "least" in names:
        least, most = read.number(names["least"]), None
    bias = read.flag(names["bias"])
    common: dict[str, Any] = {
        **{"heads": heads, "dim": dim, "groups": groups, "least": least, "most": most},
        **{name: read.size(names[name]) for name in ("state", "taps")},
        **{"conv_bias": read.flag(names["conv_bias"]), "bias": bias},
    }
    if not read.family.space_beside:
        return StateSpace(**common, out_bias=bias)
    norm = "before" if read.flag("mamba_norm_before_gate") else "after"
    scales = read.get("ssm_multipliers") or [1.0] * OF_PARTS
    if not _numbers(scales, OF_PARTS):
        problem = f"ssm_multipliers is {scales!r}"
        raise ConfigError(f"config: {problem}; it must list {OF_PARTS} numbers")
    return StateSpace(
        **common,
        out_bias=read.flag("projectors_bias"),
        norm=norm if read.flag("mamba_rms_norm") else None,
        beside=True,
        scale=read.number("ssm_in_multiplier"),
        scales=tuple(map(float, scales)) if {*scales} != {1} else (),
        out_scale=read.number("ssm_out_multiplier"),
    )


def multipliers_of(read: Reader) -> dict[str, Any]:
    """Return the factors of attention and MLP that families with ``space_beside`` have."""
    if not read.family.space_beside:
        return {}
    of_mlp = read.get("mlp_multipliers") or [1.0, 1.0]
    if not _numbers(of_mlp, 2):
        raise ConfigError(f"config: mlp_multipliers is {of_mlp!r}; it must list two numbers")
    both = (read.number(f"attention_{side}_multiplier") for side in ("in", "out"))
    gate, down = map(float, of_mlp)
    return {"gate_scale": gate, "down_scale": down, "attention_scales": tuple(both)}


def _inner(read: Reader, names: Mapping[str, str]) -> int:
    """Return the number of channels of x."""
    if "inner" in names and read.get(names["inner"]) is not None:
        return read.size(names["inner"])
    if "expand" not in names:
        return read.size(names["heads"]) * read.size(names["dim"])
    return int(read.number(names["expand"]) * read.size("hidden_size"))


def _limits(read: Reader) -> tuple[float, float | None]:
    """Return the bounds of time steps; transformers writes infinity as an object."""
    limits = read.get("time_step_limit")
    if limits is None:
        return 0.0, None
    values = list(limits) if isinstance(limits, list | tuple) else []
    endless = ({"__float__": "Infinity"}, math.inf, None)
    values = [math.inf if any(value == one for one in endless) else value for value in values]
    if not _numbers(values, 2) or not 0 <= values[0] <= values[1]:
        problem = f"time_step_limit is {limits!r}"
        raise ConfigError(f"config: {problem}; it must list two numbers, 0 <= least <= most")
    return float(values[0]), None if values[1] == math.inf else float(values[1])


def _numbers(values: Any, count: int) -> bool:
    """Return whether ``values`` is a list of ``count`` numbers."""
    listed = isinstance(values, list | tuple) and len(values) == count
    return listed and all(type(each) in (int, float) for each in values)
