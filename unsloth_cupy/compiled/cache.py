"""Binaries of kernels on disk, found by what they are made of.

An entry is FOLDER/KEY/DIGEST.cubin: KEY is a hash of source, options, NVRTC's version and
architecture, DIGEST one of the bytes, so that an entry says itself whether it is whole.  Entries
are written beside their names and renamed, which is safe for many processes on a shared disk.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import CACHE, cache_folder

IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
Version = tuple[int, int]


def folder() -> Path:
    """Return where binaries are kept: in UNSLOTH_CUPY_CACHE_DIR, or among the user's caches."""
    return cache_folder() / "kernels"


def key_of(source: str, options: Sequence[str], version: Version, architecture: str) -> str:
    """Return what a binary is found by; folders of headers are none of it.

    A source names the digest of all headers, and CUDA's belong to the version.
    """
    given = [option for option in options if not option.startswith("-I")]
    made = json.dumps([source, given, [*version], architecture])
    return hashlib.sha256(made.encode()).hexdigest()[:40]


def find(root: Path, key: str) -> Path | None:
    """Return the file of a whole binary, if there is one; a damaged one is removed."""
    try:
        entries = sorted((root / key).glob("*.cubin"))
    except OSError:
        return None
    for entry in entries:
        with contextlib.suppress(OSError):
            if hashlib.sha256(entry.read_bytes()).hexdigest() == entry.stem:
                return entry
            entry.unlink()
    return None


def keep(root: Path, key: str, binary: bytes) -> Path:
    """Write a binary, whole or not at all, and return its file.

    Raises
    ------
    ConfigError
        The folder cannot be written.
    """
    place = root / key
    entry = place / f"{hashlib.sha256(binary).hexdigest()}.cubin"
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=".", dir=place)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(binary)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(partial, 0o644)  # others of a shared disk read it
            os.replace(partial, entry)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        cure = f"set {CACHE} to a folder that can be written"
        raise ConfigError(f"{place} cannot be written: {error.strerror}; {cure}") from error
    return entry


@functools.cache
def prepare() -> None:
    """Let CuPy be imported, and compile, where it cannot write to the folder of its own cache.

    It makes that folder as it is imported, and fails where it cannot.
    """
    own = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    if not _writable(own):
        os.environ.setdefault(IN_MEMORY, "1")
        if not os.path.isdir(own):
            os.environ["CUPY_CACHE_DIR"] = tempfile.gettempdir()  # it is there; nothing is written


def unit(cupy: Any, source: str, options: Sequence[str]) -> dict[str, Any]:
    """Return what ``cupy.RawModule`` is to make a module of: a kept binary, or the source."""
    root = folder()
    if root.is_dir():
        architecture = str(cupy.cuda.Device().compute_capability)
        key = key_of(source, options, tuple(cupy.cuda.nvrtc.getVersion()), architecture)
        entry = find(root, key)
        if entry is not None:
            return {"path": str(entry)}
    return {"code": source, "options": tuple(options)}


def _writable(place: Path) -> bool:
    """Make a folder, as CuPy would, and say whether files can be made in it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # which os.access does not foresee: a full disk, a name that is too long
        return False
    return os.access(place, os.W_OK | os.X_OK)
