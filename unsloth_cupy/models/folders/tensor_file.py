"""Safetensors files that are written one tensor at a time, and the parts of one save.

    model-00001-of-00002.safetensors     a part; its metadata have the SHA-256 of its data
    model.safetensors.index.json         the file of each tensor, and the SHA-256 of each part

Each part of a folder is compared with the index, so parts of two saves are never mixed.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...core.arrays import Unwritten
from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import regular, sync
from .expert_homes import CODES as BYTES
from .expert_homes import DTYPES

CODES = {dtype: code for code, dtype in DTYPES.items()}  # names of dtypes in a safetensors file
CODES |= {np.dtype("uint8"): BYTES, np.dtype("int64"): "I64"}
DIGEST = "sha256"  # key in the metadata of a part, and in the metadata of an index
BLOCK = 2**22  # bytes read at a time


class TensorFile:
    """A safetensors file that is written in a ``with`` block, one tensor at a time.

    Parameters
    ----------
    path : Path
    tensors : {name: (dtype, shape)}
        The tensors, in the order of ``append``.  Tensors of the largest dtypes must be first, so
        that every tensor begins at a multiple of its item size.
    is_part : bool
        Whether the metadata contain the SHA-256 of the data, as ``digest`` does at the end.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[Any, Any]], *, is_part: bool = False
    ) -> None:
        self.path, self.is_part, self.digest = path, is_part, "0" * 64
        self.header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, (dtype, shape) in tensors.items():
            stop = start + math.prod(shape) * dtype.itemsize
            place = {"shape": [*shape], "data_offsets": [start, stop]}
            self.header[name] = {"dtype": CODES[dtype], **place}
            start = stop
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        self.file = self.path.open("wb")
        self._write_header()
        return self

    def append(self, array: Array) -> int:
        """Write the data of the next tensor; return their size in bytes."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.file.write(data)
        if self.is_part:
            self._hash.update(data)
        return data.nbytes

    def __exit__(self, kind: object, *_: object) -> None:
        with self.file as file:
            if kind is None and self.is_part:
                self.digest = self._hash.hexdigest()
                file.seek(0)
                self._write_header()
        if kind is None:
            sync(self.path)

    def _write_header(self) -> None:
        """Write the header, whose size does not depend on the digest."""
        if self.is_part:
            self.header["__metadata__"][DIGEST] = self.digest
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 8)
        self.file.write(len(text).to_bytes(8, "little") + text)


def write_one_by_one(
    path: Path, tensors: Mapping[str, Unwritten], written: Callable[[int], object]
) -> None:
    """Write a safetensors file with one tensor in memory at a time."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    with TensorFile(path, {name: tensors[name][:2] for name in order}) as file:
        for name in order:
            written(file.append(tensors[name].read()))


def data_digest(path: Path) -> str:
    """Return the SHA-256 of the data of a safetensors file, without the header."""
    digest = hashlib.sha256()
    with regular(path).open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while data := file.read(BLOCK):
            digest.update(data)
    return digest.hexdigest()


def digests_in(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each part in the values of an index; {} if other programs wrote it."""
    facts = index.get("metadata")
    digests = facts.get(DIGEST) if isinstance(facts, dict) else None
    return digests if isinstance(digests, dict) else {}


def check_parts(
    index: Path, digests: Mapping[str, str], listed: Iterable[str], opened: Callable[[Path], Any]
) -> None:
    """Raise a ConfigError unless a folder holds the parts of an index, and no others.

    Only headers are read: a part has the digest that it had when it was written.
    """
    folder, stem = index.parent, index.name.partition(".")[0]
    problem = f"{folder} holds parts of two saves"
    cure = "copy the folder again"
    if strange := {*listed} ^ digests.keys():
        raise ConfigError(f"{problem}: {index.name} lists {min(strange)} without SHA-256; {cure}")
    paths = [*folder.glob(f"{stem}-*-of-*.safetensors"), *folder.glob(f"{stem}.safetensors")]
    if others := {path.name for path in paths} - digests.keys():
        raise ConfigError(f"{problem}: {min(others)} is not in {index.name}; remove it, or {cure}")
    for name, digest in digests.items():
        with opened(folder / name) as tensors:
            if (tensors.metadata() or {}).get(DIGEST) != digest:
                raise ConfigError(f"{problem}: {name} is not the part in {index.name}; {cure}")
