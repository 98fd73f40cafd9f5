"""Weights that other programs quantized, which become dense as they are read.

    gptq                  qweight (inputs bits / 32, outputs), qzeros, scales, g_idx
    awq                   qweight (inputs, outputs / 8), qzeros, scales
    fp8, fbgemm_fp8       weight (outputs, inputs) in e4m3, weight_scale_inv or weight_scale
    compressed-tensors    weight_packed (outputs, inputs bits / 32) or weight in int8 or e4m3,
                          weight_scale, weight_zero_point, weight_g_idx, weight_shape

All are w = (code - zero) scale, with one scale for a group of columns, a row, a block or a tensor.
Codes are packed without gaps, the first in the lowest bits of an int32.  AutoRound writes GPTQ's
files, as gptq or under its own name.  What these formats say of
activations is not read: activations keep the dtype of the model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.call import check_entries
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...files import say_once
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
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of 8 in the i-th lowest bits of an int32
LINKED = ("gptq", "gptq_v2")  # values of checkpoint_format
FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"),
    "dense",
)
ANY = ...
SPARSITY = "sparsity_config"  # of compressed-tensors, whose older files have one of format dense
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
BACKENDS = (  # of AWQ: kernels for this format; that of llm-awq has its own
    *("auto", "autoawq", "auto_trainable", "machete", "marlin", "exllama_v1", "exllama_v2", "gemm"),
    *("gemm_triton", "torch_awq", "torch_fused_awq"),
)
# Values of the keys of quantization_config that are understood; ... stands for any.
KEYS: Mapping[str, Mapping[str, Any]] = {
    "gptq": {
        **OF_GPTQ,
        "checkpoint_format": LINKED,
        "format": LINKED,
        "is_marlin_format": (False,),
    },
    "auto-round": {**OF_GPTQ, "packing_format": PACKINGS},
    "awq": {
        **HOW,
        **dict.fromkeys(("bits", "w_bit"), (4,)),
        **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm", "GEMM")),
        "zero_point": (True,),
        "backend": BACKENDS,
        **dict.fromkeys(("q_group_size", "modules_to_not_convert", "do_fuse"), ANY),
        **dict.fromkeys(("fuse_max_seq_len", "modules_to_fuse"), ANY),
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
        **dict.fromkeys(("global_compression_ratio", "run_compressed", "kv_cache_scheme"), ANY),
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


KINDS: Mapping[str, Any] = {  # types of the values of all of these keys
    **dict.fromkeys(("bits", "w_bit", "group_size", "q_group_size", "num_bits"), int | None),
    **dict.fromkeys(("desc_act", "sym", "symmetric", "zero_point", "dequantize"), bool | None),
    **dict.fromkeys(("modules_to_not_convert", "modules_to_convert"), Sequence[str] | None),
    **dict.fromkeys(("ignore", "ignored_layers", "targets"), Sequence[str] | None),
    **dict.fromkeys(("config_groups", "dynamic", "observer_kwargs"), Mapping | bool | None),
    **dict.fromkeys(("weight_block_size", "block_structure"), str | Sequence[int] | None),
    **dict.fromkeys(("activation_scheme", "strategy", "type", "format"), str | None),
    **dict.fromkeys(("checkpoint_format", "packing_format", "fmt", "scale_fmt"), str | None),
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
def method_of(facts: Mapping[str, Any]) -> str | None:
    """Return the format of the weights that another program quantized, as its quant_method."""
    method = facts.get("quant_method")
    return "gptq" if method == "auto-round" else method if method in KEYS else None


def check_quantization(facts: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a key or a value of quantization_config that is not understood."""
    method = facts["quant_method"]
    if method not in KEYS:
        return
    check_entries(f"config: {KEY} of {method}", facts, KINDS)
    _check(f"{KEY} of {method}", facts, {**KEYS[method], "quant_method": (method,)})
    if method == "auto-round" and facts.get("packing_format") not in PACKINGS:
        problem = f"packing_format is missing; it must be {' or '.join(PACKINGS)}"
        raise ConfigError(f"config: {KEY} of {method}: {problem}; load the plain weights instead")
    if len({facts.get(key) for key in ("checkpoint_format", "format")} - {None}) == 2:
        problem = "checkpoint_format and format are two formats"
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
        _check(f"{KEY}, {name}", group, GROUP)
        check_entries(f"config: {KEY}, {name}", group, KINDS)
        check_entries(f"config: {KEY}, weights of {name}", group["weights"], KINDS)
        _check(f"{KEY}, weights of {name}", group["weights"], WEIGHTS)
        if group["weights"].get("type") == "float" and group["weights"].get("num_bits") != 8:
            problem = f"weights of {name} are floats of {group['weights'].get('num_bits')} bits"
            raise ConfigError(f"config: {KEY}: {problem}; load the plain weights instead")


def _check(where: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise a ConfigError that names a key which is not known, or a value."""
    for key, value in values.items():
        if key in known and (known[key] is ANY or value in known[key] or value is None):
            continue
        plain = key == SPARSITY and isinstance(value, Mapping) and value.get("format") == "dense"
        if key not in known and (plain or value in (None, False, "", [], {})):
            continue
        listed = f"; it must be {' or '.join(map(str, known[key]))}" if key in known else ""
        problem = f"{str(key)[:60]}={str(value)[:60]} is not read{listed}"
        raise ConfigError(f"config: {where}: {problem}; load the plain weights instead")


# ---- tensors ------------------------------------------------------------------------------------
def is_of_activations(method: Any, name: str, shapes: Mapping[str, Any]) -> bool:
    """Return whether a tensor says how activations are quantized, or a cache; it is not read."""
    module, _, key = name.rpartition(".")
    of_cache = method in PARTS and key in OF_CACHE
    if of_cache:
        problem = f"{key} and other scales of a quantized cache are not read"
        say_once(f"{KEY} of {method}: {problem}: caches have the dtype of the model")
    return of_cache or (method in PARTS and key in OF_ACTIVATIONS and f"{module}.weight" in shapes)


def part_in(method: Any, name: str, code: str, shapes: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return which parameter a tensor is a part of, and the part's name; None: of no such one."""
    module, _, key = name.rpartition(".")
    parameter = f"{module}.weight"
    if method not in PARTS or parameter not in shapes:
        return None
    codes = key == "weight" and code in CODES
    return (parameter, key) if codes or key in PARTS[method] else None


def with_zeros(
    facts: Mapping[str, Any], weights: Found, read: Callable[[Part], Array]
) -> tuple[Mapping[str, Any], str]:
    """Return quantization_config with the form of GPTQ's zeros that its weights have, and a note.

    Symmetric codes of b bits have the zero 2^(b - 1).  Where all zeros of the largest weight are
    another one in the form that config.json names, and this one in the other form, codes decide:
    a weight has a mean of about 0.  If that is within the error of a mean, it is the other form.
    """
    if method_of(facts) != "gptq" or facts.get("sym", True) is not True:
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


def stored_weight(
    facts: Mapping[str, Any], name: str, shape: tuple[int, ...], parts: Mapping[str, Part]
) -> StoredTensor:
    """Return where a quantized weight is stored, and how it becomes dense.

    Raises
    ------
    ConfigError
        A tensor is missing, or its shape or dtype is not that of such a weight.
    """
    method = method_of(facts)
    main = next((key for key in ("qweight", "weight_packed", "weight") if key in parts), "weight")
    scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    needed = (main, *(("qzeros", "scales") if method in ("gptq", "awq") else (scale,)))
    if missing := [key for key in needed if key not in parts]:
        problem = f"{name.removesuffix('weight')}{missing[0]} is missing, a part of its {method}"
        raise ConfigError(f"{problem}; copy the checkpoint again")
    make = _Weight(facts, name, shape, parts).reader(main)
    first = parts[main]
    others = {key: (part.file, part.stored) for key, part in parts.items() if key != main}
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
    """Return the weight of tensors whose scales must be finite."""
    if not np.isfinite(state[scales].astype(FLOAT32)).all():
        problem = f"{name.removesuffix('weight')}{scales} holds a number that is not finite"
        raise ConfigError(f"{problem}; copy the checkpoint again")
    return make(state)


class _Weight(NamedTuple):
    """What config.json and the headers of files say of a weight."""

    facts: Mapping[str, Any]
    name: str
    shape: tuple[int, ...]  # outputs, inputs
    parts: Mapping[str, Part]

    def reader(self, main: str) -> "partial[Array]":
        """Return the function from a weight's tensors to the weight."""
        outputs, inputs = self.shape
        method = method_of(self.facts)
        of_layer = partial(_ordered, self.name)
        self.check_dtypes()
        if main == "qweight":
            groups = self.parts["scales"].shape[0]
            places = self.places(1, groups, self.known("group_size", "q_group_size", default=128))
            self.check("scales", (groups, outputs))
        if main == "qweight" and method == "gptq":
            bits = self.bits(self.parts["qweight"].shape[0], self.known("bits", default=4))
            self.check("qweight", (-(-inputs * bits // 32), outputs))
            self.check("qzeros", (groups, -(-outputs * bits // 32)))
            if "g_idx" in self.parts:
                self.check("g_idx", (inputs,))
            older = not _linked(self.facts)
            make = partial(_of_gptq, shape=self.shape, bits=bits, older=older, label=f"{bits} bits")
            return partial(make, columns=partial(of_layer, places))
        if main == "qweight":
            self.check("qweight", (inputs, outputs // 8))
            self.check("qzeros", (groups, outputs // 8))
            return partial(_of_awq, outputs=outputs, columns=places, label="4 bits")
        grid, rows, columns = self.scales()
        zeros = self.parts.get("weight_zero_point")
        if main == "weight":
            self.check("weight", self.shape)
            if zeros is not None:
                self.check("weight_zero_point", grid, self.parts[self.scale].shape)
            label = "e4m3" if self.parts["weight"].code == "F8_E4M3" else "int8"
            return partial(_of_numbers, grid=grid, rows=rows, columns=columns, label=label)
        words = self.parts["weight_packed"].shape
        bits = self.bits(words[-1], self.known("num_bits", default=8))
        self.check("weight_packed", (outputs, words[-1]))
        if zeros is not None and zeros.code == "I32":
            counts = (-(-grid[0] * bits // 32), -(-grid[0] // (32 // bits)))
            self.check("weight_zero_point", *((count, grid[1]) for count in counts))
        elif zeros is not None:
            self.check("weight_zero_point", grid, self.parts["weight_scale"].shape)
        if "weight_g_idx" in self.parts:
            self.check("weight_g_idx", (inputs,))
        if "weight_shape" in self.parts:
            self.check("weight_shape", (2,))
        make = partial(
            _of_packed, name=self.name, shape=self.shape, bits=bits, grid=grid, rows=rows
        )
        return partial(make, columns=partial(of_layer, columns), label=f"{bits} bits")

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


def _ordered(name: str, columns: Array, order: Array | None) -> Array:
    """Return the group of each column: as ``order`` says, in which groups are equally large."""
    if order is None or (order == -1).all():  # unset
        return columns
    if not np.array_equal(np.sort(order), columns):
        problem = f"{name}: its g_idx does not give each group its {np.sum(columns == 0)} columns"
        raise ConfigError(f"{problem}; copy the checkpoint again")
    return order


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
    return _scaled(codes, state["scales"].T, zeros.T, np.arange(outputs), order)


def _of_awq(state: Mapping[str, Array], *, outputs: int, columns: Array, label: str) -> Array:
    """Return a weight of AWQ, whose columns are in another order in each int32."""
    back = np.argsort(AWQ_ORDER)

    def ordered(packed: Array) -> Array:
        codes = unpacked(packed, 4, outputs)
        return codes.reshape(len(codes), -1, 8)[:, :, back].reshape(len(codes), -1)

    codes, zeros = ordered(state["weight"]), ordered(state["qzeros"])
    return _scaled(codes.T, state["scales"].T, zeros.T, np.arange(outputs), columns)


def _of_packed(
    state: Mapping[str, Array],
    *,
    name: str,
    shape: tuple[int, ...],
    bits: int,
    grid: tuple[int, int],
    rows: Array,
    columns: Callable[[Array | None], Array],
    label: str,
) -> Array:
    """Return a weight of compressed-tensors, whose codes and zeros are from -2^(bits - 1) on."""
    half, stored_shape = 1 << (bits - 1), tuple(map(int, state.get("weight_shape", shape)))
    if stored_shape != shape:
        problem = f"{name}: its weight_shape is {stored_shape}; config.json asks for {shape}"
        raise ConfigError(f"{problem}; copy the checkpoint again, or correct config.json")
    zeros: Any = np.full(grid, half)
    stored = state.get("weight_zero_point")
    if stored is not None and stored.dtype == np.int32:  # packed along the rows
        zeros = unpacked(stored.T, bits, grid[0]).T
    elif stored is not None:
        zeros = zeros + stored.reshape(grid)
    codes, order = unpacked(state["weight"], bits, shape[1]), columns(state.get("weight_g_idx"))
    return _scaled(codes, state["weight_scale"].reshape(grid), zeros, rows, order)


def _of_numbers(
    state: Mapping[str, Array], *, grid: tuple[int, int], rows: Array, columns: Array, label: str
) -> Array:
    """Return a weight of numbers in 8 bits, with scales of blocks, groups, rows or of all."""
    scales = state["weight_scale_inv" if "weight_scale_inv" in state else "weight_scale"]
    zeros = state.get("weight_zero_point")
    zeros = None if zeros is None else zeros.reshape(grid)
    return _scaled(state["weight"], scales.reshape(grid), zeros, rows, columns)
