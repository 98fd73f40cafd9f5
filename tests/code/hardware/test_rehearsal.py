"""Tests marked gpu get past their Python: see ``rehearsal``."""

import os
import re
import subprocess
import sys
from pathlib import Path

from ...harness.sampling import Sample
from .fixtures import ROOT
from .session import ENVIRONMENT, OPTIONS, marked

TESTS = """
import numpy as np, pytest
from tests.harness.parity import on_gpu, within_rule

pytestmark = pytest.mark.gpu
x = np.ones((2, 3), np.float32)

@pytest.fixture
def cupy():
    import cupy
    return cupy

def test_compares(cupy):
    assert on_gpu(x[:, 1:]).get()[0, 0] == 1
    assert cupy.ones(3).get()[0] == 2

def test_compares_arrays(cupy): np.testing.assert_array_equal(cupy.zeros(3).get(), np.ones(3))
def test_waits_for_an_error(cupy):
    with pytest.raises(ValueError): cupy.zeros(3)

@pytest.mark.parametrize("by", ["first", "between", "last"])
def test_of_a_kind(cupy, by):
    if by == "between": cupy.unknown

def test_fails_by_what_cupy_lacks(cupy): cupy.zeros(3).ctypes
def test_fails_by_a_mixture(cupy): cupy.zeros(3) + np.ones(3)
def test_fails_by_a_shape(cupy): np.testing.assert_allclose(cupy.zeros(3).get(), np.ones(2))
def test_fails_by_a_dtype(cupy): within_rule({"y": x}, {"y": x}, {"y": cupy.zeros((2, 3), "f2")})
"""

HIDDEN = (
    *("asv", "bitsandbytes", "datasets", "gguf", "jax", "mpi4py", "peft", "pyarrow", "sphinx"),
    *("torch", "transformers", "trl"),
)
HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec

def hidden(cls, name, *of):
    return None if name.partition(".")[0] in HIDDEN else find(name, *of)

PathFinder.find_spec = classmethod(hidden)
"""


def rehearse(*given: str) -> tuple[int, str]:
    """Run the tests marked gpu of these paths; return the exit status and what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.code.hardware.rehearsal", "-m", "gpu"]
    options = ("-q", "-o", "addopts=", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    options = (*options, *given)
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_tests_marked_gpu_get_past_their_python() -> None:
    status, said = rehearse("--sample", "all", *Sample.one_in(3, marked()))
    assert status == 0, said


def test_tests_marked_gpu_are_collected_where_other_packages_are_missing(tmp_path: Path) -> None:
    """Those of the extra `cli` and hypothesis are there; a module that needs others lacks tests."""
    (tmp_path / "sitecustomize.py").write_text(f"HIDDEN = {HIDDEN}\n{HIDE}")
    paths = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--collect-only", "-q", *marked()]
    own = {"cwd": ROOT, "env": ENVIRONMENT | {"PYTHONPATH": paths}}
    done = subprocess.run(command, **own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "tests/ops/test_rounded_sum.py::" in done.stdout


def test_what_is_not_about_numbers_fails(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    _, said = rehearse(str(tmp_path))
    failed = {name.removeprefix("test_fails_") for name in re.findall(r"::(\w+) - ", said)}
    expected = {"by_what_cupy_lacks", "by_a_mixture", "by_a_shape", "by_a_dtype"}
    assert failed == expected, said
    assert "4 failed, 5 passed" in said
