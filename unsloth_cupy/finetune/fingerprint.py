"""Digests of a model's files, to detect that an adapter's base weights have changed."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .progress import reading

PATTERNS = ("config.json", "*.safetensors")
BLOCK = 2**22  # bytes read at a time


def fingerprints(folder: Path, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of each config.json and safetensors file of a model, by file name.

    If size, change time and inode of a file are those of its known fingerprint, the digest is
    taken from there: the file is not read again.
    """
    paths = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    result: dict[str, dict[str, Any]] = {}
    for path in paths:
        stat = path.stat()
        state = {"bytes": stat.st_size, "changed": stat.st_ctime_ns, "inode": stat.st_ino}
        before = known.get(path.name, {})
        if any(before.get(key) != value for key, value in state.items()):
            digest = hashlib.sha256()
            for (data,) in reading(_blocks(path), stat.st_size, f"reading {path.name}"):
                digest.update(data)
            before = {"sha256": digest.hexdigest()}
        result[path.name] = {"sha256": before["sha256"], **state}
    return result


def _blocks(path: Path) -> Iterator[tuple[bytes]]:
    """Yield the bytes of a file in blocks."""
    with path.open("rb") as file:
        while data := file.read(BLOCK):
            yield (data,)
