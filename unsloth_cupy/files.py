"""Atomic writes: a file is written under a temporary name, flushed to disk, then renamed."""

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import ConfigError

PARTIAL = ".partial"
NEW = ".new"  # a subfolder of complete files that are about to replace those of the folder
CACHE = "UNSLOTH_CUPY_CACHE_DIR"
TOKENIZER = 2**26  # bytes of a tokenizer.json: the largest have 2**25
MOST = 2**22  # bytes of a file of settings: the longest have 2**20; as objects they take 30 times
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder() -> Path:
    """Return the folder of cached files; they may be removed at any time and are made again."""
    own, all_caches = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(all_caches or "~/.cache").expanduser() / "unsloth_cupy"


def path_of(call: str, value: Any) -> Path:
    """Return an argument as a Path; raise ConfigError if it is not a path."""
    try:
        path = Path(os.fspath(value))
    except TypeError:
        raise ConfigError(f"{call}({value!r}): pass a path, a str or a pathlib.Path") from None
    if "\0" in str(path):
        raise ConfigError(f"{call}({value!r}): a path has no null character; pass another")
    try:
        path.exists()
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"{call}({value!r}): {error.strerror}; pass another path") from None
    return path


@contextmanager
def atomic_path(path: Path, call: str = "") -> Iterator[Path]:
    """Yield a name next to path for a new file or folder; rename it to path once it is on disk.

    If writing fails or is interrupted, the partial file or folder is removed.

    Raises
    ------
    ConfigError
        The disk is full, or the path cannot be written; the message begins with ``call``.
    """
    partial = path.parent / (path.name + PARTIAL)
    try:
        remove(partial)
        yield partial
        for name in [*partial.rglob("*"), partial]:
            sync(name)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            remove(partial)
        named = Path(error.filename) if isinstance(error.filename, str) else None
        if error.errno in FULL:
            cure = "make room on its disk"
        elif named is not None and (named == path.parent or partial in (named, *named.parents)):
            cure = "pass a path in a folder that exists and can be written"
        else:
            raise  # of another file
        problem = f"{path} cannot be written: {error.strerror}; {cure}"
        raise ConfigError(f"{call}: {problem}" if call else problem) from None
    except BaseException:
        remove(partial)
        raise


@contextmanager
def replacing_files(folder: Path, key: str, call: str = "") -> Iterator[Path]:
    """Yield a folder for new files that replace those of ``folder``, all of them or none.

    A folder that does not exist yet appears complete; an existing one keeps its other files.  New
    files are moved into it once all of them are on disk.  During the moves it has no file ``key``,
    without which no reader accepts it; if they are interrupted, ``complete_moves`` completes them.
    """
    complete_moves(folder, key)
    with atomic_path(folder / NEW if folder.is_dir() else folder, call) as partial:
        partial.mkdir(parents=True)
        yield partial
    complete_moves(folder, key)


def complete_moves(folder: Path, key: str) -> None:
    """Complete interrupted moves of ``replacing_files`` into a folder; wait for running ones."""
    if not (folder / NEW).is_dir():
        return
    try:
        with folder_lock(folder):
            _move(folder, key)
    except OSError as error:
        raise ConfigError(
            f"{folder}: the files in {NEW} must replace those next to it, but {error.strerror};"
            " load it once where it can be written, or move them"
        ) from None


def _move(folder: Path, key: str) -> None:
    new = folder / NEW
    if not new.is_dir():  # another process has moved them
        return
    if (new / key).exists():
        (folder / key).unlink(missing_ok=True)
        sync(folder)
    for path in sorted(new.iterdir(), key=lambda path: path.name == key):
        path.replace(folder / path.name)
    new.rmdir()
    sync(folder)


@contextmanager
def folder_lock(folder: Path, busy: str = "") -> Iterator[None]:
    """Hold an exclusive lock on a folder against other processes and threads that call this.

    They wait, or raise ConfigError(busy) if they pass ``busy``.  The end of the process, however it
    happens, releases the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise ConfigError(busy) from None
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file or the names in a folder are on disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders, and writes their names to disk by itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists.

    A folder is renamed first, so that no incomplete one ever has its name.
    """
    if path.is_dir() and not path.is_symlink():
        doomed = path if path.name.endswith(PARTIAL) else path.with_name(path.name + PARTIAL)
        if doomed != path:
            path.replace(doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def check_room(path: Path, needed: int, what: str) -> None:
    """Raise unless the disk of a path has room for ``needed`` bytes.

    Raises
    ------
    ConfigError
        It has less; the message says how much it has.
    """
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"{path}: {what} takes {needed / 2**20:,.0f} MiB, and its disk has {free / 2**20:,.0f}"
            " MiB left; make room, or name a folder on another disk"
        )


def regular(path: Path) -> Path:
    """Return a path, if reading it ends: raise ConfigError for a pipe, a device or a socket."""
    with suppress(OSError):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(f"{path} is a pipe or a device; write what it gives to a file first")
    return path


def read_text(path: Path, most: int = MOST) -> str:
    """Return the text of a UTF-8 file of at most ``most`` bytes; a byte order mark is left out.

    Raises
    ------
    ConfigError
        It is larger, or no file.
    OSError, UnicodeDecodeError
        It cannot be read.
    """
    with regular(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(f"{path} has more than {most >> 20} MiB; no file of its kind is so large")
    return data.decode("utf-8-sig")


def read_json(path: Path, most: int = MOST) -> dict[str, Any]:
    """Return the object that a JSON file of at most ``most`` bytes holds."""
    try:
        values = json.loads(read_text(path, most))
    except FileNotFoundError:
        cure = "pass a file that exists, or a folder that holds one"
        raise ConfigError(f"{path} is missing; {cure}") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; copy it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; it must hold an object")
    return values


def of_library(error: BaseException) -> bool:
    """Return whether a library raised an error: an Exception, or a panic of Rust, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def missing_folder_advice(path: Path, cure: str) -> str:
    """Return the advice for a missing folder: ``cure``, or how to download a model."""
    name = path.as_posix()
    if path.parent.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return cure
    return (
        f"if it is a model of huggingface.co, download it: hf download {name} --local-dir"
        f" {path.name}, then pass {path.name} here"
    )
