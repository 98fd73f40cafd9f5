"""Rows of Python as training data: what a file of the same rows says, an iterable of them says."""

import json
from collections import UserDict
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Settings, Trainer, evaluate, inspect_data, read_data
from unsloth_cupy.finetune.data.records import Records

ROWS: list[dict[str, Any]] = [{"question": f"what {i}?", "answer": f"{i}"} for i in range(30)]
RUN: dict[str, Any] = {"steps": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300}


def _dataset(rows: list[dict[str, Any]]) -> Any:
    datasets = pytest.importorskip("datasets", reason="not a dependency")
    return datasets.Dataset.from_list(rows)


def _splits(rows: list[dict[str, Any]]) -> Any:
    datasets = pytest.importorskip("datasets", reason="not a dependency")
    return datasets.DatasetDict(train=_dataset(rows), test=_dataset(rows[:2]))


def _frame(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas", reason="not a dependency").DataFrame(rows)


FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": lambda rows: (row for row in rows),
    "mappings": lambda rows: map(UserDict, rows),
    "Dataset": _dataset,
    "splits": _splits,
    "stream": lambda rows: _dataset(rows).to_iterable_dataset(),
    "table": lambda rows: _dataset(rows).data.table,
    "DataFrame": _frame,
}


def _written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _said(data: Any, **options: Any) -> str:
    """What is refused, without file and line."""
    with pytest.raises(ConfigError) as refused:
        read_data(data, **options)
    return str(refused.value).partition(": ")[2]


@pytest.mark.parametrize("form", FORMS)
def test_an_iterable_is_read_as_a_file_of_its_rows(form: str, tmp_path: Path) -> None:
    expected, actual = (
        read_data(_written(tmp_path / "rows.jsonl", ROWS)),
        read_data(FORMS[form](ROWS)),
    )
    assert isinstance(actual, Records)
    assert isinstance(expected, Records)
    assert (actual.train, actual.held_out) == (expected.train, expected.held_out)
    assert (actual.digest, actual.size) == (expected.digest, expected.size)
    assert actual.place(3) == "row 3"


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"answer": "a"}, "sft"),
        ({"question": "a", "answer": 3}, "sft"),
        ({"question": "a", "answer": ""}, "sft"),
        ({"question": "a", "answer": "\ud800"}, "sft"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "sft"),
        ({"text": "a" * 2**21}, "sft"),
        ({"text": "a"}, "dpo"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "reward"),
        ({}, "sft"),
    ],
)
def test_a_row_is_refused_as_in_a_file(row: Any, method: str, tmp_path: Path) -> None:
    file = _written(tmp_path / "rows.jsonl", [row, row])
    assert _said([row, row], method=method) == _said(file, method=method)
    with pytest.raises(ConfigError, match=r"^row 1: "):
        read_data(iter([row, row]), method=method)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"text": "a"}, "b.jsonl"], r"row 2 is of type str; pass mappings .* or only paths"),
        (iter(["a"]), r"row 1 is of type str"),
        (np.zeros(3), r"row 1 is of type float64"),
        ({"text": ["a", "b"]}, r"\(dict\): this is a single mapping; pass a list of rows"),
        ([{"text": "a"}, {"text": object()}], r"row 2: column text cannot be written as JSON \(it"),
        ([{"text": {1j}}], r"row 1: column text cannot .*holds a set"),
        ([{("a", "b"): "c"}], r"row 1: has the column \('a', 'b'\); use strings as column"),
        (iter([]), r"is empty"),
        ([{1: "a", "1": "b"}], r"row 1: .*has the key 1 twice"),
        (3, r"pass a path"),
    ],
)
def test_what_is_no_row_is_refused_by_its_number(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_data(data)


def test_values_of_other_libraries_are_those_of_json() -> None:
    rows = [
        {
            "prompt": f"{i}", "number": np.int64(i), "share": np.float32(0.5),
            "flags": (True, None), "array": np.arange(2), "day": date(2025, 1, 2),
            "cost": Decimal("1.5"), "name": b"abc", "inner": UserDict(a=np.bool_(True)),
        }
        for i in range(2)
    ]  # fmt: skip
    record = read_data(rows, method="grpo").train[0]
    assert record.value == {
        "number": int(record.prompt), "share": 0.5, "flags": [True, None], "array": [0, 1],
        "day": "2025-01-02", "cost": "1.5", "name": "abc", "inner": {"a": True},
    }  # fmt: skip


def test_missing_cells_of_a_data_frame_are_absent() -> None:
    pandas = pytest.importorskip("pandas", reason="not a dependency")
    rows = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]}
    for missing in (float("nan"), None, pandas.NA, pandas.NaT, np.float32("nan")):
        frame = pandas.DataFrame(rows | {"margin": pandas.Series([missing] * 2, dtype=object)})
        records = read_data(frame, method="reward")
        assert [record.value for record in (*records.train, *records.held_out)] == [None, None]


@pytest.mark.parametrize(
    ("columns", "said"),
    [("tt", "2 columns are called t;"), ("tbtb", "2 columns are called t;"),
     ("btt", "2 columns are called t;"), ("tbbb", "3 columns are called b;")],
)  # fmt: skip
def test_a_column_of_a_data_frame_has_its_own_name(columns: str, said: str) -> None:
    pandas = pytest.importorskip("pandas", reason="not a dependency")
    with pytest.raises(ConfigError, match=f"{said} name each once"):
        read_data(pandas.DataFrame([[*columns]], columns=[*columns]))


def test_inspection_and_evaluation_take_rows(tmp_path: Path) -> None:
    report = inspect_data(iter(ROWS))
    assert (report.train + report.held_out, report.examples[0].where) == (30, "row 1")
    run = Trainer(
        None, ROWS, Settings(**RUN, out=tmp_path / "run"), evaluate=iter(ROWS[:3])
    ).train()
    assert len(run.files.lines()) > 2
    file = _written(tmp_path / "few.jsonl", ROWS[:3])
    of_file, of_rows = evaluate(run.folder, file), evaluate(run.folder, iter(ROWS[:3]))
    assert (of_file[0].loss, of_rows[0].source) == (of_rows[0].loss, "rows")


def test_a_run_on_rows_is_resumed_by_their_hash(tmp_path: Path) -> None:
    settings = Settings(**RUN, out=tmp_path / "run")
    times = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal times
        times += 1
        yield from ROWS

    run = Trainer(None, rows(), settings).train()
    assert times == 1
    assert [json.loads(line) for line in run.files.rows.read_text().splitlines()] == ROWS
    again = Trainer(None, ROWS, settings).train()
    assert again.loop is None
    of_file = Trainer(None, _written(tmp_path / "rows.jsonl", ROWS), settings).train()
    assert of_file.losses == run.losses
    for other in (ROWS[1:], ROWS[::-1]):
        with pytest.raises(ConfigError, match="an iterable of rows has changed since"):
            Trainer(None, iter(other), settings).train()


def test_the_earlier_name_of_the_data_works_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="Trainer: text is named data now"):
        trainer = Trainer(None, text=ROWS, settings=Settings(**RUN, out=tmp_path / "run"))
    assert trainer.text.name == "rows"
    with pytest.raises(ConfigError, match="pass data alone"):
        Trainer(None, ROWS, text=ROWS)


def test_rows_that_read_data_returned_are_lines() -> None:
    assert Trainer(None, read_data(ROWS), Settings(**RUN, pack=True)).lines
