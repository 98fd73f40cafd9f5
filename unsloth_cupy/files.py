"""A file is there whole or not at all: written beside its name, flushed to disk, then renamed."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ConfigError

PARTIAL = ".partial"
NEW = ".new"  # inside a folder: files that are whole and about to replace those of the folder
CACHE = "UNSLOTH_CUPY_CACHE_DIR"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder() -> Path:
    """Return the folder of files that may be removed at any time: they are made again."""
    own, all_caches = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(all_caches or "~/.cache").expanduser() / "unsloth_cupy"


def path_of(call: str, given: Any) -> Path:
    """Return what a caller gave as a path; raise ConfigError for what is not one."""
    try:
        path = Path(os.fspath(given))
    except TypeError:
        raise ConfigError(f"{call}({given!r}): pass a path, a str or a pathlib.Path") from None
    if "\0" in str(path):
        raise ConfigError(f"{call}({given!r}): no path has a null character; pass another")
    return path


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Give a name beside path to write a file or a folder to; rename it when all is on disk.

    What was written so far is removed where that fails or is interrupted.

    Raises
    ------
    ConfigError
        The disk is full.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        remove(partial)
        yield partial
        for name in [*partial.rglob("*"), partial]:
            sync(name)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        remove(partial)
        if error.errno in FULL:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}; make room on its disk"
            ) from None
        raise
    except BaseException:
        remove(partial)
        raise


@contextmanager
def renewed(folder: Path, key: str) -> Iterator[Path]:
    """Give a folder to write files to that replace those of ``folder``, all of them or none.

    A folder that is not there yet appears whole; one that is there keeps its other files.  Its
    new files are moved into it once all of them are on disk.  Meanwhile it has no file ``key``,
    without which nobody reads it, and where the moves are stopped, ``settle`` ends them.
    """
    settle(folder, key)
    with written_beside(folder / NEW if folder.is_dir() else folder) as partial:
        partial.mkdir(parents=True)
        yield partial
    settle(folder, key)


def settle(folder: Path, key: str) -> None:
    """End the moves of ``renewed`` into a folder, if they were stopped; wait if they go on."""
    if not (folder / NEW).is_dir():
        return
    try:
        with alone(folder):
            _move(folder, key)
    except OSError as error:
        raise ConfigError(
            f"{folder}: its files in {NEW} are to replace those beside it, but {error.strerror};"
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
def alone(folder: Path, busy: str = "") -> Iterator[None]:
    """Keep other processes and threads that ask for the same out of a folder.

    They wait, or raise ConfigError(busy) where they say that.  The end of the process, however it
    comes, lets go.
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
        return  # Windows opens no folders, and keeps their names by itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder that may be there; a folder loses its name first."""
    if path.is_dir() and not path.is_symlink():
        doomed = path if path.name.endswith(PARTIAL) else path.with_name(path.name + PARTIAL)
        if doomed != path:
            path.replace(doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def check_room(path: Path, needed: int, what: str) -> None:
    """Raise unless the disk of a path has room for so many bytes.

    Raises
    ------
    ConfigError
        It has not; the message says how much is missing.
    """
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ConfigError(
            f"{path}: {what} takes {needed / 2**20:,.0f} MiB, and its disk has {free / 2**20:,.0f}"
            " MiB left; make room, or name a folder on another disk"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        cure = "name a file that is there, or a folder that holds one"
        raise ConfigError(f"{path} is missing; {cure}") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; copy it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; it must hold an object")
    return values


def absent(path: Path, cure: str) -> str:
    """Return what to do about a folder that is not there: the cure, or how to download a model."""
    name = path.as_posix()
    if path.parent.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return cure
    return (
        f"if it is a model of huggingface.co, download it: hf download {name} --local-dir"
        f" {path.name}, then give {path.name} here"
    )
