"""One rank of three does what the others do not: ``python -m tests.parallel.faults KIND``."""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from unsloth_cupy.errors import CommunicationError
from unsloth_cupy.parallel import MpiCommunicator, SocketCommunicator
from unsloth_cupy.parallel.exchanges import Exchanges

KIND = sys.argv[1]
DISAGREE = {  # what rank 2 calls, where the others call all_reduce of three float32
    "shape": lambda comm: comm.all_reduce(np.ones(4, np.float32)),
    "dtype": lambda comm: comm.all_reduce(np.ones(3, np.float64)),
    "order": lambda comm: comm.barrier(),
    "axis": lambda comm: comm.reduce_scatter(np.ones(3, np.float32)),
}


def told(call: Callable[[], object], said: str) -> None:
    """Assert that a call raises for rank 2 and says so."""
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


def main() -> None:
    made = SocketCommunicator.from_environment if "RANK" in os.environ else MpiCommunicator
    comm = made(timeout=60, checked=KIND == "disagree")
    odd = comm.rank == 2
    comm.all_reduce(np.ones(100_000, np.float32))  # all are under way
    if KIND == "late":
        comm.timeout = 3
    if KIND == "raise" and odd:
        raise ValueError("this rank has a problem")
    if KIND == "kill" and odd:
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "late" and odd:
        time.sleep(60)
    if KIND == "disagree":
        disagree(comm, odd)
        return
    comm.all_reduce(np.ones(3 + (odd and KIND == "size"), np.float32))


main()
