"""Weights that other programs quantized, which become dense as they are read.

    gptq                  qweight (inputs bits / 32, outputs), qzeros, scales, g_idx
    awq                   qweight (inputs, outputs / 8), qzeros, scales
    fp8, fbgemm_fp8       weight (outputs, inputs) in e4m3, weight_scale_inv or weight_scale
    compressed-tensors    weight_packed (outputs, inputs bits / 32) or weight in int8 or e4m3,
                          weight_scale, weight_zero_point, weight_g_idx, weight_shape

All are w = (code - zero) scale, with one scale for a group of columns, a row, a block or a tensor.
Codes are packed without gaps, the first in the lowest bits of an int32.  What these formats say of
activations is not read: activations keep the dtype of the model.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..errors import ConfigError
from .lazy_parameter import StoredTensor
from .quantized_weights import KEY

PARTS = {  # names after a layer's name of what makes its weight, by quant_method
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight_scale_inv", "weight_scale"),
    "fbgemm_fp8": ("weight_scale",),
    "compressed-tensors": (
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    ),
}
OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_zero_point", "output_scale")
CODES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "F8_E8M0": 1, "I32": 4, "I64": 8}  # bytes of a number
SIZES = {**CODES, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
AT_ONCE = 1 << 22  # numbers that are computed at a time
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of 8 in the i-th lowest bits of an int32
LINKED = ("gptq", "gptq_v2")  # values of checkpoint_format
FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"),
    "dense",
)
ANY = ...
# Values of the keys of quantization_config that are understood; ... stands for any.
KEYS: Mapping[str, Mapping[str, Any]] = {
    "gptq": {
        "bits": (2, 3, 4, 8),
        "checkpoint_format": LINKED,
        "format": LINKED,
        "is_marlin_format": (False,),
        "pack_dtype": ("int32",),
        **dict.fromkeys(("group_size", "desc_act", "act_group_aware", "static_groups"), ANY),
        **dict.fromkeys(("sym", "true_sequential", "damp_percent", "dynamic", "lm_head"), ANY),
        **dict.fromkeys(("damp_auto_increment", "meta", "model_name_or_path", "mse"), ANY),
        **dict.fromkeys(("model_file_base_name", "tokenizer", "dataset", "batch_size"), ANY),
        **dict.fromkeys(("block_name_to_quantize", "module_name_preceding_first_block"), ANY),
        **dict.fromkeys(("use_cuda_fp16", "max_input_length", "cache_block_outputs"), ANY),
        **dict.fromkeys(("modules_in_block_to_quantize", "pad_token_id", "backend"), ANY),
        **dict.fromkeys(("model_seqlen", "exllama_config", "use_exllama", "version"), ANY),
        **dict.fromkeys(("disable_exllama", "hyb_act", "offload_to_disk", "device"), ANY),
    },
    "awq": {
        **dict.fromkeys(("bits", "w_bit"), (4,)),
        **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm", "GEMM")),
        "zero_point": (True,),
        "pack_dtype": ("int32",),
        **dict.fromkeys(("group_size", "q_group_size", "modules_to_not_convert", "sym"), ANY),
        **dict.fromkeys(("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"), ANY),
        **dict.fromkeys(("exllama_config", "lm_head", "meta", "model_name_or_path"), ANY),
    },
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn"),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
        **dict.fromkeys(("activation_scheme", "weight_block_size", "dequantize"), ANY),
        **dict.fromkeys(("modules_to_not_convert", "modules_to_convert", "ignored_layers"), ANY),
    },
    "fbgemm_fp8": dict.fromkeys(("activation_scale_ub", "modules_to_not_convert"), ANY),
    "compressed-tensors": {
        "format": FORMATS,
        **dict.fromkeys(("config_groups", "ignore", "quantization_status", "version"), ANY),
        **dict.fromkeys(("global_compression_ratio", "run_compressed"), ANY),
    },
}
GROUP: Mapping[str, Any] = {  # keys of a group of layers in compressed-tensors
    "format": FORMATS,
    **dict.fromkeys(("targets", "weights", "input_activations", "output_activations"), ANY),
}
WEIGHTS: Mapping[str, Any] = {
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block"),
    "num_bits": range(1, 9),
    "dynamic": (False,),
    **dict.fromkeys(("symmetric", "group_size", "block_structure", "actorder"), ANY),
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), ANY),
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


# ---- config.json --------------------------------------------------------------------------------
def check_quantization(facts: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a key or a value of quantization_config that is not understood."""
    method = facts["quant_method"]
    if method not in KEYS:
        return
    _check(f"{KEY} of {method}", facts, {**KEYS[method], "quant_method": (method,)})
    groups = facts.get("config_groups") or {}
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            problem = f"{KEY}: {name} of config_groups is {str(group)[:60]}, without its weights"
            raise ConfigError(f"config: {problem}; load the plain weights instead")
        _check(f"{KEY}, {name}", group, GROUP)
        _check(f"{KEY}, weights of {name}", group["weights"], WEIGHTS)
        if group["weights"].get("type") == "float" and group["weights"].get("num_bits") != 8:
            problem = f"weights of {name} are floats of {group['weights'].get('num_bits')} bits"
            raise ConfigError(f"config: {KEY}: {problem}; load the plain weights instead")


def _check(where: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise a ConfigError that names a key which is not known, or a value."""
    for key, value in values.items():
        if key in known and (known[key] is ANY or value in known[key] or value is None):
            continue
        if key not in known and value in (None, False, "", [], {}):
            continue
        listed = f"; it must be {' or '.join(map(str, known[key]))}" if key in known else ""
        problem = f"{key}={str(value)[:60]} is not read{listed}"
        raise ConfigError(f"config: {where}: {problem}; load the plain weights instead")


# ---- tensors ------------------------------------------------------------------------------------
def part_in(method: Any, name: str, code: str, shapes: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return which parameter a tensor is a part of, and the part's name; None: of no such one."""
    module, _, key = name.rpartition(".")
    parameter = f"{module}.weight"
    if method not in PARTS or parameter not in shapes:
        return None
    codes = key == "weight" and code in CODES
    return (parameter, key) if codes or key in (*PARTS[method], *OF_ACTIVATIONS) else None


def stored_weight(
    facts: Mapping[str, Any], name: str, shape: tuple[int, ...], parts: Mapping[str, Part]
) -> StoredTensor:
    """Return where a quantized weight is stored, and how it becomes dense.

    Raises
    ------
    ConfigError
        A tensor is missing, or its shape is not that of such a weight.
    """
    method = str(facts["quant_method"])
    read = {key: part for key, part in parts.items() if key not in OF_ACTIVATIONS}
    main = next((key for key in ("qweight", "weight_packed", "weight") if key in read), None)
    scale = "weight_scale_inv" if "weight_scale_inv" in read else "weight_scale"
    needed = ("qzeros", "scales") if method in ("gptq", "awq") else (scale,)
    if missing := [key for key in ("weight" * (main is None), *needed) if key and key not in read]:
        problem = f"{name.removesuffix('weight')}{missing[0]} is missing, a part of its {method}"
        raise ConfigError(f"{problem}; copy the checkpoint again")
    make = _maker(facts, name, shape, read, str(main))
    first = read[str(main)]
    others = {key: (part.file, part.stored) for key, part in read.items() if key != main}
    kind = f"{method} {make.keywords['label']}"
    size = sum(part.bytes for part in parts.values())
    return StoredTensor(
        first.file, first.stored, shape, FLOAT32, parts=others, dense=make, format=kind, bytes=size
    )


def _maker(
    facts: Mapping[str, Any],
    name: str,
    shape: tuple[int, ...],
    parts: Mapping[str, Part],
    main: str,
) -> "partial[Array]":
    """Return the function from a weight's tensors to the weight; check their shapes."""
    method, packed = facts["quant_method"], parts[main].shape
    outputs, inputs = shape

    def check(key: str, expected: Sequence[int]) -> None:
        actual = parts[key].shape
        if actual != tuple(expected):
            problem = f"tensor {parts[key].stored!r} is {actual}, not {tuple(expected)}"
            raise ConfigError(f"{problem}, as {KEY} says; copy the checkpoint again")

    if main == "qweight" and method == "gptq":
        bits = facts.get("bits") or 4
        if isinstance(facts.get("dynamic"), Mapping) and packed[0] * 32 % inputs == 0:
            bits = packed[0] * 32 // inputs  # a layer may have others
        groups = parts["scales"].shape[0]
        check("qweight", (-(-inputs * bits // 32), outputs))
        check("scales", (groups, outputs))
        check("qzeros", (groups, -(-outputs * bits // 32)))
        older = (facts.get("checkpoint_format") or facts.get("format")) != "gptq_v2"
        return partial(_of_gptq, shape=shape, bits=bits, older=older, label=f"{bits} bits")
    if main == "qweight":
        groups = parts["scales"].shape[0]
        check("qweight", (inputs, outputs // 8))
        check("scales", (groups, outputs))
        check("qzeros", (groups, outputs // 8))
        return partial(_of_awq, shape=shape, label="4 bits")
    blocks = facts.get("weight_block_size")
    if method == "compressed-tensors":
        every = [group["weights"] for group in (facts.get("config_groups") or {}).values()]
        structures = {tuple(each.get("block_structure") or ()) for each in every} - {()}
        blocks = min(structures, default=None)
        if main == "weight_packed":
            bits = _bits(
                name, inputs, packed[-1], [int(each.get("num_bits") or 8) for each in every]
            )
            check("weight_packed", (outputs, packed[-1]))
            return partial(_of_packed, shape=shape, bits=bits, label=f"{bits} bits")
    check("weight", shape)
    label = "e4m3" if parts["weight"].code == "F8_E4M3" else parts["weight"].code.lower()
    return partial(_of_numbers, shape=shape, blocks=blocks, label=label)


def _bits(name: str, count: int, words: int, known: Sequence[int]) -> int:
    """Return the number of bits of which this many codes take this many int32."""
    for bits in dict.fromkeys((*known, 4, 8)):
        if words in (-(-count * bits // 32), -(-count // (32 // bits))):
            return bits
    problem = f"{count} codes of {' or '.join(map(str, known))} bits do not take {words} int32"
    raise ConfigError(f"tensor {name!r}: {problem}; copy the checkpoint again")


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


def _scaled(codes: Array, scales: Array, zeros: Any, rows: Array, columns: Array) -> Array:
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


def _groups(inputs: int, count: int, order: Array | None = None) -> Array:
    """Return the group of each column: as ``order`` says, or ``count`` equal ones in a row."""
    if order is not None:
        return np.asarray(order)
    return np.arange(inputs) // -(-inputs // max(1, count))


def _of_gptq(
    state: Mapping[str, Array], *, shape: tuple[int, ...], bits: int, older: bool, label: str
) -> Array:
    """Return a weight of GPTQ.  Older files have zero - 1 in place of zero, modulo 2^bits."""
    outputs, inputs = shape
    codes = unpacked(state["weight"].T, bits, inputs)
    zeros = unpacked(state["qzeros"], bits, outputs)
    if older:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    columns = _groups(inputs, len(state["scales"]), state.get("g_idx"))
    return _scaled(codes, state["scales"].T, zeros.T, np.arange(outputs), columns)


def _of_awq(state: Mapping[str, Array], *, shape: tuple[int, ...], label: str) -> Array:
    """Return a weight of AWQ, whose columns are in another order in each int32."""
    outputs, inputs = shape
    back = np.argsort(AWQ_ORDER)

    def columns(packed: Array) -> Array:
        codes = unpacked(packed, 4, outputs)
        return codes.reshape(len(codes), -1, 8)[:, :, back].reshape(len(codes), -1)

    codes, zeros = columns(state["weight"]), columns(state["qzeros"])
    groups = _groups(inputs, len(zeros))
    return _scaled(codes.T, state["scales"].T, zeros.T, np.arange(outputs), groups)


def _of_packed(
    state: Mapping[str, Array], *, shape: tuple[int, ...], bits: int, label: str
) -> Array:
    """Return a weight of compressed-tensors, whose codes and zeros are from -2^(bits - 1) on."""
    (outputs, inputs), half = shape, 1 << (bits - 1)
    codes, scales = unpacked(state["weight"], bits, inputs), state["weight_scale"]
    scales = scales.reshape(len(scales), -1) if scales.ndim else scales.reshape(1, 1)
    zeros: Any = np.full((1, 1), half)
    stored = state.get("weight_zero_point")
    if stored is not None:  # packed along the rows
        zeros = unpacked(stored.T, bits, outputs).T
    rows = np.arange(outputs) if len(scales) == outputs else np.zeros(outputs, int)
    columns = _groups(inputs, scales.shape[1], state.get("weight_g_idx"))
    if stored is None:
        zeros = np.broadcast_to(zeros, scales.shape)
    return _scaled(codes, scales, zeros, rows, columns)


def _of_numbers(
    state: Mapping[str, Array], *, shape: tuple[int, ...], blocks: Any, label: str
) -> Array:
    """Return a weight of numbers in 8 bits, with scales of blocks, groups, rows or of all."""
    codes = state["weight"]
    scales = state["weight_scale_inv" if "weight_scale_inv" in state else "weight_scale"]
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
    places = []
    for axis, (size, count) in enumerate(zip(shape, scales.shape, strict=True)):
        block = blocks[axis] if blocks and count > 1 else -(-size // count)
        if -(-size // block) != count:
            problem = f"its scales {scales.shape} do not fit {shape} in blocks of {block}"
            raise ConfigError(f"a weight in {label}: {problem}; copy the checkpoint again")
        places.append(np.arange(size) // block)
    zeros = state.get("weight_zero_point")
    zeros = None if zeros is None else zeros.reshape(scales.shape)
    return _scaled(codes, scales, zeros, *places)
