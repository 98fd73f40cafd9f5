"""Start programs of this folder in several ranks, and what those programs share."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
BESIDE = Path(sys.executable).parent / "mpiexec"
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs the extra `mpi`: mpi4py and mpiexec",
)


def run(ranks: int, *arguments: str, limit: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``python -m tests.parallel.*`` in ranks; a hang past the limit fails the test."""
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-W", "error", "-m", *arguments]
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | threads,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def close(found: object, wanted: object, relative: float = 1e-5) -> None:
    """Assert that arrays agree, to a share of the largest element of what is wanted."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if wanted.size:
        most = np.abs(found - wanted).max()
        assert most <= relative * np.abs(wanted).max(), most
