"""A communicator of NumPy arrays for ranks that MPI starts: ``mpiexec -n 4 python program.py``.

Every exchange consists of messages between two ranks, and has a time limit: an error names the late
rank.
"""

import os
import sys
import time
import traceback
from typing import Any

import numpy as np

from ..errors import CommunicationError, ConfigError, DeviceError, printable
from .communicator import check_color
from .exchanges import MIXED, Exchanges, raw
from .sockets import contradiction, first_of

DATA, NUMBERS = range(2)  # message tags of arrays, and of ``_gather_rows``
PRINTED = 0.3  # seconds in which mpiexec can forward printed output before it ends all processes
SPINS = 200  # polls without a pause, if each rank has a core
NAP = 1e-4  # seconds of the first pause between polls
# Later pauses are this share of the time waited so far, at most this many seconds.  They are longer
# if ranks share cores: a waiting rank should leave its core to others.
LATER, SHARED = (0.05, 2e-3), (0.2, 2e-2)


class MpiCommunicator(Exchanges):
    """A communicator of MPI ranks, through mpi4py, that exchanges NumPy arrays.

    Elements of any dtype, including bfloat16, are sent as raw bytes.  Sums of 16-bit floats are
    computed in float32 and rounded once.  All sums are computed in the order of the ranks.  If a
    process ends with an error, its rank is printed, and all processes end immediately.  If a
    process is killed, mpiexec ends the others and names the process and its machine.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        None: all ranks.
    timeout : float
        Seconds that an exchange waits for another rank.
    checked : bool
        Whether ranks compare calls, shapes and dtypes before each exchange.  It costs one more
        message to every rank.

    Raises
    ------
    DeviceError
        mpi4py or an MPI library is not installed.
    ConfigError
        timeout is not positive; or RANK or WORLD_SIZE is set and contradicts mpiexec.
    CommunicationError
        In an exchange: another rank did not take part in time, or ranks made different calls.
    FrameworkError
        In an exchange: an array is not a NumPy array.
    """

    def __init__(self, comm: Any = None, *, timeout: float = 600.0, checked: bool = False) -> None:
        super().__init__(timeout, checked)
        self._mpi = load_mpi()
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        problem = contradiction(os.environ) if comm is None else ""
        own = self._mpi.Get_processor_name(), problem
        self._hosts, problems = zip(*self._comm.allgather(own), strict=True)
        if problem := next(filter(None, problems), ""):  # on all ranks, so that all of them end
            raise ConfigError(problem)
        world = self._mpi.COMM_WORLD.Get_size()
        local = int(first_of(os.environ, ("MPI_LOCALNRANKS",)) or world)
        self._cores = local <= (os.cpu_count() or 1)
        self._sent: list[tuple[Any, Any]] = []  # pending requests, and the arrays that they use
        if world > 1:
            _end_all_on_error(self._mpi)

    def split(self, color: int) -> "MpiCommunicator":
        """Return a communicator of the ranks that passed the same color, in their order."""
        check_color(color)
        self._agree("split()")
        comm = self._comm.Split(color, self.rank)
        return MpiCommunicator(comm, timeout=self.timeout, checked=self.checked)

    def _gather_rows(self, call: str, row: Any) -> Any:
        """Return a matrix with the NumPy row of each rank; rows have equal sizes and dtypes."""
        rows = np.empty((self.size, *row.shape), row.dtype)
        self._exchange(call, [row] * self.size, [*rows], NUMBERS)
        return rows

    def _post(self, x: Any, to: int) -> None:
        """Send a copy of an array without waiting."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        x = x.copy()
        self._sent.append((self._comm.Isend([raw(x), self._mpi.BYTE], to, DATA), x))

    def local_rank(self) -> int:
        """Return the index of this rank among the ranks of its machine."""
        return int(self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank).Get_rank())

    def _exchange(self, call: str, sends: list[Any], receives: list[Any], tag: int = DATA) -> None:
        """Send ``sends[r]`` to rank r and receive ``receives[r]`` from it; None: nothing."""
        byte, pending = self._mpi.BYTE, []
        for rank, array in enumerate(receives):
            if array is not None and rank != self.rank:
                request = self._comm.Irecv([raw(array), byte], rank, tag)
                pending.append((request, rank, array))
        for rank, array in enumerate(sends):
            if array is not None and rank != self.rank:
                request = self._comm.Isend([raw(array), byte], rank, tag)
                pending.append((request, rank, array))
            elif array is not None and receives[rank] is not None:
                receives[rank][...] = array
        self._wait(call, pending)

    def _wait(self, call: str, pending: list[tuple[Any, int, Any]]) -> None:
        """Wait until all messages have arrived; at the time limit raise, naming the late ranks."""
        start = time.monotonic()
        polls = 0 if self._cores else SPINS
        while pending:
            pending = [each for each in pending if not self._done(call, *each)]
            polls, waited = polls + 1, time.monotonic() - start
            if pending and waited > self.timeout:
                late = sorted({rank for _, rank, _ in pending})
                for request, _, array in pending:
                    request.Cancel()
                    self._sent.append((request, array))  # MPI may still write into the array
                hosts = dict.fromkeys(self._hosts[rank] for rank in late)
                names = f"{', '.join(map(str, late))} on {', '.join(hosts)}"
                problem = f"rank {self.rank}: {call} waited {self.timeout:g} s for rank {names}"
                cure = "its process may be busy or gone, or the network; see what it printed"
                raise CommunicationError(f"{problem}; {cure}", rank=late[0])
            if pending and polls > SPINS:
                share, most = LATER if self._cores else SHARED
                time.sleep(min(max(NAP, waited * share), most))

    def _done(self, call: str, request: Any, rank: int, array: Any) -> bool:
        """Return whether a message has arrived; raise if its size differs from the array's."""
        status = self._mpi.Status()
        try:
            done = request.Test(status)
            size = status.Get_count(self._mpi.BYTE) if done else array.nbytes
            source = status.Get_source()
        except self._mpi.Exception:  # the message is longer than the array
            done, size, source = True, "more", rank
        if done and source == rank and size != array.nbytes:
            cure = (
                MIXED if self.checked else "try MpiCommunicator(checked=True), which compares calls"
            )
            problem = f"{call}: rank {rank} sent {size} bytes, not the {array.nbytes} expected"
            raise CommunicationError(f"{problem}; {cure}", rank=rank)
        return bool(done)


def load_mpi() -> Any:
    """Return mpi4py's MPI; raise a DeviceError if mpi4py or MPI is missing."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        cure = 'pip install "unsloth-cupy[mpi]", and start programs with mpiexec'
        raise DeviceError(f"MpiCommunicator: MPI is not available ({error}); {cure}") from error
    return MPI


def _end_all_on_error(mpi: Any) -> None:
    """Install an exception hook that prints the rank and the error, and ends all processes."""
    before = sys.excepthook
    if getattr(before, "ends_all", False):
        return

    def hook(*error: Any) -> None:
        rank, lines = mpi.COMM_WORLD.Get_rank(), traceback.format_exception(*error)
        try:  # one write, the last line first: another rank may end this process at any moment
            shown = f"{error[1]}\n" if error[2] is None else lines[-1] + "".join(lines)
            shown = printable(f"rank {rank} failed: {shown}")
            print(shown, file=sys.stderr, end="", flush=True)
            if before is not sys.__excepthook__:
                before(*error)
            time.sleep(PRINTED)
        finally:
            mpi.COMM_WORLD.Abort(1)

    hook.ends_all = True  # type: ignore[attr-defined]
    sys.excepthook = hook
