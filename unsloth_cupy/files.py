"""Atomic writes, and folders in which nobody but the user and root can write.

A file is written under a temporary name, flushed to disk, then renamed.
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
TRIES = 100  # to open the files of one save
NEW = ".new"  # a subfolder of complete files that are about to replace those of the folder
CACHE = "UNSLOTH_CUPY_CACHE_DIR"
TOKENIZER = 2**26  # bytes of a tokenizer.json: the largest have 2**25
MOST = 2**22  # bytes of a file of settings: the longest have 2**20; as objects they take 30 times
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder(*, writing: bool = True) -> Path:
    """Return the folder of cached files, which may be removed at any time and are made again.

    It is made if ``writing``.  Where the user's cache folder does not suit, a temporary one takes
    its place.

    Raises
    ------
    ConfigError
        UNSLOTH_CUPY_CACHE_DIR names a folder in which this user cannot write, or others can.
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
    """Return this package's part of a folder of the user; None if the user has no home."""
    with suppress(RuntimeError):
        return Path(os.environ.get(variable) or default).expanduser() / "unsloth_cupy"
    return None


def doubt(path: Path) -> str:
    """Return why others than this user and root may have made what is at a path; "" if not."""
    try:
        link, status = path.lstat(), path.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    if not hasattr(os, "geteuid"):  # Windows, where folders of a user are the user's own
        return ""
    owners = {link.st_uid, status.st_uid} - {0, os.geteuid()}
    if owners:
        return f"belongs to user {min(owners)}"
    return "can be written by others (chmod go-w mends that)" * bool(status.st_mode & 0o022)


def own_folder(path: Path | None, instead: str, cure: str) -> Path:
    """Return a folder in which this user can write and no other, made if it is missing.

    If ``path`` is not one, it is ``instead`` in a temporary folder; a warning says why, once.
    """
    why = "is not known, as there is no home" if path is None else unsuited(path)
    if path is not None and not why:
        return path
    other = temporary_folder() / instead
    other.mkdir(0o700, exist_ok=True)
    say_once(f"{path or 'a folder of the user'} {why}: {other} takes its place; {cure}")
    return other


def unsuited(path: Path) -> str:
    """Make a folder, and return why this user cannot write there, or others can; "" if it suits."""
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:  # os.access does not detect these: a full disk, too long a name
        return f"cannot be made ({error.strerror})"
    if why := doubt(path):  # a disk without permissions ignores those of a new folder, too
        return why
    return "cannot be written" * (not os.access(path, os.W_OK | os.X_OK))


@functools.cache
def say_once(text: str) -> None:
    """Warn of something once, without a line of source code or a control character."""
    warnings.warn_explicit(shortened(printable(text)), UserWarning, "unsloth_cupy", 0)


def is_own(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user, and nobody else can read it."""
    if not hasattr(os, "geteuid"):  # Windows
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def temporary_name() -> Path:
    """Return the name of this user's folder among the temporary ones."""
    try:  # Windows has no numbers of users, but a folder for each
        return Path(tempfile.gettempdir()) / f"unsloth_cupy-{getattr(os, 'geteuid', str)()}"
    except OSError as error:
        raise ConfigError(f"{error.strerror}; set TMPDIR to a folder that can be written") from None


@functools.cache
def temporary_folder() -> Path:
    """Return a temporary folder that only this user can read; a new one if its name is taken."""
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
def atomic_path(
    path: Path, call: str = "", commit: Callable[[Path, Path], object] = Path.replace
) -> Iterator[Path]:
    """Yield a name next to path for a new file or folder; rename it to path once it is on disk.

    No other writer has this name.  If writing fails or is interrupted, the partial file or folder
    is removed; the next writer removes those of processes that were killed.

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


_numbers = itertools.count()


def _writer() -> str:
    """Return a name of this process: that of its machine, as a number, and its id."""
    return f"{zlib.crc32(os.fsencode(platform.node())):08x}-{os.getpid()}"


def _remove_leftovers(path: Path) -> None:
    """Remove what writers of a path have left that were killed, and what is half removed."""
    form = re.compile(rf"{re.escape(path.name)}(\.([0-9a-f]{{8}})-(\d+)\.\d+)?{re.escape(PARTIAL)}")
    for leftover in path.parent.glob(f"*{PARTIAL}"):
        writer, machine = form.fullmatch(leftover.name), _writer().partition("-")[0]
        if writer and not (writer[1] and (writer[2] != machine or _runs(int(writer[3])))):
            remove(leftover)


def _runs(process: int) -> bool:
    """Return whether a process of this machine may still run."""
    if os.name == "nt":
        return True  # there is no harmless question
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # of another user
    return True


@contextmanager
def replacing_files(folder: Path, key: str, call: str = "") -> Iterator[Path]:
    """Yield a folder for new files that replace those of ``folder``, all of them or none.

    A folder that does not exist yet appears complete; an existing one keeps its other files.  New
    files are moved into it once all of them are on disk.  During the moves it has no file ``key``,
    without which no reader accepts it; if they are interrupted, ``complete_moves`` completes them.
    Of writers at the same time, each replaces the files of those before it.
    """

    def commit(partial: Path, place: Path) -> None:
        try:
            if place == folder:
                partial.replace(folder)
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # otherwise another writer has made the folder
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
            f"{folder}: the files in {NEW} must replace those next to it, but {error.strerror};"
            " load it once where it can be written, or move them"
        ) from None


def of_one_save(folder: Path, key: str, read: Callable[[], T]) -> T:
    """Return the result of a function that opens files which ``replacing_files`` may replace.

    It is called again if they were replaced meanwhile, so that all are of one save.

    Raises
    ------
    ConfigError
        ``read`` raises one; or the files are replaced during every one of many tries.
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
    raise ConfigError(f"{folder} is saved again and again by another process; end that first")


def files_state(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return what tells the files of a checkpoint from those of a later save, by their names."""
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
    """Hold an exclusive lock on a path against other processes of this user, as ``folder_lock``.

    The lock is that of an empty database in the temporary folder: SQLite locks files on every
    system, and the system releases the lock of a process that ends.

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
    """Return a database that holds the lock of its file, until it is closed."""
    import sqlite3

    database = sqlite3.connect(file, timeout=0.0 if once else 1.0, isolation_level=None)
    while True:
        try:
            database.execute("BEGIN EXCLUSIVE")
            return database
        except sqlite3.OperationalError as error:
            if once or error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                database.close()
                raise  # else it tries again: Ctrl-C is handled in between


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


def check_room(call: str, path: Path, needed: int, what: str) -> None:
    """Raise unless the disk of a path has room for ``needed`` bytes.

    Raises
    ------
    ConfigError
        It has less; the message names the call, and how much there is.
    """
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"{call}: {what} takes {needed / 2**20:,.0f} MiB, and the disk of {path} has"
            f" {free / 2**20:,.0f} MiB left; make room, or name a folder on another disk"
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
        size = os.fstat(file.fileno()).st_size  # a read allocates all bytes that it is asked for
        data = file.read(min(most, size) + 1)
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


def present(path: Path) -> bool:
    """Return whether there is a file or a folder at a path; a name that no disk takes has none."""
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
        f"if it is a model of huggingface.co, download it: hf download {name} --local-dir"
        f" {path.name}, then pass {path.name} here"
    )
