"""What the readers of weights that other programs quantized share.

All weights are w = (code - zero) scale, with one scale for a group of columns, a row, a block or a
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

CODES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "F8_E8M0": 1, "I32": 4, "I64": 8}  # bytes of a number
SIZES = {**CODES, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
FLOATS = ("F16", "BF16", "F32", "F64", "F8_E8M0")
DTYPES_OF = {  # of the parts of a weight, but of numbers in 8 bits
    **dict.fromkeys(("qweight", "qzeros", "weight_packed"), ("I32",)),
    **dict.fromkeys(("g_idx", "weight_g_idx", "weight_shape"), ("I32", "I64")),
    **dict.fromkeys(("scales", "weight_scale", "weight_scale_inv"), FLOATS),
    "weight_zero_point": ("I32", "I8", "F8_E4M3"),
}
AT_ONCE = 1 << 22  # numbers that are computed at a time
ANY = ...  # any value of a key of quantization_config
HOW = {  # keys that say how GPTQ and AWQ found the codes, or which kernels read them
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


Found = dict[str, dict[str, Part]]  # parameter -> name after the layer's name -> tensor


class Weight(NamedTuple):
    """What config.json and the headers of files say of a weight."""

    facts: Mapping[str, Any]
    name: str
    shape: tuple[int, ...]  # outputs, inputs
    parts: Mapping[str, Part]

    @property
    def scale(self) -> str:
        """The name of the scales of a weight that is not of GPTQ or AWQ."""
        return "weight_scale_inv" if "weight_scale_inv" in self.parts else "weight_scale"

    def known(self, *keys: str, default: int) -> list[int]:
        """Return all values of a setting: those of the folder, of groups and of single layers."""
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

    def places(self, axis: int, count: int, known: Sequence[int]) -> Array:
        """Return which of ``count`` scales each row or column has, in groups of a known size."""
        size = self.shape[axis]
        fits = {min(each, size) if each > 0 else size for each in known}
        fits = {each for each in fits if -(-size // each) == count}
        if len(fits) != 1:
            which = f"{count} along {size} {('rows', 'columns')[axis]}"
            problem = f"{self.name}: its scales are {which}, unlike the groups or blocks of {KEY}"
            raise ConfigError(f"{problem}; correct these, or copy the checkpoint again")
        return np.arange(size) // fits.pop()

    def scales(self) -> tuple[tuple[int, int], Array, Array]:
        """Return the rows and columns of scales, and which each row and column of codes has."""
        stored = self.parts[self.scale].shape
        first, second = (*stored, 1, 1)[:2] if len(stored) < 3 else (0, 0)
        blocks = [self.facts.get("weight_block_size", (128, 128))]  # as in transformers
        groups = self.facts.get("config_groups") or {}
        blocks += [group["weights"].get("block_structure") for group in groups.values()]
        lists = [[*each] for each in blocks if isinstance(each, list | tuple)]
        every = [each for each in lists if [type(size) for size in each] == [int, int]]
        rows = self.places(0, first, [1, -1, *(each[0] for each in every)])
        widths = [-1, *self.known("group_size", default=-1), *(each[1] for each in every)]
        return (first, second), rows, self.places(1, second, widths)

    def bits(self, words: int, known: Sequence[int]) -> int:
        """Return the number of bits of which a column's or row's codes take this many int32."""
        inputs = self.shape[1]
        for bits in (each for each in known if 1 <= each <= 8):
            if words in (-(-inputs * bits // 32), -(-inputs // (32 // bits))):
                return bits
        listed = " or ".join(map(str, dict.fromkeys(known)))
        problem = f"{inputs} codes of {listed} bits do not take {words} int32"
        raise ConfigError(f"{self.name}: {problem}, as {KEY} says; copy the checkpoint again")

    def check(self, key: str, *expected: tuple[int, ...]) -> None:
        """Raise a ConfigError for a tensor of another shape."""
        part = self.parts[key]
        if part.shape not in expected:
            problem = f"tensor {part.stored!r} is {part.shape}, not {expected[0]}"
            raise ConfigError(f"{problem}, as {KEY} says; copy the checkpoint again")

    def check_dtypes(self) -> None:
        """Raise a ConfigError for a tensor of a dtype that it does not have in this format."""
        groups = self.facts.get("config_groups") or {}
        types = {group["weights"].get("type") or "int" for group in groups.values()} or {"float"}
        own = [code for kind, code in (("float", "F8_E4M3"), ("int", "I8")) if kind in types]
        for key, part in self.parts.items():
            allowed = own if key == "weight" else DTYPES_OF[key]
            if part.code not in allowed:
                problem = f"tensor {part.stored!r} is {part.code}; it must be {', '.join(allowed)}"
                raise ConfigError(f"{problem}; copy the checkpoint again")


def unpacked(words: Array, bits: int, count: int) -> Array:
    """Return the first codes in the last axis of int32, each of ``bits`` bits.

    They stand without gaps, or as many as an int32 holds whole: as the number of int32 says.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    whole = 32 // bits
    if 32 % bits == 0 or words.shape[-1] != -(-count * bits // 32):
        shifts = (np.arange(whole, dtype=np.uint32) * bits).astype(np.uint32)
        codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
        return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)[..., :count]
    stream = words.astype("<u4").view(np.uint8)
    single = np.unpackbits(stream, axis=-1, bitorder="little")[..., : count * bits]
    each = single.reshape(*words.shape[:-1], count, bits)
    return (each << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def scaled(codes: Array, scales: Array, zeros: Any, rows: Array, columns: Array) -> Array:
    """Return (code - zero) scale, of codes (outputs, inputs), in float32.

    ``rows`` and ``columns`` say which row and column of scales and zeros each of the codes has.
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
    """Return the group of each column: as ``order`` says, in which groups are equally large."""
    if order is None or (order == -1).all():  # unset
        return columns
    if not np.array_equal(np.sort(order), columns):
        problem = f"{name}: its g_idx does not give each group its {np.sum(columns == 0)} columns"
        raise ConfigError(f"{problem}; copy the checkpoint again")
    return order


def numbers(weight: Weight) -> "partial[Array]":
    """Return the function from the tensors of a weight of numbers in 8 bits to the weight."""
    grid, rows, columns = weight.scales()
    weight.check("weight", weight.shape)
    if "weight_zero_point" in weight.parts:
        weight.check("weight_zero_point", grid, weight.parts[weight.scale].shape)
    label = "e4m3" if weight.parts["weight"].code == "F8_E4M3" else "int8"
    return partial(_of_numbers, grid=grid, rows=rows, columns=columns, label=label)


def _of_numbers(
    state: Mapping[str, Array], *, grid: tuple[int, int], rows: Array, columns: Array, label: str
) -> Array:
    """Return a weight of numbers in 8 bits, with scales of blocks, groups, rows or of all."""
    scales = state["weight_scale_inv" if "weight_scale_inv" in state else "weight_scale"]
    zeros = state.get("weight_zero_point")
    zeros = None if zeros is None else zeros.reshape(grid)
    return scaled(state["weight"], scales.reshape(grid), zeros, rows, columns)
