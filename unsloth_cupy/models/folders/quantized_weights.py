"""Quantized weights in checkpoints: the tensors that store a weight, and config.json's entry.

    model.layers.0.mlp.up_proj.weight                                      codes
    model.layers.0.mlp.up_proj.weight.absmax                               and the rest of the
    model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4        state of an ``Nf4``

For a stack of experts, the ending follows the name of the stack, as in bitsandbytes: ``.absmax``.
``quantization_config`` in config.json describes the weights.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...core.dtypes import Array, Stored
from ...errors import ConfigError, GradientError, RangeError, ShapeError
from ...ops.quantized.int8 import Int8
from ...ops.quantized.nf4 import Nf4
from ...ops.quantized.ternary import Ternary
from ...ops.quantized.weight import Quantized
from ..configs.config import BUFFERS, CORRECTION, EXPERT_BIAS, SCALAR
from ..configs.names import INDEXER, is_stack
from ..quantizer import OF_STACKS

# endings of tensor names after a layer's name, except weight and bias, by class of weights
PARTS: Mapping[type[Quantized], re.Pattern[str]] = {
    Nf4: re.compile(
        r"\.(weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map"
        r"|quant_state\.bitsandbytes__(?:nf4|fp4)))$"
    ),
    Int8: re.compile(r"\.(SCB|weight_format)$"),
    Ternary: re.compile(r"\.(weight_(?:scale|form))$"),
}
KEY = "quantization_config"
GGUF = "gguf"  # the quant_method of a GGUF file that is read as a folder
FIXED = (*(f".act_fn.{name}" for name in BUFFERS), CORRECTION, EXPERT_BIAS, f".{SCALAR}")
LEFT_DENSE = {"bitnet": "modules_to_not_convert"}  # the key that lists the layers that stay dense


class Part(NamedTuple):
    """A tensor of a quantized weight: the parameter, the name after the layer's, and the class."""

    parameter: str
    key: str
    kind: type[Quantized]


def part_of(name: str, shapes: Mapping[str, Any]) -> Part | None:
    """Return the quantized weight that a tensor of a checkpoint is a part of, or None."""
    stack, _, key = name.partition("_proj.")
    if is_stack(f"{stack}_proj") and PARTS[Nf4].search(f".weight.{key}"):
        return Part(f"{stack}_proj", f"weight.{key}", Nf4) if f"{stack}_proj" in shapes else None
    for kind, parts in PARTS.items():
        match = parts.search(name)
        if match and f"{name[: match.start()]}.weight" in shapes:
            return Part(f"{name[: match.start()]}.weight", match[1], kind)
    return None


def assembled(
    name: str,
    kind: type[Quantized],
    state: Mapping[str, Array],
    shape: Any,
    dtype: Any,
    inverse: bool = False,
) -> Quantized:
    """Return the weight of a checkpoint's tensors; ``dtype`` is for results, None: as stored."""
    options = {"inverse": True} if inverse and kind is Ternary else {}
    try:
        weight = kind.from_state(state, **options)
    except (ConfigError, RangeError, ShapeError) as error:
        raise ConfigError(f"tensor {name!r}: {error}") from None
    if weight.shape != tuple(shape):
        problem = f"tensor {name!r} is a quantized {weight.shape}"
        raise ConfigError(f"{problem}; config.json implies {tuple(shape)}")
    return weight if dtype is None else weight.computed_in(dtype)


def tensors_of(name: str, value: Any, inverse: bool = False) -> dict[str, Any]:
    """Return the tensors that a parameter is written as."""
    if not isinstance(value, Quantized):
        return {name: value}
    state = value.state(inverse) if isinstance(value, Ternary) else value.state()
    if is_stack(name):
        return {name + key.removeprefix("weight"): array for key, array in state.items()}
    module = name.removesuffix("weight")
    return {module + key: array for key, array in state.items()}


def in_folders(name: str, value: Any) -> Any:
    """Return a parameter in a form that folders support: dense, if only GGUF supports its form."""
    if not isinstance(value, Quantized):
        return value
    is_supported = value.IN_FOLDERS and (is_stack(name) or not value.OF_STACKS)
    return value if is_supported else value.dequantize()


def saved_config(
    config: Mapping[str, Any], parameters: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Return the config.json with its dtype and ``quantization_config`` set for these parameters.

    Raises
    ------
    ConfigError
        Weights are quantized in different ways, which a config.json cannot describe.
    """
    plain = {key: value for key, value in config.items() if key != KEY or online(config)}
    plain |= dict.fromkeys({"dtype", "torch_dtype"} & plain.keys(), dtype)
    quantized = {n: value for n, value in parameters.items() if isinstance(value, Quantized)}
    if not quantized:
        return plain
    entries = [value.quantization_config(dtype) for value in quantized.values()]
    if inverse_scales(config):
        entries = [{**each, "linear_class": "bitlinear"} for each in entries]
    if any(each != entries[0] for each in entries):
        raise ConfigError("save: weights are quantized in more than one way; use one kind")
    if all(value.OF_STACKS for value in quantized.values()):
        return {**plain, KEY: {**entries[0], **(config.get(KEY) or {})}}
    named = {n: value for n, value in parameters.items() if n.endswith(".weight")}
    matrices = {n.removesuffix(".weight") for n, value in named.items() if value.ndim == 2}
    dense = matrices - {n.removesuffix(".weight") for n in quantized}
    listed = sorted(dense - {"model.embed_tokens", "lm_head"})  # the head is dense by default
    key = LEFT_DENSE.get(entries[0]["quant_method"], "llm_int8_skip_modules")
    return {**plain, KEY: {**entries[0], key: [*listed, "lm_head"] if listed else None}}


def packed_stacks(values: Mapping[str, Any]) -> set[str]:
    """Return the names of the expert stacks with a stored form that only stacks have."""
    return {n for n, each in values.items() if is_stack(n) and getattr(each, "OF_STACKS", False)}


def is_fixed(name: str) -> bool:
    """Return whether a parameter has no gradient: constants, and what only chooses keys."""
    return name.endswith(FIXED) or INDEXER in name


def trainable(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the trainable parameters; raise if a matrix is quantized.

    Packed stacks of experts are frozen; the rest of their model is dense.
    """
    packed = packed_stacks(parameters)
    stored = (n for n, value in parameters.items() if isinstance(value, Stored) and n not in packed)
    frozen = next(stored, None)
    if frozen is not None:
        cure = "call add_adapter(rank) first, or load the dense weights"
        if not getattr(parameters[frozen], "IN_FOLDERS", True):
            cure += ", which save(folder) writes"
        raise GradientError(f"{frozen} is quantized and frozen; {cure}")
    trained = {n: value for n, value in parameters.items() if not (n in packed or is_fixed(n))}
    return trained if len(trained) < len(parameters) else parameters


def online(config: Mapping[str, Any]) -> bool:
    """Return whether config.json requires rounding dense weights at every call (BitNet)."""
    return (config.get(KEY) or {}).get("quantization_mode") == "online"


def inverse_scales(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json names BitNet's BitLinear, which divides by its scales."""
    facts = config.get(KEY) or {}
    linear_class = facts.get("linear_class", "bitlinear")
    return facts.get("quant_method") == "bitnet" and linear_class == "bitlinear"


def stored_kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of the quantized weights that a config.json declares, or None."""
    facts = config.get(KEY) or {}
    if facts.get("quant_method") == "bitnet":
        return None if online(config) else Ternary.KIND
    if facts.get("quant_method") in OF_STACKS:
        return str(facts["quant_method"])
    if facts.get("quant_method") == GGUF:
        return str(facts["kind"])
    if not facts.get("load_in_4bit"):
        return None
    kind = str(facts.get("bnb_4bit_quant_type", "fp4"))
    return f"{kind}-double" if kind == "nf4" and facts.get("bnb_4bit_use_double_quant") else kind
