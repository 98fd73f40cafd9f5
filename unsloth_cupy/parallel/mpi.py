"""Ranks that MPI starts, with arrays of NumPy: ``mpiexec -n 4 python program.py``.

Every exchange is made of messages between two ranks, waited for with a limit of time, so that the
rank that did not come is known by its number.
"""

import sys
import time
from typing import Any

import numpy as np

from ..core.arrays import framework_of, packed
from ..errors import CommunicationError, ConfigError, DeviceError, FrameworkError
from .communicator import (
    Reduction,
    along,
    check_axis,
    check_color,
    check_rank,
    check_reduction,
    part,
    sum_dtype,
)

DATA, CALL, SIZE = range(3)  # tags of messages
CALL_BYTES = 512  # of the text of a call, which a checked communicator sends first
SPINS, NAP = 200, 1e-4  # looks without a pause, then one each 0.1 ms


class MpiCommunicator:
    """Ranks of MPI, through mpi4py; arrays are NumPy's.

    Elements travel as the bytes that they are, bfloat16 too; sums of 16-bit floats are made in
    float32 and rounded once, and all sums in the order of the ranks.  A process that ends with an
    error ends all of them, at once.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        All ranks where absent.
    timeout : float
        Seconds that an exchange waits for another rank.
    checked : bool
        Compare calls, shapes and dtypes among ranks before each exchange, which takes a message
        more to every rank.

    Raises
    ------
    DeviceError
        mpi4py, or a library of MPI, is not there.
    ConfigError
        timeout is not positive.
    CommunicationError
        From an exchange: a rank did not come in time, or ranks do not agree about the call.
    FrameworkError
        From an exchange: an array is not NumPy's.
    """

    def __init__(self, comm: Any = None, *, timeout: float = 600.0, checked: bool = False) -> None:
        if not timeout > 0:
            raise ConfigError(f"MpiCommunicator(timeout={timeout!r}) is not positive; pass seconds")
        self._mpi = _mpi()
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.timeout, self.checked = timeout, checked
        self._calls = 0
        self._sent: list[tuple[Any, Any]] = []  # requests of messages under way, and their arrays
        if self._mpi.COMM_WORLD.Get_size() > 1:
            _end_all_on_error(self._mpi)

    def split(self, color: int) -> "MpiCommunicator":
        """Return a communicator of the ranks that passed the same color, in their order."""
        check_color(color)
        self._agree("split()")
        comm = self._comm.Split(color, self.rank)
        return MpiCommunicator(comm, timeout=self.timeout, checked=self.checked)

    def all_reduce(self, x: Any, op: Reduction = "sum") -> Any:
        """Return the sum, or the largest, of the arrays of all ranks, element by element."""
        check_reduction(op)
        x = self._own("all_reduce", x)
        self._agree(f"all_reduce(x{x.shape} {x.dtype}, op={op!r})")
        whole = np.empty(x.size, x.dtype)
        mine = self._reduced("all_reduce", x.reshape(-1), 0, op)
        parts = [whole[part(x.size, self, rank)] for rank in range(self.size)]
        self._swap("all_reduce", [mine] * self.size, parts)
        return whole.reshape(x.shape)

    def all_gather(self, x: Any, axis: int = 0) -> Any:
        """Return the arrays of all ranks end to end; they may differ in size along the axis."""
        axis = check_axis("all_gather", x, axis)
        x = self._own("all_gather", x)
        others = (*x.shape[:axis], "any", *x.shape[axis + 1 :])
        self._agree(f"all_gather(x{others} {x.dtype}, axis={axis})")
        sizes = np.empty((self.size, 1), np.int64)
        length = np.array([x.shape[axis]])
        self._swap("all_gather", [length] * self.size, [*sizes], SIZE)
        shape = x.shape
        parts = [
            np.empty((*shape[:axis], int(n), *shape[axis + 1 :]), x.dtype) for n in sizes[:, 0]
        ]
        self._swap("all_gather", [x] * self.size, parts)
        return np.concatenate(parts, axis)

    def reduce_scatter(self, x: Any, axis: int = 0) -> Any:
        """Return this rank's part of the sum over ranks, divided along an axis as by ``part``."""
        axis = check_axis("reduce_scatter", x, axis)
        x = self._own("reduce_scatter", x)
        self._agree(f"reduce_scatter(x{x.shape} {x.dtype}, axis={axis})")
        return self._reduced("reduce_scatter", x, axis, "sum")

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Return the array of rank root; the others pass one of its shape and dtype."""
        check_rank(self, "broadcast", root)
        x = self._own("broadcast", x)
        self._agree(f"broadcast(x{x.shape} {x.dtype}, root={root})")
        if self.rank == root:
            self._swap("broadcast", [x] * self.size, [None] * self.size)
            return x.copy()
        out = np.empty_like(x)
        self._swap("broadcast", [None] * self.size, self._only(root, out))
        return out

    def send(self, x: Any, to: int) -> None:
        """Send a copy of an array to another rank, without waiting for it to be received."""
        check_rank(self, "send", to, other=True)
        x = self._own("send", x).copy()
        self._post(x, to, f"send(x{x.shape} {x.dtype})")

    def receive(self, out: Any, source: int) -> Any:
        """Write the array that another rank sends to ``out``, and return it."""
        check_rank(self, "receive", source, other=True)
        if not (isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable):
            cure = "pass numpy.empty(shape, dtype)"
            raise ConfigError(f"receive: out is not a writeable array in C order; {cure}")
        self._expect(out, source)
        self._swap("receive", [None] * self.size, self._only(source, out))
        return out

    def exchange(self, x: Any, to: int, out: Any, source: int) -> Any:
        """Send x to one rank and receive ``out`` from another, both at once."""
        check_rank(self, "exchange", to)
        check_rank(self, "exchange", source)
        if to == self.rank == source:
            out[...] = x
            return out
        self.send(x, to)
        return self.receive(out, source)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._agree("barrier()")
        nothing = np.empty((self.size, 1), np.uint8)
        self._swap("barrier", [np.zeros(1, np.uint8)] * self.size, [*nothing])

    def _own(self, call: str, x: Any) -> Any:
        if isinstance(x, np.generic):
            x = np.asarray(x)
        if not isinstance(x, np.ndarray):
            library = framework_of(x, f"{call}: x")
            raise FrameworkError(f"{call}: x is not an array of NumPy but of {library}; copy it")
        return packed(x)

    def _only(self, rank: int, out: Any) -> list[Any]:
        return [out if each == rank else None for each in range(self.size)]

    def _reduced(self, call: str, x: Any, axis: int, op: Reduction) -> Any:
        """Return this rank's part of a reduction, made in the order of the ranks."""
        length = x.shape[axis]
        given = [packed(x[along(axis, part(length, self, to))]) for to in range(self.size)]
        parts = [np.empty_like(given[self.rank]) for _ in range(self.size)]
        self._swap(call, given, parts)
        total = parts[0].astype(sum_dtype(x.dtype))
        join = np.add if op == "sum" else np.maximum
        for other in parts[1:]:
            join(total, other, out=total)
        with np.errstate(over="ignore"):
            return total.astype(x.dtype, copy=False)

    def _agree(self, call: str) -> None:
        """Compare a call with those of all ranks, where that is asked for."""
        if not self.checked:
            return
        self._calls += 1
        texts = np.empty((self.size, CALL_BYTES), np.uint8)
        self._swap(call.partition("(")[0], [_bytes(call)] * self.size, [*texts], CALL)
        calls = [_text(row) for row in texts]
        if len({*calls}) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            odd = min(range(self.size), key=lambda rank: calls.count(calls[rank]))
            problem = f"call {self._calls} is not the same on all ranks: {listed}"
            raise CommunicationError(f"{problem}; let all make one call", rank=odd)

    def _expect(self, out: Any, source: int) -> None:
        """Compare what is to be received with what is sent, where that is asked for."""
        if not self.checked:
            return
        text, wanted = np.empty(CALL_BYTES, np.uint8), f"send(x{out.shape} {out.dtype})"
        self._swap("receive", [None] * self.size, self._only(source, text), CALL)
        if (call := _text(text)) != wanted:
            problem = f"receive: rank {source} called {call}, which is not {wanted}"
            raise CommunicationError(f"{problem}; let both name one array", rank=source)

    def _post(self, x: Any, to: int, call: str) -> None:
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        for tag, array in ((CALL, _bytes(call)), (DATA, x))[not self.checked :]:
            self._sent.append((self._comm.Isend([_raw(array), self._mpi.BYTE], to, tag), array))

    def _swap(self, call: str, given: list[Any], taken: list[Any], tag: int = DATA) -> None:
        """Send ``given[r]`` to rank r and write what it sends to ``taken[r]``; None is nothing."""
        byte, under_way = self._mpi.BYTE, []
        for rank, array in enumerate(taken):
            if array is not None and rank != self.rank:
                request = self._comm.Irecv([_raw(array), byte], rank, tag)
                under_way.append((request, rank, array))
        for rank, array in enumerate(given):
            if array is not None and rank != self.rank:
                request = self._comm.Isend([_raw(array), byte], rank, tag)
                under_way.append((request, rank, array))
            elif array is not None and taken[rank] is not None:
                taken[rank][...] = array
        self._wait(call, under_way)

    def _wait(self, call: str, under_way: list[tuple[Any, int, Any]]) -> None:
        """Wait until all messages have arrived; raise for the ranks whose messages have not."""
        limit, looks = time.monotonic() + self.timeout, 0
        while under_way:
            under_way = [each for each in under_way if not self._done(call, *each)]
            looks += 1
            if under_way and time.monotonic() > limit:
                late = sorted({rank for _, rank, _ in under_way})
                for request, _, array in under_way:
                    request.Cancel()
                    self._sent.append((request, array))  # MPI may still write there
                names = ", ".join(map(str, late))
                problem = f"rank {self.rank}: {call} waited {self.timeout:g} s for rank {names}"
                raise CommunicationError(f"{problem}; see what it printed", rank=late[0])
            if looks > SPINS:
                time.sleep(NAP)

    def _done(self, call: str, request: Any, rank: int, array: Any) -> bool:
        """Say whether a message has arrived; raise where it is not of the size of the array."""
        status = self._mpi.Status()
        try:
            done = request.Test(status)
            got = status.Get_count(self._mpi.BYTE) if done else array.nbytes
            source = status.Get_source()
        except self._mpi.Exception:  # it is too long
            done, got, source = True, "more", rank
        if done and source == rank and got != array.nbytes:
            cure = "try MpiCommunicator(checked=True), which compares calls"
            problem = f"{call}: rank {rank} sent {got} bytes where {array.nbytes} are asked for"
            raise CommunicationError(f"{problem}; {cure}", rank=rank)
        return bool(done)


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        cure = 'pip install "unsloth-cupy[mpi]", and start programs with mpiexec'
        raise DeviceError(f"MpiCommunicator: MPI is not there ({error}); {cure}") from error
    return MPI


def _end_all_on_error(mpi: Any) -> None:
    """Let an error that nobody catches end the processes of all ranks, named by its rank."""
    before = sys.excepthook
    if getattr(before, "ends_all", False):
        return

    def hook(*error: Any) -> None:
        try:
            print(f"rank {mpi.COMM_WORLD.Get_rank()} failed:", file=sys.stderr)
            before(*error)
            sys.stderr.flush()
        finally:
            mpi.COMM_WORLD.Abort(1)

    hook.ends_all = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _raw(array: Any) -> Any:
    """Return the bytes of an array in C order, without a copy."""
    return array.reshape(-1).view(np.uint8)


def _bytes(call: str) -> Any:
    return np.frombuffer(call.encode().ljust(CALL_BYTES)[:CALL_BYTES], np.uint8).copy()


def _text(row: Any) -> str:
    return bytes(row).decode(errors="replace").strip()
