"""Faults of one rank of three: calls that the others do not make, then a missing call."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from unsloth_cupy.errors import CommunicationError
from unsloth_cupy.parallel import SocketCommunicator
from unsloth_cupy.parallel.exchanges import Exchanges

DISAGREE = {  # calls of rank 2, while the others call all_reduce of three float32
    "shape": lambda comm: comm.all_reduce(np.ones(4, np.float32)),
    "dtype": lambda comm: comm.all_reduce(np.ones(3, np.float64)),
    "order": lambda comm: comm.barrier(),
    "axis": lambda comm: comm.reduce_scatter(np.ones(3, np.float32)),
}


def told(call: Callable[[], object], said: str) -> None:
    """Assert that a call raises because of rank 2, and that the error names it."""
    try:
        call()
    except CommunicationError as error:
        if error.rank != 2 or said not in str(error):
            raise
    else:
        raise SystemExit("nobody noticed")


def disagree(comm: Exchanges, odd: bool) -> None:
    for call in DISAGREE.values():
        own = call if odd else lambda comm: comm.all_reduce(np.ones(3, np.float32))
        told(partial(own, comm), "rank 0: all_reduce(x(3,) float32")
    if odd:
        comm.send(np.ones(3, np.int32), 0)
    elif comm.rank == 0:
        told(lambda: comm.receive(np.empty(3, np.float32), 2), "send(x(3,) int32)")


def sizes(comm: Exchanges, odd: bool) -> None:
    """Without the check of calls, parts of another size than requested are detected."""
    try:
        comm.all_reduce(np.ones(3 + 9 * odd, np.float32))
    except CommunicationError as error:
        if "bytes, not the" not in str(error):
            raise
    else:
        raise SystemExit("nobody noticed")


def mixed(comm: Exchanges) -> None:
    """If only some ranks compare calls, the cure is not to compare them."""
    comm.checked = comm.rank == 0
    if comm.rank == 1:
        comm.send(np.ones(3, np.float32), 0)
    elif comm.rank == 0:
        try:
            comm.receive(np.empty(3, np.float32), 1)
        except CommunicationError as error:
            if not str(error).endswith("expected; pass checked=True on all ranks, or on none"):
                raise
        else:
            raise SystemExit("nobody noticed")


def all_checks(comm: Exchanges) -> None:
    """The last of three ranks makes other calls than the others, and in the end waits."""
    odd = comm.rank == 2
    comm.all_reduce(np.ones(100_000, np.float32))  # all are under way
    checked = comm.split(0)
    checked.checked = True
    disagree(checked, odd)
    sizes(comm.split(0), odd)
    mixed(comm.split(0))
    comm.timeout = 1
    if odd:
        time.sleep(60)
    comm.all_reduce(np.ones(3, np.float32))


if __name__ == "__main__":
    all_checks(SocketCommunicator.from_environment(timeout=60))
