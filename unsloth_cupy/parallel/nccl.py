"""A communicator of CuPy arrays for ranks with a GPU each, through NCCL on the current stream.

MPI or sockets connect the hosts, which set up NCCL, compare calls if ``checked``, exchange sizes,
and detect a rank that fails while a GPU waits for it.
"""

import os
from contextlib import suppress
from typing import Any

import numpy as np

from ..core.arrays import contiguous
from ..core.gpu import count, cupy, is_cupys
from ..errors import CommunicationError, DeviceError, FrameworkError
from ._watchdog import Watchdog
from .communicator import check_color
from .exchanges import Exchanges
from .mpi import MpiCommunicator
from .sockets import SocketCommunicator, first_of

# The index that torchrun, mpiexec, mpirun or srun sets; an inner launcher comes first.
LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
Host = MpiCommunicator | SocketCommunicator


def local_rank(host: Host) -> int:
    """Return the index of this rank on its machine, from the environment or from ``host``."""
    local = first_of(os.environ, LOCAL_RANK)
    return host.local_rank() if local is None else int(local)


class NcclCommunicator(Exchanges):
    """A communicator of NCCL ranks, each with the GPU that is current at creation.

    Exchanges are launched on the current stream, and the host does not wait for them.  Sums are
    computed in the order of the ranks, so that reruns have equal bits.  If a rank fails, or does
    not take part within ``timeout`` seconds, this process ends, because its GPU would wait without
    a limit.  The message names a failed rank, and with ``checked`` and a ``host`` also a late rank.

    Parameters
    ----------
    rank, size : int
    unique_id : bytes
        The id that ``cupy.cuda.nccl.get_unique_id()`` returned in one rank.
    timeout : float
        Seconds that an exchange waits for another rank.
    checked : bool
        Whether ranks compare calls, shapes and dtypes before each exchange; hosts then wait.
    host : MpiCommunicator or SocketCommunicator, optional
        A communicator of the same ranks, which exchanges NumPy arrays.  Without it, NumPy arrays
        raise, and ``all_gather``, ``barrier`` and ``checked`` exchange their numbers through the
        GPU: the host waits for them, and a CUDA graph cannot capture them.

    Raises
    ------
    DeviceError
        NCCL is not available.
    CommunicationError
        NCCL reports an error; or ranks made different calls.
    FrameworkError
        In an exchange: an array is not a CuPy array, nor with a host a NumPy array.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        unique_id: bytes,
        *,
        timeout: float = 600.0,
        checked: bool = False,
        host: Host | None = None,
    ) -> None:
        super().__init__(timeout, checked)
        self._nccl, self.rank, self.size, self.host = load_nccl(), rank, size, host
        self._comm = self._nccl.NcclCommunicator(size, unique_id, rank)
        self._watchdog = Watchdog(rank, timeout, self._comm, checked and host is not None)
        if isinstance(host, SocketCommunicator):
            host.peers.on_failure = self._watchdog.failed

    @classmethod
    def from_mpi(
        cls, comm: Any = None, *, timeout: float = 600.0, checked: bool = False
    ) -> "NcclCommunicator":
        """Return a communicator of MPI's ranks, each with a GPU of its machine."""
        return cls.over(MpiCommunicator(comm, timeout=timeout), checked=checked)

    @classmethod
    def from_environment(
        cls, *, timeout: float = 600.0, checked: bool = False
    ) -> "NcclCommunicator":
        """Return a communicator of the ranks that torchrun, srun or a shell started.

        The launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        """
        return cls.over(SocketCommunicator.from_environment(timeout=timeout), checked=checked)

    @classmethod
    def over(cls, host: Host, *, checked: bool = False) -> "NcclCommunicator":
        """Return a communicator of the ranks of ``host``, each with a GPU of its machine."""
        # all ranks take part, also without a GPU, and all raise: none waits for another one
        with suppress(ImportError):
            cupy()
        local, gpus = local_rank(host), count()
        without = np.flatnonzero(host.all_gather(np.array([gpus])) == 0)
        if without.size:
            cure = "check nvidia-smi, or use --device cpu or MpiCommunicator"
            where = f" in rank {', '.join(map(str, without))}" * (without.size < host.size)
            raise DeviceError(f"NcclCommunicator: CuPy sees no GPU{where}; {cure}")
        cupy().cuda.Device(local % gpus).use()
        return cls._of(host, host.timeout, checked)

    @classmethod
    def _of(cls, host: Host, timeout: float, checked: bool) -> "NcclCommunicator":
        """Return a communicator of the ranks of ``host``, each with its current GPU."""
        own_id = load_nccl().get_unique_id() if host.rank == 0 else bytes(128)
        unique_id = host.broadcast(np.frombuffer(own_id, np.uint8)).tobytes()
        return cls(host.rank, host.size, unique_id, timeout=timeout, checked=checked, host=host)

    def split(self, color: int) -> "NcclCommunicator":
        """Return a communicator of the ranks that passed the same color, in their order."""
        check_color(color)
        self._agree("split()")
        if self.host is not None:
            return self._of(self.host.split(color), self.timeout, self.checked)
        colors = self._gather_rows("split", np.array([color]))[:, 0]
        members = [rank for rank in range(self.size) if colors[rank] == color]
        own_id = self._nccl.get_unique_id() if members[0] == self.rank else bytes(128)
        unique_id = self._gather_rows("split", np.frombuffer(own_id, np.uint8))[
            members[0]
        ].tobytes()
        rank = members.index(self.rank)
        return NcclCommunicator(
            rank, len(members), unique_id, timeout=self.timeout, checked=self.checked
        )

    def launched(self, call: str) -> None:
        """Watch a CUDA graph with exchanges that was launched on the current stream."""
        self._watchdog.watch(call)

    def _exchange(self, call: str, sends: list[Any], receives: list[Any]) -> None:
        """Send and receive as in ``Exchanges``; NumPy arrays go through the host."""
        if self.host is not None and not all(map(_is_on_gpu, (*sends, *receives))):
            self.host._exchange(call, sends, receives)
            return
        stream = cupy().cuda.get_current_stream().ptr
        kind = self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        try:
            for rank, array in enumerate(sends):
                if array is not None and array.nbytes and rank != self.rank:
                    self._comm.send(array.data.ptr, array.nbytes, kind, rank, stream)
            for rank, array in enumerate(receives):
                if array is not None and array.nbytes and rank != self.rank:
                    self._comm.recv(array.data.ptr, array.nbytes, kind, rank, stream)
            self._nccl.groupEnd()
        except self._nccl.NcclError as error:
            problem = f"rank {self.rank}: {call}: NCCL reports {error}"
            cure = "set NCCL_DEBUG=WARN for details"
            raise CommunicationError(f"{problem}; {cure}", rank=self.rank) from error
        if sends[self.rank] is not None and receives[self.rank] is not None:
            receives[self.rank][...] = sends[self.rank]
        self._watchdog.watch(call)

    def _gather_rows(self, call: str, row: Any) -> Any:
        """Return a matrix with the row of each rank; hosts exchange them if there are hosts."""
        if self.host is not None:
            return self.host._gather_rows(call, row)
        module = cupy()
        row = module.asarray(row)
        rows = module.empty((self.size, *row.shape), row.dtype)
        self._exchange(call, [row] * self.size, [rows[rank] for rank in range(self.size)])
        return rows.get()

    def _post(self, x: Any, to: int) -> None:
        """Send an array; a NumPy array goes through the host."""
        if self.host is not None and not _is_on_gpu(x):
            self.host._post(x, to)
            return
        self._exchange("send", self._only(to, x), [None] * self.size)

    def _own(self, call: str, x: Any) -> Any:
        """Return x in C order; raise unless it is a CuPy array, or with a host a NumPy array."""
        kind: Any = type(x)
        if not is_cupys(kind):
            if self.host is not None:
                return self.host._own(call, x)
            cure = "copy it to a GPU with cupy.asarray"
            raise FrameworkError(f"{call}: x is {kind.__name__}, not an array of CuPy; {cure}")
        return contiguous(x)

    def _placed(self, row: Any, like: Any) -> Any:
        """Return a NumPy row on the device of ``like``."""
        return cupy().asarray(row) if _is_on_gpu(like) else row


def _is_on_gpu(array: Any) -> bool:
    """Return whether an array is a CuPy array or None, so that NCCL can send it."""
    kind: Any = type(array)
    return array is None or is_cupys(kind)


def load_nccl() -> Any:
    """Return CuPy's NCCL module; raise a DeviceError if CuPy or NCCL is missing."""
    try:
        from_cupy = cupy().cuda.nccl
    except ImportError as error:
        cure = 'pip install "unsloth-cupy[cuda12]"'
        raise DeviceError(f"NcclCommunicator: CuPy is not installed ({error}); {cure}") from error
    if not from_cupy.available:
        cure = 'pip install "nvidia-nccl-cu12", or -cu13, as CuPy is'
        raise DeviceError(f"NcclCommunicator: CuPy does not find NCCL; {cure}")
    return from_cupy
