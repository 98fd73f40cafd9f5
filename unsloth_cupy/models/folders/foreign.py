"""Code that is shared by the readers of weights that other programs quantized.

Every weight is w = (code - zero) scale, with one scale for a group of columns, a row, a block or a
tensor.  Codes are packed without gaps, the first in the lowest bits of an int32.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from .quantized_weights import KEY

CODES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "F8_E8M0": 1, "I32": 4, "I64": 8}  # bytes per code
SIZES = {**CODES, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
FLOATS = ("F16", "BF16", "F32", "F64", "F8_E8M0")
DTYPES_OF = {  # dtypes of the parts of a weight, except 8-bit weights
    **dict.fromkeys(("qweight", "qzeros", "weight_packed"), ("I32",)),
    **dict.fromkeys(("g_idx", "weight_g_idx", "weight_shape"), ("I32", "I64")),
    **dict.fromkeys(("scales", "weight_scale", "weight_scale_inv"), FLOATS),
    "weight_zero_point": ("I32", "I8", "F8_E4M3"),
}
AT_ONCE = 1 << 22  # number of elements that are computed at a time
ANY = ...  # any value of a key of quantization_config
HOW = {  # keys for how GPTQ and AWQ computed the codes, or which kernels read them
    **dict.fromkeys(("group_size", "desc_act", "act_group_aware", "static_groups"), ANY),
    **dict.fromkeys(("sym", "true_sequential", "damp_percent", "dynamic", "lm_head"), ANY),
    **dict.fromkeys(("damp_auto_increment", "meta", "model_name_or_path", "mse"), ANY),
    **dict.fromkeys(("model_file_base_name", "tokenizer", "dataset", "batch_size"), ANY),
    **dict.fromkeys(("block_name_to_quantize", "module_name_preceding_first_block"), ANY),
    **dict.fromkeys(("use_cuda_fp16", "max_input_length", "cache_block_outputs"), ANY),
    **dict.fromkeys(("modules_in_block_to_quantize", "pad_token_id", "backend"), ANY),
    **dict.fromkeys(("model_seqlen", "exllama_config", "use_exllama", "version"), ANY),
    **dict.fromkeys(("disable_exllama", "hyb_act", "offload_to_disk", "device"), ANY),
    "pack_dtype": ("int32",),
}


class Part(NamedTuple):
    """A tensor of a weight: where it is, its shape, and the name of its dtype."""

    file: str
    stored: str
    shape: tuple[int, ...]
    code: str

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * SIZES.get(self.code, 1)


WeightParts = dict[str, dict[str, Part]]  # parameter -> name after the layer's name -> tensor


class Weight(NamedTuple):
    """A weight, as config.json and the headers of files describe it."""

    facts: Mapping[str, Any]
    name: str
    shape: tuple[int, ...]  # outputs, inputs
    parts: Mapping[str, Part]

    @property
    def scale(self) -> str:
        """The name of the scales of a weight in FP8 or compressed-tensors."""
        return "weight_scale_inv" if "weight_scale_inv" in self.parts else "weight_scale"

    def values_of(self, *keys: str, default: int) -> list[int]:
        """Return all values of a setting: for the folder, for groups and for single layers."""
        groups = self.facts.get("config_groups")
        own_settings = map(self.facts.get, ("dynamic", "extra_config", "regex_config"))
        more = [
            each for some in own_settings if isinstance(some, Mapping) for each in some.values()
        ]
        if isinstance(groups, Mapping):
            sources = [group["weights"] for group in groups.values()]
        else:
            own = {key: default for key in keys[:1] if not any(map(self.facts.get, keys))}
            sources = [own, self.facts, *(each for each in more if isinstance(each, Mapping))]
        pairs = [(key, each.get(key)) for each in sources for key in keys]
        for key, value in pairs:
            if value is not None and type(value) is not int:
                problem = f"{key} is {str(value)[:60]}; it must be an integer"
                raise ConfigError(f"config: {KEY}: {problem}")
        return [value for _, value in pairs if value]

    def places(self, axis: int, count: int, sizes: Sequence[int]) -> Array:
        """Return the scale index of each row or column, in groups of one of ``sizes``."""
        size = self.shape[axis]
        fits = {min(each, size) if each > 0 else size for each in sizes}
        fits = {each for each in fits if -(-size // each) == count}
        if len(fits) != 1:
            which = f"{count} scales along {size} {('rows', 'columns')[axis]}"
            problem = f"{self.name} has {which}, unlike the groups or blocks of {KEY}"
            raise ConfigError(f"{problem}; correct these, or copy the checkpoint again")
        return np.arange(size) // fits.pop()

    def scales(self) -> tuple[tuple[int, int], Array, Array]:
        """Return the shape of the scales, and the scale index of each row and column of codes."""
        stored = self.parts[self.scale].shape
        first, second = (*stored, 1, 1)[:2] if len(stored) < 3 else (0, 0)
        blocks = [self.facts.get("weight_block_size", (128, 128))]  # as in transformers
        groups = self.facts.get("config_groups") or {}
        blocks += [group["weights"].get("block_structure") for group in groups.values()]
        lists = [[*each] for each in blocks if isinstance(each, list | tuple)]
        every = [each for each in lists if [type(size) for size in each] == [int, int]]
        rows = self.places(0, first, [1, -1, *(each[0] for each in every)])
        widths = [-1, *self.values_of("group_size", default=-1), *(each[1] for each in every)]
        return (first, second), rows, self.places(1, second, widths)

    def bits(self, words: int, options: Sequence[int]) -> int:
        """Return the bits per code, if the codes of a row or column fill ``words`` int32."""
        inputs = self.shape[1]
        for bits in (each for each in options if 1 <= each <= 8):
            if words in (-(-inputs * bits // 32), -(-inputs // (32 // bits))):
                return bits
        listed = " or ".join(map(str, dict.fromkeys(options)))
        problem = f"{inputs} codes of {listed} bits do not fill {words} int32"
        raise ConfigError(f"{self.name}: {problem}, as {KEY} says; copy the checkpoint again")

    def check(self, key: str, *expected: tuple[int, ...]) -> None:
        """Raise a ConfigError unless a tensor has an expected shape."""
        part = self.parts[key]
        if part.shape not in expected:
            problem = f"tensor {part.stored!r} is {part.shape}, not {expected[0]}"
            raise ConfigError(f"{problem}, as {KEY} says; copy the checkpoint again")

    def check_dtypes(self) -> None:
        """Raise a ConfigError for a tensor with a dtype that this format does not use."""
        groups = self.facts.get("config_groups") or {}
        types = {group["weights"].get("type") or "int" for group in groups.values()} or {"float"}
        own = [code for kind, code in (("float", "F8_E4M3"), ("int", "I8")) if kind in types]
        for key, part in self.parts.items():
            allowed = own if key == "weight" else DTYPES_OF[key]
            if part.code not in allowed:
                problem = f"tensor {part.stored!r} is {part.code}; it must be {', '.join(allowed)}"
                raise ConfigError(f"{problem}; copy the checkpoint again")


def unpacked(words: Array, bits: int, count: int) -> Array:
    """Return the first ``count`` codes of ``bits`` bits along the last axis of int32.

    Codes are packed without gaps, or each int32 holds as many whole codes as fit: the number of
    int32 decides.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    whole = 32 // bits
    if 32 % bits == 0 or words.shape[-1] != -(-count * bits // 32):
        shifts = (np.arange(whole, dtype=np.uint32) * bits).astype(np.uint32)
        codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
        codes = codes.astype(np.uint8).reshape(*words.shape[:-1], -1)  # (..., codes)
        return codes[..., :count]
    stream = words.astype("<u4").view(np.uint8)
    single = np.unpackbits(stream, axis=-1, bitorder="little")[..., : count * bits]
    each = single.reshape(*words.shape[:-1], count, bits)  # (..., count, bits)
    return (each << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def scaled(codes: Array, scales: Array, zeros: Any, rows: Array, columns: Array) -> Array:
    """Return (code - zero) scale in float32, for codes (outputs, inputs).

    ``rows`` and ``columns`` are the indices of the scale and zero for each row and column of codes.
    """
    result = np.empty(codes.shape, FLOAT32)
    step = max(1, AT_ONCE // max(1, codes.shape[1]))
    for top in range(0, len(codes), step):
        part = slice(top, top + step)
        result[part] = codes[part]
        if zeros is not None:
            result[part] -= zeros[rows[part]][:, columns].astype(FLOAT32)
        result[part] *= scales[rows[part]][:, columns].astype(FLOAT32)
    return result


def ordered(name: str, columns: Array, order: Array | None) -> Array:
    """Return the group of each column: ``order`` if it is set; its groups must be equally large."""
    if order is None or (order == -1).all():  # unset
        return columns
    if not np.array_equal(np.sort(order), columns):
        problem = f"{name}: g_idx does not assign {np.sum(columns == 0)} columns to each group"
        raise ConfigError(f"{problem}; copy the checkpoint again")
    return order


def numbers(weight: Weight) -> "partial[Array]":
    """Return the function that computes the dense weight from the tensors of an 8-bit weight."""
    grid, rows, columns = weight.scales()
    weight.check("weight", weight.shape)
    if "weight_zero_point" in weight.parts:
        weight.check("weight_zero_point", grid, weight.parts[weight.scale].shape)
    label = "e4m3" if weight.parts["weight"].code == "F8_E4M3" else "int8"
    return partial(_of_numbers, grid=grid, rows=rows, columns=columns, label=label)


def _of_numbers(
    state: Mapping[str, Array], *, grid: tuple[int, int], rows: Array, columns: Array, label: str
) -> Array:
    """Return the dense weight of 8-bit codes, with scales per block, group, row or tensor."""
    scales = state["weight_scale_inv" if "weight_scale_inv" in state else "weight_scale"]
    zeros = state.get("weight_zero_point")
    zeros = None if zeros is None else zeros.reshape(grid)
    return scaled(state["weight"], scales.reshape(grid), zeros, rows, columns)
