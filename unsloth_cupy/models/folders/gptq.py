"""GPTQ: qweight (inputs bits / 32, outputs), qzeros, scales, g_idx.

AutoRound writes GPTQ's files, as gptq or under its own name.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...core.dtypes import Array
from .foreign import ANY, HOW, Found, Part, Weight, ordered, scaled, unpacked

PARTS = ("qweight", "qzeros", "scales", "g_idx")
LINKED = ("gptq", "gptq_v2")  # values of checkpoint_format
AUTO_ROUND = {  # keys of AutoRound: how it found the codes, settings of single layers
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
PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq")  # of AutoRound: GPTQ's, v1
KEYS: Mapping[str, Mapping[str, Any]] = {  # by quant_method
    "gptq": {
        **OF_GPTQ,
        "checkpoint_format": LINKED,
        "format": LINKED,
        "is_marlin_format": (False,),
    },
    "auto-round": {**OF_GPTQ, "packing_format": PACKINGS},
}


def with_zeros(
    facts: Mapping[str, Any], weights: Found, read: Callable[[Part], Array]
) -> tuple[Mapping[str, Any], str]:
    """Return quantization_config with the form of GPTQ's zeros that its weights have, and a note.

    Symmetric codes of b bits have the zero 2^(b - 1).  Where all zeros of the largest weight are
    another one in the form that config.json names, and this one in the other form, codes decide:
    a weight has a mean of about 0.  If that is within the error of a mean, it is the other form.
    """
    if facts.get("quant_method") not in KEYS or facts.get("sym", True) is not True:
        return facts, ""
    whole = [each for each in weights.values() if {"qweight", "qzeros"} <= each.keys()]
    parts = max(whole, key=lambda each: each["qweight"].bytes, default=None)
    if parts is None or any(len(parts[key].shape) != 2 for key in ("qweight", "qzeros")):
        return facts, ""
    older, outputs = not _linked(facts), parts["qweight"].shape[1]
    fits = (b for b in (2, 3, 4, 8) if -(-outputs * b // 32) == parts["qzeros"].shape[1])
    bits = next(fits, 8)
    zeros, half = unpacked(read(parts["qzeros"]), bits, outputs), 1 << (bits - 1)
    zero = half if older else half - 1  # as a symmetric file of the other form has it
    if not (zeros == zero).all():
        return facts, ""
    words = read(parts["qweight"])
    codes = unpacked(words.T, bits, len(words) * 32 // bits)
    mean, error = float(codes.mean()), 3 * float(codes.std()) / math.sqrt(codes.size)
    above = mean - (zero + 0.5)  # the zero is that, or 1 more in the older form
    sure = abs(above) > error  # else the mean of so few codes says nothing
    taken = LINKED[above < 0 if sure else older]
    note = f"zeros are {zero}, and codes have the mean {mean:.2f}: read as {taken}"
    return {**facts, "checkpoint_format": taken, "format": None}, note


def _linked(facts: Mapping[str, Any]) -> bool:
    """Return whether zeros of GPTQ are stored as they are; older files have them less 1."""
    return (facts.get("checkpoint_format") or facts.get("format")) == LINKED[1]


def reader(weight: Weight) -> "partial[Array]":
    """Return the function from a weight's tensors to the weight."""
    outputs, inputs = weight.shape
    groups = weight.parts["scales"].shape[0]
    places = weight.places(1, groups, weight.known("group_size", "q_group_size", default=128))
    weight.check("scales", (groups, outputs))
    bits = weight.bits(weight.parts["qweight"].shape[0], weight.known("bits", default=4))
    weight.check("qweight", (-(-inputs * bits // 32), outputs))
    weight.check("qzeros", (groups, -(-outputs * bits // 32)))
    if "g_idx" in weight.parts:
        weight.check("g_idx", (inputs,))
    columns = partial(ordered, weight.name, places)
    how: Any = {"shape": weight.shape, "bits": bits, "older": not _linked(weight.facts)}
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
    """Return a weight of GPTQ.  Older files have zero - 1 in place of zero, modulo 2^bits."""
    outputs, inputs = shape
    codes = unpacked(state["weight"].T, bits, inputs)
    zeros = unpacked(state["qzeros"], bits, outputs)
    if older:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    order = columns(state.get("g_idx"))
    return scaled(codes, state["scales"].T, zeros.T, np.arange(outputs), order)
