"""Reads training data of any form: files, folders, standard input, rows of Python.

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
    """Files of training data that are found, and not read yet."""

    files: list[Located]  # none: Python's documentation
    name: str
    ignore: tuple[str, ...]
    note: str
    method: str = "sft"

    @property
    def lines(self) -> bool:
        """Whether they are records: one text alone is running text."""
        return len(self.files) > 1 or any(file.kind != "text" for file in self.files)

    def read(self, *, whole: bool = False) -> Text | Records:
        """Return the text or the records; of ``whole`` files no record is held out."""
        if not self.files:
            return split("python-docs", python_documentation())
        if self.lines:
            arguments = (self.files, self.name, self.ignore, self.note, self.method)
            return read_records(*arguments, whole=whole)
        (file,) = self.files
        if self.ignore or file.weight != 1:
            what = "a weight" if file.weight != 1 else "a column to ignore"
            raise ConfigError(f"{file.name} is one running text, for which {what} has no meaning")
        plain = unpacked(file)
        return read_text(plain.path, self.name, plain.keep)


def find_data(
    data: Any, ignore: Collection[str] = (), call: str = "read_data", method: str = "sft"
) -> DataFiles:
    """Return the files of training data that ``read_data`` reads."""
    every: Any = ignore
    check_choice(call, "method", method, tuple(KINDS))
    if not isinstance(every, list | tuple | set | frozenset):
        raise ConfigError(f"{call}(ignore={ignore!r}): give a list of columns")
    if is_rows(data):
        file, note = stored(data, call)
        return DataFiles([file], NAME, tuple(ignore), note, method)
    files, note = ([], "") if data is None else located(data, call)
    several = isinstance(data, list | tuple)
    folder = not several and files and data != "-" and Path(data).is_dir()
    name = Path(data).resolve().name if folder else name_of(files) if files else ""
    return DataFiles(files, name, tuple(ignore), note, method)


def read_data(data: Any, *, ignore: Collection[str] = (), method: str = "sft") -> Text | Records:
    """Return the texts, instructions or chats in files, a tenth of them held out.

    Parameters
    ----------
    data : path, str, list of these, or iterable of mappings
        ``.jsonl .ndjson .json .csv .tsv .parquet .arrow .txt .md``, each also ``.gz .zst .bz2``; a
        folder of them, or one that the package ``datasets`` saved; ``"-"``: standard input.
        ``"FILE:2"`` or ``(path, 2)`` gives a file the weight 2: an epoch has its rows twice; of
        weight 0.5, a random half.  None: Python's documentation.
        Or rows, each a mapping of columns to values: a list, a ``datasets.Dataset``, a generator,
        which is read once, or a DataFrame, whose NaN is no value.  Values of NumPy and torch count
        as numbers and lists.  Messages name a row by its number: row 3.
    ignore : collection of str, optional
        Columns that are not read.
    method : str
        The method of training that the rows are for: of dpo and its relatives they are pairs, of
        kto answers that are good or bad.

    Returns
    -------
    Text or Records
        Running text, if ``data`` is one text; else its rows, of which each is a text of its own.
        ``note`` says what was recognised.

    Raises
    ------
    ConfigError
        A file cannot be read, holds something else than its name says, has a row that is not one,
        or is for another method; the message has file, line, column and cure.  A row may have
        1 MiB; a packed file may grow to 1 GiB or 100 times its size.
    """
    return find_data(data, ignore, method=method).read()
