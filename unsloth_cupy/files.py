"""Atomic writes, locks, and folders in which only the user and root can write.

A file is written under a temporary name, flushed to disk, and then renamed.
"""

import atexit
import errno
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError, printable, shortened

T = TypeVar("T")

PARTIAL = ".partial"
TRIES = 100  # attempts to open the files of a single save
NEW = ".new"  # subfolder with complete files that replace the files of the folder
CACHE = "UNSLOTH_CUPY_CACHE_DIR"
TOKENIZER = 2**26  # maximum bytes of a tokenizer.json; the largest known have 2**25
MOST = 2**22  # maximum bytes of a JSON file; known ones have up to 2**20, and 30x as objects
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder(*, writing: bool = True) -> Path:
    """Return the folder of cached files, which may be deleted at any time.

    With ``writing``, the folder is created.  If the cache folder of the user cannot be used, the
    result is a temporary folder.

    Raises
    ------
    ConfigError
        This user cannot write in the folder UNSLOTH_CUPY_CACHE_DIR, or other users can.
    """
    own = os.environ.get(CACHE)
    path = Path(own) if own else user_folder("XDG_CACHE_HOME", "~/.cache")
    if not writing and path is not None and not doubt(path):
        with suppress(ConfigError):  # there is no folder for temporary files
            return path if path.exists() else temporary_name()
        return path
    if own and writing and (why := unsuited(Path(own))):
        raise ConfigError(f"{CACHE}={own} {why}; set it to a folder that only you can write")
    return own_folder(path, "", f"set {CACHE} to another folder")


def user_folder(variable: str, default: str) -> Path | None:
    """Return the subfolder of this package in a folder of the user; None without a home."""
    with suppress(RuntimeError):
        return Path(os.environ.get(variable) or default).expanduser() / "unsloth_cupy"
    return None


def doubt(path: Path) -> str:
    """Return why other users (except root) may have written a path; "" if they cannot."""
    try:
        link, status = path.lstat(), path.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    if not hasattr(os, "geteuid"):  # Windows: the folders of a user are private
        return ""
    owners = {link.st_uid, status.st_uid} - {0, os.geteuid()}
    if owners:
        return f"belongs to user {min(owners)}"
    return "can be written by others (fix it with chmod go-w)" * bool(status.st_mode & 0o022)


def own_folder(path: Path | None, instead: str, cure: str) -> Path:
    """Return ``path`` if only this user can write there, creating it if it is missing.

    Otherwise warn once, and return ``instead`` in a temporary folder.
    """
    why = "is unknown without a home folder" if path is None else unsuited(path)
    if path is not None and not why:
        return path
    other = temporary_folder() / instead
    other.mkdir(0o700, exist_ok=True)
    say_once(f"{path or 'the cache folder'} {why}: using {other} instead; {cure}")
    return other


def unsuited(path: Path) -> str:
    """Create a folder; return why it is not private and writable, or "" if it is."""
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:  # os.access does not detect a full disk or a too long name
        return f"cannot be created ({error.strerror})"
    if why := doubt(path):  # a disk without permissions ignores the mode of a new folder
        return why
    return "cannot be written" * (not os.access(path, os.W_OK | os.X_OK))


@functools.cache
def say_once(text: str) -> None:
    """Warn once, without a line of source code or control characters."""
    warnings.warn_explicit(shortened(printable(text)), UserWarning, "unsloth_cupy", 0)


def is_own(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user and is not readable by others."""
    if not hasattr(os, "geteuid"):  # Windows
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def temporary_name() -> Path:
    """Return the path of the temporary folder of this user."""
    try:  # Windows has no user ids, but a temporary folder per user
        return Path(tempfile.gettempdir()) / f"unsloth_cupy-{getattr(os, 'geteuid', str)()}"
    except OSError as error:
        raise ConfigError(f"{error.strerror}; set TMPDIR to a folder that can be written") from None


@functools.cache
def temporary_folder() -> Path:
    """Return a temporary folder that only this user can read, creating it if necessary."""
    path = temporary_name()
    with suppress(OSError):
        path.mkdir(0o700, exist_ok=True)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and is_own(status):
            return path
    path = Path(tempfile.mkdtemp(prefix=f"{path.name}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def path_of(call: str, value: Any) -> Path:
    """Return an argument as a Path; raise a ConfigError if it is not a path."""
    try:
        path = Path(os.fspath(value))
    except TypeError:
        raise ConfigError(f"{call}({value!r}): pass a path, a str or a pathlib.Path") from None
    if "\0" in str(path):
        raise ConfigError(f"{call}({value!r}): a path has no null character; pass another")
    try:
        path.exists()
    except OSError as error:  # such as a too long name
        raise ConfigError(f"{call}({value!r}): {error.strerror}; pass another path") from None
    return path


@contextmanager
def atomic_path(
    path: Path, call: str = "", commit: Callable[[Path, Path], object] = Path.replace
) -> Iterator[Path]:
    """Yield a temporary name next to ``path``; rename it to ``path`` once it is on disk.

    The name is unique.  If writing fails or is interrupted, the partial file or folder is removed;
    the next writer removes partial files of killed processes.

    Raises
    ------
    ConfigError
        The disk is full, or the path cannot be written; the message begins with ``call``.
    """
    partial = path.parent / f"{path.name}.{_writer()}.{next(_numbers)}{PARTIAL}"
    try:
        _remove_leftovers(path)
        yield partial
        for name in [*partial.rglob("*"), partial]:
            sync(name)
        commit(partial, path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            remove(partial)
        place = Path(error.filename) if isinstance(error.filename, str) else None
        if error.errno in FULL:
            cure = "make room on its disk"
        elif place is not None and (place == path.parent or partial in (place, *place.parents)):
            cure = "pass a path in a folder that exists and can be written"
        else:
            raise  # the error concerns another file
        problem = f"{path} cannot be written: {error.strerror}; {cure}"
        raise ConfigError(f"{call}: {problem}" if call else problem) from None
    except BaseException:
        remove(partial)
        raise


_numbers = itertools.count()


def _writer() -> str:
    """Return a name of this process: a hash of the machine name, and the process id."""
    return f"{zlib.crc32(os.fsencode(platform.node())):08x}-{os.getpid()}"


def _remove_leftovers(path: Path) -> None:
    """Remove files of killed writers of a path, and partially removed folders."""
    form = re.compile(rf"{re.escape(path.name)}(\.([0-9a-f]{{8}})-(\d+)\.\d+)?{re.escape(PARTIAL)}")
    for leftover in path.parent.glob(f"*{PARTIAL}"):
        writer, machine = form.fullmatch(leftover.name), _writer().partition("-")[0]
        if writer and not (writer[1] and (writer[2] != machine or _runs(int(writer[3])))):
            remove(leftover)


def _runs(process: int) -> bool:
    """Return whether a process of this machine may still be running."""
    if os.name == "nt":
        return True  # no harmless check exists
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # a process of another user
    return True


@contextmanager
def replacing_files(folder: Path, key: str, call: str = "") -> Iterator[Path]:
    """Yield a folder for new files that replace the files of ``folder``, all or none.

    A new folder appears when it is complete; an existing folder keeps its other files.  New files
    are moved once all of them are on disk.  During the moves, the folder has no file ``key``,
    without which readers reject it; ``complete_moves`` completes interrupted moves.  If several
    writers run at the same time, the last one wins.
    """

    def commit(partial: Path, place: Path) -> None:
        try:
            if place == folder:
                partial.replace(folder)
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # ENOTEMPTY, EEXIST: another writer has created the folder
        with folder_lock(folder):
            _move(folder, key)
            partial.replace(folder / NEW)
            sync(folder)
            _move(folder, key)

    complete_moves(folder, key)
    with atomic_path(folder / NEW if folder.is_dir() else folder, call, commit) as partial:
        partial.mkdir(parents=True)
        yield partial


def complete_moves(folder: Path, key: str) -> None:
    """Complete interrupted moves of ``replacing_files`` into a folder; wait for running ones."""
    if not (folder / NEW).is_dir():
        return
    try:
        with folder_lock(folder):
            _move(folder, key)
    except OSError as error:
        raise ConfigError(
            f"{folder}: the files in {NEW} must be moved into the folder, but {error.strerror};"
            " load the folder once with write access, or move them yourself"
        ) from None


def of_one_save(folder: Path, key: str, read: Callable[[], T]) -> T:
    """Call a function that opens files which ``replacing_files`` may replace; return its result.

    The function is called again if files were replaced meanwhile, so all files belong to one save.

    Raises
    ------
    ConfigError
        ``read`` raises it, or the files are replaced during each of ``TRIES`` attempts.
    """
    for _ in range(TRIES):
        complete_moves(folder, key)
        before = files_state(folder)
        try:
            result = read()
        except ConfigError:
            if files_state(folder) == before and NEW not in before:
                raise
        else:
            if files_state(folder) == before and NEW not in before:
                return result
    raise ConfigError(f"{folder} is saved repeatedly by another process; stop that process")


def files_state(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return a fingerprint of each file of a checkpoint by name, which every save changes."""
    state = dict[str, tuple[int, ...]]()
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name == NEW or entry.suffix in (".json", ".safetensors"):
            with suppress(FileNotFoundError):  # replaced at this moment
                each = entry.stat()
                state[entry.name] = each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns
    return state


def _move(folder: Path, key: str) -> None:
    new = folder / NEW
    if not new.is_dir():  # another process has moved them
        return
    if (new / key).exists():
        (folder / key).unlink(missing_ok=True)
        sync(folder)
    inner = [path for path in new.iterdir() if path.is_dir()]  # with files only
    for path in inner:
        (folder / path.name).mkdir(exist_ok=True)
        for each in path.iterdir():
            each.replace(folder / path.name / each.name)
        sync(folder / path.name)
        path.rmdir()
    for path in sorted(new.iterdir(), key=lambda path: path.name == key):
        path.replace(folder / path.name)
    new.rmdir()
    sync(folder)


@contextmanager
def folder_lock(folder: Path, busy: str = "") -> Iterator[None]:
    """Hold an exclusive lock on a folder inside a ``with`` block.

    Other processes and threads that call this function wait, or raise ConfigError(busy) if they
    pass ``busy``.  The lock is released when the process ends, also when it is killed.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        with name_lock(folder, busy):
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


@contextmanager
def name_lock(path: Path, busy: str = "") -> Iterator[None]:
    """Hold an exclusive lock on a path among the processes of this user, like ``folder_lock``.

    The lock is an empty SQLite database in the temporary folder: SQLite locks files on every
    system, and the system releases the lock when the process ends.

    Raises
    ------
    ConfigError
        ``busy``, or the file cannot be locked.
    """
    import sqlite3

    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:40]
    file = temporary_folder() / f"{name}.lock"
    try:
        database = _locked(file, once=bool(busy))
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise ConfigError(busy) from None
        cure = "set TMPDIR to a folder that can be written"
        raise ConfigError(f"{file} cannot be locked: {error}; {cure}") from None
    with closing(database):
        yield


def _locked(file: Path, *, once: bool) -> Any:
    """Return a database that holds the lock of its file until it is closed."""
    import sqlite3

    database = sqlite3.connect(file, timeout=0.0 if once else 1.0, isolation_level=None)
    while True:
        try:
            database.execute("BEGIN EXCLUSIVE")
            return database
        except sqlite3.OperationalError as error:
            if once or error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                database.close()
                raise  # otherwise try again; Ctrl-C is handled in between


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders, and flushes their entries itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists.

    A folder is renamed first, so no incomplete folder ever has its name.
    """
    if path.is_dir() and not path.is_symlink():
        doomed = path if path.name.endswith(PARTIAL) else path.with_name(path.name + PARTIAL)
        if doomed != path:
            path.replace(doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def check_room(call: str, path: Path, needed: int, what: str) -> None:
    """Raise a ConfigError unless the disk of a path has ``needed`` free bytes.

    Raises
    ------
    ConfigError
        There is less space; the message has the call and the free space.
    """
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"{call}: {what} needs {needed / 2**20:,.1f} MiB, but the disk of {path} has only"
            f" {free / 2**20:,.1f} MiB left; make room, or use a folder on another disk"
        )


def regular(path: Path) -> Path:
    """Return a path; raise a ConfigError for a pipe, device or socket, whose reads may not end."""
    with suppress(OSError):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(f"{path} is a pipe or a device; write its content to a file first")
    return path


def read_text(path: Path, most: int = MOST) -> str:
    """Return the text of a UTF-8 file of at most ``most`` bytes, without a byte order mark.

    Raises
    ------
    ConfigError
        The file is larger, or not a regular file.
    OSError, UnicodeDecodeError
        The file cannot be read.
    """
    with regular(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size  # read(n) allocates n bytes
        data = file.read(min(most, size) + 1)
    if len(data) > most:
        raise ConfigError(f"{path} exceeds {most >> 20} MiB, the limit for files of this kind")
    return data.decode("utf-8-sig")


def read_json(path: Path, most: int = MOST) -> dict[str, Any]:
    """Return the object in a JSON file of at most ``most`` bytes."""
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
        raise ConfigError(f"{path} holds {type(values).__name__}; it must hold a JSON object")
    return values


def of_library(error: BaseException) -> bool:
    """Return whether a library raised an error: an Exception, or a Rust panic, which is not one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def present(path: Path) -> bool:
    """Return whether a file or folder exists; False for a name that the system rejects."""
    try:
        return path.exists()
    except OSError:
        return False


def missing_folder_advice(path: Path, cure: str) -> str:
    """Return the advice for a missing folder: ``cure``, or how to download a model."""
    name = path.as_posix()
    if present(path.parent) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return cure
    return (
        f"to download a model of huggingface.co: hf download {name} --local-dir"
        f" {path.name}, then pass {path.name} here"
    )
