"""Collectives built from messages between two ranks, shared by the MPI, socket and NCCL classes.

    all_reduce              each rank sums its part of all arrays, in rank order; then all gather
    all_reduce, small x     each rank receives all arrays, and sums them in rank order

A subclass defines ``_exchange``, which moves bytes between ranks, and ``_gather_rows``, which
gathers a few numbers of all ranks on the hosts.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.arrays import contiguous, empty, framework_of
from ..core.call import is_number
from ..core.dtypes import KERNEL_DTYPES
from ..core.target import target_of
from ..errors import CommunicationError, ConfigError, FrameworkError
from ..ops.common.columns import sum_in_order
from ..placement import to_numpy
from .communicator import (
    Communicator,
    Reduction,
    along,
    check_axes,
    check_axis,
    check_counts,
    check_rank,
    check_reduction,
    part,
    sum_dtype,
)

MIXED = "pass checked=True on all ranks, or on none"  # the cure if only some ranks compare calls
# If the arrays of all ranks have at most this many bytes, each rank sums them all: one exchange
# instead of two, as latency outweighs the time to send more bytes.
AT_ONCE = 2**20
CALL_BYTES = 512  # size of a call's text, which a checked communicator sends first


class Exchanges(ABC):
    """Base class of communicators: collectives that use a subclass's exchange of bytes.

    Elements of any dtype, including bfloat16, are sent as raw bytes.  Sums of 16-bit floats are
    computed in float32 and rounded once.  All sums are computed in the order of the ranks.
    """

    rank: int
    size: int

    def __init__(self, timeout: float, checked: bool) -> None:
        if not is_number(timeout) or not 0 < timeout <= threading.TIMEOUT_MAX:
            kind = type(self).__name__
            raise ConfigError(f"{kind}(timeout={timeout!r}) is not positive; pass seconds")
        self.timeout, self.checked = timeout, checked
        self._calls = 0

    @abstractmethod
    def split(self, color: int) -> Communicator:
        """Return a communicator of the ranks that passed the same color, in their order."""

    @abstractmethod
    def _exchange(self, call: str, sends: list[Any], receives: list[Any]) -> None:
        """Send ``sends[r]`` to rank r and receive ``receives[r]`` from it; None: nothing."""

    @abstractmethod
    def _gather_rows(self, call: str, row: Any) -> Any:
        """Return a matrix with the NumPy row of each rank; rows have equal sizes and dtypes."""

    @abstractmethod
    def _post(self, x: Any, to: int) -> None:
        """Send an array, without waiting if possible."""

    def all_reduce(self, x: Any, op: Reduction = "sum") -> Any:
        """Return the elementwise sum or maximum of the arrays of all ranks."""
        check_reduction(op)
        x = self._own("all_reduce", x)
        self._agree(f"all_reduce(x{x.shape} {x.dtype}, op={op!r})")
        if x.nbytes * self.size <= AT_ONCE:
            return self._summed("all_reduce", [x] * self.size, op)
        whole = empty((x.size,), x.dtype, x)
        own_part = self._reduced("all_reduce", x.reshape(-1), 0, op)
        parts = [whole[part(x.size, self, rank)] for rank in range(self.size)]
        self._exchange("all_reduce", [own_part] * self.size, parts)
        return whole.reshape(x.shape)

    def all_gather(self, x: Any, axis: int = 0) -> Any:
        """Return the concatenated arrays of all ranks, which may differ in size along the axis."""
        axis = check_axis("all_gather", x, axis)
        x = self._own("all_gather", x)
        shape = x.shape
        others = (*shape[:axis], "any", *shape[axis + 1 :])
        self._agree(f"all_gather(x{others} {x.dtype}, axis={axis})")
        sizes = self._gather_rows("all_gather", np.array([shape[axis]]))[:, 0]
        if axis == 0:  # received in place, without a second copy of the whole
            whole, stops = empty((int(sizes.sum()), *shape[1:]), x.dtype, x), np.cumsum(sizes)
            slices = zip(stops - sizes, stops, strict=True)
            self._exchange("all_gather", [x] * self.size, [whole[a:b] for a, b in slices])
            return whole
        parts = [empty((*shape[:axis], int(n), *shape[axis + 1 :]), x.dtype, x) for n in sizes]
        self._exchange("all_gather", [x] * self.size, parts)
        return np.concatenate(parts, axis)

    def reduce_scatter(self, x: Any, axis: int = 0) -> Any:
        """Return this rank's part of the sum over ranks, divided along an axis as by ``part``."""
        axis = check_axis("reduce_scatter", x, axis)
        x = self._own("reduce_scatter", x)
        self._agree(f"reduce_scatter(x{x.shape} {x.dtype}, axis={axis})")
        return self._reduced("reduce_scatter", x, axis, "sum")

    def all_to_all(self, x: Any, divided: int, joined: int) -> Any:
        """Return this rank's part along one axis of the arrays of all ranks, joined along another.

        Arrays may differ in size along the axis that is joined; the other is divided by ``part``.
        """
        cut, end = check_axes("all_to_all", x, divided, joined)
        x = self._own("all_to_all", x)
        others = tuple("any" if axis == end else size for axis, size in enumerate(x.shape))
        self._agree(f"all_to_all(x{others} {x.dtype}, divided={cut}, joined={end})")
        sizes = self._gather_rows("all_to_all", np.array([x.shape[end]]))[:, 0]
        ranges = (part(x.shape[cut], self, rank) for rank in range(self.size))
        to_send = [contiguous(x[along(cut, where)]) for where in ranges]
        shapes = [[*to_send[self.rank].shape] for _ in range(self.size)]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[end] = int(size)
        parts = [empty(tuple(shape), x.dtype, x) for shape in shapes]
        self._exchange("all_to_all", to_send, parts)
        return np.concatenate(parts, end)

    def all_to_all_rows(self, x: Any, counts: Sequence[int]) -> tuple[Any, list[int]]:
        """Return the rows that all ranks send to this one, in rank order, and their counts.

        The first ``counts[0]`` rows of x go to rank 0, the next ``counts[1]`` to rank 1, and so on.
        """
        check_counts(self, x, counts)
        x = self._own("all_to_all_rows", x)
        self._agree(f"all_to_all_rows(x{('any', *x.shape[1:])} {x.dtype})")
        sent = np.array([*counts], np.int64)
        came = self._gather_rows("all_to_all_rows", sent)[:, self.rank]
        out = empty((int(came.sum()), *x.shape[1:]), x.dtype, x)
        self._exchange("all_to_all_rows", *(pieces(a, n) for a, n in ((x, sent), (out, came))))
        return out, came.tolist()

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Return the array of rank root; other ranks pass an array of equal shape and dtype."""
        check_rank(self, "broadcast", root)
        x = self._own("broadcast", x)
        self._agree(f"broadcast(x{x.shape} {x.dtype}, root={root})")
        if self.rank == root:
            self._exchange("broadcast", [x] * self.size, [None] * self.size)
            return x.copy()
        out = empty(x.shape, x.dtype, x)
        self._exchange("broadcast", [None] * self.size, self._only(root, out))
        return out

    def send(self, x: Any, to: int) -> None:
        """Send an array to another rank; NumPy arrays are copied, and the call does not wait."""
        check_rank(self, "send", to, other=True)
        x = self._own("send", x)
        if self.checked:
            self._post(self._placed(call_bytes(_sent(x)), x), to)
        self._post(x, to)

    def receive(self, out: Any, source: int) -> Any:
        """Receive an array from another rank into ``out``, and return it."""
        check_rank(self, "receive", source, other=True)
        return self._passed("receive", None, self.rank, out, source)

    def exchange(self, x: Any, to: int, out: Any, source: int) -> Any:
        """Send x to one rank and receive ``out`` from another at the same time."""
        check_rank(self, "exchange", to)
        check_rank(self, "exchange", source)
        return self._passed("exchange", self._own("exchange", x), to, out, source)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._agree("barrier()")
        self._gather_rows("barrier", np.zeros(1, np.uint8))

    def _own(self, call: str, x: Any) -> Any:
        """Return x as a NumPy array in C order; raise for arrays of other libraries."""
        if isinstance(x, np.generic):
            x = np.asarray(x)
        if not isinstance(x, np.ndarray):
            library = framework_of(x, f"{call}: x")
            cure = "copy it to NumPy"
            raise FrameworkError(f"{call}: x is an array of {library}, not of NumPy; {cure}")
        return contiguous(x)

    def _placed(self, row: Any, like: Any) -> Any:
        """Return a NumPy row on the device of ``like``."""
        return row

    def _only(self, rank: int, out: Any) -> list[Any]:
        """Return a list with ``out`` for one rank, and None for the others."""
        return [out if each == rank else None for each in range(self.size)]

    def _reduced(self, call: str, x: Any, axis: int, op: Reduction) -> Any:
        """Return this rank's part of a reduction, computed in the order of the ranks."""
        length = x.shape[axis]
        to_send = [contiguous(x[along(axis, part(length, self, to))]) for to in range(self.size)]
        return self._summed(call, to_send, op)

    def _summed(self, call: str, to_send: list[Any], op: Reduction) -> Any:
        """Return the reduction of the arrays that this rank receives, in the order of the ranks."""
        own = to_send[self.rank]
        rows = empty((self.size, *own.shape), own.dtype, own)
        parts = [rows[rank, ...] for rank in range(self.size)]
        self._exchange(call, to_send, parts)
        kernel = op == "sum" and rows.dtype in KERNEL_DTYPES and target_of(rows) is not None
        if kernel and rows.size:
            return sum_in_order(rows)
        total = parts[0].astype(sum_dtype(rows.dtype))
        reduce = np.add if op == "sum" else np.maximum
        with np.errstate(over="ignore", invalid="ignore"):  # no warnings, like a GPU
            for other in parts[1:]:
                reduce(total, other, out=total)
            return total.astype(rows.dtype, copy=False)

    def _agree(self, call: str) -> None:
        """Raise unless all ranks make this call; do nothing if not ``checked``."""
        if not self.checked:
            return
        self._calls += 1
        calls = [
            call_text(row) for row in self._gather_rows(call.partition("(")[0], call_bytes(call))
        ]
        if len({*calls}) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            deviating = min(range(self.size), key=lambda rank: calls.count(calls[rank]))
            problem = f"call {self._calls} is not the same on all ranks: {listed}"
            raise CommunicationError(f"{problem}; make the same calls on all", rank=deviating)

    def _passed(self, call: str, x: Any, to: int, out: Any, source: int) -> Any:
        """Send x unless it is None, and receive ``out``; if ``checked``, compare calls first."""
        if self._own(call, out) is not out or not getattr(out.flags, "writeable", True):
            cure = "pass numpy.empty(shape, dtype)"
            raise ConfigError(f"{call}: out is not a writeable array in C order; {cure}")
        if self.checked:
            own = None if x is None else self._placed(call_bytes(_sent(x)), out)
            text = self._placed(np.empty(CALL_BYTES, np.uint8), out)
            self._exchange(call, self._only(to, own), self._only(source, text))
            sent, expected = call_text(to_numpy(text)), _sent(out)
            if sent != expected:
                problem = f"{call}: rank {source} called {sent}, not {expected}"
                raise CommunicationError(f"{problem}; pass equal shapes and dtypes", rank=source)
        self._exchange(call, self._only(to, x), self._only(source, out))
        return out


def pieces(x: Any, counts: Any) -> list[Any]:
    """Return views of consecutive rows, ``counts[r]`` for rank r."""
    ends = np.cumsum(counts).tolist()
    return [x[stop - count : stop] for stop, count in zip(ends, counts.tolist(), strict=True)]


def _sent(x: Any) -> str:
    """Return the text of a call that sends x."""
    return f"send(x{x.shape} {x.dtype})"


def raw(array: Any) -> Any:
    """Return the bytes of an array in C order, without a copy."""
    return array.reshape(-1).view(np.uint8)


def call_bytes(call: str) -> Any:
    """Return the text of a call as an array of CALL_BYTES bytes."""
    return np.frombuffer(call.encode().ljust(CALL_BYTES)[:CALL_BYTES], np.uint8).copy()


def call_text(row: Any) -> str:
    """Return the text of a call from an array of CALL_BYTES bytes."""
    return bytes(row).decode(errors="replace").strip()
