"""Rounding of a model's weights to the types of a GGUF file, without writing the file."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...core.stand_in import is_planned
from ...errors import ConfigError
from ...placement import to_device_of, to_numpy
from ..configs.config import Config
from ..configs.draft_heads import without_heads
from ..configs.names import is_norm

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType as Type


def types_of(call: str, config: Config, kind: str) -> dict[str, "Type"]:
    """Return the type of each parameter that a file of this kind rounds, by Hugging Face name.

    Raises
    ------
    ConfigError
        The package gguf is missing; llama.cpp does not support the family; or a file has a
        parameter in two types, or multiplied by a factor.
    """
    try:
        from ._families import architecture, factor_of
        from ._tensors import tensors
        from ._types import KINDS
    except ImportError as error:
        cure = "install it with pip install 'unsloth_cupy[gguf]'"
        raise ConfigError(f"{call} needs the package {error.name}; {cure}") from None
    known = architecture(call, config)
    problem, names = None, without_heads(config).shapes()
    factors = {n: factor_of(config, known, n) for n in names if not is_norm(n)}
    if scaled := [name for name, factor in factors.items() if np.any(factor != 1)]:
        problem = f"has {scaled[0]} times a factor"
    types: dict[str, Type] = {}
    if config.latent is not None and known.absorbed:
        problem = "has kv_b_proj in two tensors, one of them transposed"
    for each in tensors(call, config, known, KINDS[kind], lambda _: np.empty(0)):
        if types.setdefault(each.stored, each.type) != each.type:
            problem = f"has {each.stored} in two types"
    if problem is not None:
        cure = "choose a kind of quantized weights in a folder, such as nf4"
        raise ConfigError(f"{call}: a GGUF file of a {config.model_type} {problem}; {cure}")
    return {name: kind for name, kind in types.items() if name and kind.name != "F32"}


def block_of(kind: "Type") -> int:
    """Return the block size of a type: the number of values in a row that share a scale."""
    import gguf

    return int(gguf.GGML_QUANT_SIZES[kind][0])


def rounded(call: str, name: str, array: Any, kind: "Type") -> Array:
    """Return an array rounded to a type, in float32, as a reader of the file gets it.

    The host computes it with the code that writes files.
    """
    from ._types import packed, unpacked

    if is_planned(array):
        planned: Array = array.astype(FLOAT32)
        return planned
    data = packed(call, name, to_numpy(array), kind)
    dense = np.ascontiguousarray(unpacked(data, kind, slice(None)), FLOAT32)
    result: Array = to_device_of(dense.reshape(array.shape), array)
    return result
