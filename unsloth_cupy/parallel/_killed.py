"""Which rank was killed: MPICH's mpiexec names a process alone, and ends all others at once.

Beside the ranks of a machine runs one more process, this file, which mpiexec does not end.  Every
rank is connected with it, and has lent it the connection by which mpiexec notices an end: so it
says whose connection ended without a farewell, and only then does mpiexec hear of it.
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

HELLO = struct.Struct("!II")  # the number of a rank and of its process
FAREWELL, FAILED = b".", b"!"
SECONDS = 60.0  # in which all ranks of a machine have called
_links: list[socket.socket] = []  # of this process, one at most


def watched(mpi: Any) -> None:
    """Let another process say so if this one is killed; all ranks of MPI call it."""
    if sys.platform != "linux" or _links:
        return
    world = mpi.COMM_WORLD
    here = world.Split_type(mpi.COMM_TYPE_SHARED, world.Get_rank())
    address = _started(here.Get_size()) if here.Get_rank() == 0 else None
    link = socket.socket(socket.AF_UNIX)
    link.connect(here.bcast(address))
    here.Free()
    lent = [int(number) for number in [os.environ.get("PMI_FD", "")] if number.isdigit()]
    socket.send_fds(link, [HELLO.pack(world.Get_rank(), os.getpid())], lent)
    _links.append(link)
    atexit.register(farewell)


def _started(ranks: int) -> bytes:
    """Start the other process, and return where it listens."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("")  # to a name that nobody has
        door.listen(ranks)
        command = [sys.executable, "-I", "-S", __file__, str(door.fileno()), str(ranks)]
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[door.fileno()],
            start_new_session=True,
        ).returncode = 0  # nobody waits for it
        return bytes(door.getsockname())


def farewell(word: bytes = FAREWELL) -> None:
    """Say that this process ends by itself, or that it FAILED and will end all others."""
    for link in _links:
        try:
            link.sendall(word)
        except OSError:
            continue


def main(door: socket.socket, ranks: int) -> None:
    """Listen until one of so many ranks is killed, or all are gone."""
    names, links, waiting = dict[int, str](), dict[int, socket.socket](), epoll()
    door.settimeout(SECONDS)
    for _ in range(ranks):
        link, _ = door.accept()
        hello, _, _, _ = socket.recv_fds(link, HELLO.size, 1)
        rank, process = HELLO.unpack(hello)
        names[link.fileno()] = f"rank {rank} was killed: process {process}"
        links[link.fileno()] = link
        waiting.register(link.fileno(), EPOLLIN)
    while links:
        for number, _ in waiting.poll():  # who ended first comes first
            word = links[number].recv(1)
            if not word:
                print(f"{names[number]} of {socket.gethostname()}", file=sys.stderr, flush=True)
            if word != FAREWELL:
                return
            waiting.unregister(number)
            del links[number]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
