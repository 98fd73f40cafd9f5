"""Reads training data from files, folders, standard input, or rows in Python.

data = read_data(["chat.jsonl:2", "more.parquet"])
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...ops.common.checks import check_choice
from .data_files import Located, located, name_of, unpacked
from .iterables import NAME, is_rows, stored
from .records import Records, read_records
from .rows import KINDS
from .text import Text, python_documentation, read_text, split


class DataFiles(NamedTuple):
    """Files of training data before they are read."""

    files: list[Located]  # empty: Python's documentation
    name: str
    ignore: tuple[str, ...]
    note: str
    method: str = "sft"

    @property
    def lines(self) -> bool:
        """Whether the files are records; a single text file is running text."""
        return len(self.files) > 1 or any(file.kind != "text" for file in self.files)

    def read(self, *, whole: bool = False) -> Text | Records:
        """Return the text or the records; with ``whole``, no record is held out."""
        if not self.files:
            return split("python-docs", python_documentation())
        if self.lines:
            arguments = (self.files, self.name, self.ignore, self.note, self.method)
            return read_records(*arguments, whole=whole)
        (file,) = self.files
        if self.ignore or file.weight != 1:
            what = "a weight" if file.weight != 1 else "a column to ignore"
            raise ConfigError(f"{file.name} is one running text; {what} has no meaning for it")
        plain = unpacked(file)
        return read_text(plain.path, self.name, plain.keep)


def find_data(
    data: Any, ignore: Collection[str] = (), call: str = "read_data", method: str = "sft"
) -> DataFiles:
    """Return the files that ``read_data(data)`` reads."""
    every: Any = ignore
    check_choice(call, "method", method, tuple(KINDS))
    if not isinstance(every, list | tuple | set | frozenset):
        raise ConfigError(f"{call}(ignore={ignore!r}): pass a list of columns")
    if is_rows(data):
        file, note = stored(data, call)
        return DataFiles([file], NAME, tuple(ignore), note, method)
    files, note = ([], "") if data is None else located(data, call)
    several = isinstance(data, list | tuple)
    folder = not several and files and data != "-" and Path(data).is_dir()
    name = Path(data).resolve().name if folder else name_of(files) if files else ""
    return DataFiles(files, name, tuple(ignore), note, method)


def read_data(data: Any, *, ignore: Collection[str] = (), method: str = "sft") -> Text | Records:
    """Read texts, instructions or chats from files, and hold out a tenth for evaluation.

    Parameters
    ----------
    data : path, str, list of these, or iterable of mappings
        Files ``.jsonl .ndjson .json .csv .tsv .parquet .arrow .txt .md``, optionally compressed as
        ``.gz .zst .bz2``; a folder of such files, or a folder saved by the package ``datasets``;
        ``"-"`` for standard input.  ``"FILE:2"`` or ``(path, 2)`` sets the weight of a file to 2:
        each epoch contains its rows twice; a weight of 0.5 selects a random half.  None reads
        Python's documentation.  Or rows that map columns to values: a list, a ``datasets.Dataset``,
        a generator (read once), or a DataFrame (NaN is a missing value).  Values may be arrays of
        NumPy and torch.  Messages refer to such a row by its number, for example row 3.
    ignore : collection of str, optional
        Columns to skip.
    method : str
        The training method, which determines the format of rows: for example pairs for dpo, and
        rated answers for kto.

    Returns
    -------
    Text or Records
        Running text if ``data`` is one text file; else records, one per row.  ``note`` summarizes
        the formats of the rows and the unused columns.

    Raises
    ------
    ConfigError
        A file cannot be read, its content does not match its extension, or a row is invalid or for
        another method; the message contains the file, line and column, and what to do.  A row is
        limited to 1 MiB; a compressed file may unpack to 1 GiB or 100 times its size.
    """
    return find_data(data, ignore, method=method).read()
