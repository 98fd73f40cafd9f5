"""What a GGUF file makes of each tensor of a model: its type, and the numbers in it."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...core.stand_in import is_planned
from ...errors import ConfigError
from ...placement import to_device_of, to_numpy
from ..configs.config import Config
from ..configs.names import is_norm

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType as Type


def types_of(call: str, config: Config, kind: str) -> dict[str, "Type"]:
    """Return the type of each tensor that a file of this kind rounds, by its Hugging Face name.

    Raises
    ------
    ConfigError
        The package gguf is missing; llama.cpp does not have the family; or the file has a tensor
        twice in two types, or times a factor.
    """
    try:
        from ._families import architecture, factor_of
        from ._tensors import tensors
        from ._types import KINDS
    except ImportError as error:
        cure = "install it with pip install 'unsloth_cupy[gguf]'"
        raise ConfigError(f"{call} needs the package {error.name}; {cure}") from None
    known = architecture(call, config)
    problem = None
    factors = {n: factor_of(config, known, n) for n in config.shapes() if not is_norm(n)}
    if scaled := [name for name, factor in factors.items() if np.any(factor != 1)]:
        problem = f"has {scaled[0]} times a factor"
    types: dict[str, Type] = {}
    if config.latent is not None and known.absorbed:
        problem = "has kv_b_proj in two tensors, one of them turned"
    for each in tensors(call, config, known, KINDS[kind], lambda _: np.empty(0)):
        if types.setdefault(each.stored, each.type) != each.type:
            problem = f"has {each.stored} in two types"
    if problem is not None:
        cure = "choose a kind of weights in a folder, as nf4"
        raise ConfigError(f"{call}: a GGUF file of a {config.model_type} {problem}; {cure}")
    return {name: kind for name, kind in types.items() if name and kind.name != "F32"}


def block_of(kind: "Type") -> int:
    """Return how many values of a row share what a type stores."""
    import gguf

    return int(gguf.GGML_QUANT_SIZES[kind][0])


def rounded(call: str, name: str, array: Any, kind: "Type") -> Array:
    """Return what a reader of a file gets for an array that is written in a type, in float32.

    It is computed on the host, by the code that writes files.
    """
    from ._types import packed, unpacked

    if is_planned(array):
        planned: Array = array.astype(FLOAT32)
        return planned
    data = packed(call, name, to_numpy(array), kind)
    dense = np.ascontiguousarray(unpacked(data, kind, slice(None)), FLOAT32)
    result: Array = to_device_of(dense.reshape(array.shape), array)
    return result
