"""Quantized weights of a model: the arrays they are kept in, and the tensors of a checkpoint.

    model.layers.0.mlp.up_proj.weight                                      codes
    model.layers.0.mlp.up_proj.weight.absmax                               and the rest of the
    model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4        state of an ``Nf4``

and what config.json says of them, as ``quantization_config``.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core.dtypes import Array, Stored
from ..errors import ConfigError, GradientError, RangeError, ShapeError
from ..ops.quantized.int8 import Int8
from ..ops.quantized.nf4 import Nf4
from ..ops.quantized.ternary import Ternary
from ..ops.quantized.weight import Quantized

# what may follow a layer's name beside weight and bias, of each class of weights
PARTS: Mapping[type[Quantized], re.Pattern[str]] = {
    Nf4: re.compile(
        r"weight\.(absmax|quant_map|nested_absmax|nested_quant_map"
        r"|quant_state\.bitsandbytes__(nf4|fp4))$"
    ),
    Int8: re.compile(r"(SCB|weight_format)$"),
    Ternary: re.compile(r"weight_(scale|form)$"),
}
KEY = "quantization_config"
LEFT_DENSE = {"bitnet": "modules_to_not_convert"}  # what it calls the layers that stay dense


class Part(NamedTuple):
    """A part of a quantized weight: the parameter that it belongs to, and its name there."""

    parameter: str
    key: str
    kind: type[Quantized]


def part_of(name: str, shapes: Mapping[str, Any]) -> Part | None:
    """Return what a tensor of a checkpoint is a part of, if it is one of a known weight."""
    pieces = name.split(".")
    for count in range(len(pieces) - 1, 0, -1):
        module, key = ".".join(pieces[:count]), ".".join(pieces[count:])
        if f"{module}.weight" in shapes:
            kind = next((kind for kind, parts in PARTS.items() if parts.match(key)), None)
            return None if kind is None else Part(f"{module}.weight", key, kind)
    return None


def assembled(
    name: str,
    kind: type[Quantized],
    state: Mapping[str, Array],
    shape: Any,
    dtype: Any,
    inverse: bool = False,
) -> Quantized:
    """Return the weight of a checkpoint's parts, in a dtype to compute in; None: the stored one."""
    more = {"inverse": True} if inverse and kind is Ternary else {}
    try:
        made = kind.from_state(state, **more)
    except (ConfigError, RangeError, ShapeError) as error:
        raise ConfigError(f"tensor {name!r}: {error}") from None
    if made.shape != tuple(shape):
        problem = f"tensor {name!r} is a quantized {made.shape}"
        raise ConfigError(f"{problem}; config.json asks for {tuple(shape)}")
    return made if dtype is None else made.computed_in(dtype)


def tensors_of(name: str, value: Any, inverse: bool = False) -> dict[str, Any]:
    """Return the tensors that a parameter is written as."""
    if not isinstance(value, Quantized):
        return {name: value}
    module = name.removesuffix("weight")
    state = value.state(inverse) if isinstance(value, Ternary) else value.state()
    return {module + key: array for key, array in state.items()}


def saved_config(
    config: Mapping[str, Any], parameters: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Return a config.json that says the dtype, which weights are quantized, and how.

    Raises
    ------
    ConfigError
        Weights of two kinds are quantized, which no config.json says.
    """
    plain = {key: value for key, value in config.items() if key != KEY or online(config)}
    plain |= dict.fromkeys({"dtype", "torch_dtype"} & plain.keys(), dtype)
    made = {n: value for n, value in parameters.items() if isinstance(value, Quantized)}
    if not made:
        return plain
    facts = [value.quantization_config(dtype) for value in made.values()]
    if inverse_scales(config):
        facts = [{**each, "linear_class": "bitlinear"} for each in facts]
    if any(each != facts[0] for each in facts):
        raise ConfigError("save: weights are quantized in more than one way; quantize them alike")
    matrices = {n.removesuffix(".weight") for n, value in parameters.items() if value.ndim == 2}
    dense = matrices - {n.removesuffix(".weight") for n in made}
    left = sorted(dense - {"model.embed_tokens", "lm_head"})  # a head stays dense without a word
    key = LEFT_DENSE.get(facts[0]["quant_method"], "llm_int8_skip_modules")
    return {**plain, KEY: {**facts[0], key: [*left, "lm_head"] if left else None}}


def trainable(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return parameters that can learn; raise where one of them is quantized."""
    frozen = next((name for name, value in parameters.items() if isinstance(value, Stored)), None)
    if frozen is not None:
        cure = "call add_adapter(rank) first, or load the dense weights"
        raise GradientError(f"{frozen} is quantized and frozen; {cure}")
    return parameters


def online(config: Mapping[str, Any]) -> bool:
    """Say whether dense weights are rounded at every call, as a config.json of BitNet tells."""
    return (config.get(KEY) or {}).get("quantization_mode") == "online"


def inverse_scales(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json of BitNet tells of BitLinear, which divides by its scales."""
    facts = config.get(KEY) or {}
    named = facts.get("linear_class", "bitlinear")
    return facts.get("quant_method") == "bitnet" and named == "bitlinear"


def stored_kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of the quantized weights that a config.json tells of, if it does."""
    facts = config.get(KEY) or {}
    if facts.get("quant_method") == "bitnet":
        return None if online(config) else Ternary.KIND
    if not facts.get("load_in_4bit"):
        return None
    kind = str(facts.get("bnb_4bit_quant_type", "fp4"))
    return f"{kind}-double" if kind == "nf4" and facts.get("bnb_4bit_use_double_quant") else kind
