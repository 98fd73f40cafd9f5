"""The protocol of communicators, through which ranks exchange arrays, and ``SingleCommunicator``.

Sums over ranks are computed in the order of the ranks, in float32 for 16-bit arrays, so that all
ranks and all runs get equal bits.
"""

import reprlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ..core.arrays import framework_of
from ..core.call import is_integer
from ..core.dtypes import FLOAT32
from ..errors import ConfigError, ShapeError

Reduction = Literal["sum", "max"]
TIMEOUT = 600.0  # seconds: a rank may compile kernels, or save a model, while others wait


class Communicator(Protocol):
    """Ranks that exchange arrays; all of them make the same calls in the same order.

    Attributes
    ----------
    rank, size : int
        The index of this process, from 0, and the number of processes (world size).
    """

    rank: int
    size: int

    def split(self, color: int) -> "Communicator":
        """Return a communicator of the ranks that passed the same color, in their order."""

    def all_reduce(self, x: Any, op: Reduction = "sum") -> Any:
        """Return the elementwise sum or maximum of the arrays of all ranks."""

    def all_gather(self, x: Any, axis: int = 0) -> Any:
        """Return the concatenated arrays of all ranks, which may differ in size along the axis."""

    def reduce_scatter(self, x: Any, axis: int = 0) -> Any:
        """Return this rank's part of the sum over ranks, divided along an axis as by ``part``."""

    def all_to_all(self, x: Any, divided: int, joined: int) -> Any:
        """Return this rank's part along one axis of the arrays of all ranks, joined along another.

        Arrays may differ in size along the axis that is joined; the other is divided by ``part``.
        """

    def all_to_all_rows(self, x: Any, counts: Sequence[int]) -> tuple[Any, list[int]]:
        """Return the rows that all ranks send to this one, in rank order, and their counts.

        The first ``counts[0]`` rows of x go to rank 0, the next ``counts[1]`` to rank 1, and so on.
        """

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Return the array of rank root; other ranks pass an array of equal shape and dtype."""

    def send(self, x: Any, to: int) -> None:
        """Send an array to another rank."""

    def receive(self, out: Any, source: int) -> Any:
        """Receive an array from another rank into ``out``, and return it."""

    def exchange(self, x: Any, to: int, out: Any, source: int) -> Any:
        """Send x to one rank and receive ``out`` from another at the same time."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""


class SingleCommunicator:
    """The communicator of a single process: its collectives return copies of its own arrays."""

    rank, size = 0, 1

    def split(self, color: int) -> "SingleCommunicator":
        """Return a communicator of this process."""
        check_color(color)
        return self

    def all_reduce(self, x: Any, op: Reduction = "sum") -> Any:
        """Return a copy."""
        check_reduction(op)
        return _copy("all_reduce", x)

    def all_gather(self, x: Any, axis: int = 0) -> Any:
        """Return a copy."""
        check_axis("all_gather", x, axis)
        return _copy("all_gather", x)

    def reduce_scatter(self, x: Any, axis: int = 0) -> Any:
        """Return a copy."""
        check_axis("reduce_scatter", x, axis)
        return _copy("reduce_scatter", x)

    def all_to_all(self, x: Any, divided: int, joined: int) -> Any:
        """Return a copy."""
        check_axes("all_to_all", x, divided, joined)
        return _copy("all_to_all", x)

    def all_to_all_rows(self, x: Any, counts: Sequence[int]) -> tuple[Any, list[int]]:
        """Return a copy, and its number of rows."""
        check_counts(self, x, counts)
        return x.copy(), [len(x)]

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Return a copy."""
        check_rank(self, "broadcast", root)
        return _copy("broadcast", x)

    def send(self, x: Any, to: int) -> None:
        """Raise ConfigError: there is no other rank."""
        check_rank(self, "send", to, other=True)

    def receive(self, out: Any, source: int) -> Any:
        """Raise ConfigError: there is no other rank."""
        check_rank(self, "receive", source, other=True)

    def exchange(self, x: Any, to: int, out: Any, source: int) -> Any:
        """Copy x to ``out``."""
        check_rank(self, "exchange", to)
        check_rank(self, "exchange", source)
        for name, array in (("x", x), ("out", out)):
            framework_of(array, f"exchange: {name}")
        if x.shape != out.shape:
            problem = f"exchange: out is {tuple(out.shape)}; it must be {tuple(x.shape)}"
            raise ShapeError(problem, expected=tuple(x.shape), actual=tuple(out.shape))
        out[...] = x
        return out

    def barrier(self) -> None:
        """Return."""


def _copy(call: str, x: Any) -> Any:
    framework_of(x, f"{call}: x")
    return x.copy()


def check_communicator(call: str, comm: Any) -> None:
    """Raise ConfigError unless comm is a communicator."""
    sizes = is_integer(getattr(comm, "size", None), 1) and is_integer(getattr(comm, "rank", None))
    if not (sizes and callable(getattr(comm, "all_reduce", None))):
        cure = "pass one, such as SingleCommunicator()"
        raise ConfigError(f"{call}: {reprlib.repr(comm)} is not a communicator; {cure}")


def part(size: int, comm: Communicator, rank: int | None = None) -> slice:
    """Return the slice of ``size`` elements that a rank stores; None: this rank.

    Parts differ by at most one element; the first ranks have the larger parts.
    """
    check_communicator("part", comm)
    rank = comm.rank if rank is None else rank
    check_rank(comm, "part", rank)
    if not is_integer(size):
        raise ConfigError(f"part(size={size!r}): pass a number of elements, 0 or more")
    quotient, remainder = divmod(size, comm.size)
    start = rank * quotient + min(rank, remainder)
    return slice(start, start + quotient + (rank < remainder))


def along(axis: int, where: slice) -> tuple[slice, ...]:
    """Return the index of a slice along an axis, which must not be negative."""
    return (slice(None),) * axis + (where,)


def sum_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which arrays are summed: float32 for narrower floats, else their own."""
    dtype = np.dtype(dtype)
    narrow = dtype.itemsize < FLOAT32.itemsize and dtype.kind not in "iub"
    return FLOAT32 if narrow else dtype


def check_axis(call: str, x: Any, axis: int) -> int:
    """Return the axis as a number, 0 or more; raise ShapeError if x has no such axis."""
    framework_of(x, f"{call}: x")
    if not is_integer(axis, -x.ndim) or axis >= x.ndim:
        problem = f"{call}(axis={axis!r}) is not an axis of x{tuple(x.shape)}"
        legal = range(-x.ndim, x.ndim)
        cure = f"pass one in {-x.ndim} .. {x.ndim - 1}"
        raise ShapeError(f"{problem}; {cure}", expected=legal, actual=axis)
    return axis % x.ndim


def check_axes(call: str, x: Any, divided: int, joined: int) -> tuple[int, int]:
    """Return two axes as numbers, 0 or more; raise ShapeError unless x has them and they differ."""
    axes = check_axis(call, x, divided), check_axis(call, x, joined)
    if axes[0] == axes[1]:
        problem = f"{call}(divided={divided}, joined={joined}) are the same axis"
        raise ShapeError(f"{problem}; pass two different ones", expected=2, actual=1)
    return axes


def check_counts(comm: Communicator, x: Any, counts: Sequence[int]) -> None:
    """Raise ShapeError unless counts has a number for every rank, and they add up to the rows."""
    framework_of(x, "all_to_all_rows: x")
    sizes: Any = [*counts]
    rows = x.shape[0] if x.ndim else 0
    if not x.ndim or len(sizes) != comm.size or min(sizes) < 0 or sum(sizes) != rows:
        problem = f"all_to_all_rows(x{tuple(x.shape)}, counts={sizes}) with {comm.size} ranks"
        cure = f"pass {comm.size} numbers, 0 or more, whose sum is {rows}"
        raise ShapeError(f"{problem}; {cure}", expected=rows, actual=sum(sizes))


def check_rank(comm: Communicator, call: str, rank: int, *, other: bool = False) -> None:
    """Raise ConfigError unless rank is a rank; with ``other``, it must be another rank."""
    if not is_integer(rank) or not 0 <= rank < comm.size or (other and rank == comm.rank):
        kind = "another rank" if other else "a rank"
        cure = f"there are {comm.size}, from 0, and this is {comm.rank}"
        raise ConfigError(f"{call}: {rank!r} is not {kind}; {cure}")


def check_reduction(op: str) -> None:
    """Raise ConfigError unless op is a reduction."""
    name: Any = op
    if not isinstance(name, str) or op not in ("sum", "max"):
        raise ConfigError(f"all_reduce(op={op!r}) is not a reduction; choose 'sum' or 'max'")


def check_color(color: int) -> None:
    """Raise ConfigError unless color is an integer, 0 or more."""
    if not is_integer(color) or not 0 <= color < 2**31:
        raise ConfigError(f"split(color={color!r}) is not a color; pass an integer, 0 or more")
