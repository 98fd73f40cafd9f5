"""A communicator of NumPy arrays over TCP, for ranks that torchrun, SLURM or a shell starts.

    RANK=1 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500 python program.py

Rank 0 listens at that address.  The other ranks send it the addresses at which they listen, and
rank 0 sends all addresses to every rank.  Then every pair of ranks connects.  Each connection
begins with a proof of both ends that they know a secret key.
"""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.call import is_integer
from ..errors import CommunicationError, ConfigError
from ._meeting import meet
from ._peers import Peers
from .communicator import check_color
from .exchanges import MIXED, Exchanges, raw

NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_LAUNCH_NODE_IPADDR")
PORTS = range(20000, 32000)  # below the ephemeral ports of operating systems
LOOPBACK = "127.0.0.1"
NUMBER = re.compile("[0-9]{1,18}")  # a rank, a port or a job number
RANK, SIZE = ("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")


class SocketCommunicator(Exchanges):
    """A communicator of ranks that are connected by TCP, and exchange NumPy arrays.

    If a process ends with an error or is killed, or a connection breaks, all processes end.  Ranks
    authenticate each other by a key: the value of UNSLOTH_CUPY_AUTHKEY; without it, the random run
    id of ``torchrun --standalone``; otherwise the content of ``~/.config/unsloth_cupy/authkey``, a
    file that the first rank creates and only the user can read.  Messages are not encrypted.

    Parameters
    ----------
    rank, size : int
    address : str
        Address or name of rank 0's machine; rank 0 listens only there.
    port : int
        A free port of that host.
    timeout : float
        Seconds that an exchange, or connecting at the start, waits for another rank.
    checked : bool
        Whether ranks compare calls, shapes and dtypes before each exchange.

    Raises
    ------
    ConfigError
        rank is not below size, or timeout is not positive.
    CommunicationError
        Another rank did not take part in time, has another key, or has ended; or in an exchange,
        ranks made different calls.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str = "127.0.0.1",
        port: int = 29500,
        *,
        timeout: float = 600.0,
        checked: bool = False,
    ) -> None:
        super().__init__(timeout, checked)
        if not (is_integer(rank) and is_integer(size) and rank < size < 2**16):
            problem = f"SocketCommunicator(rank={rank!r}, size={size!r}) is not a rank"
            raise ConfigError(f"{problem}; pass one in 0 .. size - 1")
        host: Any = address
        if not isinstance(host, str) or not is_integer(port) or port >= 2**16:
            problem = f"SocketCommunicator(address={address!r}, port={port!r})"
            raise ConfigError(f"{problem}: pass a name or an address, and a port below 65536")
        self.rank, self.size = rank, size
        self.peers = Peers(rank)
        try:
            if size > 1:
                meet(self.peers, size, address, port, timeout)
        except BaseException:
            self.peers.close()
            raise
        self.peers.start()
        self._members, self._group, self._splits = list(range(size)), "", 0

    @classmethod
    def from_environment(
        cls, *, timeout: float = 600.0, checked: bool = False
    ) -> "SocketCommunicator":
        """Return a communicator of the ranks that torchrun, srun or a shell started.

        Raises
        ------
        ConfigError
            RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is missing or invalid, and no variable of
            SLURM replaces it.
        """
        rank, size, address, port = rendezvous(os.environ)
        return cls(rank, size, address, port, timeout=timeout, checked=checked)

    def split(self, color: int) -> "SocketCommunicator":
        """Return a communicator of the ranks that passed the same color, in their order."""
        check_color(color)
        self._agree("split()")
        colors = self._gather_rows("split", np.array([color]))[:, 0]
        self._splits += 1
        comm = object.__new__(SocketCommunicator)
        Exchanges.__init__(comm, self.timeout, self.checked)
        local = [rank for rank in range(self.size) if colors[rank] == color]
        comm._members = [self._members[rank] for rank in local]
        comm.rank, comm.size, comm.peers = local.index(self.rank), len(local), self.peers
        comm._group, comm._splits = f"{self._group}/{self._splits}.{color}", 0
        return comm

    def _exchange(self, call: str, sends: list[Any], receives: list[Any], kind: str = "") -> None:
        """Send and receive as in ``Exchanges``; ``kind`` separates messages of ``_gather_rows``."""
        for rank, array in enumerate(sends):
            if array is not None and rank != self.rank:
                self.peers.send(self._members[rank], self._group + kind, raw(array))
            elif array is not None and receives[rank] is not None:
                receives[rank][...] = array
        limit = time.monotonic() + self.timeout
        for rank, array in enumerate(receives):
            if array is not None and rank != self.rank:
                self._take(call, rank, array, limit, kind)

    def _take(self, call: str, rank: int, array: Any, limit: float, kind: str) -> None:
        """Receive a message of a rank into an array; raise if the rank is late or has ended."""
        data = self.peers.take(self._members[rank], self._group + kind, limit)
        if data is None:
            own, member = self._members[self.rank], self._members[rank]
            ended = member in self.peers.gone
            what = "has ended" if ended else f"did not come within {self.timeout:g} s"
            failed, is_known = self.peers.failed(), False
            if failed is not None:  # probably the reason why the other rank ended
                member, what = failed[0], f"has failed: {failed[1]}"
                is_known = self.peers.is_reported(*failed)
            problem = f"rank {own}: {call}: rank {member} {what}"
            raise CommunicationError(f"{problem}; see what it printed", rank=member, told=is_known)
        if len(data) != array.nbytes:
            cure = MIXED if self.checked else "try checked=True, which compares calls"
            problem = f"{call}: rank {rank} sent {len(data)} bytes, not the {array.nbytes}"
            raise CommunicationError(f"{problem} expected; {cure}", rank=rank)
        raw(array)[...] = np.frombuffer(data, np.uint8)

    def _gather_rows(self, call: str, row: Any) -> Any:
        """Return a matrix with the NumPy row of each rank; rows have equal sizes and dtypes."""
        rows = np.empty((self.size, *row.shape), row.dtype)
        self._exchange(call, [row] * self.size, [*rows], ":rows")
        return rows

    def _post(self, x: Any, to: int) -> None:
        """Send an array; a thread of the other rank receives it immediately."""
        self.peers.send(self._members[to], self._group, raw(x))

    def local_rank(self) -> int:
        """Return this rank: all ranks are assumed to be on one machine."""
        return self.rank


def rendezvous(environment: Mapping[str, str]) -> tuple[int, int, str, int]:
    """Return rank, size, and the address and port of rank 0, from torchrun's or SLURM's variables.

    torchrun itself listens at MASTER_PORT, so ranks use the next port.  With srun alone, rank 0 is
    on the first node of the step, and the job number determines the port.  If the launcher reports
    that all ranks are on one machine, they connect on loopback.
    """
    rank, size = (first_of(environment, names) for names in (RANK, SIZE))
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address is None and "SLURM_PROCID" in environment:
        nodes = (environment.get(name, "") for name in NODES)
        address = first_host(next(filter(None, nodes), "")) or None
    local = "LOCAL_WORLD_SIZE" if "RANK" in environment else "SLURM_STEP_TASKS_PER_NODE"
    if address is not None and size is not None and environment.get(local) == size:
        address = LOOPBACK
    job = environment.get("SLURM_JOB_ID", "")
    if port is None and NUMBER.fullmatch(job):
        port = str(PORTS.start + int(job) % len(PORTS))
    if None in (rank, size) or address is None or not NUMBER.fullmatch(port or ""):
        variables = {name: environment.get(name) for name in (*RANK, *SIZE)}
        listed = ", ".join(f"{n}={v}" for n, v in variables.items() if v is not None)
        problem = f"from_environment: {listed} MASTER_ADDR={address} MASTER_PORT={port} is not"
        cure = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does"
        raise ConfigError(f"{problem} enough to connect ranks; {cure}")
    port_is_taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(rank or 0), int(size or 0), address, int(port or 0) + port_is_taken


def first_host(nodes: str) -> str:
    """Return the first host in a list in SLURM's notation: node07 for node[07-09,12],gpu1."""
    head, _, tail = nodes.partition("[")
    if not tail or "," in head:
        return head.partition(",")[0]
    inside, _, after = tail.partition("]")
    return head + re.split("[-,]", inside)[0] + after.partition(",")[0]


def first_of(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the first of these environment variables that is a number, or None."""
    values = (environment.get(name, "") for name in names)
    return next((value for value in values if NUMBER.fullmatch(value)), None)
