"""Finds and opens the files of training data, and checks their kind and their unpacked size.

    located(["chat.jsonl:2", "more.parquet.gz", "docs"])   # files with kinds and weights

The kind in the name of a file must agree with its content.
"""

import bz2
import gzip
import io
import json
import math
import os
import re
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...errors import ConfigError
from ...files import path_of, regular, temporary_folder
from .forms import is_header

KINDS = {
    ".jsonl": "JSON lines", ".ndjson": "JSON lines", ".json": "JSON", ".csv": "CSV", ".tsv": "TSV",
    ".parquet": "Parquet", ".arrow": "Arrow", ".txt": "text", ".md": "text",
}  # fmt: skip
ROWS = "rows"  # rows passed from Python, stored in a temporary file of JSON lines
PACKINGS = {".gz": "gzip", ".zst": "Zstandard", ".bz2": "bzip2"}
MAGIC = {  # the first bytes of a file of each kind
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"BZh": "bzip2", b"PAR1": "Parquet",
    b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow", b"PK\x03\x04": "a ZIP archive or a workbook",
    b"%PDF": "PDF", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x80\x04": "a pickle",
    b"version https://git-lfs": "a pointer of Git LFS",
    b"<!DOCTYPE": "HTML", b"<!doctype": "HTML", b"<html": "HTML", b"SQLite": "SQLite",
    # skippable frames, such as an index
    **{bytes([first]) + b"\x2a\x4d\x18": "Zstandard" for first in range(0x50, 0x60)},
}  # fmt: skip
CURES = {
    "UTF-16": "convert it, for example with iconv -f utf-16 -t utf-8",
    "a pointer of Git LFS": "fetch the file with git lfs pull",
    "HTML": "download the file itself, not the page about it",
}
HEAD = 2**16  # bytes read to detect the kind
UNPACKED, RATIO = 2**30, 100  # limit of unpacked bytes: the larger of 1 GiB and 100x the size
WINDOW = 2**27  # maximum bytes of a Zstandard window
STEP = 2**10  # packed bytes per read: they may unpack to 32,768 times as many
MOST_FILES = 10_000  # maximum files in a folder
SPLITS = {"train": True, "test": False, "valid": False, "validation": False, "val": False,
          "dev": False, "eval": False}  # fmt: skip
ABOUT = re.compile(r"(readme|license|dataset_infos?|dataset_dict|state|config)\.\w+", re.I)
STDIN = "-"
SUFFIXES = f"{' '.join(KINDS)}, each also {' '.join(PACKINGS)}"


class Located(NamedTuple):
    """A file of training data."""

    path: Path  # the file to read; a temporary file for standard input
    name: str  # the name in messages
    kind: str  # a value of KINDS, or ROWS
    packing: str  # a value of PACKINGS, or ""
    weight: float
    keep: Any = None  # owner of a temporary file, which is removed with it

    @property
    def before(self) -> str:
        """The text before a line number in messages."""
        return "row " if self.kind == ROWS else f"{self.name}:"


class Temporary:
    """A temporary file that only this user can read; it is removed with this object."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(dir=temporary_folder())
        self.path, self.file = Path(name), os.fdopen(handle, "w+b")
        weakref.finalize(self, self._remove, self.file, self.path)

    @staticmethod
    def _remove(file: BinaryIO, path: Path) -> None:
        file.close()
        path.unlink(missing_ok=True)


def located(data: Any, call: str = "read_data") -> tuple[list[Located], str]:
    """Return the files that ``data`` names, and a message about skipped files in folders.

    ``data`` is a path, "path:weight", (path, weight), "-" for standard input, or a list of these.

    Raises
    ------
    ConfigError
        A file is missing, or its content does not match its name.
    """
    several = isinstance(data, list) or (
        isinstance(data, tuple) and not (len(data) == 2 and _is_weight(data[1]))
    )
    files, notes = list[Located](), list[str]()
    for each in data if several else [data]:
        path, weight = _weighed(each, call)
        if str(path) == STDIN:
            files.append(_standard_input(weight))
        elif path.is_dir():
            paths, note = _in_folder(path)
            files += [_located(inside, weight) for inside in paths]
            notes += [note] * bool(note)
        else:
            files.append(_located(path, weight))
    if not files:
        raise ConfigError(f"{call}({data!r}): no file; pass at least one")
    return files, "; ".join(notes)


def name_of(files: Sequence[Located]) -> str:
    """Return a name for files without suffixes, such as "chat" or "chat-and-2-more"."""
    if (first := files[0]).keep is not None:
        return first.name.replace(" ", "-")
    stem = Path(first.path.stem).stem if first.packing else first.path.stem
    return stem + f"-and-{len(files) - 1}-more" * (len(files) > 1)


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _weighed(each: Any, call: str) -> tuple[Path, float]:
    """Return the path and the weight of "path", "path:2" or (path, 2); the default weight is 1."""
    weight: Any = 1
    if isinstance(each, tuple) and len(each) == 2:
        each, weight = each
    elif isinstance(each, str) and not path_of(call, each).exists():
        name, _, number = each.rpartition(":")
        if name and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf|nan", number, re.I):
            each, weight = name, float(number)
    path = path_of(call, each)
    if not (_is_weight(weight) and math.isfinite(weight) and 0 < weight <= 1000):
        raise ConfigError(f"{path}: weight {weight!r}; pass a number above 0 and at most 1000")
    return path, float(weight)


def _standard_input(weight: float) -> Located:
    """Copy standard input to a temporary file."""
    kept = Temporary()
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("- reads standard input, but that is a terminal; pipe a file into it")
    while data := sys.stdin.buffer.read(HEAD):
        kept.file.write(data)
    kept.file.flush()
    return _located(kept.path, weight, "standard input", kept)


def _in_folder(folder: Path) -> tuple[list[Path], str]:
    """Return the files of training data in a folder, and a message about skipped files.

    In a folder saved by the package ``datasets``, these are the files that it lists.  If there are
    splits, only train is read.  If there are tables, text files are skipped: they may describe the
    tables.
    """
    state, splits = folder / "state.json", folder / "dataset_dict.json"
    if splits.is_file():
        names = _listed(splits, "splits")
        chosen = split_of(names, f"{folder}")
        others = [name for name in names if name != chosen]
        note = f"{folder}: reading split {chosen}; skipping {', '.join(others)}" * bool(others)
        return _in_folder(folder / chosen)[0], note
    if state.is_file():
        return [folder / name for name in _listed(state, "_data_files")], ""
    paths = list[Path]()
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        paths += [Path(place) / name for name in sorted(names) if name[0] not in "._"]
        if len(paths) > MOST_FILES:
            raise ConfigError(f"{folder} holds over {MOST_FILES:,} files; name the files to read")
    data = [path for path in paths if _kind_named(path)[0] and not ABOUT.match(path.name)]
    tables = [path for path in data if _kind_named(path)[0] != "text"]
    read = tables or data
    is_train = {path: _split_of(path.relative_to(folder)) for path in read}
    if True in is_train.values():
        read = [path for path in read if is_train[path] is not False]
    elif False in is_train.values() and len(set(is_train.values())) > 1:
        raise ConfigError(f"{folder} holds splits but none called train; name the files to read")
    if not read:
        problem = f"{folder}: Is a directory without training data"
        raise ConfigError(f"{problem}; pass files with one of the suffixes {SUFFIXES}")
    others = [path.relative_to(folder).as_posix() for path in data if path not in read]
    shown = ", ".join(others[:5]) + ", ..." * (len(others) > 5)
    return read, f"{folder}: reading {len(read)} files; skipping {shown}" * bool(others)


def split_of(names: Sequence[Any], where: str) -> Any:
    """Return the name of the training split: "train", or the only split."""
    if "train" not in names and len(names) != 1:
        each = ", ".join(map(str, names))
        raise ConfigError(f"{where} holds the splits {each}; name one of them")
    return "train" if "train" in names else names[0]


def _listed(path: Path, key: str) -> list[str]:
    """Return the names of files or folders that a JSON file of ``datasets`` lists."""
    from ...files import read_json

    values = read_json(path).get(key)
    names: list[Any] = [each.get("filename") if isinstance(each, dict) else each
                        for each in (values if isinstance(values, list) else [])]  # fmt: skip
    for name in names:
        if not (isinstance(name, str) and re.fullmatch(r"[\w. -]*\w[\w. -]*", name)):
            raise ConfigError(f"{path}: its {key} names {name!r}; save the dataset again")
    if not names:
        raise ConfigError(f"{path}: its {key} is not a list of names; save the dataset again")
    return names


def _split_of(path: Path) -> bool | None:
    """Return True for the path of a training split, False for a test split, None for neither."""
    words = [re.split(r"[-_.\d]", part.lower())[0] for part in path.parts]
    return next((SPLITS[word] for word in reversed(words) if word in SPLITS), None)


def _kind_named(path: Path) -> tuple[str, str, str]:
    """Return the kind, the packing and the suffix in the name of a file, "" for none."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    packing = PACKINGS.get(suffixes[-1], "") if suffixes else ""
    rest = suffixes[:-1] if packing else suffixes[-1:]
    suffix = rest[-1] if rest else ""
    return KINDS.get(suffix, ""), packing, "".join(suffixes[-1 - bool(packing) :])


def _located(path: Path, weight: float, name: str = "", keep: Any = None) -> Located:
    """Return a file with its kind; raise a ConfigError if name and content disagree."""
    shown = name or str(path)
    kind, packing, suffix = ("", "", "") if name else _kind_named(path)
    with readable(shown):
        with regular(path).open("rb") as raw:
            head = raw.read(HEAD)
        packed = next((p for begin, p in MAGIC.items() if head.startswith(begin)), "")
        if packed not in PACKINGS.values():
            packed = ""
        if head and packing != packed and (packed or packing):
            holds = packed or content(head, kind) or "text"
            raise ConfigError(
                f"{shown} is named {suffix} but holds {holds}; {_renamed(holds, packing)}"
            )
        file = Located(path, shown, kind or "text", packed, weight, keep)
        with opened(file) as stream:
            head = stream.read(HEAD)
    holds = content(head, kind) if head else ""
    if not head and kind in ("Parquet", "Arrow"):
        raise ConfigError(f"{shown} is empty; copy it again")
    if holds and kind and holds != kind:
        raise ConfigError(f"{shown} is named {suffix} but holds {holds}; {_renamed(holds)}")
    if holds and holds not in KINDS.values():
        raise ConfigError(f"{shown} holds {holds}; {_renamed(holds)}")
    return file._replace(kind=kind or holds or "text")


def _renamed(holds: str, packing: str = "") -> str:
    """Return the advice for a file whose name has the suffix of another kind or packing."""
    ends = {kind: suffix for suffix, kind in reversed([*KINDS.items(), *PACKINGS.items()])}
    if holds in PACKINGS.values():
        return f"rename it to end in {ends[holds]}" if packing else f"add {ends[holds]} to its name"
    if holds in ends:
        return f"rename it to end in {ends[holds]}"
    return CURES.get(holds, f"convert it to one of {SUFFIXES}")


def content(head: bytes, kind: str) -> str:
    """Return the kind of content by its first bytes; "" if the content can have ``kind``."""
    for begin, name in MAGIC.items():
        if head.startswith(begin):
            return name
    if kind in ("Parquet", "Arrow"):
        return _text_kind(head) or "text"
    if b"\0" in head and kind != "text":
        return "binary data"
    text_kind = _text_kind(head)
    if kind == "JSON" and text_kind == "JSON lines":
        return ""  # both use the suffix .json
    long = len(head) == HEAD and b"\n" not in head  # perhaps a list in one long line
    if kind in ("JSON lines", "JSON") and (text_kind == "" or (long and kind == "JSON lines")):
        return ""  # the error of its first line is more precise
    return text_kind


def _text_kind(head: bytes) -> str:
    """Return the kind of a text that begins like a table, JSON or JSON lines; else ""."""
    text = head.decode("utf-8", "ignore").removeprefix("\ufeff").lstrip()
    line, ended, rest = text.partition("\n")
    if re.match(r"\[\s*(\{|$)", text):
        of_messages = re.match(r'\[\s*\{\s*"(role|from|content|value)"', text)
        if line.rstrip().endswith("]") and (of_messages or rest.lstrip().startswith("[")):
            return "JSON lines"  # each line is a list
        return "JSON" if re.match(r'\[\s*\{\s*"', text) else ""
    if text.startswith("{"):
        try:
            json.JSONDecoder().raw_decode(line)
        except (ValueError, RecursionError):
            whole = re.match(r'\{\s*"[^"\n]*"\s*:', text)
            open_line = ended and re.search(r"[{\[,]\s*$", line)
            goes_on = open_line and not rest.lstrip().startswith("{")
            return ("JSON" if goes_on else "JSON lines") if whole else ""
        return "JSON lines"
    for kind, delimiter in (("TSV", "\t"), ("CSV", ","), ("CSV", ";")):
        if delimiter in line and is_header([cell.strip(' "\r') for cell in line.split(delimiter)]):
            return kind
    return ""


class _Counted(io.RawIOBase):
    """An unpacked stream that raises an error beyond a number of bytes."""

    def __init__(self, stream: BinaryIO, most: int, name: str) -> None:
        super().__init__()
        self.stream, self.left, self.most, self.name = stream, most, most, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer; return their number."""
        data = self.stream.read(len(buffer))
        self.left -= len(data)
        check_growth(self.left, self.name)
        buffer[: len(data)] = data
        return len(data)


def check_growth(left: float, name: str) -> None:
    """Raise a ConfigError if the remaining bytes of the limit of a packed file are negative."""
    if left < 0:
        raise ConfigError(
            f"{name} expands to more than {UNPACKED >> 30} GiB and more than {RATIO} times its size"
            " (rows count with their size as objects), as decompression bombs do; if you trust the"
            " file, unpack it first"
        )


def bound(path: Path) -> int:
    """Return the maximum unpacked size of a file in bytes."""
    return max(UNPACKED, RATIO * path.stat().st_size)


@contextmanager
def opened(file: Located) -> Iterator[BinaryIO]:
    """Open a file and unpack it, up to its maximum size."""
    with readable(file.name), regular(file.path).open("rb") as raw:
        if not file.packing:
            yield raw
            return
        stream = _OPENERS[file.packing](raw, file.name)
        counted = _Counted(stream, bound(file.path), file.name)
        with io.BufferedReader(counted, HEAD) as buffered:
            buffered.packed = raw  # type: ignore[attr-defined]  # for the progress bar
            yield buffered


class _Zstandard:
    """Unpacks with the package ``zstandard``, whose own reader accepts truncated files."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        try:
            import zstandard
        except ModuleNotFoundError:
            raise ConfigError(needs(name, "zstandard")) from None
        self.raw, self.name, self.rest, self.packed = raw, name, b"", b""
        self.unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW)
        self.frame: Any = None

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes; b"" at the end."""
        while not self.rest:
            self.packed = self.packed or self.raw.read(STEP)
            if not self.packed:
                if self.frame is not None:
                    problem = f"{self.name} is truncated or broken: it ends within a frame"
                    raise ConfigError(f"{problem}; copy it again")
                break
            self.frame = self.frame or self.unpacker.decompressobj()
            self.rest, self.packed = self.frame.decompress(self.packed), b""
            if self.frame.eof:
                self.packed, self.frame = self.frame.unused_data, None
        data, self.rest = self.rest[:size], self.rest[size:]
        return data


def _zstandard(raw: BinaryIO, name: str) -> Any:
    """Open a Zstandard stream with the standard library, or with the package ``zstandard``."""
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(raw)
    return _Zstandard(raw, name)


def needs(name: str, package: str) -> str:
    """Return the message for a file that needs a package."""
    return f"{name} needs the package {package}; install it with pip install 'unsloth_cupy[data]'"


_OPENERS: dict[str, Callable[[BinaryIO, str], Any]] = {
    "gzip": lambda raw, _: gzip.GzipFile(fileobj=raw),
    "bzip2": lambda raw, _: bz2.BZ2File(raw),
    "Zstandard": _zstandard,
}


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Raise a ConfigError that names a file if it cannot be read or unpacked."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{name} is truncated or broken: {error}; copy it again") from None
    except OSError as error:
        if error.strerror is None:  # of bz2
            raise ConfigError(f"{name} is truncated or broken: {error}; copy it again") from None
        cure = "pass a readable file"
        is_repository = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not _kind_named(Path(name))[0]
        if error.errno == 2 and is_repository:
            cure = f"for a dataset of huggingface.co: hf download {name} --repo-type dataset"
            cure += f" --local-dir {name.partition('/')[2]}, then pass that folder"
        raise ConfigError(f"{name}: {error.strerror}; {cure}") from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise ConfigError(f"{name} is truncated or broken: {error}; copy it again") from None


def unpacked(file: Located) -> Located:
    """Return an unpacked file: the file itself, or a temporary unpacked copy."""
    if not file.packing:
        return file
    kept = Temporary()
    with opened(file) as stream:
        while data := stream.read(HEAD):
            kept.file.write(data)
    kept.file.flush()
    return file._replace(path=kept.path, packing="", keep=kept)
