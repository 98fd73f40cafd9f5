"""The tensor types of a GGUF file, and the range of each."""

from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from ...core.dtypes import Array
from ...errors import ConfigError

CHUNK = 1 << 22  # numbers converted through float32 at a time
HALF = 65504.0  # the largest float16, the type of block scales too


@dataclass(frozen=True)
class Kind:
    """The tensor types of a kind of file.

    ``most`` is the largest magnitude that the type can hold with float16 scales.  ``tables`` is the
    type of the embedding table and the head, if it is another.
    """

    type: Type
    file_type: LlamaFileType
    most: float = HALF
    tables: Type | None = None


KINDS = {
    "f32": Kind(Type.F32, LlamaFileType.ALL_F32, np.inf),
    "f16": Kind(Type.F16, LlamaFileType.MOSTLY_F16),
    "bf16": Kind(Type.BF16, LlamaFileType.MOSTLY_BF16, np.inf),
    "q8_0": Kind(Type.Q8_0, LlamaFileType.MOSTLY_Q8_0, 127 * HALF),
    "q4_0": Kind(Type.Q4_0, LlamaFileType.MOSTLY_Q4_0, 8 * HALF),
    "tq1_0": Kind(Type.TQ1_0, LlamaFileType.MOSTLY_TQ1_0, tables=Type.F16),
    "tq2_0": Kind(Type.TQ2_0, LlamaFileType.MOSTLY_TQ2_0, tables=Type.F16),
}
MOST = {kind.type: kind.most for kind in KINDS.values()}


def size_of(shape: tuple[int, ...], kind: Type) -> int:
    """Return the size of a tensor in a file, in bytes."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // numbers * size


def divides(shape: tuple[int, ...], kind: Type) -> bool:
    """Return whether the rows of a tensor are whole blocks of a type."""
    return shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0


def packed(name: str, array: Array, kind: Type) -> Array:
    """Return an array as the bytes of a type; chunks of rows are converted through float32.

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
        _check(name, part, kind)
        result[top : top + step] = gguf.quants.quantize(part, kind).view(np.uint8)
    return result


def _check(name: str, part: Array, kind: Type) -> None:
    """Raise a ConfigError unless all values are finite and in the range of the type."""
    most = max(float(part.max(initial=0)), -float(part.min(initial=0)))
    if not np.isfinite(most):  # NaN too
        raise ConfigError(
            f"export_gguf: {name} holds numbers that are not finite; load a sound checkpoint"
        )
    if most > MOST[kind]:
        raise ConfigError(
            f"export_gguf: {name} holds {most:g}, which {kind.name.lower()} does not; choose bf16"
            " or f32"
        )
