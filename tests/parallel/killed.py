"""Rank 1 of three is killed, and the others wait for it: they must end within seconds."""

import os
import signal

import numpy as np

from unsloth_cupy.parallel import SocketCommunicator

if __name__ == "__main__":
    comm = SocketCommunicator.from_environment()
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(np.ones(3, np.float32))
