"""Start programs of this folder in several ranks, and helpers that those programs share."""

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from unsloth_cupy import sum as total

from .namespaces import Network

ROOT = Path(__file__).parent.parent.parent
BESIDE = Path(sys.executable).parent / "mpiexec"
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs the extra `mpi`: mpi4py and mpiexec",
)


THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class Ended(NamedTuple):
    """The exit status of a process, and its output."""

    code: int
    said: str


def free_port(ports: Iterable[int] = (0,)) -> int:
    """Return a free port: any, or the first of several consecutive ones."""
    for port in ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as door:
            return int(door.getsockname()[1])
    raise OSError("no port is free")


def by_sockets(
    ranks: int,
    *arguments: str,
    told: str = "",
    limit: float = 60,
    places: Sequence[Path] | None = None,
    network: Network | None = None,
) -> list[Ended]:
    """Run ``python -m tests.parallel.*`` in ranks that find each other as those of torchrun do.

    Only rank 0 gets input (``told``); another rank that reads input would wait until rank 0 ends.
    ``places`` are the working folders of the ranks, which then have a home of their own, too; with
    ``network``, each of its two machines runs a rank.
    """
    address = "127.0.0.1" if network is None else network.address
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    enter: Sequence[list[str]] = [[]] * ranks if network is None else network.enter
    own = [dict[str, str]() for _ in range(ranks)]
    if places is not None:
        place |= {"UNSLOTH_CUPY_AUTHKEY": secrets.token_hex(16), "PYTHONPATH": str(ROOT)}
        own = [{"HOME": str(folder / "home"), "LOCAL_RANK": "0"} for folder in places]
    command = [sys.executable, "-W", "error", "-m", *arguments]
    started = [
        subprocess.Popen(
            [*enter[rank], *command],
            cwd=ROOT if places is None else places[rank],
            env=os.environ | THREADS | place | own[rank] | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [started[0].communicate(told, limit)[0]]
        said += [process.communicate(timeout=limit)[0] for process in started[1:]]
    finally:
        for process in started:
            process.kill()
    return [Ended(process.returncode, text) for process, text in zip(started, said, strict=True)]


def run(ranks: int, *arguments: str, limit: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``python -m tests.parallel.*`` in ranks; a hang past the limit fails the test."""
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-W", "error", "-m", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | THREADS,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def likelihoods(model: Any, tokens: Any, labels: Any, **options: Any) -> Any:
    """A loss of log-probabilities and entropies; ranks that divide rows have a share of it."""
    found = model.log_probs(tokens, labels, temperature=0.7, **options)
    ranks = 1 if model.context is None else model.context.size
    return total(found.log_probs * found.log_probs + found.entropy) * (1 / (tokens.size * ranks))


def few(gradient: np.ndarray) -> float:
    """Return the bound of a gradient: few numbers are sums over all tokens, which round more."""
    return 5e-5 if gradient.size < 16 else 1e-5


def close(actual: object, expected: object, relative: float = 1e-5) -> None:
    """Assert that arrays agree within a fraction of the largest expected element."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if expected.size:
        most = np.abs(actual - expected).max()
        assert most <= relative * np.abs(expected).max(), most
