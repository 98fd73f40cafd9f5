"""The emulator's README tells the truth: its Python runs, and it names every file."""

import re
from pathlib import Path
from typing import Any

import pytest

from ...harness.tracked import tracked
from ...machines import cuda_on_cpu

FOLDER = Path(cuda_on_cpu.__file__).parent
README = (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"^```python\n(.*?)^```", README, re.M | re.S))
def test_its_python_runs(block: str) -> None:
    names: dict[str, Any] = {}
    exec(block, names)


def test_every_file_has_its_row() -> None:
    folder = "tests/machines/cuda_on_cpu"
    files = [path.name for path in tracked(f"{folder}/src/*.cpp") + tracked(f"{folder}/*.py")]
    assert not [file for file in files if f"`{file}`" not in README]
