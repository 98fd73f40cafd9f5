"""The package works with the names that Python has on Windows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..harness.tracked import ROOT

PROGRAM = """
import importlib
import json
import pkgutil
import threading
from pathlib import Path

import numpy as np

import unsloth_cupy
from sitecustomize import MODULES
from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.files import atomic_path, folder_lock
from unsloth_cupy.finetune.data import tokens
from unsloth_cupy.finetune.methods.reward_pool import ending

for module in pkgutil.walk_packages(unsloth_cupy.__path__, "unsloth_cupy."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # a package that is not installed
        assert error.name.partition(".")[0] not in {*MODULES, "unsloth_cupy"}, module.name

with atomic_path(Path("file")) as partial:
    partial.write_text("whole")
assert Path("file").read_text() == "whole"

Path("folder").mkdir()
free = threading.Event()
with folder_lock(Path("folder")):
    def wait():
        with folder_lock(Path("folder")):
            free.set()
    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        with folder_lock(Path("folder"), "busy"):
            raise SystemExit("the lock is not exclusive")
    except ConfigError as error:
        assert str(error) == "busy"
    assert not free.wait(0.2)
waiting.join(30)
assert free.is_set()

assert [ending(code) for code in (137, -9, 255, 0xC0000005)] == [
    "by SIGKILL", "by SIGKILL", "with 255", "with 3221225477"
]

tokens.SMALL = 100  # so that tokens go through a file
words = np.random.default_rng(0).choice(["a", "tree", "walks"], 400)
Path("text.txt").write_text(" ".join(words))
rows = [{"prompt": f"{word} a"} for word in words[:8]]
Path("prompts.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
Path("own.py").write_text("def short(completions): return [-len(each) for each in completions]")
for line in (
    "info",
    "finetune --data text.txt --layers 1 --hidden 32 --vocabulary 270 --tokens 16 --steps 2"
    " --out new",
    "finetune new --data prompts.jsonl --method grpo --reward own.py:short --samples 2"
    " --max-new-tokens 3 --steps 1 --lora 2 --out learned",
    "generate learned tree --chat --max-new-tokens 2",
    "merge learned merged",
    "plan merged --batch 1 --tokens 8",
):
    group.main(line.split(), standalone_mode=False)
print("ended")
"""


@pytest.mark.slow
def test_imports_locks_writes_trains_and_rewards(tmp_path: Path) -> None:
    """In a process, and in those that it starts, that lack what only POSIX systems have."""
    places = tmp_path / "site"
    places.mkdir()
    shutil.copy(Path(__file__).parents[1] / "harness/without_posix.py", places / "sitecustomize.py")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(places), str(ROOT)]),
        "PACKAGE_WITHOUT_POSIX": str(ROOT / "unsloth_cupy"),
        "UNSLOTH_CUPY_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ended\n")
