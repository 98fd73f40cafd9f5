"""The secret key by which ranks authenticate each other when they connect.

The key is the first of these that exists:

    UNSLOTH_CUPY_AUTHKEY      an environment variable
    torchrun's run id         if it is a random UUID
    a file                    that only the user can read; the first rank that needs it creates it

Job numbers and step names of a scheduler are not keys: everybody on the cluster can read them.
"""

import os
import secrets
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from ..errors import CommunicationError
from ..files import is_own, temporary_folder, user_folder

AUTHKEY = "UNSLOTH_CUPY_AUTHKEY"
LONGEST = 4096  # most bytes that are read from the file
# Symbolic links are not followed, and opening a pipe does not wait for a writer.
FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def authkey() -> bytes:
    """Return the key of this process.

    Raises
    ------
    CommunicationError
        Other users can read the file, or it cannot be created.
    """
    if own := os.environ.get(AUTHKEY):
        return os.fsencode(own)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if is_secret(run):
        return run.encode()
    place = user_folder("XDG_CONFIG_HOME", "~/.config")
    try:
        if place is not None:
            with suppress(OSError):
                return read_or_create(place / "authkey")
        return read_or_create(temporary_folder() / "authkey")
    except OSError as error:
        problem = f"the file with the key of the ranks cannot be created: {error}"
        cure = f"set {AUTHKEY} to the same secret in all ranks"
        raise CommunicationError(f"{problem}; {cure}") from error


def is_secret(run: str) -> bool:
    """Return whether a run id of torchrun is a random UUID, and thus a key."""
    with suppress(ValueError):
        return uuid.UUID(run).version == 4
    return False


def read_or_create(path: Path) -> bytes:
    """Return the content of a file that only this user can read; create the file if needed."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    while not path.is_symlink() and not path.exists():
        handle, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "w", encoding="ascii") as file:
                if not is_own(os.fstat(handle)):  # the file system has no permissions
                    raise PermissionError
                file.write(secrets.token_hex())
            with suppress(FileExistsError):  # another rank created it first
                os.link(draft, path)
        finally:
            os.unlink(draft)
    try:
        with open(os.open(path, FLAGS), "rb") as opened:
            status, key = os.fstat(opened.fileno()), opened.read(LONGEST)
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    else:
        if is_own(status) and key:
            return key
        why = "is empty" if is_own(status) else "can be read by others, or belongs to them"
    cure = f"remove it, or set {AUTHKEY} to the same secret in all ranks"
    raise CommunicationError(f"{path}, with the key of the ranks, {why}; {cure}")
