"""Reading of GGUF files, which may have several parts: keys, and tensors as arrays.

file = opened_gguf(Path("model.gguf"))
file.values["llama.block_count"]
file.get_tensor("blk.0.attn_q.weight")
"""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import BFLOAT16, FLOAT32, Array
from ...errors import ConfigError
from ...files import of_library

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
CODES = {"F16": np.dtype("float16"), "BF16": BFLOAT16, "F32": FLOAT32}
AT_ONCE = 1 << 22  # numbers that are converted at a time: 16 MiB in float32
# tensors of single experts, in files of early 2024
ONE_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")
AS_STORED = ":blocks"  # suffix of a tensor's name, to get the bytes of its rows


def opened_gguf(path: Path) -> "GgufFile":
    """Return an open file; the path of one part opens all parts.

    Raises
    ------
    ConfigError
        The package gguf is missing; or a file is missing or broken, or has a tensor type that the
        package does not support.
    """
    parts = parts_of(path)
    for part in parts:
        if not part.is_file():
            problem = f"{part} is missing, which is a part of {path.name}"
            raise ConfigError(f"{problem}; copy it into the same folder")
    states = ((each, each.stat()) for each in parts)
    return _opened(tuple((each, state.st_size, state.st_mtime_ns) for each, state in states))


def parts_of(path: Path) -> list[Path]:
    """Return all parts of the model that ``path`` is a part of, in order."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{n + 1:05}-of-{count:05}.gguf") for n in range(count)]


@functools.lru_cache(maxsize=4)
def _opened(states: tuple[tuple[Path, int, int], ...]) -> "GgufFile":
    return GgufFile([path for path, _, _ in states])


class Stored(NamedTuple):
    """A tensor of a file: shape, type, and the numbers or blocks of its rows."""

    shape: tuple[int, ...]
    type: Any
    data: Array


class Stack:
    """A lazy stack of the arrays of single experts; only what is indexed is read into memory."""

    def __init__(self, parts: list[Array]) -> None:
        self.parts, self.shape = parts, (len(parts), *parts[0].shape)
        self.dtype, self.nbytes = parts[0].dtype, sum(part.nbytes for part in parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, key: Any) -> Array:
        """Return a part; indices are slices and numbers, as for an array."""
        rows, others = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
        if rows is ...:
            rows, others = slice(None), (..., *others)
        if not isinstance(rows, slice):
            part: Array = self.parts[rows][others]
            return part
        shape = self.parts[0][others].shape
        chosen = [part[others] for part in self.parts[rows]]
        return np.stack(chosen) if chosen else np.empty((0, *shape), self.dtype)


def _reader(path: Path) -> Any:
    """Return the package's reader, which reads lists at once: a vocabulary has 400,000 entries."""
    import gguf

    scalars = gguf.GGUFReader.gguf_scalar_to_np

    class Reader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            data, start = np.asarray(self.data), int(orig_offs)
            plain = raw_type == gguf.GGUFValueType.ARRAY and self.byte_order == "I"
            if not plain or start + 12 > len(data):
                return super()._get_field_parts(orig_offs, raw_type)
            (kind,), (count,) = (
                data[start : start + 4].view("<u4"), data[start + 4 : start + 12].view("<u8")
            )  # fmt: skip
            place, texts = start + 12, kind == gguf.GGUFValueType.STRING
            # a text has a length of 8 bytes, so a list of ``count`` texts has at least as many
            size = 8 if texts else np.dtype(scalars.get(kind, "u1")).itemsize
            if not (texts or kind in scalars) or int(count) * size > len(data) - place:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [gguf.GGUFValueType.ARRAY, *[gguf.GGUFValueType(kind)] * bool(count)]
            if not texts:
                end = place + int(count) * size
                numbers = data[place:end].view(scalars[kind])
                return end - start, [numbers], [0], types
            parts = []
            for _ in range(int(count)):
                first = place + 8
                place = first + int.from_bytes(data[place:first].tobytes(), "little")
                if place > len(data):
                    problem = "is truncated, broken or no GGUF file (a text is too long)"
                    raise ConfigError(f"{path} {problem}; copy it again")
                parts.append(data[first:place])
            return place - start, parts, range(len(parts)), types

    return Reader(path)


class GgufFile:
    """The keys and tensors of a file, with the methods of an open safetensors file.

    Attributes
    ----------
    values : dict
        The keys of the first part.
    tensors : dict of str to Stored
    """

    def __init__(self, paths: list[Path]) -> None:
        try:
            import gguf  # noqa: F401
        except ImportError:
            cure = "install it with pip install 'unsloth_cupy[gguf]'"
            raise ConfigError(f"{paths[0]} needs the package gguf; {cure}") from None
        self.path = paths[0]
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        for path in paths:
            try:
                reader = _reader(path)
                if not self.values:
                    self.values = {name: each.contents() for name, each in reader.fields.items()}
            except BaseException as error:
                if not of_library(error):
                    raise
                problem = f"{path} is truncated, broken or no GGUF file"
                raise ConfigError(f"{problem} ({error}); copy it again") from None
            for each in reader.tensors:
                shape = tuple(int(size) for size in reversed(each.shape))
                self.tensors[each.name] = Stored(shape, each.tensor_type, each.data)
        self._join_experts()
        self._check_types()
        tensors = {name: each for name, each in self.tensors.items() if "_exps." not in name}
        matrices = {each.type.name for each in tensors.values() if len(each.shape) > 1}
        if len(tensors) < len(self.tensors):  # with experts, ignore the routers, which are float32
            matrices = matrices - {"F32"} or matrices
        only = matrices.pop() if len(matrices) == 1 else "F32"
        self.code = only if only in CODES else "F32"  # dtype of matrices, which vectors get, too

    def _join_experts(self) -> None:
        """Join the tensors of single experts to stacks, as in newer files."""
        experts: dict[str, dict[int, str]] = {}
        for name in self.tensors:
            if match := ONE_EXPERT.fullmatch(name):
                experts.setdefault(f"{match[1]}_exps.weight", {})[int(match[2])] = name
        for name, names in experts.items():
            parts = [self.tensors[names[n]] for n in range(len(names)) if n in names]
            whole = len(parts) == len(names) and name not in self.tensors
            if not whole or len({(part.shape, part.type) for part in parts}) > 1:
                problem = f"the experts of {name} need one tensor each, of equal shape and type"
                raise ConfigError(f"{self.path}: {problem}; fetch the file again")
            shape, kind, _ = parts[0]
            stack: Any = Stack([part.data for part in parts])
            self.tensors[name] = Stored((len(parts), *shape), kind, stack)
            for each in names.values():
                del self.tensors[each]

    def _check_types(self) -> None:
        """Raise a ConfigError for a tensor type that the package cannot convert."""
        examples = {each.type: (name, each) for name, each in self.tensors.items()}
        for name, each in examples.values():
            try:
                _dense(each.data[:1], each.type)
            except NotImplementedError:
                problem = f"the package gguf does not convert {each.type.name}, of {name!r}"
                cure = "install a newer one (pip install -U gguf), or use a file of another type"
                raise ConfigError(f"{self.path}: {problem}; {cure}") from None

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return [*self.tensors]

    def metadata(self) -> dict[str, str]:
        """Return an empty dict: the metadata of a safetensors file."""
        return {}

    def get_slice(self, name: str) -> "Rows":
        """Return a lazy tensor."""
        return Rows(self, name)

    def get_tensor(self, name: str) -> Array:
        """Return a tensor as an array."""
        return Rows(self, name)[...]


class Rows:
    """A lazy tensor of a file: indexing converts only the rows that are needed."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self.name = file, name.removesuffix(AS_STORED)
        self.stored = file.tensors[self.name]
        self.as_stored = name.endswith(AS_STORED)

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return [*(self.stored.data if self.as_stored else self.stored).shape]

    def get_dtype(self) -> str:
        """Return the name of the dtype of results; vectors are float32."""
        wide = len(self.stored.shape) == 1 or self.stored.type.name == "F32"
        return "F32" if wide else self.file.code

    def __getitem__(self, key: Any) -> Array:
        """Return a part; the rows that it needs are converted, in float32, and rounded once."""
        if self.as_stored:
            return self.stored.data[key]
        rows, others = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
        if rows is ... or not isinstance(rows, slice) or not self.stored.shape:
            return self._of(slice(None))[key]
        result = self._of(rows)
        return result[(slice(None), *others)] if others else result

    def _of(self, rows: slice) -> Array:
        shape, kind, data = self.stored
        part, dtype, coded = data[rows], CODES[self.get_dtype()], kind.name not in (*CODES, "F64")
        result = np.empty((len(part), *shape[1:]), dtype)
        step = max(1, AT_ONCE // max(1, result[:1].size))
        for top in range(0, len(part), step):
            dense = _dense(part[top : top + step], kind)
            if coded and not np.isfinite(dense).all():
                problem = f"a block of tensor {self.name!r} has a scale that is not finite"
                raise ConfigError(f"{self.file.path}: {problem}; fetch the file again")
            result[top : top + step] = dense
        return result


def _dense(data: Array, kind: Any) -> Array:
    """Return rows of a tensor as floats."""
    from gguf.quants import dequantize

    if kind.name in ("F16", "F32", "F64"):
        return np.asarray(data)
    with np.errstate(all="ignore"):  # the caller raises for numbers that are not finite
        return np.asarray(dequantize(np.ascontiguousarray(data), kind), FLOAT32)
