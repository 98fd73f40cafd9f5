"""The fixtures that GPUs left are of today's primitives; with a GPU, each primitive runs on it."""

import ctypes
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ...harness.parity import on_gpu, within_rule
from . import fixtures
from .__main__ import KINDS, run
from .fixtures import FILE, ROOT, Fixture, digest, read, table, write
from .primitives import PRIMITIVES, Tile, launch, runs_on
from .session import STEPS


def test_fixtures_are_of_primitives_that_exist() -> None:
    assert set(read()) <= set(PRIMITIVES)
    stale = [name for name, kept in read().items() if kept.digest != digest(launch(name))]
    assert not stale, f"run python -m tests.code.hardware found --only first on a GPU: {stale}"


def test_numpy_is_enough_to_start() -> None:
    code = "import sys, tests.code.hardware.__main__; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"ml_dtypes", "unsloth_cupy", "pytest", "cupy"} & set(done.stdout.split())


def test_the_script_says_what_it_needs() -> None:
    # CUDA finds no device under this name, wherever the tests run
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.code.hardware", "found"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=hidden
    )
    assert done.returncode != 0
    assert "tests.code.hardware needs a GPU and CuPy" in done.stderr


def test_the_recipe_asks_for_every_step_in_15_minutes() -> None:
    text = (ROOT / "tests/code/hardware/README.md").read_text(encoding="utf-8")
    calls = re.findall(r"hardware found --only (.*) --minutes (\d+)\n", text)
    assert len(calls) == text.count("python -m tests.code.hardware found") == 4
    assert tuple(" ".join(steps for steps, _ in calls).split()) == STEPS
    assert sum(int(minutes) for _, minutes in calls) <= 13  # a machine starts, and files travel
    rows = re.findall(r"^\| (\w+) \| (?!seconds)[^|]{20}", text, re.MULTILINE)
    assert tuple(rows[: len(STEPS)]) == STEPS


@pytest.mark.slow
def test_a_launch_is_the_same_on_every_call() -> None:
    digests = {digest(launch(name)) for name in PRIMITIVES}
    assert digests == {digest(launch(name)) for name in PRIMITIVES}
    assert len(digests) == len(PRIMITIVES)


def test_the_table_tells_confirmed_from_unconfirmed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fixtures, "FILE", tmp_path / FILE.name)
    assert table().count("unconfirmed") == len(PRIMITIVES)
    write(
        {
            "dp4a": Fixture("2026-01-02", "a GPU", digest(launch("dp4a"))),
            "mma s8": Fixture("2026-01-02", "a GPU", "of another launch"),
        }
    )
    assert "| dp4a | 80 | 2026-01-02, a GPU |" in table()
    assert "| mma s8 | 80 | unconfirmed |" in table()


def test_every_tile_has_a_kind_of_the_driver() -> None:
    tiles = [arg for name in PRIMITIVES for arg in launch(name).args if isinstance(arg, Tile)]
    assert {tile.number or tile.array.dtype.name for tile in tiles} <= set(KINDS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRIMITIVES)
def test_on_a_gpu(name: str) -> None:
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    if not runs_on(name, capability):
        pytest.skip("needs another GPU")
    made = launch(name)
    for position, actual in run(made).items():
        expected = made.expected[position]
        np.testing.assert_array_equal(actual.view(expected.dtype), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a[1:, ::2],
        lambda a: a.T,
        lambda a: a[::-1, 3:],
        lambda a: a.ravel()[5:].reshape(5, 11),
        lambda a: np.broadcast_to(a[2], (3, 10)),
        lambda a: a[:0],
        lambda a: a[2, 3, ...],
        lambda a: a.T.copy(order="K"),
        lambda a: np.float32(3),
    ],
)
def test_arrays_lie_on_a_gpu_as_they_do_here(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is played by another one of the host."""
    copies = []

    def asarray(array: Any) -> Any:
        copies.append(array.copy())
        return types.SimpleNamespace(data=copies[-1].ctypes.data)

    def ndarray(shape: Any, dtype: Any, start: int, strides: Any) -> np.ndarray:
        room = (ctypes.c_byte * copies[-1].nbytes).from_address(copies[-1].ctypes.data)
        return np.ndarray(shape, dtype, room, start - copies[-1].ctypes.data, strides)

    cupy = types.SimpleNamespace(asarray=asarray, ndarray=ndarray)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    here = view(np.arange(60, dtype=np.float32).reshape(6, 10))
    there = on_gpu(here)
    np.testing.assert_array_equal(there, here)
    assert there.strides == here.strides


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (2.5, r"y: 1 of 6 are off by more than 2.38e-06, .* at \(1, 2\) is 2.5, not 5"),
        (np.nan, r"1 of 6 are NaN, the first at \(1, 2\)"),
    ],
)
def test_a_difference_is_told_by_its_place(wrong: float, says: str) -> None:
    exact = {"y": np.arange(6.0).reshape(2, 3)}
    plain = {"y": exact["y"].astype(np.float32)}
    kernel = {"y": plain["y"].copy()}
    within_rule(plain, exact, kernel)
    kernel["y"][1, 2] = wrong
    with pytest.raises(AssertionError, match=says):
        within_rule(plain, exact, kernel)
