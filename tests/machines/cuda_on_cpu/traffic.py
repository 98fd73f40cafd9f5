"""Count memory traffic of warps: sectors of global memory, passes over shared memory.

    with counted() as traffic, using(Emulator()):
        rms_norm(x, weight)
    assert traffic.of("global").efficiency == 1      all bytes of the moved sectors were requested
    assert traffic.of("shared").efficiency == 1      there was no bank conflict

A GPU moves 32 bytes of global memory even if a warp requests one of them, and needs another pass
over shared memory for every further word that a request has in one bank.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Requests(NamedTuple):
    """The requests of one source line, or of several, and their traffic."""

    where: str
    space: str  # global or shared
    write: bool
    requests: int
    bytes: int  # requested by lanes; in global memory, a byte counts once in a request
    moved: int  # sectors or passes
    least: int  # the fewest sectors that hold the bytes; passes without bank conflicts

    @property
    def efficiency(self) -> float:
        """The share of the traffic that was needed; 1 without traffic."""
        return self.least / self.moved if self.moved else 1.0

    @property
    def per_request(self) -> float:
        """The sectors, or passes, for each request; 0 without requests."""
        return self.moved / self.requests if self.requests else 0.0


class Traffic(list[Requests]):
    """The requests of every launch inside a ``with counted()``, one entry per line and launch."""

    def of(self, space: str, *, write: bool | None = None) -> Requests:
        """Return the sum over the requests to one memory: all, or only reads or writes."""
        chosen = [r for r in self if r.space == space and write in (None, r.write)]
        sums = (sum(column) for column in zip(*(r[3:] for r in chosen), strict=True))
        return Requests("all", space, bool(write), *(sums if chosen else (0, 0, 0, 0)))


class _Row(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_void_p),
        ("line", ctypes.c_int),
        ("shared", ctypes.c_int),
        ("write", ctypes.c_int),
        *((name, ctypes.c_uint64) for name in Requests._fields[3:]),
    )


open_counts: list[Traffic] = []


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count the traffic of checked launches inside a ``with`` block."""
    open_counts.append(Traffic())
    try:
        yield open_counts[-1]
    finally:
        open_counts.pop()


def collect(runtime: Any, place: Callable[[int, int], str]) -> None:
    """Add the runtime's counts of a launch; ``place`` returns the name of a source line."""
    rows = (_Row * runtime.emu_counted(None, 0))()
    runtime.emu_counted(rows, len(rows))
    sums: dict[tuple[str, str, bool], list[int]] = {}
    for row in rows:  # the compiler may have made several copies of one line
        key = place(row.file, row.line), "shared" if row.shared else "global", bool(row.write)
        numbers = (getattr(row, name) for name in Requests._fields[3:])
        sums[key] = [a + b for a, b in zip(sums.get(key, [0] * 4), numbers, strict=True)]
    for traffic in open_counts:
        traffic += [Requests(*key, *numbers) for key, numbers in sums.items()]
