"""What the files of a model hold, by digests: an adapter is of no use on other weights."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .progress import reading

PATTERNS = ("config.json", "*.safetensors")
BLOCK = 2**22  # bytes that are read at a time


def fingerprints(folder: Path, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a digest of each file that a model's weights and sizes are in.

    Known fingerprints of a file that nobody has touched since are believed: it is not read again.
    """
    paths = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        stat = path.stat()
        state = {"bytes": stat.st_size, "changed": stat.st_ctime_ns, "inode": stat.st_ino}
        before = known.get(path.name, {})
        if any(before.get(key) != value for key, value in state.items()):
            digest = hashlib.sha256()
            for (data,) in reading(_blocks(path), stat.st_size, f"reading {path.name}"):
                digest.update(data)
            before = {"sha256": digest.hexdigest()}
        found[path.name] = {"sha256": before["sha256"], **state}
    return found


def _blocks(path: Path) -> Iterator[tuple[bytes]]:
    with path.open("rb") as file:
        while data := file.read(BLOCK):
            yield (data,)
