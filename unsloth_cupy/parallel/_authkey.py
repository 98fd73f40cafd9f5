"""The key that ranks prove to each other when they connect.

It is the value of UNSLOTH_CUPY_AUTHKEY; else torchrun's run id if it is a random UUID; else the
content of a file that only the user can read, made by the rank that needs it first.  Job numbers
and step names of a scheduler are not keys: everybody on the cluster can read them.
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
LONGEST = 4096  # bytes that are read of the file
FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # nor a pipe


def authkey() -> bytes:
    """Return the key of this process.

    Raises
    ------
    CommunicationError
        The file can be read by others, or cannot be made.
    """
    if own := os.environ.get(AUTHKEY):
        return os.fsencode(own)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    with suppress(ValueError):
        if uuid.UUID(run).version == 4:
            return run.encode()
    place = user_folder("XDG_CONFIG_HOME", "~/.config")
    try:
        if place is not None:
            with suppress(OSError):
                return kept(place / "authkey")
        return kept(temporary_folder() / "authkey")
    except OSError as error:
        problem = f"the file with the key of the ranks cannot be made: {error}"
        raise CommunicationError(f"{problem}; set {AUTHKEY} to one secret in all ranks") from error


def kept(path: Path) -> bytes:
    """Return what a file holds that only this user can read; make it if there is none."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    while not path.is_symlink() and not path.exists():
        handle, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "w", encoding="ascii") as file:
                if not is_own(os.fstat(handle)):  # this disk has no permissions
                    raise PermissionError
                file.write(secrets.token_hex())
            with suppress(FileExistsError):  # another rank was first
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
    cure = f"remove it, or set {AUTHKEY} to one secret in all ranks"
    raise CommunicationError(f"{path}, with the key of the ranks, {why}; {cure}")
