"""Yields the rows of a file: JSON lines, JSON, CSV, TSV, Parquet, Arrow, or a text as one row.

A row has a line number (a row number in Parquet and Arrow) and its values by column name.
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
from .text import BREAK, PIECE, SMALL, text_byte

PROMPTS = "lines"  # kind of a text whose lines are prompts
PROCESSED = ("Parquet", "Arrow")  # kinds that a separate process reads
LONGEST = SMALL  # maximum bytes of a row: its text is tokenized as a whole
ROW = 256  # minimum memory of a row in bytes: a small file may hold very many short rows
MARK = b"\xef\xbb\xbf"
PROCESS = Path(__file__).with_name("table_process.py")
BLANK = 100_000  # maximum consecutive blank lines: a small packed file may hold a billion
TOKEN = 10  # characters of a JSON token, which the end of a piece may split
DELIMITERS = ",;"  # of CSV files


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise a ConfigError for duplicate keys, of which json keeps the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ConfigError(f"an object has the key {shown(twice)} twice")
    return values


DECODER = json.JSONDecoder(object_pairs_hook=_once)


class Row(NamedTuple):
    """A row of a file."""

    read: range  # its length is the number of bytes read for the row, for progress bars
    line: int
    values: Any


def rows_of(file: Located, digest: Any) -> Iterator[Row]:
    """Yield the rows of a file; update ``digest`` with all bytes read.

    Raises
    ------
    ConfigError
        The file cannot be read, or a row is invalid; the message has file, line and cure.
    """
    most = bound(file.path) if file.packing or file.kind in PROCESSED else math.inf
    for count, row in enumerate(_read(file, digest), 1):
        check_growth(most - count * ROW, file.name)
        yield row


def _read(file: Located, digest: Any) -> Iterator[Row]:
    """Yield the rows of a file without the size limit."""
    if file.kind in PROCESSED:
        yield from _from_process(unpacked(file), digest)
        return
    with opened(file) as stream:
        yield from _READERS[file.kind](file, stream, digest)


def _wrong(file: Located, line: int, problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{file.before}{line}: {problem}; {cure}")


class _Place:
    """Counts the bytes read from a file, also from a packed one."""

    def __init__(self, stream: BinaryIO) -> None:
        self.packed, self.before = getattr(stream, "packed", None), 0

    def read(self, count: int) -> range:
        """Return a range whose length is the bytes of the file read since the last call.

        ``count`` is the number of unpacked bytes.  Progress bars use the length of the range.
        """
        if self.packed is None:
            return range(count)
        before, self.before = self.before, self.packed.tell()
        return range(self.before - before)


def _lines(
    file: Located, stream: BinaryIO, digest: Any, first: int = 1
) -> Iterator[tuple[range, int, bytes]]:
    """Yield the lines of a file, including line ends, without a byte order mark."""
    place, blank = _Place(stream), 0
    for number, whole in enumerate(iter(lambda: stream.readline(LONGEST + 1), b""), first):
        if len(whole) > LONGEST:
            cure = "split its text into several lines"
            _wrong(file, number, f"has more than {LONGEST >> 20} MiB, and tokenizing it would take"
                   " hundreds of MiB of memory", cure)  # fmt: skip
        line = whole.removeprefix(MARK) if number == 1 else whole
        digest.update(line)
        blank = 0 if line.strip() else blank + 1
        if blank > BLANK:
            _wrong(file, number, f"more than {BLANK:,} blank lines end here", "remove them")
        yield place.read(len(whole)), number, line


def _decoded(file: Located, number: int, line: bytes) -> str:
    """Decode a line; raise a ConfigError if it is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        _not_utf8(file, number, error.start, error)


def _not_utf8(file: Located, line: int, start: int, error: UnicodeDecodeError) -> NoReturn:
    byte = f"byte {start} is {text_byte(error)}"
    cure = "convert the file, for example with iconv -t utf-8"
    _wrong(file, line, f"is not UTF-8: {byte}", cure)


def _json_lines(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield a row for each line that is not blank."""
    for read, number, line in _lines(file, stream, digest):
        if line.strip():
            yield Row(read, number, _json(file, number, line.removesuffix(b"\n")))


def _json(file: Located, number: int, line: bytes) -> Any:
    """Parse a line of JSON."""
    text = _decoded(file, number, line)
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        problem = f"is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        _wrong(file, number, problem, "write one object per line")
    except (ValueError, RecursionError) as error:
        _wrong(file, number, f"cannot be read as JSON ({error})", "write one object per line")


def _json_values(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield the objects of a JSON list, or consecutive objects; each may span many lines."""
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
                _wrong(file, line, "has text after its list", "write one list")
            return
        if value := _first_value(file, line, text, more):
            yield Row(range(read), line, value[0])
            line, text, read = line + text[: value[1]].count("\n"), text[value[1] :], 0
            continue
        if not more:
            if inside:
                _wrong(file, line, "the list has no end", "add a ], or copy the file again")
            return
        if len(text) > LONGEST:
            _wrong(file, line, f"an object has more than {LONGEST >> 20} MiB", "split its text")
        # read as much again, so that a long object is not decoded after every piece
        remainder, parts, more = max(2**12, len(text)), [text], False
        for share, piece in pieces:
            parts.append(piece)
            read, remainder, more = read + len(share), remainder - len(piece), True
            if remainder <= 0:
                break
        text = "".join(parts)


def _first_value(file: Located, line: int, text: str, more: bool) -> tuple[Any, int] | None:
    """Return the first object of a text and its end; None if it continues in the next piece."""
    if text and text[0] != "{":
        cure = "write a list of objects, or one object per line in a .jsonl file"
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
    """Yield the text of a file in pieces, without a byte order mark."""
    decoder, place = codecs.getincrementaldecoder("utf-8-sig")(), _Place(stream)
    line, start = 1, 0  # the number of a line, and its bytes so far

    def count(data: bytes) -> None:
        nonlocal line, start
        *lines, last = data.split(b"\n")
        line, start = line + len(lines), len(last) + (0 if lines else start)

    while True:
        data = stream.read(PIECE)
        digest.update(data)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            count(error.object[: error.start])
            _not_utf8(file, line, start, error)
        if not data:
            return
        count(text.encode())
        yield place.read(len(data)), text


def _table(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV; its first row holds the column names."""
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
        raise ConfigError(f"{file.name} is named .csv but holds TSV; rename it to end in .tsv")
    before = csv.field_size_limit(LONGEST)
    try:
        reader = csv.reader(_behind(first, source), delimiter=delimiter, strict=True)
        header = next(reader, [])
        blank = (n for n, name in enumerate(header) if name.strip())
        for place in range(next(blank, 0)):  # index columns, which pandas writes without a name
            header[place] = f"Unnamed: {place}"  # as pandas reads them
        if len({*header}) < len(header) or not all(map(str.strip, header)):
            cure = "write unique column names there"
            _wrong(file, 1, f"its first line is {', '.join(map(repr, header))[:80]}", cure)
        at = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                cure = f"quote cells that contain {delimiter!r} or a line break"
                problem = f"has {len(cells)} cells, but the first line has {len(header)}"
                _wrong(file, at, problem, cure)
            if cells:
                yield Row(range(read), at, dict(zip(header, cells, strict=True)))
            at, read = reader.line_num + 1, 0
    except csv.Error as error:
        cure = "close its quotes, and double a quote inside quotes"
        _wrong(file, at, f"is not a row ({error})", cure)
    finally:
        csv.field_size_limit(before)


def _behind(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _paragraphs(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield a text as one row, or split at paragraphs into rows of at most ``LONGEST`` bytes."""
    lines, size, start, read = list[str](), 0, 1, 0
    for share, number, line in _lines(file, stream, digest):
        read += len(share)
        while size + len(line) > LONGEST:
            whole = "".join(lines)
            parts = re.split(f"({BREAK})", whole)
            rest = parts.pop() if len(parts) > 1 else ""
            yield Row(range(read), start, {"text": whole[: len(whole) - len(rest)]})
            lines, size, start, read = [rest], len(rest.encode()), number - rest.count("\n"), 0
        lines.append(_decoded(file, number, line))
        size += len(line)
    if (text := "".join(lines)).strip():
        yield Row(range(read), start, {"text": text})


def _prompts(file: Located, stream: BinaryIO, digest: Any) -> Iterator[Row]:
    """Yield a row for each line of a text that is not blank."""
    for read, number, line in _lines(file, stream, digest):
        if line.strip():
            text = _decoded(file, number, line).removesuffix("\n").removesuffix("\r")
            yield Row(read, number, {"prompt": text})


def _from_process(file: Located, digest: Any) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file from a process with limited memory."""
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
                if line.startswith(b"["):  # a status line
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
        problem = f"its reader ended after row {number}: it crashed or ran out of memory"
        raise ConfigError(f"{file.name} cannot be read: {problem}; copy it again")


_READERS: dict[str, Callable[[Located, BinaryIO, Any], Iterator[Row]]] = {
    "JSON lines": _json_lines,
    ROWS: _json_lines,
    "JSON": _json_values,
    "CSV": _table,
    "TSV": _table,
    "text": _paragraphs,
    PROMPTS: _prompts,
}
