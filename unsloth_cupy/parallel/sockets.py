"""A communicator of NumPy arrays over TCP, for ranks that torchrun, SLURM or a shell starts.

    RANK=1 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500 python program.py

Rank 0 listens at that address.  The other ranks send it the addresses at which they listen, and
rank 0 sends all addresses to every rank.  Then every pair of ranks connects.  Each connection
begins with a proof of both ends that they know a secret key.
"""

import hashlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.call import is_integer
from ..errors import CommunicationError, ConfigError
from ._authkey import is_secret
from ._meeting import RUN, meet
from ._peers import Peers
from .communicator import check_color
from .exchanges import MIXED, Exchanges, raw

# The variables in which launchers set the rank and the number of ranks.  torchrun, a program of the
# user and mpiexec may run inside of srun, so srun's variables come last.
LAUNCHERS = {
    "torchrun or a shell": ("RANK", "WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS"),
}
RANKS, SIZES = zip(*LAUNCHERS.values(), strict=True)
PLACE = ("MASTER_ADDR", "MASTER_PORT")
NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_LAUNCH_NODE_IPADDR")
PORTS = range(20000, 32000)  # below the ephemeral ports of operating systems
# Steps of a job differ in their ports, and this factor, which has no common divisor with the number
# of ports, places them far from the ports of the next jobs.
STEP = 7417
SCRIPTS = 0xFFFF_FFF0  # numbers of steps from here on are batch scripts and interactive shells
LOOPBACK = "127.0.0.1"
NUMBER = re.compile("[0-9]{1,18}")  # a rank, a port or a job number
BRACKETS, RANGE = re.compile(r"\[([^][]*)\]"), re.compile("[0-9]+-[0-9]+")


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
    run : str
        Identity of the run, at most 128 bytes; ranks with different values do not connect.

    Raises
    ------
    ConfigError
        rank is not below size, or timeout is not positive.
    CommunicationError
        Another rank did not take part in time, has another key, or has ended; two processes have
        the same rank, or ranks have different sizes; or in an exchange, ranks made different calls.
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
        run: str = "",
    ) -> None:
        super().__init__(timeout, checked)
        if not (is_integer(rank) and is_integer(size) and rank < size < 2**16):
            problem = f"SocketCommunicator(rank={rank!r}, size={size!r}) is not a rank"
            raise ConfigError(f"{problem}; pass one in 0 .. size - 1")
        host: Any = address
        if not isinstance(host, str) or not is_integer(port) or port >= 2**16:
            problem = f"SocketCommunicator(address={address!r}, port={port!r})"
            raise ConfigError(f"{problem}: pass a name or an address, and a port below 65536")
        name: Any = run
        if not isinstance(name, str) or len(os.fsencode(name)) > RUN or "\0" in name:
            problem = f"SocketCommunicator(run={run!r:.200}) is not the identity of a run"
            raise ConfigError(f"{problem}; pass a text of at most {RUN} bytes")
        self.rank, self.size = rank, size
        self.peers = Peers(rank)
        try:
            if size > 1:
                meet(self.peers, size, address, port, timeout, run)
        except BaseException as error:
            self.peers.abandon(error)
            raise
        self.peers.start()
        self._members, self._group, self._splits = list(range(size)), "", 0

    @classmethod
    def from_environment(
        cls, *, timeout: float = 600.0, checked: bool = False
    ) -> "SocketCommunicator":
        """Return a communicator of the ranks that torchrun, srun or a shell started.

        The inner launcher counts: under ``srun torchrun``, recognized by TORCHELASTIC_RUN_ID, or if
        a program under srun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and WORLD_SIZE is
        not the number of tasks of srun, the variables of Slurm are ignored.

        Raises
        ------
        ConfigError
            RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is missing or invalid, and no variable of
            Slurm replaces it; or the variables of two launchers contradict each other.
        """
        place = rendezvous(os.environ)
        return cls(*place, timeout=timeout, checked=checked, run=run_of(os.environ))

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
            what = "has ended"
            if member not in self.peers.gone:
                what = f"did not come within {self.timeout:g} s: {self.peers.silence(member)}; its"
                what += " process may be busy or gone, or the network"
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
        raw(array)[...] = data

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
    """Return rank, size, and the address and port of rank 0, from the launcher's variables.

    torchrun itself listens at MASTER_PORT, so ranks use the next port.  With srun alone, rank 0 is
    on the first node of the step, and the numbers of the job and of the step determine the port.
    If the launcher reports that all ranks are on one machine, they connect on loopback.
    """
    if problem := contradiction(environment):
        raise ConfigError(problem)
    rank, size = (first_of(environment, names) for names in (RANKS, SIZES))
    address, port = map(environment.get, PLACE)
    if address is None and "SLURM_PROCID" in environment:
        nodes = (environment.get(name, "") for name in NODES)
        address = first_host(next(filter(None, nodes), "")) or None
    local = "LOCAL_WORLD_SIZE" if "RANK" in environment else "SLURM_STEP_TASKS_PER_NODE"
    if address is not None and size is not None and environment.get(local) == size:
        address = LOOPBACK
    job = first_of(environment, ("SLURM_JOB_ID",))
    if port is None and job is not None:
        number = int(job) + STEP * int(step_of(environment) or 0)
        port = str(PORTS.start + number % len(PORTS))
    if None in (rank, size) or address is None or not NUMBER.fullmatch(port or ""):
        variables = {name: environment.get(name) for name in (*RANKS, *SIZES)}
        listed = ", ".join(f"{n}={v}" for n, v in variables.items() if v is not None)
        problem = f"from_environment: {listed} MASTER_ADDR={address} MASTER_PORT={port} is not"
        cure = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does"
        if first_of(environment, RANKS[1:3]) is not None:
            cure = "under mpiexec, use MpiCommunicator(), or set MASTER_ADDR and MASTER_PORT"
        raise ConfigError(f"{problem} enough to connect ranks; {cure}")
    port_is_taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(rank or 0), int(size or 0), address, int(port or 0) + port_is_taken


def contradiction(environment: Mapping[str, str]) -> str:
    """Return how RANK or WORLD_SIZE contradicts the variable of another launcher; "" if neither.

    An inner launcher may start several processes in each task of an outer one.  Thus nothing is
    compared under torchrun, and with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only if both
    launchers started the same number of processes.  In a batch script, the task is always 0.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return ""
    (inner, own), *others = LAUNCHERS.items()
    is_whole = all(environment.get(name) for name in (*own, *PLACE))
    for outer, names in others:
        values = {name: first_of(environment, (name,)) for name in (*own, *names)}
        is_script = values[names[0]] == "0" and outer == "srun" and step_of(environment) is None
        if is_whole and (is_script or values[own[1]] != values[names[1]]):
            continue
        for name, other in zip(own, names, strict=True):
            if None not in (values[name], values[other]) and values[name] != values[other]:
                problem = f"{name}={values[name]} of {inner} and {other}={values[other]} of {outer}"
                cure = f"unset {', '.join(own)}, or start ranks with one launcher"
                return f"{problem} contradict each other; {cure}"
    return ""


def run_of(environment: Mapping[str, str]) -> str:
    """Return the identity of a run: its launcher, job, step and attempt; "" for another launcher.

    A run id of torchrun that serves as the key is replaced by a digest.  Each agent of torchrun has
    its own number of restarts, in which changes of the nodes do not count: with several agents, the
    attempt is not part of the identity.
    """
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        if is_secret(run) or not re.fullmatch("[A-Za-z0-9_.:-]{1,40}", run):
            run = hashlib.sha256(os.fsencode(run)).hexdigest()[:8]
        attempt = first_of(environment, ("TORCHELASTIC_RESTART_COUNT",)) or 0
        is_alone = environment.get("GROUP_WORLD_SIZE", "1") == "1"
        return f"torchrun {run}, attempt {attempt}" if is_alone else f"torchrun {run}"
    job, step = first_of(environment, ("SLURM_JOB_ID",)), step_of(environment)
    rank, size = (first_of(environment, names) for names in (RANKS, SIZES))
    own = tuple(map(environment.get, LAUNCHERS["srun"]))
    if job is None or step is None or own != (rank, size):
        return ""
    attempt = first_of(environment, ("SLURM_RESTART_COUNT",)) or 0
    return f"Slurm job {job}, step {step}, attempt {attempt}"


def step_of(environment: Mapping[str, str]) -> str | None:
    """Return the number of the step that srun started; None in a batch script or a shell."""
    step = first_of(environment, ("SLURM_STEP_ID",))
    return step if step is not None and int(step) < SCRIPTS else None


def first_host(nodes: str) -> str:
    """Return the first host in a list of Slurm: rack0node07 for rack[0-1]node[07-09,12],gpu1."""
    count = 1
    while count:  # inner brackets before outer ones
        nodes, count = BRACKETS.subn(first_item, nodes)
    return nodes.partition(",")[0].strip()


def first_item(brackets: re.Match[str]) -> str:
    """Return the first item of a list in brackets; of a range, its first number."""
    item = brackets[1].partition(",")[0].strip()
    return item.partition("-")[0] if RANGE.fullmatch(item) else item


def first_of(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the first of these environment variables that is a number, or None."""
    values = (environment.get(name, "") for name in names)
    return next((value for value in values if NUMBER.fullmatch(value)), None)
