"""Weights that other programs quantized, by quant_method: they become dense when they are read.

Settings for activations are ignored: activations have the dtype of the model.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core.call import check_entries
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...files import say_once
from . import awq, compressed_tensors, fp8, gptq
from .foreign import ANY, CODES, Part, Weight, numbers
from .gptq import PACKINGS
from .lazy_parameter import StoredTensor
from .quantized_weights import KEY

PARTS = {  # names, after a layer's name, of the tensors of its weight, by quant_method
    "gptq": gptq.PARTS,
    "awq": awq.PARTS,
    **fp8.PARTS,
    "compressed-tensors": compressed_tensors.PARTS,
}
READERS: Mapping[str, Callable[[Weight], "partial[Array]"]] = {
    "gptq": gptq.reader,
    "awq": awq.reader,
    **dict.fromkeys(fp8.PARTS, numbers),
    "compressed-tensors": compressed_tensors.reader,
}
# Supported values of the keys of quantization_config; ... stands for any.
KEYS: Mapping[str, Mapping[str, Any]] = {
    **gptq.KEYS,
    "awq": awq.KEYS,
    **fp8.KEYS,
    "compressed-tensors": compressed_tensors.KEYS,
}
SCALES = ("scales", "weight_scale_inv", "weight_scale")
OF_CACHE = (
    "k_scale",
    "v_scale",
    "kv_scale",
    "q_scale",
    "prob_scale",
    "k_zero_point",
    "v_zero_point",
)
OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_zero_point", "output_scale")
SPARSITY = "sparsity_config"  # older files of compressed-tensors have one with the format dense
KINDS: Mapping[str, Any] = {  # types of the values of these keys
    **dict.fromkeys(("bits", "w_bit", "group_size", "q_group_size", "num_bits"), int | None),
    **dict.fromkeys(("desc_act", "sym", "symmetric", "zero_point", "dequantize"), bool | None),
    **dict.fromkeys(("modules_to_not_convert", "modules_to_convert"), Sequence[str] | None),
    **dict.fromkeys(("ignore", "ignored_layers", "targets"), Sequence[str] | None),
    **dict.fromkeys(("config_groups", "dynamic", "observer_kwargs"), Mapping | bool | None),
    **dict.fromkeys(("weight_block_size", "block_structure"), str | Sequence[int] | None),
    **dict.fromkeys(("activation_scheme", "strategy", "type", "format"), str | None),
    **dict.fromkeys(("checkpoint_format", "packing_format", "fmt", "scale_fmt"), str | None),
}


# ---- config.json --------------------------------------------------------------------------------
def method_of(facts: Mapping[str, Any]) -> str | None:
    """Return the quant_method of weights that another program quantized; None for others."""
    method = facts.get("quant_method")
    return "gptq" if method == "auto-round" else method if method in KEYS else None


def check_quantization(facts: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a key or a value of quantization_config that is not supported."""
    method = facts["quant_method"]
    if method not in KEYS:
        return
    check_entries(f"config: {KEY} of {method}", facts, KINDS)
    _check(f"{KEY} of {method}", facts, {**KEYS[method], "quant_method": (method,)})
    if method == "auto-round" and facts.get("packing_format") not in PACKINGS:
        problem = f"packing_format is missing; it must be {' or '.join(PACKINGS)}"
        raise ConfigError(f"config: {KEY} of {method}: {problem}; load the plain weights instead")
    if len({facts.get(key) for key in ("checkpoint_format", "format")} - {None}) == 2:
        problem = "checkpoint_format and format differ"
        raise ConfigError(f"config: {KEY} of {method}: {problem}; remove the one that is wrong")
    for key in ("config_groups", "dynamic", "extra_config", "regex_config"):
        if facts.get(key) and not isinstance(facts[key], Mapping):
            problem = f"{key} is {str(facts[key])[:60]}; it must be a dict"
            raise ConfigError(f"config: {KEY} of {method}: {problem}")
    block = facts.get("weight_block_size")
    sizes = block if isinstance(block, list | tuple) else ()
    if block is not None and [type(size) for size in sizes] != [int, int]:
        problem = f"weight_block_size is {str(block)[:60]}; it must be two integers"
        raise ConfigError(f"config: {KEY} of {method}: {problem}")
    groups = facts.get("config_groups") or {}
    for key, group in groups.items():
        name = str(key)[:60]
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            problem = f"{KEY}: {name} of config_groups is {str(group)[:60]}, without its weights"
            raise ConfigError(f"config: {problem}; load the plain weights instead")
        _check(f"{KEY}, {name}", group, compressed_tensors.GROUP)
        check_entries(f"config: {KEY}, {name}", group, KINDS)
        check_entries(f"config: {KEY}, weights of {name}", group["weights"], KINDS)
        _check(f"{KEY}, weights of {name}", group["weights"], compressed_tensors.WEIGHTS)
        if group["weights"].get("type") == "float" and group["weights"].get("num_bits") != 8:
            problem = f"weights of {name} are floats of {group['weights'].get('num_bits')} bits"
            raise ConfigError(f"config: {KEY}: {problem}; load the plain weights instead")


def _check(where: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise a ConfigError that names a key or a value that is not supported."""
    for key, value in values.items():
        if key in known and (known[key] is ANY or value in known[key] or value is None):
            continue
        plain = key == SPARSITY and isinstance(value, Mapping) and value.get("format") == "dense"
        if key not in known and (plain or value in (None, False, "", [], {})):
            continue
        listed = f"; it must be {' or '.join(map(str, known[key]))}" if key in known else ""
        problem = f"{str(key)[:60]}={str(value)[:60]} is not supported{listed}"
        raise ConfigError(f"config: {where}: {problem}; load the plain weights instead")


# ---- tensors ------------------------------------------------------------------------------------
def is_of_activations(method: Any, name: str, shapes: Mapping[str, Any]) -> bool:
    """Return whether a tensor belongs to quantized activations or caches, which are ignored."""
    module, _, key = name.rpartition(".")
    of_cache = method in PARTS and key in OF_CACHE
    if of_cache:
        problem = f"{key} and other scales of a quantized cache are ignored"
        say_once(f"{KEY} of {method}: {problem}: caches have the dtype of the model")
    return of_cache or (method in PARTS and key in OF_ACTIVATIONS and f"{module}.weight" in shapes)


def part_in(method: Any, name: str, code: str, shapes: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the parameter that a tensor is a part of, and the part's name; None: it is no part."""
    module, _, key = name.rpartition(".")
    parameter = f"{module}.weight"
    if method not in PARTS or parameter not in shapes:
        return None
    codes = key == "weight" and code in CODES
    return (parameter, key) if codes or key in PARTS[method] else None


def stored_weight(
    facts: Mapping[str, Any], name: str, shape: tuple[int, ...], parts: Mapping[str, Part]
) -> StoredTensor:
    """Return where a quantized weight is stored, and how it becomes dense.

    Raises
    ------
    ConfigError
        A tensor is missing, or its shape or dtype does not fit.
    """
    method, weight = str(method_of(facts)), Weight(facts, name, shape, parts)
    if method in ("gptq", "awq"):
        needed = ["qweight", "qzeros", "scales"]
    else:
        needed = ["weight_packed" if "weight_packed" in parts else "weight", weight.scale]
    if missing := [key for key in needed if key not in parts]:
        problem = f"{name.removesuffix('weight')}{missing[0]} is missing, a part of {method}"
        raise ConfigError(f"{problem}; copy the checkpoint again")
    weight.check_dtypes()
    make = READERS[method](weight)
    first = parts[needed[0]]
    others = {key: (part.file, part.stored) for key, part in parts.items() if key != needed[0]}
    kind = f"{method} {make.keywords['label']}"
    size = sum(part.bytes for part in parts.values())
    dense = partial(_of_finite, make, name, next(key for key in SCALES if key in parts))
    return StoredTensor(
        first.file, first.stored, shape, FLOAT32, parts=others, dense=dense, format=kind, bytes=size
    )


def _of_finite(
    make: Callable[[Mapping[str, Array]], Array],
    name: str,
    scales: str,
    state: Mapping[str, Array],
) -> Array:
    """Return the dense weight; raise a ConfigError if a scale is not finite."""
    if not np.isfinite(state[scales].astype(FLOAT32)).all():
        problem = f"{name.removesuffix('weight')}{scales} holds a number that is not finite"
        raise ConfigError(f"{problem}; copy the checkpoint again")
    return make(state)
