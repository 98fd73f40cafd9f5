"""The tensors of a GGUF file in which each parameter of a model is stored."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ..configs.config import Config
from ..configs.draft_heads import without_heads
from ..configs.heads import Choice
from ..configs.names import HEAD, is_norm
from ..folders.lazy_parameter import StoredTensor
from .packed import maker, packed_class
from .reading import AS_STORED, CODES, GgufFile, Stored, opened_gguf

if TYPE_CHECKING:
    from ._parts import Part

# tensors that are read with config.json, and the head, which a model may lack
SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
OUTPUT = "output.weight"
MORE = ("more", "most")  # keys of a parameter's second and third tensor


def find_gguf_tensors(path: Path, config: Config, choice: Choice) -> dict[str, StoredTensor]:
    """Return the stored tensor of each parameter of a model, in the config's order.

    Raises
    ------
    ConfigError
        A tensor is missing, unexpected, or has another shape than the keys imply.
    """
    file, config = opened_gguf(path), without_heads(config)
    from ._families import known_as
    from ._parts import as_it_is, parts_of

    known = known_as("load", config)
    parts_of_name, homes = parts_of("load", config, known), dict[str, StoredTensor]()
    left = {n for n in file.tensors if n not in SETTINGS and not _predicts(file, n, config.layers)}
    for name, shape in config.shapes().items():
        if name in choice.optional and name != HEAD:
            continue
        if ".act_fn." in name:
            homes[name] = _of_keys(file, name, shape)
            continue
        parts, joined = parts_of_name(name)
        stored, *others = (part.name for part in parts)
        if stored not in file.tensors and (name in choice.optional or name in config.unused):
            continue  # files of llama.cpp's converter have no pooler
        tensors = [_tensor_of(file, part) for part in parts]
        left -= {stored, *others}
        undone = _undone(config, interleaved=known.interleaved, name=name)
        dense: Any = undone if joined is as_it_is else partial(_joined, joined)
        dtype = config.dtype_of(name, CODES[file.code])
        if is_norm(name) and len(shape) == 1 and not _holds(dtype, file.get_tensor(stored), undone):
            dtype = FLOAT32
        kinds = {each.type.name for each in tensors}
        packed = packed_class(name, shape, tensors[0].type.name)
        if config.bit_layers or len(kinds) > 1 or not all(part.by_rows for part in parts):
            packed = None
        if packed is not None:
            stored, dense = stored + AS_STORED, maker(packed, dense)
            others = [each + AS_STORED for each in others]
        more = {key: (str(path), other) for key, other in zip(MORE, others, strict=False)}
        place = str(path), stored, shape, dtype, packed, more
        kind, size = " and ".join(sorted(kinds)).lower(), sum(each.data.nbytes for each in tensors)
        homes[name] = StoredTensor(
            *place, dense=dense, format=kind, bytes=size, wide=config.widened(name)
        )
    if HEAD not in config.shapes():  # the head is the embedding table, or another head
        left.discard(OUTPUT)
    if left:
        rest = f" and {len(left) - 1} more are" if len(left) > 1 else " is"
        problem = f"tensor {min(left)!r}{rest} not part of the {config.model_type} of its keys"
        raise ConfigError(f"{path}: {problem}; use the model's Hugging Face folder")
    return homes


def _holds(dtype: Any, stored: Array, dense: Callable[[Mapping[str, Array]], Array]) -> bool:
    """Return whether a dtype can represent a norm's weight exactly; a file may store it plus 1."""
    offset, wide = np.float32(0), dense({"weight": stored})
    if isinstance(dense, partial):
        offset = np.float32(dense.args[0])
    return np.array_equal(wide.astype(dtype).astype(FLOAT32) + offset, stored)


def _undone(
    config: Config, *, interleaved: bool, name: str
) -> Callable[[Mapping[str, Array]], Array]:
    """Return the function from llama.cpp's tensor to the parameter, the inverse of ``_reader``."""
    from ._families import ropes
    from ._parts import has_offset

    module = name.split(".")[-2]
    if interleaved and not config.interleaved and module in ("q_proj", "k_proj"):
        heads = config.heads if module == "q_proj" else config.kv_heads
        return partial(halves, heads, ropes(config)[0].dim)
    if has_offset(config, name):
        return partial(_less, config.norm_offset)
    return _same


def draft_heads_of(file: GgufFile) -> int:
    """Return the number of draft heads (multi-token prediction), which are not loaded."""
    counts = (n for key, n in file.values.items() if key.endswith(".nextn_predict_layers"))
    return int(next(counts, 0) or 0)


def _predicts(file: GgufFile, name: str, layers: int) -> bool:
    """Return whether a tensor belongs to a draft head."""
    further = draft_heads_of(file)
    block, number, *_ = (*name.split("."), "")
    return further > 0 and block == "blk" and number.isdecimal() and int(number) >= layers


def _tensor_of(file: GgufFile, part: "Part") -> Stored:
    """Return a tensor of a file; raise if it is missing or has another shape."""
    tensor = file.tensors.get(part.name)
    if tensor is None or _flat(tensor.shape) != _flat(part.shape):
        problem = "is missing" if tensor is None else f"is {tensor.shape}, not {part.shape}"
        raise ConfigError(f"{file.path}: tensor {part.name!r} {problem}; fetch the file again")
    if len(tensor.shape) > len(part.shape):  # a vector that is stored as a matrix with one row
        tensor = tensor._replace(shape=tensor.shape[1:], data=tensor.data[0])
        file.tensors[part.name] = tensor
    return tensor


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without a leading axis of length 1: a file may store a vector as a matrix."""
    return shape[1:] if shape[:1] == (1,) and len(shape) > 1 else shape


def _joined(join: Callable[..., Array], state: Mapping[str, Array]) -> Array:
    """Return a parameter from its tensors."""
    return join(*(state[key] for key in ("weight", *MORE) if key in state))


def _same(state: Mapping[str, Array]) -> Array:
    return state["weight"]


def _less(offset: float, state: Mapping[str, Array]) -> Array:
    """Return the weight of a norm without the offset that the model adds."""
    weight = state["weight"]
    return (weight.astype(FLOAT32) - np.float32(offset)).astype(weight.dtype)


def halves(heads: int, rotated: int, state: Mapping[str, Array]) -> Array:
    """Reorder rows of heads so that adjacent rotary pairs become ``rotated`` / 2 rows apart."""
    array = state["weight"]
    by_heads = array.reshape(heads, -1, *array.shape[1:])
    pairs = by_heads[:, :rotated].reshape(heads, rotated // 2, 2, *array.shape[1:])
    halves = pairs.swapaxes(1, 2).reshape(heads, rotated, *array.shape[1:])
    return np.concatenate([halves, by_heads[:, rotated:]], axis=1).reshape(array.shape)


def _of_keys(file: GgufFile, name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return the stored tensor of an xielu parameter, which is a key of the file."""
    layer, part = int(name.split(".")[2]), name.rpartition(".")[2]
    try:
        number = file.values[f"xielu.{part}"][layer]
    except (KeyError, IndexError, TypeError):
        problem = f"xielu.{part} is not a number for each layer"
        raise ConfigError(f"{file.path}: {problem}; fetch the file again") from None

    def dense(state: Any) -> Array:
        return np.full(shape, number, FLOAT32)

    return StoredTensor(str(file.path), OUTPUT, shape, CODES[file.code], dense=dense)
