"""A cache of compiled kernels on disk, keyed by everything that they are compiled from.

An entry is FOLDER/KEY/DIGEST.cubin: KEY is a hash of source, options, NVRTC's version and
architecture, DIGEST a hash of the bytes, which shows whether an entry is intact.  Entries are
written under a temporary name and renamed, which is safe for many processes on a shared disk.
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

from ..errors import ConfigError, KernelError
from ..files import CACHE, cache_folder

IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
OLDEST = 80  # the architecture that the kernels need
Version = tuple[int, int]


def folder() -> Path:
    """Return the folder of binaries: in UNSLOTH_CUPY_CACHE_DIR, or in the user's cache folder."""
    return cache_folder() / "kernels"


def key_of(source: str, options: Sequence[str], version: Version, architecture: str) -> str:
    """Return the key of a binary; folders of headers are not a part of it.

    A source contains the digest of our headers, and CUDA's headers belong to the version.
    """
    relevant = [option for option in options if not option.startswith("-I")]
    text = json.dumps([source, relevant, [*version], architecture])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def find(root: Path, key: str) -> Path | None:
    """Return the file of an intact binary, or None; a damaged one is removed."""
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
    """Write a binary, completely or not at all, and return its file.

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
            os.chmod(partial, 0o644)  # other users of a shared disk read it
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
    """Let CuPy be imported, and compile, even if it cannot write to the folder of its own cache.

    CuPy creates that folder when it is imported, and fails if it cannot.
    """
    own = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    if not _writable(own):
        os.environ.setdefault(IN_MEMORY, "1")
        if not os.path.isdir(own):
            os.environ["CUPY_CACHE_DIR"] = tempfile.gettempdir()  # exists; nothing is written


def unit(cupy: Any, source: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of ``cupy.RawModule``: a cached binary, or the source and options.

    Raises
    ------
    KernelError
        The GPU is too old for the kernels, or too new for NVRTC.
    """
    root, nvrtc = folder(), cupy.cuda.nvrtc
    architecture = str(cupy.cuda.Device().compute_capability)
    if root.is_dir():
        key = key_of(source, options, tuple(nvrtc.getVersion()), architecture)
        entry = find(root, key)
        if entry is not None:
            return {"path": str(entry)}
    if refused := refusal(int(architecture), nvrtc):
        raise KernelError(refused)
    return {"code": source, "options": tuple(options)}


def refusal(architecture: int, nvrtc: Any) -> str:
    """Return why kernels cannot be compiled for an architecture, such as 90; "" if they can."""
    if architecture < OLDEST:
        return f"kernels need a GPU of sm_{OLDEST} or newer; this one is sm_{architecture}"
    if architecture in nvrtc.getSupportedArchs():
        return ""
    version = ".".join(map(str, nvrtc.getVersion()))
    return f"NVRTC {version} does not compile for sm_{architecture}; install a newer one"


def _writable(place: Path) -> bool:
    """Create a folder, as CuPy would, and return whether files can be created in it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # os.access does not detect these: a full disk, a name that is too long
        return False
    return os.access(place, os.W_OK | os.X_OK)
