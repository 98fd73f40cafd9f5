"""Collectives made of messages between two ranks: those of MPI, of sockets and of NCCL alike.

    all_reduce = each rank sums its part of all arrays, in the order of the ranks; then all gather

A communicator brings ``_swap``, which moves bytes, and ``_told``, which asks hosts for numbers.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ..core.arrays import empty, framework_of, packed
from ..errors import CommunicationError, ConfigError, FrameworkError
from ..placement import to_numpy
from .communicator import (
    Communicator,
    Reduction,
    along,
    check_axes,
    check_axis,
    check_rank,
    check_reduction,
    part,
    sum_dtype,
)

CALL_BYTES = 512  # of the text of a call, which a checked communicator sends first


class Exchanges(ABC):
    """Ranks that send bytes to each other, and what is made of that.

    Elements travel as the bytes that they are, bfloat16 too; sums of 16-bit floats are made in
    float32 and rounded once, and all sums in the order of the ranks.
    """

    rank: int
    size: int

    def __init__(self, timeout: float, checked: bool) -> None:
        if not timeout > 0:
            kind = type(self).__name__
            raise ConfigError(f"{kind}(timeout={timeout!r}) is not positive; pass seconds")
        self.timeout, self.checked = timeout, checked
        self._calls = 0

    @abstractmethod
    def split(self, color: int) -> Communicator:
        """Return a communicator of the ranks that passed the same color, in their order."""

    @abstractmethod
    def _swap(self, call: str, given: list[Any], taken: list[Any]) -> None:
        """Send ``given[r]`` to rank r and write what it sends to ``taken[r]``; None is nothing."""

    @abstractmethod
    def _told(self, call: str, row: Any) -> Any:
        """Return the rows of NumPy that all ranks pass, of one size and dtype, as an array."""

    @abstractmethod
    def _post(self, x: Any, to: int) -> None:
        """Send an array, without waiting where that can be."""

    def all_reduce(self, x: Any, op: Reduction = "sum") -> Any:
        """Return the sum, or the largest, of the arrays of all ranks, element by element."""
        check_reduction(op)
        x = self._own("all_reduce", x)
        self._agree(f"all_reduce(x{x.shape} {x.dtype}, op={op!r})")
        whole = empty((x.size,), x.dtype, x)
        mine = self._reduced("all_reduce", x.reshape(-1), 0, op)
        parts = [whole[part(x.size, self, rank)] for rank in range(self.size)]
        self._swap("all_reduce", [mine] * self.size, parts)
        return whole.reshape(x.shape)

    def all_gather(self, x: Any, axis: int = 0) -> Any:
        """Return the arrays of all ranks end to end; they may differ in size along the axis."""
        axis = check_axis("all_gather", x, axis)
        x = self._own("all_gather", x)
        shape = x.shape
        others = (*shape[:axis], "any", *shape[axis + 1 :])
        self._agree(f"all_gather(x{others} {x.dtype}, axis={axis})")
        sizes = self._told("all_gather", np.array([shape[axis]]))[:, 0]
        parts = [empty((*shape[:axis], int(n), *shape[axis + 1 :]), x.dtype, x) for n in sizes]
        self._swap("all_gather", [x] * self.size, parts)
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
        sizes = self._told("all_to_all", np.array([x.shape[end]]))[:, 0]
        places = (part(x.shape[cut], self, rank) for rank in range(self.size))
        given = [packed(x[along(cut, place)]) for place in places]
        shapes = [[*given[self.rank].shape] for _ in range(self.size)]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[end] = int(size)
        parts = [empty(tuple(shape), x.dtype, x) for shape in shapes]
        self._swap("all_to_all", given, parts)
        return np.concatenate(parts, end)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Return the array of rank root; the others pass one of its shape and dtype."""
        check_rank(self, "broadcast", root)
        x = self._own("broadcast", x)
        self._agree(f"broadcast(x{x.shape} {x.dtype}, root={root})")
        if self.rank == root:
            self._swap("broadcast", [x] * self.size, [None] * self.size)
            return x.copy()
        out = empty(x.shape, x.dtype, x)
        self._swap("broadcast", [None] * self.size, self._only(root, out))
        return out

    def send(self, x: Any, to: int) -> None:
        """Send an array to another rank, on a host a copy, which nobody waits for."""
        check_rank(self, "send", to, other=True)
        x = self._own("send", x)
        if self.checked:
            self._post(self._placed(call_bytes(_sent(x)), x), to)
        self._post(x, to)

    def receive(self, out: Any, source: int) -> Any:
        """Write the array that another rank sends to ``out``, and return it."""
        check_rank(self, "receive", source, other=True)
        return self._passed("receive", None, self.rank, out, source)

    def exchange(self, x: Any, to: int, out: Any, source: int) -> Any:
        """Send x to one rank and receive ``out`` from another, both at once."""
        check_rank(self, "exchange", to)
        check_rank(self, "exchange", source)
        return self._passed("exchange", self._own("exchange", x), to, out, source)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._agree("barrier()")
        self._told("barrier", np.zeros(1, np.uint8))

    def _own(self, call: str, x: Any) -> Any:
        """Return an array of NumPy in C order, or raise."""
        if isinstance(x, np.generic):
            x = np.asarray(x)
        if not isinstance(x, np.ndarray):
            library = framework_of(x, f"{call}: x")
            raise FrameworkError(f"{call}: x is not an array of NumPy but of {library}; copy it")
        return packed(x)

    def _placed(self, row: Any, like: Any) -> Any:
        """Return a row of NumPy where arrays of these ranks live."""
        return row

    def _only(self, rank: int, out: Any) -> list[Any]:
        return [out if each == rank else None for each in range(self.size)]

    def _reduced(self, call: str, x: Any, axis: int, op: Reduction) -> Any:
        """Return this rank's part of a reduction, made in the order of the ranks."""
        length = x.shape[axis]
        given = [packed(x[along(axis, part(length, self, to))]) for to in range(self.size)]
        mine = given[self.rank]
        parts = [empty(mine.shape, mine.dtype, mine) for _ in range(self.size)]
        self._swap(call, given, parts)
        total = parts[0].astype(sum_dtype(x.dtype))
        join = np.add if op == "sum" else np.maximum
        with np.errstate(over="ignore", invalid="ignore"):  # as on a GPU
            for other in parts[1:]:
                join(total, other, out=total)
            return total.astype(x.dtype, copy=False)

    def _agree(self, call: str) -> None:
        """Compare a call with those of all ranks, where that is asked for."""
        if not self.checked:
            return
        self._calls += 1
        calls = [call_text(row) for row in self._told(call.partition("(")[0], call_bytes(call))]
        if len({*calls}) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            odd = min(range(self.size), key=lambda rank: calls.count(calls[rank]))
            problem = f"call {self._calls} is not the same on all ranks: {listed}"
            raise CommunicationError(f"{problem}; let all make one call", rank=odd)

    def _passed(self, call: str, x: Any, to: int, out: Any, source: int) -> Any:
        """Send x, where there is one, and write ``out``; a checked one sends texts before."""
        if self._own(call, out) is not out or not getattr(out.flags, "writeable", True):
            cure = "pass numpy.empty(shape, dtype)"
            raise ConfigError(f"{call}: out is not a writeable array in C order; {cure}")
        if self.checked:
            own = None if x is None else self._placed(call_bytes(_sent(x)), out)
            text = self._placed(np.empty(CALL_BYTES, np.uint8), out)
            self._swap(call, self._only(to, own), self._only(source, text))
            sent, wanted = call_text(to_numpy(text)), _sent(out)
            if sent != wanted:
                problem = f"{call}: rank {source} called {sent}, which is not {wanted}"
                raise CommunicationError(f"{problem}; let both name one array", rank=source)
        self._swap(call, self._only(to, x), self._only(source, out))
        return out


def _sent(x: Any) -> str:
    return f"send(x{x.shape} {x.dtype})"


def raw(array: Any) -> Any:
    """Return the bytes of an array in C order, without a copy."""
    return array.reshape(-1).view(np.uint8)


def call_bytes(call: str) -> Any:
    """Return the text of a call as CALL_BYTES."""
    return np.frombuffer(call.encode().ljust(CALL_BYTES)[:CALL_BYTES], np.uint8).copy()


def call_text(row: Any) -> str:
    """Return the text in CALL_BYTES."""
    return bytes(row).decode(errors="replace").strip()
