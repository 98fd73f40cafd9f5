"""A process alone exchanges what NumPy says, to the last bit; what is refused."""

import sys

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError, DeviceError, ShapeError
from unsloth_cupy.parallel import MpiCommunicator, SingleCommunicator, grid, part

from .collectives import all_checks


def test_a_process_alone_has_all_exchanges() -> None:
    all_checks(SingleCommunicator())


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 6, 7, 20])
def test_parts_are_even_and_cover_all(ranks: int, size: int) -> None:
    comm = SingleCommunicator()
    comm.size = ranks
    parts = [range(size)[part(size, comm, rank)] for rank in range(ranks)]
    assert [i for each in parts for i in each] == [*range(size)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_what_makes_no_sense_is_refused() -> None:
    comm, x = SingleCommunicator(), np.ones((2, 3), np.float32)
    for wrong in (
        lambda: comm.split(-1),
        lambda: grid(comm, tensor=2),
        lambda: grid(comm, data=0),
        lambda: grid(comm, pipeline=True),
        lambda: comm.all_reduce(x, "mean"),
        lambda: comm.broadcast(x, 1),
        lambda: comm.send(x, 0),
        lambda: comm.receive(x, 0),
        lambda: MpiCommunicator(timeout=0),
    ):
        with pytest.raises(ConfigError, match="is not"):
            wrong()
    with pytest.raises(ShapeError, match=r"axis=2.*pass one in -2 \.\. 1"):
        comm.all_gather(x, axis=2)


def test_without_mpi_the_cure_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DeviceError, match=r"unsloth-cupy\[mpi\]"):
        MpiCommunicator()
