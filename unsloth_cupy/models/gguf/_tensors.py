"""The tensors of a GGUF file: their names, shapes, types and order of rows."""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import MODEL_TENSOR
from gguf import GGMLQuantizationType as Type

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...ops.position.rope_tables import RULES, frequencies
from ...ops.quantized.weight import Quantized
from ...placement import to_numpy
from ..configs.config import Config
from ..configs.draft_heads import without_heads
from ._families import Architecture, factor_of, has_two_tables, ropes, scaling_of
from ._parts import HEAD, TABLE, Part, has_offset, parts_of
from ._types import Kind, dividing
from .packed import blocks_of

STILL = np.float32(1e30)  # factor of a wavelength that does not rotate, as llama.cpp writes it


class Tensor(NamedTuple):
    """A tensor of a file, and a function that reads it."""

    name: str
    stored: str  # the Hugging Face name of its parameter, or ""
    shape: tuple[int, ...]
    type: Type
    read: Callable[[], Array]
    target: Type  # the type that it has if its rows are whole blocks


def tensors(
    call: str,
    config: Config,
    known: Architecture,
    kind: Kind,
    read: Callable[[str], Any],
    packed: Mapping[str, str] = MappingProxyType({}),
) -> list[Tensor]:
    """Return all tensors of a model's file, in the order in which they are written.

    Parameters in ``packed`` keep these types.
    """
    parts, result = parts_of(call, config, known), []
    is_own = has_two_tables(config, known)
    own = is_own or (not config.tied and HEAD in config.shapes())
    head = parts(HEAD if own else TABLE).tensors[0].name
    whole = functools.lru_cache(maxsize=1)(read)  # read once for several tensors of a parameter

    def add(stored: str, part: Part, several: bool = False, role: str = "") -> None:
        same = packed.get(stored)
        target = Type[same] if same else kind.of(part.name, part.shape, config, head)
        own = dividing(part.shape, target)
        reader = _reader(config, known, stored, whole if several else read, part, own.name, role)
        result.append(Tensor(part.name, stored, part.shape, own, reader, target))

    for stored in without_heads(config).shapes():
        if ".act_fn." in stored:  # these are in the metadata
            continue
        each = parts(stored).tensors
        for part in each:
            add(stored, part, len(each) > 1)
    if is_own:
        add(TABLE, parts(TABLE).tensors[0]._replace(name=head), role=HEAD)
    for name, array in _rope_factors(config, known):
        result.append(Tensor(name, "", array.shape, Type.F32, lambda array=array: array, Type.F32))  # type: ignore[misc]
    return result


def adapter_tensors(
    call: str, config: Config, known: Architecture, kind: Type, adapter: Any
) -> tuple[list[Tensor], float]:
    """Return the tensors of an adapter's file, and alpha: llama.cpp adds alpha B A / rank.

    A file has one alpha; B of layers with another scale is multiplied by the quotient.
    """
    parts, result = parts_of(call, config, known), list[Tensor]()
    alphas = {
        module: scale * len(adapter.pair(adapter.parameters, module)[0])
        for module, scale in adapter.scales.items()
    }
    alpha = next(filter(None, alphas.values()), 1.0)  # llama.cpp treats 0 as absent

    def add(module: str) -> None:
        (tensor, *others), _ = parts(f"{module}.weight")
        if others or not tensor.by_rows:
            problem = f"a file stores {module} in several tensors or in another order of rows"
            raise ConfigError(f"{call}: {problem}; export_gguf merges the adapter")
        a, b = map(to_numpy, adapter.pair(adapter.parameters, module))
        b = b.astype(FLOAT32) * np.float32(alphas[module] / alpha)
        reads = (lambda: a), _reader(config, known, f"{module}.weight", lambda _: b, tensor)
        for part, array, read in zip("ab", (a, b), reads, strict=True):
            name = f"{tensor.name}.lora_{part}"
            result.append(Tensor(name, "", array.shape, kind, read, kind))

    for module in alphas:
        add(module)
    return result, alpha


def _reader(
    config: Config,
    known: Architecture,
    stored: str,
    read: Callable[[str], Any],
    part: Part | None = None,
    kind: str = "",
    role: str = "",
) -> Callable[[], Array]:
    """Return a function that reads a tensor, or B of an adapter, in llama.cpp's layout.

    Weights that are packed in this kind stay packed, as uint8.  ``role`` is the parameter whose
    factor applies: the embedding table may also be written as the head.
    """
    module = stored.split(".")[-2]

    def converted() -> Array:
        array = read(stored)
        factor = np.asarray(factor_of(config, known, role or stored), FLOAT32)
        plain = bool((factor == 1).all())
        if isinstance(array, Quantized):
            as_rows = plain and part is not None and part.by_rows
            blocks = blocks_of(array, kind) if as_rows else None
            array = to_numpy(array.dequantize(FLOAT32)) if blocks is None else blocks
        array = array if part is None else part.of(array)
        if known.interleaved and not config.interleaved and module in ("q_proj", "k_proj"):
            heads = config.heads if module == "q_proj" else config.kv_heads
            array = interleaved(array, heads, ropes(config)[0].dim)
        if has_offset(config, stored):
            array = array.astype(FLOAT32) + np.float32(config.norm_offset)
        if not plain:
            array = array.astype(FLOAT32) * factor
        return array

    return converted


def interleaved(array: Array, heads: int, rotated: int) -> Array:
    """Reorder rows of heads so that rotary pairs, ``rotated`` / 2 rows apart, become adjacent."""
    by_heads = array.reshape(heads, -1, *array.shape[1:])
    halves = by_heads[:, :rotated].reshape(heads, 2, rotated // 2, *array.shape[1:])
    pairs = halves.swapaxes(1, 2).reshape(heads, rotated, *array.shape[1:])
    return np.concatenate([pairs, by_heads[:, rotated:]], axis=1).reshape(array.shape)


def _rope_factors(config: Config, known: Architecture) -> Iterator[tuple[str, Array]]:
    """Yield tensors of rotary scaling factors, one per wavelength: llama3, longrope, Gemma 4's."""
    rope, _ = ropes(config)
    kind, scaling = scaling_of(rope), rope.scaling or {}
    if kind == "llama3" or known.sized:  # with sizes by type, llama.cpp requires the tensor
        stretched = RULES[kind](scaling, 1, rope.dim, rope.base)[0]
        name = gguf.TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]
        with np.errstate(divide="ignore"):
            factors = frequencies(rope.dim, rope.base) / stretched
        yield f"{name}.weight", np.minimum(factors, STILL).astype(FLOAT32)
    if kind == "longrope":
        for key, tensor in (
            ("long_factor", MODEL_TENSOR.ROPE_FACTORS_LONG),
            ("short_factor", MODEL_TENSOR.ROPE_FACTORS_SHORT),
        ):
            yield f"{gguf.TENSOR_NAMES[tensor]}.weight", np.asarray(scaling[key], FLOAT32)
