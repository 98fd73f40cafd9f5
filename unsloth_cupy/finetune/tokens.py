"""The tokens of a text: in memory where it is small, else in a file that is mapped.

The file is found again by its name, which is a digest of the text and the tokenizer, so each text
is tokenised once.  It is written beside its place and renamed.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from ..files import CACHE, cache_folder, check_room
from .progress import reading
from .text import PIECE, SMALL, Text
from .tokenizer import encode, token_kind

CONTEXT = 256  # characters on either side of a seam: longer than what a token depends on
AGREED = 8  # tokens before a seam that two pieces must agree in
SPARE = 1.2  # room that is asked for, over what the first piece lets expect


def tokens_of(text: Text, tokenizer: Any) -> Array:
    """Return the tokens of what is trained on.

    Raises
    ------
    ConfigError
        The file of the tokens would not fit on its disk.
    """
    if text.cut <= SMALL:
        return encode(tokenizer, "".join(part for _, part in text.blocks()))
    kind = token_kind(tokenizer)
    digest = hashlib.sha256((text.digest + tokenizer.to_str()).encode()).hexdigest()
    path = cache_folder() / f"{digest}.{kind.name}"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, text, tokenizer, kind)
        except OSError as error:
            raise ConfigError(
                f"{path.parent} cannot take the tokens of --text ({error.strerror or error}); make"
                f" room there, or set {CACHE} to another folder"
            ) from None
    found: Array = np.memmap(path, kind, "r")
    return found


def _write(path: Path, text: Text, tokenizer: Any, kind: np.dtype[Any]) -> None:
    """Tokenise a text into a file; another run that does the same is waited for."""
    partial = path.with_suffix(path.suffix + ".partial")
    while not path.is_file():
        with partial.open("ab") as file:
            _lock(file)
            if not _has(partial, file):  # who was waited for is done with it, or was stopped
                continue
            try:
                if not path.is_file():
                    _fill(file, text, tokenizer, kind)
                    partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)


def _fill(file: BinaryIO, text: Text, tokenizer: Any, kind: np.dtype[Any]) -> None:
    file.truncate(0)
    asked = False
    blocks = reading(text.blocks(), text.cut, "tokenising")
    for part in tokenised(tokenizer, (block[1] for block in blocks)):
        if not asked:
            needed = SPARE * len(part) * kind.itemsize * text.cut / PIECE
            check_room(Path(file.name), int(needed), f"the file of --text's tokens ({CACHE})")
            asked = True
        file.write(part.astype(kind).tobytes())
    file.flush()
    os.fsync(file.fileno())


def _has(path: Path, file: BinaryIO) -> bool:
    """Say whether an open file is still the one of its name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _lock(file: BinaryIO) -> None:
    with suppress(ImportError):  # Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            click.echo("another run tokenises this text: waiting for it", err=True)
            fcntl.flock(file, fcntl.LOCK_EX)


def tokenised(tokenizer: Any, pieces: Iterable[str], context: int = CONTEXT) -> Iterator[Array]:
    """Yield the tokens of a text that comes in pieces, as if it were encoded whole.

    Each piece is encoded with the end of the one before it; where both agree, their tokens are
    joined.  A word longer than the context may be cut in two where pieces meet.
    """
    text, done, before = "", 0, np.empty(0, np.int64)
    coming = iter(pieces)
    piece = next(coming, None)
    while piece is not None:
        text, piece = text + piece, next(coming, None)
        encoding, tokens, first = _encoded(tokenizer, text, done, before)
        if first is None:  # no token begins there
            text = text[done:]
            encoding, tokens, first = _encoded(tokenizer, text, 0, before)
        stop, end = len(tokens), len(text)
        if piece is not None:
            stop, end = _seam(encoding, len(tokens), len(text) - context, len(text))
        yield tokens[first:stop]
        before = np.append(before, tokens[first:stop])[-AGREED:]
        text, done = text[max(0, end - context) :], min(end, context)


def _encoded(tokenizer: Any, text: str, done: int, before: Array) -> tuple[Any, Array, int | None]:
    """Return an encoding, its tokens, and the first of them that is new; None: there is none."""
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
    """Return the last token that begins before a character, and where; else the end of all."""
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
    """Say whether a token begins with this character, and no other token has a part of that."""
    here = encoding.token_to_chars(token)
    last = encoding.token_to_chars(token - 1) if token else (0, 0)
    return bool(here and last and here[0] == place and last[1] <= place and last[0] < place)
