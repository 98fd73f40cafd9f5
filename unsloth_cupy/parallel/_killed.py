"""Report which rank was killed: MPICH's mpiexec names only a process, and kills all others at once.

This file runs as one more process beside the ranks of a machine, a monitor that mpiexec does not
kill.  Every rank connects to it and sends it a duplicate of the descriptor (PMI_FD) whose closing
tells mpiexec that the rank has ended.  So the monitor first reports the rank whose connection
closed without a farewell, and only then, as it exits, does mpiexec notice.
"""

import atexit
import os
import socket
import struct
import subprocess
import sys
from typing import Any

if sys.platform == "linux":
    from select import EPOLLIN, epoll

HELLO = struct.Struct("!II")  # rank and process id
FAREWELL, FAILED = b".", b"!"
SECONDS = 60.0  # time limit for each rank of a machine to connect
_links: list[socket.socket] = []  # this process's connection to the monitor, at most one


def watched(mpi: Any) -> None:
    """Connect to a monitor that reports if this process is killed; all ranks of MPI call it."""
    if sys.platform != "linux" or _links:
        return
    world = mpi.COMM_WORLD
    machine = world.Split_type(mpi.COMM_TYPE_SHARED, world.Get_rank())
    address = _started(machine.Get_size()) if machine.Get_rank() == 0 else None
    link = socket.socket(socket.AF_UNIX)
    link.connect(machine.bcast(address))
    machine.Free()
    descriptors = [int(number) for number in [os.environ.get("PMI_FD", "")] if number.isdigit()]
    socket.send_fds(link, [HELLO.pack(world.Get_rank(), os.getpid())], descriptors)
    _links.append(link)
    atexit.register(farewell)


def _started(ranks: int) -> bytes:
    """Start the monitor process, and return the address at which it listens."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an unused abstract name
        listener.listen(ranks)
        command = [sys.executable, "-I", "-S", __file__, str(listener.fileno()), str(ranks)]
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        ).returncode = 0  # so that no warning says it still runs: nobody waits for it
        return bytes(listener.getsockname())


def farewell(word: bytes = FAREWELL) -> None:
    """Tell the monitor that this process ends normally, or that it FAILED and ends all others."""
    for link in _links:
        try:
            link.sendall(word)
        except OSError:
            continue


def main(listener: socket.socket, ranks: int) -> None:
    """Run the monitor of this number of ranks until one is killed or all have ended."""
    names, links, waiting = dict[int, str](), dict[int, socket.socket](), epoll()
    listener.settimeout(SECONDS)
    for _ in range(ranks):
        link, _ = listener.accept()
        hello, _, _, _ = socket.recv_fds(link, HELLO.size, 1)
        rank, process = HELLO.unpack(hello)
        names[link.fileno()] = f"rank {rank} was killed: process {process}"
        links[link.fileno()] = link
        waiting.register(link.fileno(), EPOLLIN)
    while links:
        for number, _ in waiting.poll():  # in the order in which they ended
            word = links[number].recv(1)
            if not word:
                print(f"{names[number]} of {socket.gethostname()}", file=sys.stderr, flush=True)
            if word != FAREWELL:
                return
            waiting.unregister(number)
            del links[number]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
