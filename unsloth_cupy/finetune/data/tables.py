"""The rows of a file, one at a time: JSON lines, JSON, CSV, Parquet, Arrow, or a text as one row.

A row is the number of its line (of its row, in Parquet and Arrow) and its columns by name.
"""

import codecs
import csv
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from ...errors import ConfigError
from ...models.text.chat import NEEDED
from .data_files import ROWS, Located, bound, check_growth, needs, opened, unpacked
from .messages import shown
from .text import BREAK, PIECE, SMALL

PROCESSED = ("Parquet", "Arrow")  # kinds that a process of its own reads
LONGEST = SMALL  # bytes of a row: its text is tokenised as a whole
ROW = 256  # bytes that a row takes in memory, however short: a small file may hold very many
MARK = b"\xef\xbb\xbf"
PROCESS = Path(__file__).with_name("table_process.py")
BLANK = 100_000  # lines one after another: a small packed file may hold a billion
TOKEN = 10  # characters of a word of JSON, which a piece may cut
DELIMITERS = ",;"  # that a CSV may have


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise a ConfigError if it has a key twice, of which json takes the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ConfigError(f"an object has the key {shown(twice)} twice")
    return values


DECODER = json.JSONDecoder(object_pairs_hook=_once)


class Row(NamedTuple):
    """A row of a file."""

    read: range  # as long as the bytes of the file that it takes, for a bar of progress
    line: int
    values: Any


def rows_of(file: Located, digest: Any) -> Iterator[Row]:
    """Yield the rows of a file; ``digest`` takes what is read.

    Raises
    ------
    ConfigError
        The file cannot be read, or a row is not one; the message has file, line and cure.
    """
    most = bound(file.path) if file.packing or file.kind in PROCESSED else math.inf
    for count, row in enumerate(_read(file, digest), 1):
        check_growth(most - count * ROW, file.name)
        yield row


def _read(file: Located, digest: Any) -> Iterator[Row]:
    """Yield the rows of a file."""
    if file.kind in PROCESSED:
        yield from _from_process(unpacked(file), digest)
        return
    with opened(file) as stream:
        yield from _READERS[file.kind](file, stream, digest)


def _wrong(file: Located, line: int, problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{file.before}{line}: {problem}; {cure}")


class _Place:
    """Tells how many bytes of a file were read, whose stream may be packed."""

    def __init__(self, stream: BinaryIO) -> None:
        self.packed, self.before = getattr(stream, "packed", None), 0

    def read(self, count: int) -> range:
        """Return a range as long as the bytes since the last call, which were ``count`` unpacked.

        A listener takes the length of what it is told.
        """
        if self.packed is None:
            return range(count)
        before, self.before = self.before, self.packed.tell()
        return range(self.before - before)


def _lines(
    file: Located, stream: BinaryIO, digest: Any, first: int = 1
) -> Iterator[tuple[range, int, bytes]]:
    """Yield the lines of a file, with their ends and without a byte order mark."""
    place, blank = _Place(stream), 0
    for number, whole in enumerate(iter(lambda: stream.readline(LONGEST + 1), b""), first):
        if len(whole) > LONGEST:
            cure = "divide its text into several lines"
            _wrong(file, number, f"has more than {LONGEST >> 20} MiB, whose tokens would take"
                   " hundreds of MiB of memory", cure)  # fmt: skip
        line = whole.removeprefix(MARK) if number == 1 else whole
        digest.update(line)
        blank = 0 if line.strip() else blank + 1
        if blank > BLANK:
            _wrong(file, number, f"more than {BLANK:,} lines without text end here", "remove them")
        yield place.read(len(whole)), number, line


def _decoded(file: Located, number: int, line: bytes) -> str:
    """Return a line as text."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        _not_utf8(file, number, error)


def _not_utf8(file: Located, line: int, error: UnicodeDecodeError) -> NoReturn:
    byte = f"byte {error.start} is 0x{error.object[error.start]:02x}"
    cure = "convert the file, for example with iconv -t utf-8"
    _wrong(file, line, f"is not UTF-8: {byte}", cure)


def _json_lines(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield a row for each line that is not blank."""
    for read, number, line in _lines(file, stream, digest):
        if line.strip():
            yield Row(read, number, _json(file, number, line.removesuffix(b"\n")))


def _json(file: Located, number: int, line: bytes) -> Any:
    """Return the value of a line of JSON."""
    text = _decoded(file, number, line)
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        problem = f"is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        _wrong(file, number, problem, "write one object in each line")
    except (ValueError, RecursionError) as error:
        _wrong(file, number, f"cannot be read as JSON ({error})", "write one object in each line")


def _json_values(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield the objects of a JSON list, or objects one after another; each may take many lines."""
    line, inside, read = 1, False, 0
    pieces, text, more = _characters(file, stream, digest), "", True
    while True:
        rest = text.lstrip(" \t\r\n,") if inside else text.lstrip()
        line, text = line + text[: len(text) - len(rest)].count("\n"), rest
        if text[:1] == "[" and not inside:
            inside, text = True, text[1:]
            continue
        if text[:1] == "]" and inside:
            if (text[1:] + "".join(piece for _, piece in pieces)).strip():
                _wrong(file, line, "goes on behind its list", "write one list")
            return
        if value := _first_value(file, line, text, more):
            yield Row(range(read), line, value[0])
            line, text, read = line + text[: value[1]].count("\n"), text[value[1] :], 0
            continue
        if not more:
            if inside:
                _wrong(file, line, "the list has no end", "write a ] there, or copy it again")
            return
        if len(text) > LONGEST:
            _wrong(file, line, f"an object has more than {LONGEST >> 20} MiB", "divide its text")
        # as much again: a long object is not decoded at every piece
        remainder, parts, more = max(2**12, len(text)), [text], False
        for share, piece in pieces:
            parts.append(piece)
            read, remainder, more = read + len(share), remainder - len(piece), True
            if remainder <= 0:
                break
        text = "".join(parts)


def _first_value(file: Located, line: int, text: str, more: bool) -> tuple[Any, int] | None:
    """Return the object with which a text begins, and its end; None if ``more`` of it is needed."""
    if text and text[0] != "{":
        cure = "write a list of objects, or one object in each line of a .jsonl file"
        _wrong(file, line, f"holds {text.split(None, 1)[0][:20]!r} where an object begins", cure)
    try:
        return DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        ended = error.pos < len(text.rstrip()) - TOKEN and not error.msg.startswith("Unterminated")
        if text and (ended or not more):
            problem = f"is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
            _wrong(file, line + error.lineno - 1, problem, "write a list of objects")
    except (ValueError, RecursionError) as error:
        _wrong(file, line, f"cannot be read as JSON ({error})", "write a list of flat objects")
    return None


def _characters(file: Located, stream: BinaryIO, digest: Any) -> Iterator[tuple[range, str]]:
    """Yield the characters of a file in pieces, without a byte order mark."""
    decoder, line, place = codecs.getincrementaldecoder("utf-8-sig")(), 1, _Place(stream)
    while True:
        data = stream.read(PIECE)
        digest.update(data)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            _not_utf8(file, line, error)
        if not data:
            return
        line += text.count("\n")
        yield place.read(len(data)), text


def _table(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield the rows of a CSV or a TSV, whose first row holds the names of its columns."""
    at, read = 1, 0

    def lines() -> Iterator[str]:
        nonlocal read
        for share, number, line in _lines(file, stream, digest):
            read += len(share)
            yield _decoded(file, number, line)

    source = lines()
    first = next(source, "")
    delimiter = "\t" if file.kind == "TSV" else max(DELIMITERS, key=first.count)
    if file.kind == "CSV" and "\t" in first and delimiter not in first:
        raise ConfigError(f"{file.name} is named .csv and holds TSV; let its name end in .tsv")
    before = csv.field_size_limit(LONGEST)
    try:
        reader = csv.reader(_behind(first, source), delimiter=delimiter, strict=True)
        header = next(reader, [])
        blank = (n for n, name in enumerate(header) if name.strip())
        for place in range(next(blank, 0)):  # of row numbers, which pandas writes without a name
            header[place] = f"Unnamed: {place}"  # as it reads them
        if len({*header}) < len(header) or not all(map(str.strip, header)):
            cure = "write the names of the columns there, each once"
            _wrong(file, 1, f"its first line is {', '.join(map(repr, header))[:80]}", cure)
        at = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                cure = f"quote cells that hold {delimiter!r} or a line's end"
                problem = f"has {len(cells)} cells, and the first line {len(header)}"
                _wrong(file, at, problem, cure)
            if cells:
                yield Row(range(read), at, dict(zip(header, cells, strict=True)))
            at, read = reader.line_num + 1, 0
    except csv.Error as error:
        cure = "close its quotes, and write a quote inside of quotes twice"
        _wrong(file, at, f"is not a row ({error})", cure)
    finally:
        csv.field_size_limit(before)


def _behind(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _paragraphs(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield a text as one row; a longer one than a row may be in several, of whole paragraphs."""
    held, size, start, read = list[str](), 0, 1, 0
    for share, number, line in _lines(file, stream, digest):
        read += len(share)
        if size + len(line) > LONGEST:
            whole = "".join(held)
            parts = re.split(f"({BREAK})", whole)
            keep = parts.pop() if len(parts) > 1 else ""
            yield Row(range(read), start, {"text": whole[: len(whole) - len(keep)]})
            held, size, start, read = [keep], len(keep.encode()), number - keep.count("\n"), 0
        held.append(_decoded(file, number, line))
        size += len(line)
    if (text := "".join(held)).strip():
        yield Row(range(read), start, {"text": text})


def _from_process(file: Located, digest: Any) -> Iterator[Row]:
    """Yield the rows of a Parquet or an Arrow file, which a process of limited memory reads."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(needs(f"{file.name} ({file.kind})", "pyarrow"))
    left, size = bound(file.path), file.path.stat().st_size
    environment = {key: os.environ[key] for key in NEEDED if key in os.environ}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-P", str(PROCESS), str(file.path.resolve()), file.kind]
    share, number = range(0), 0
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, env=environment) as process:  # fmt: skip
        try:
            stream: Any = process.stdout
            for _, number, line in _lines(file, stream, digest, first=0):
                if line.startswith(b"["):  # of the process itself
                    count, problem = json.loads(line)
                    if problem:
                        cure = "copy it again, or write it as JSON lines"
                        raise ConfigError(f"{file.name} cannot be read: {problem}; {cure}")
                    share = range(size // max(1, count))
                    continue
                left -= len(line)
                check_growth(left, file.name)
                yield Row(share, number, json.loads(line))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        problem = f"what reads it ends behind row {number}, by a fault or for want of memory"
        raise ConfigError(f"{file.name} cannot be read: {problem}; copy it again")


_READERS: dict[str, Callable[[Located, BinaryIO, Any], Iterator[Row]]] = {
    "JSON lines": _json_lines,
    ROWS: _json_lines,
    "JSON": _json_values,
    "CSV": _table,
    "TSV": _table,
    "text": _paragraphs,
}
