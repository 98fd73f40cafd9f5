"""The tensor types of a GGUF file, and their ranges."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from ...core.dtypes import Array
from ...errors import ConfigError
from ..configs.config import Config
from ._k_quants import FORMATS, quantize

CHUNK = 1 << 22  # numbers that are converted through float32 at a time: 16 MiB
HALF = 65504.0  # the largest float16, which is also the dtype of block scales


Read = Callable[[str], Array]  # from a Hugging Face name to the array
Rule = Callable[[int, Config], Type]  # from the index of a layer


# Suffixes of tensors that are float32 in files of every kind.
SINGLE = (
    *(
        ".bias",
        "ffn_gate_inp.weight",
        "conv1d.weight",
        "shortconv.conv.weight",
        ".ssm_a",
        ".ssm_d",
        "ssm_norm.weight",
    ),
    *(f"conv1d_{each}.weight" for each in "qkv"),
)


@dataclass(frozen=True)
class Kind:
    """The tensor types in one kind of file.

    ``head`` and ``table`` are the types of head and embedding table, if they differ from ``type``;
    a tied table has the type of the head.  ``parts`` has rules for tensors of a layer with another
    type: llama.cpp's mixtures give more bits to the tensors whose rounding costs most accuracy.
    """

    type: Type
    file_type: LlamaFileType
    head: Type | None = None
    table: Type | None = None
    parts: Mapping[str, Rule] = field(default_factory=dict)

    def of(self, name: str, shape: tuple[int, ...], config: Config, head: str) -> Type:
        """Return the type of a tensor; its rows need not be whole blocks of the type."""
        if len(shape) == 1 or name.endswith(SINGLE):
            return Type.F32
        if name in (head, "token_embd.weight"):
            return (self.head if name == head else self.table) or self.type
        match = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:_exps|_shexp)?\.weight", name)
        rule = self.parts.get(match[2]) if match else None
        return self.type if rule is None or match is None else rule(int(match[1]), config)


def dividing(shape: tuple[int, ...], kind: Type) -> Type:
    """Return a type, or its stand-in with smaller blocks if rows are not whole blocks of it."""
    while shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = STAND_INS.get(kind, Type.F16)
    return kind


def _all(kind: Type) -> Rule:
    return lambda layer, config: kind


def _first(count: Callable[[int], int], kind: Type, other: Type) -> Rule:
    """Return a rule: ``kind`` in the first ``count(layers)`` layers, ``other`` in the rest."""
    return lambda layer, config: kind if layer < count(config.layers) else other


def _ends_and_thirds(kind: Type, other: Type) -> Rule:
    """Return a rule: ``kind`` in the first and last eighth, and in every third layer between."""

    def rule(layer: int, config: Config) -> Type:
        eighth = config.layers // 8
        ends = layer < eighth or layer >= 7 * config.layers // 8
        return kind if ends or (layer - eighth) % 3 == 2 else other

    return rule


def _grouped(kind: Type, other: Type) -> Rule:
    """Return a rule: ``kind`` if a KV head serves 4 or more query heads, otherwise ``other``."""
    return lambda layer, config: kind if config.heads >= 4 * config.kv_heads else other


Q2, Q3, Q4, Q5, Q6 = Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K
KINDS = {
    "f32": Kind(Type.F32, LlamaFileType.ALL_F32),
    "f16": Kind(Type.F16, LlamaFileType.MOSTLY_F16),
    "bf16": Kind(Type.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": Kind(Type.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q6_k": Kind(Q6, LlamaFileType.MOSTLY_Q6_K),
    "q5_k_m": Kind(Q5, LlamaFileType.MOSTLY_Q5_K_M, Q6, parts={
        "attn_v": _ends_and_thirds(Q6, Q5), "ffn_down": _ends_and_thirds(Q6, Q5),
        "attn_qkv": _all(Q6),
    }),
    "q5_k_s": Kind(Q5, LlamaFileType.MOSTLY_Q5_K_S, Q6),
    "q5_1": Kind(Type.Q5_1, LlamaFileType.MOSTLY_Q5_1, Q6),
    "q5_0": Kind(Type.Q5_0, LlamaFileType.MOSTLY_Q5_0, Q6),
    "q4_k_m": Kind(Q4, LlamaFileType.MOSTLY_Q4_K_M, Q6, parts={
        "attn_v": _ends_and_thirds(Q6, Q4), "ffn_down": _ends_and_thirds(Q6, Q4),
        "attn_qkv": _all(Q5),
    }),
    "q4_k_s": Kind(Q4, LlamaFileType.MOSTLY_Q4_K_S, Q6, parts={
        "attn_v": _first(lambda layers: 4, Q5, Q4),
        "ffn_down": _first(lambda layers: layers // 8, Q5, Q4),
    }),
    "q4_1": Kind(Type.Q4_1, LlamaFileType.MOSTLY_Q4_1, Q6),
    "q4_0": Kind(Type.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q3_k_l": Kind(Q3, LlamaFileType.MOSTLY_Q3_K_L, Q6, parts={
        "attn_v": _all(Q5), "ffn_down": _all(Q5), "attn_output": _all(Q5), "attn_qkv": _all(Q4),
    }),
    "q3_k_m": Kind(Q3, LlamaFileType.MOSTLY_Q3_K_M, Q6, parts={
        "attn_v": _first(lambda layers: 2, Q5, Q4),
        "ffn_down": _first(lambda layers: layers // 16, Q5, Q4),
        "attn_output": _all(Q4), "attn_qkv": _all(Q4),
    }),
    "q3_k_s": Kind(Q3, LlamaFileType.MOSTLY_Q3_K_S, Q6),
    "q2_k": Kind(Q2, LlamaFileType.MOSTLY_Q2_K, Q6, parts={
        "attn_v": _grouped(Q4, Q3), "ffn_down": _all(Q3), "attn_output": _all(Q3),
    }),
    "tq1_0": Kind(Type.TQ1_0, LlamaFileType.MOSTLY_TQ1_0, Type.F16, Type.F16),
    "tq2_0": Kind(Type.TQ2_0, LlamaFileType.MOSTLY_TQ2_0, Type.F16, Type.F16),
}  # fmt: skip
# stand-ins: types with smaller blocks, for rows that are not whole blocks
STAND_INS = {
    Q2: Type.Q4_0, Q3: Type.Q4_0, Q4: Type.Q5_0, Q5: Type.Q5_1, Q6: Type.Q8_0,
}  # fmt: skip
# the largest magnitude of a type; other types have that of float16, the dtype of their scales
MOST = {
    Type.F32: np.inf, Type.BF16: np.inf, Type.Q8_0: 127 * HALF,
    Type.Q4_0: 8 * HALF, Type.Q5_0: 16 * HALF,
    Q2: 15 * HALF, Q3: 31 * HALF, Q4: 63 * HALF, Q5: 63 * HALF, Q6: 127 * HALF,
}  # fmt: skip


def size_of(shape: tuple[int, ...], kind: Type) -> int:
    """Return the size of a tensor in a file, in bytes."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // numbers * size


def packed(call: str, name: str, array: Array, kind: Type) -> Array:
    """Return the bytes of an array in a type; chunks of rows are converted through float32.

    Raises
    ------
    ConfigError
        A value is not finite, or exceeds the range of the type.
    """
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, CHUNK // rows.shape[1])
    result = np.empty((rows.shape[0], size_of(rows.shape[1:], kind)), np.uint8)
    for top in range(0, rows.shape[0], step):
        part = np.ascontiguousarray(rows[top : top + step], np.float32)
        _check(call, name, part, kind)
        blocks = quantize(part, kind) if kind in FORMATS else gguf.quants.quantize(part, kind)
        result[top : top + step] = blocks.view(np.uint8)
    return result


def unpacked(data: Array, kind: Type, rows: slice) -> Array:
    """Return rows of a tensor in float32 from the bytes that ``packed`` returned."""
    return gguf.quants.dequantize(data[rows], kind)


def _check(call: str, name: str, part: Array, kind: Type) -> None:
    """Raise a ConfigError unless all values are finite and in the range of the type."""
    most = max(float(part.max(initial=0)), -float(part.min(initial=0)))
    if not np.isfinite(most):  # NaN too
        raise ConfigError(
            f"{call}: {name} contains numbers that are not finite; use another checkpoint"
        )
    if most > MOST.get(kind, HALF):
        raise ConfigError(
            f"{call}: {name} contains {most:g}, out of range of {kind.name.lower()}; choose bf16"
            " or f32"
        )
