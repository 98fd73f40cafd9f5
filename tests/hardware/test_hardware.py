"""The fixtures that GPUs left are of today's primitives; with a GPU, each primitive runs on it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from . import fixtures
from .__main__ import KINDS, run
from .fixtures import FILE, ROOT, Fixture, digest, read, table, write
from .primitives import PRIMITIVES, Tile, launch


def test_fixtures_are_of_primitives_that_exist() -> None:
    assert set(read()) <= set(PRIMITIVES)
    stale = [name for name, kept in read().items() if kept.digest != digest(launch(name))]
    assert not stale, f"run python -m tests.hardware {' '.join(stale)} on a GPU"


def test_numpy_is_enough_to_start() -> None:
    code = "import sys, tests.hardware.__main__; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"ml_dtypes", "unsloth_cupy", "pytest", "cupy"} & set(done.stdout.split())


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
    if PRIMITIVES[name][0] > capability or (name.startswith("wgmma") and capability != 90):
        pytest.skip("needs another GPU")
    made = launch(name)
    for position, found in run(made).items():
        wanted = made.expected[position]
        np.testing.assert_array_equal(found.view(wanted.dtype), wanted)
