"""``--json`` prints what the tables say, and nothing else; ``--quiet`` prints errors alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from ..conftest import FOLDER
from .test_cli import assert_one_clear_error, run

LLAMA = FOLDER / "models" / "llama"


def printed(*words: Any) -> list[Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_tables_are_lines_of_json() -> None:
    (facts,) = printed("info")
    assert facts["unsloth_cupy"]
    assert "GPU" in facts or "GPU 0" in facts
    tables = printed("plan", LLAMA, "--tokens", 8)
    assert [table["rows"] for table in tables if "what fits" in table["title"]]
    assert all(table["rows"] for table in tables)
    (rows,) = printed("check", "softmax")
    assert {row["ok"] for row in rows} == {"yes"}
    assert {"op", "dtype", "max error"} <= {*rows[0]}
    again = run("info")
    assert not again.stdout.startswith("{"), "the next command prints tables again"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text("\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200)))
    return path


def test_a_run_prints_its_results(text: Path, tmp_path: Path) -> None:
    words = ("finetune", "--text", text, "--steps", 3, "--batch", 2, "--tokens", 16, "--layers", 1)
    words += ("--hidden", 32, "--vocabulary", 300, "--out")
    (results,) = printed(*words, tmp_path / "run", "--quiet")
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert results["step"] == 3
    assert results["held_out_loss"] == lines[-1]["held_out_loss"]
    assert results["best"] in lines
    assert results["model"] == str(tmp_path / "run/model")
    (again,) = printed(*words, tmp_path / "run")
    assert again == results
    quiet = run(*words, tmp_path / "quiet", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert_one_clear_error(run(*words, text, "--quiet"), "is a file; name a folder")
    (measured,) = printed("evaluate", tmp_path / "run", "--data", text, "--quiet")
    assert [each["source"] for each in measured] == [str(text)]
    assert measured[0]["perplexity"] > 1
