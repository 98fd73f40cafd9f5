"""A cache of compiled kernels on disk, keyed by all inputs of the compilation.

An entry is FOLDER/KEY/DIGEST.cubin: KEY is a hash of source, options, NVRTC version and
architecture; DIGEST is a hash of the binary, to detect damaged files.  Entries are written under a
temporary name and renamed, which is safe for many processes on a shared disk.  Only kernels that
this user or root has written are loaded.
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

from .errors import ConfigError, KernelError
from .files import CACHE, cache_folder, doubt, own_folder, say_once

CUPYS = "CUPY_CACHE_DIR"
OLDEST = 80  # the minimum architecture of the kernels
Version = tuple[int, int]


def folder(*, writing: bool = True) -> Path:
    """Return the folder of binaries in UNSLOTH_CUPY_CACHE_DIR or in the cache of the user."""
    return cache_folder(writing=writing) / "kernels"


def key_of(source: str, options: Sequence[str], version: Version, architecture: str) -> str:
    """Return the key of a binary; include paths are not a part of it.

    The source contains a digest of the headers here, and the NVRTC version identifies CUDA headers.
    """
    relevant = [option for option in options if not option.startswith("-I")]
    text = json.dumps([source, relevant, [*version], architecture])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def find(root: Path, key: str) -> Path | None:
    """Return the file of an intact binary, or None; remove a damaged file.

    A file that other users may have written is skipped, with one warning.
    """
    try:
        entries = sorted((root / key).glob("*.cubin"))
    except OSError:
        return None
    for entry in entries:
        why = {path: doubt(path) for path in (root, root / key, entry)}
        if place := next((path for path in why if why[path]), None):
            say_once(f"{place} {why[place]}: compiling its kernels again")
            continue
        with contextlib.suppress(OSError):
            if hashlib.sha256(entry.read_bytes()).hexdigest() == entry.stem:
                return entry
            entry.unlink()
    return None


def keep(root: Path, key: str, binary: bytes) -> Path:
    """Write a binary atomically, and return its file.

    Raises
    ------
    ConfigError
        The folder cannot be written, or other users can write there.
    """
    place = root / key
    entry = place / f"{hashlib.sha256(binary).hexdigest()}.cubin"
    cure = f"set {CACHE} to a folder that can be written"
    try:
        for path in (root, place):
            path.mkdir(0o755, parents=True, exist_ok=True)  # the umask may allow writes by others
            if why := doubt(path):
                raise ConfigError(f"{path} {why}; {cure}")
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
        raise ConfigError(f"{place} cannot be written: {error.strerror}; {cure}") from error
    return entry


@functools.cache
def prepare() -> None:
    """Make CuPy store compiled kernels in a folder that only this user can write.

    CuPy creates its cache folder on import, fails if it cannot, and loads any file from there.
    """
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    own = kernel_cache()
    place = own_folder(own, "cupy", f"set {CUPYS} to another folder")
    if str(place) != os.environ.get(CUPYS, str(own)):
        os.environ[CUPYS] = str(place)


def kernel_cache() -> Path | None:
    """Return the folder of CuPy's compiled kernels; None if the user has no home."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get(CUPYS) or "~/.cupy/kernel_cache").expanduser()
    return None


def unit(cupy: Any, source: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of ``cupy.RawModule``: a cached binary, or source and options.

    Raises
    ------
    KernelError
        The GPU is too old for the kernels, or too new for NVRTC.
    """
    root, nvrtc = folder(writing=False), cupy.cuda.nvrtc
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
    """Return why kernels do not compile for an architecture, such as 90; "" if they do."""
    if architecture < OLDEST:
        return f"kernels need a GPU of sm_{OLDEST} or newer; this one is sm_{architecture}"
    if architecture in nvrtc.getSupportedArchs():
        return ""
    version = ".".join(map(str, nvrtc.getVersion()))
    return f"NVRTC {version} does not compile for sm_{architecture}; install a newer one"
