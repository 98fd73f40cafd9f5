"""The tokens of a text: in memory for a small text, else in a cached file that is read by rows.

The name of the file is a digest of text, cut and tokenizer: each text is tokenized only once.  The
file is written under a temporary name and renamed.  It ends with a digest of its name and tokens; a
file that other users may have written, or whose digest differs, is replaced.
"""

import hashlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import CACHE, cache_folder, check_room, doubt, name_lock
from ..listener import announce, reading
from ..naming import named
from .text import COUNTED, PIECE, SMALL, Text
from .tokenizer import encode, token_kind

CONTEXT = 256  # overlap of pieces in characters: longer than the context of a token
AGREED = 8  # tokens before a seam that must be equal in both pieces
DIGEST = 32  # bytes of SHA-256 at the end of a file
LOCK = threading.Lock()  # held from seek to read
SPARE = 1.2  # required disk space, as a multiple of the estimate from the first piece


class StoredTokens:
    """Tokens in an open file; slices are read on demand.

    A file that gets shorter during the run raises an error; with a memory map, it would kill the
    process.
    """

    def __init__(self, file: BinaryIO, kind: np.dtype[Any], count: int) -> None:
        self.file, self.kind, self.count = file, kind, count
        weakref.finalize(self, file.close)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.count

    def __getitem__(self, where: slice) -> Array:
        """Return consecutive tokens."""
        start, stop, _ = where.indices(self.count)
        size = max(0, stop - start) * self.kind.itemsize
        with LOCK:
            self.file.seek(start * self.kind.itemsize)
            data = self.file.read(size)
        if len(data) < size:
            raise ConfigError(
                f"{self.file.name}, with the tokens of {named('text')}, got shorter during the run;"
                " start the run again, which tokenizes the text again"
            )
        return np.frombuffer(data, self.kind)

    def max(self) -> int:
        """Return the largest token."""
        return max(int(self[at : at + COUNTED].max()) for at in range(0, self.count, COUNTED))


def tokens_of(text: Text, tokenizer: Any) -> Array | StoredTokens:
    """Return the tokens of the training part of a text.

    Raises
    ------
    ConfigError
        The token file does not fit on its disk, or the text changes while it is read.
    """
    if text.cut <= SMALL:
        return encode(tokenizer, "".join(part for _, part in text.blocks()))
    kind = token_kind(tokenizer)
    # the cut too: another share of the same text has the same digest
    content = f"{text.digest}{text.cut} {tokenizer.to_str()}"
    digest = hashlib.sha256(content.encode()).hexdigest()
    path = cache_folder() / f"{digest}.{kind.name}"
    try:
        return _stored(path, kind) or _write(path, text, tokenizer, kind)
    except OSError as error:
        raise ConfigError(
            f"{path.parent} cannot store the tokens of {named('text')}"
            f" ({error.strerror or error}); make room there, or set {CACHE} to another folder"
        ) from None


def _stored(path: Path, kind: np.dtype[Any]) -> StoredTokens | None:
    """Return the tokens of a file; None if it is incomplete or other users could write it."""
    if not path.is_file() or doubt(path):
        return None
    file = path.open("rb", buffering=0)
    size = file.seek(-DIGEST, os.SEEK_END) if path.stat().st_size > DIGEST else 0
    digest = file.read()
    file.seek(0)
    actual = hashlib.sha256(path.name.encode())
    for at in range(0, size, PIECE):
        actual.update(file.read(min(PIECE, size - at)))
    if actual.digest() == digest:
        return StoredTokens(file, kind, size // kind.itemsize)
    file.close()
    return None


def _write(path: Path, text: Text, tokenizer: Any, kind: np.dtype[Any]) -> StoredTokens:
    """Tokenize a text into a file, or wait for another run that does the same."""
    partial = path.with_suffix(path.suffix + ".partial")
    while True:
        with _turn(path), open(partial, "ab", opener=_private) as file:
            locked = _lock(file)
            if not _has(partial, file):  # the run that held the lock has finished or stopped
                continue
            try:
                tokens = _stored(path, kind)
                if tokens is None:
                    _fill(file, text, tokenizer, kind, hashlib.sha256(path.name.encode()))
                    if not locked:
                        file.close()  # Windows cannot rename or remove an open file
                    partial.replace(path)
                    tokens = _stored(path, kind)
            finally:
                if not locked:
                    file.close()
                partial.unlink(missing_ok=True)
            if tokens is None:
                cure = f"set {CACHE} to a folder on another disk"
                raise ConfigError(f"{path}: the file read differs from the file written; {cure}")
            return tokens


def _fill(file: BinaryIO, text: Text, tokenizer: Any, kind: np.dtype[Any], digest: Any) -> None:
    """Write the tokens of a text to an open file, after a check of the disk space."""
    file.truncate(0)
    checked, text_digest = False, hashlib.sha256()

    def pieces() -> Iterator[str]:
        for data, piece in reading(text.blocks(), text.cut, "tokenising"):
            text_digest.update(data)
            yield piece
        text_digest.update(text.held_out.encode())

    for part in tokenised(tokenizer, pieces()):
        if not checked:
            needed = SPARE * len(part) * kind.itemsize * text.cut / PIECE
            what = f"the token file of {named('text')} ({CACHE})"
            check_room("finetune", Path(file.name), int(needed), what)
            checked = True
        data = part.astype(kind).tobytes()
        digest.update(data)
        file.write(data)
    if text_digest.hexdigest() != text.digest:
        cure = "start again when the file is complete"
        raise ConfigError(f"{named(text=text.path)} has changed since the run began; {cure}")
    file.write(digest.digest())
    file.flush()
    os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    """Open a file that only this user can read: a text may be confidential."""
    return os.open(path, flags, 0o600)


def _has(path: Path, file: BinaryIO) -> bool:
    """Return whether an open file is still the one at its path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold a lock on the name of a file on systems that cannot lock the file itself."""
    try:
        import fcntl  # noqa: F401
    except ImportError:  # Windows
        with name_lock(path):
            yield
    else:
        yield


def _lock(file: BinaryIO) -> bool:
    """Lock a file, waiting for other runs; return False on systems that cannot lock files."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        announce("waiting for another run that tokenizes this text")
        fcntl.flock(file, fcntl.LOCK_EX)
    return True


def tokenised(tokenizer: Any, pieces: Iterable[str], context: int = CONTEXT) -> Iterator[Array]:
    """Yield the tokens of a text in pieces, equal to the encoding of the whole text.

    Each piece is encoded together with the end of the previous piece, and the tokens are joined at
    a seam where both encodings agree.  Only a word longer than the context may differ at a seam.
    """
    text, done, before = "", 0, np.empty(0, np.int64)
    remaining = iter(pieces)
    piece = next(remaining, None)
    while piece is not None:
        text, piece = text + piece, next(remaining, None)
        encoding, tokens, first = _encoded(tokenizer, text, done, before)
        if first is None:  # the encodings do not agree: encode without the previous piece
            text = text[done:]
            encoding, tokens, first = _encoded(tokenizer, text, 0, before)
        stop, end = len(tokens), len(text)
        if piece is not None:
            stop, end = _seam(encoding, len(tokens), len(text) - context, len(text))
        yield tokens[first:stop]
        before = np.append(before, tokens[first:stop])[-AGREED:]
        text, done = text[max(0, end - context) :], min(end, context)


def _encoded(tokenizer: Any, text: str, done: int, before: Array) -> tuple[Any, Array, int | None]:
    """Return an encoding, its tokens, and the index of the token at character ``done``.

    The index is None if no token begins there, or if the preceding tokens differ from ``before``.
    """
    encoding = tokenizer.encode(text, add_special_tokens=False)
    tokens = np.asarray(encoding.ids, np.int64)
    if not done:
        return encoding, tokens, 0
    first = encoding.char_to_token(done) if done < len(text) else len(tokens)
    if first is None or (first < len(tokens) and not _begins(encoding, first, done)):
        return encoding, tokens, None
    agreed = tokens[max(0, first - AGREED) : first]
    same = len(agreed) == len(before) and (agreed == before).all()
    return encoding, tokens, first if same else None


def _seam(encoding: Any, count: int, most: int, end: int) -> tuple[int, int]:
    """Return (index, first character) of the last token that begins at or before ``most``.

    If no token is suitable, return (number of tokens, end of the text).
    """
    for token in range(count - 1, 0, -1):
        place = encoding.token_to_chars(token)
        if place is None or place[0] > most:
            continue
        first = encoding.char_to_token(place[0]) == token
        if place[0] > 0 and first and _begins(encoding, token, place[0]):
            return token, place[0]
        if place[0] < most // 2:
            break
    return count, end


def _begins(encoding: Any, token: int, place: int) -> bool:
    """Return whether a token begins at this character and no earlier token contains it."""
    here = encoding.token_to_chars(token)
    last = encoding.token_to_chars(token - 1) if token else (0, 0)
    return bool(here and last and here[0] == place and last[1] <= place and last[0] < place)
