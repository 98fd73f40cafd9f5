"""Weights of GPTQ: qweight (inputs bits / 32, outputs), qzeros, scales, g_idx.

AutoRound also writes this format, with the quant_method gptq or auto-round.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...core.dtypes import Array
from .foreign import ANY, HOW, Part, Weight, WeightParts, ordered, scaled, unpacked

PARTS = ("qweight", "qzeros", "scales", "g_idx")
FORMATS = ("gptq", "gptq_v2")  # values of checkpoint_format
AUTO_ROUND = {  # keys of AutoRound: how it computed the codes, settings of single layers
    **dict.fromkeys(("autoround_version", "provider", "model_free", "supported_types"), ANY),
    **dict.fromkeys(("iters", "lr", "minmax_lr", "seqlen", "nsamples", "train_bs", "amp"), ANY),
    **dict.fromkeys(("gradient_accumulate_steps", "low_gpu_mem_usage", "scale_dtype"), ANY),
    **dict.fromkeys(("enable_quanted_input", "enable_minmax_tuning"), ANY),
    **dict.fromkeys(("enable_norm_bias_tuning", "to_quant_block_names", "quant_block_list"), ANY),
    **dict.fromkeys(("act_group_size", "act_sym", "act_dynamic", "act_data_type"), ANY),
    **dict.fromkeys(("extra_config", "regex_config"), ANY),
    "act_bits": (16, 32),
    "data_type": ("int",),
}
OF_GPTQ = {**HOW, **AUTO_ROUND, "bits": (2, 3, 4, 8)}
PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq")  # of AutoRound: version 1 of GPTQ's format
KEYS: Mapping[str, Mapping[str, Any]] = {  # by quant_method
    "gptq": {
        **OF_GPTQ,
        "checkpoint_format": FORMATS,
        "format": FORMATS,
        "is_marlin_format": (False,),
    },
    "auto-round": {**OF_GPTQ, "packing_format": PACKINGS},
}


def with_zeros(
    facts: Mapping[str, Any], weights: WeightParts, read: Callable[[Part], Array]
) -> tuple[Mapping[str, Any], str]:
    """Return quantization_config with the format of zeros that the weights have, and a note.

    gptq stores zero - 1, gptq_v2 stores the zero.  The zero of symmetric codes with b bits is
    2^(b - 1).  If all zeros of the largest weight have this value only in the format that
    config.json does not name, the codes decide, because the mean of a weight is about 0.  If the
    mean is within three standard errors of the middle, the other format is chosen.
    """
    if facts.get("quant_method") not in KEYS or facts.get("sym", True) is not True:
        return facts, ""
    whole = [each for each in weights.values() if {"qweight", "qzeros"} <= each.keys()]
    parts = max(whole, key=lambda each: each["qweight"].bytes, default=None)
    if parts is None or any(len(parts[key].shape) != 2 for key in ("qweight", "qzeros")):
        return facts, ""
    older, outputs = not _is_v2(facts), parts["qweight"].shape[1]
    fits = (b for b in (2, 3, 4, 8) if -(-outputs * b // 32) == parts["qzeros"].shape[1])
    bits = next(fits, 8)
    zeros, half = unpacked(read(parts["qzeros"]), bits, outputs), 1 << (bits - 1)
    zero = half if older else half - 1  # the stored zero of a symmetric file in the other format
    if not (zeros == zero).all():
        return facts, ""
    words = read(parts["qweight"])
    codes = unpacked(words.T, bits, len(words) * 32 // bits)
    mean, error = float(codes.mean()), 3 * float(codes.std()) / math.sqrt(codes.size)
    above = mean - (zero + 0.5)  # the zero is ``zero`` in gptq_v2, and 1 more in gptq
    is_significant = abs(above) > error
    chosen = FORMATS[above < 0 if is_significant else older]
    note = f"zeros are {zero}, and codes have the mean {mean:.2f}: read as {chosen}"
    return {**facts, "checkpoint_format": chosen, "format": None}, note


def _is_v2(facts: Mapping[str, Any]) -> bool:
    """Return whether the files store zeros; older files store zero - 1."""
    return (facts.get("checkpoint_format") or facts.get("format")) == FORMATS[1]


def reader(weight: Weight) -> "partial[Array]":
    """Return the function that computes the dense weight from its tensors."""
    outputs, inputs = weight.shape
    groups = weight.parts["scales"].shape[0]
    places = weight.places(1, groups, weight.values_of("group_size", "q_group_size", default=128))
    weight.check("scales", (groups, outputs))
    bits = weight.bits(weight.parts["qweight"].shape[0], weight.values_of("bits", default=4))
    weight.check("qweight", (-(-inputs * bits // 32), outputs))
    weight.check("qzeros", (groups, -(-outputs * bits // 32)))
    if "g_idx" in weight.parts:
        weight.check("g_idx", (inputs,))
    columns = partial(ordered, weight.name, places)
    how: Any = {"shape": weight.shape, "bits": bits, "older": not _is_v2(weight.facts)}
    return partial(_of_gptq, columns=columns, label=f"{bits} bits", **how)


def _of_gptq(
    state: Mapping[str, Array],
    *,
    shape: tuple[int, ...],
    bits: int,
    older: bool,
    columns: Callable[[Array | None], Array],
    label: str,
) -> Array:
    """Return the dense weight; ``older`` files store zero - 1, modulo 2^bits."""
    outputs, inputs = shape
    codes = unpacked(state["weight"].T, bits, inputs)
    zeros = unpacked(state["qzeros"], bits, outputs)
    if older:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    order = columns(state.get("g_idx"))
    return scaled(codes, state["scales"].T, zeros.T, np.arange(outputs), order)
