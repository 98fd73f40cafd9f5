"""Rows from Python: stores any iterable of mappings in a temporary file of JSON lines.

    stored([{"text": "..."}, ...])      also a datasets.Dataset, a DataFrame, a generator

The file is then read like any other file, with the same checks and the same hash.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import numpy as np

from ...errors import ConfigError
from ...files import atomic_path
from .data_files import ROWS, Located, Temporary, split_of
from .table_process import plain, without_absent

NAME = "rows"  # name of all iterables, in messages and in the name of a run
MISSING = ("NAType", "NaTType")  # classes of missing values in pandas, besides NaN


def is_rows(data: Any) -> bool:
    """Return whether ``data`` is an iterable of rows, not a path or a list of paths."""
    if data is None or isinstance(data, str | bytes | PathLike):
        return False
    if isinstance(data, list | tuple):  # read_data returns named tuples
        return not hasattr(data, "_fields") and any(isinstance(each, Mapping) for each in data)
    has_items = getattr(data, "ndim", 1) != 0  # NumPy scalars have no items
    return has_items and (hasattr(data, "__iter__") or hasattr(data, "__getitem__"))


def stored(data: Any, call: str) -> tuple[Located, str]:
    """Store all rows of an iterable; return the file, and a message about skipped splits.

    Raises
    ------
    ConfigError
        A row is not a mapping, or JSON cannot store a value; the message has row and column.
    """
    note = ""
    if isinstance(data, Mapping):
        data, note = _split(data, call)
    is_table = any(hasattr(data, name) for name in ("column_names", "itertuples", "iter_rows"))
    kept = Temporary()
    for number, row in enumerate(_rows(data, call), 1):
        if not isinstance(row, Mapping):
            cure = "pass mappings of columns to values, or only paths"
            raise ConfigError(f"{call}: row {number} is of type {type(row).__name__}; {cure}")
        values = without_absent(dict(row)) if is_table else dict(row)
        kept.file.write(_line(number, values).encode() + b"\n")
    kept.file.flush()
    return Located(kept.path, NAME, ROWS, "", 1.0, kept), note


def keep(files: Sequence[Located], path: Path) -> None:
    """Copy the file of ``stored`` rows to a path, unless the path exists."""
    if files and files[0].kind == ROWS and not path.exists():
        with atomic_path(path) as partial:
            shutil.copyfile(files[0].path, partial)


def _split(splits: Mapping[Any, Any], call: str) -> tuple[Any, str]:
    """Return the split "train" of a mapping of datasets, and a message about the other splits."""
    if not splits or not all(hasattr(each, "column_names") for each in splits.values()):
        cure = "pass a list of rows, as [{...}, ...], a datasets.Dataset or a DataFrame"
        raise ConfigError(f"{call}({type(splits).__name__}): this is a single mapping; {cure}")
    name = split_of([*splits], f"{call}({type(splits).__name__})")
    others = ", ".join(str(each) for each in splits if each != name)
    return splits[name], f"reading split {name}; skipping {others}" * bool(others)


def _rows(data: Any, call: str) -> Iterable[Any]:
    """Return an iterable of rows; missing values of a DataFrame become None."""
    if hasattr(data, "itertuples"):  # pandas
        names = [*data.columns]
        for name, count in Counter(names).items():
            if count > 1:
                raise ConfigError(f"{call}: {count} columns are called {name}; name each once")
        each = data.itertuples(index=False, name=None)
        return ({n: _value(v) for n, v in zip(names, row, strict=True)} for row in each)
    if hasattr(data, "iter_rows"):  # polars
        return ({n: _value(v) for n, v in row.items()} for row in data.iter_rows(named=True))
    if hasattr(data, "to_batches") and hasattr(data, "column_names"):  # pyarrow
        return (row for batch in data.to_batches() for row in batch.to_pylist())
    rows: Iterable[Any] = data
    return rows


def _value(value: Any) -> Any:
    """Return a cell of a DataFrame; None for a missing value."""
    is_nan = isinstance(value, float | np.floating) and np.isnan(value)
    return None if is_nan or type(value).__name__ in MISSING else value


def _line(number: int, row: dict[Any, Any]) -> str:
    """Return a row as JSON."""
    if wrong := [name for name in row if not isinstance(name, str | int)]:
        _wrong(number, f"has the column {wrong[0]!r}", "use strings as column names")
    cells = []
    for name, value in row.items():
        try:
            cells.append(f"{json.dumps(str(name))}: {json.dumps(value, default=_plain)}")
        except RecursionError:
            _wrong(number, f"column {name} is nested too deeply", "write it flat")
        except (TypeError, ValueError) as error:
            cure = "use strings, numbers, lists and mappings, or leave it out"
            _wrong(number, f"column {name} cannot be written as JSON ({error})", cure)
    return "{" + ", ".join(cells) + "}"


def _wrong(number: int, problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"row {number}: {problem}; {cure}")


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot store."""
    if hasattr(value, "tolist"):  # arrays of NumPy, CuPy, torch
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | date | time | timedelta | Decimal | UUID):
        return plain(value)  # as in a Parquet file
    if isinstance(value, Sequence):
        return [*value]
    raise ConfigError(f"it holds a {type(value).__name__}")
