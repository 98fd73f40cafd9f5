"""Count what the requests of warps cost: sectors of global memory, passes over shared memory.

    with counted() as traffic, using(Emulator()):
        rms_norm(x, weight)
    assert traffic.of("global").efficiency == 1      every sector that moved was wanted
    assert traffic.of("shared").efficiency == 1      no bank was asked for two words at once

A GPU moves 32 bytes of global memory where a warp wants one of them, and passes over shared memory
once more for every further word of one bank.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Requests(NamedTuple):
    """What the requests of one source line, or of several, cost."""

    where: str
    space: str  # global or shared
    write: bool
    requests: int
    bytes: int  # that lanes asked for; global: each once a request
    moved: int  # sectors or passes
    least: int  # sectors that hold the bytes, passes without a conflict

    @property
    def efficiency(self) -> float:
        """Return the share of the traffic that was needed; 1 where there is none."""
        return self.least / self.moved if self.moved else 1.0

    @property
    def per_request(self) -> float:
        """Return the sectors, or passes, of a request; 0 where there is none."""
        return self.moved / self.requests if self.requests else 0.0


class Traffic(list[Requests]):
    """The requests of every launch inside a ``with counted()``, one entry per line and launch."""

    def of(self, space: str, *, write: bool | None = None) -> Requests:
        """Return the sum over one memory, and over its reads or writes alone."""
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
    """Count the checked launches inside a ``with`` block."""
    open_counts.append(Traffic())
    try:
        yield open_counts[-1]
    finally:
        open_counts.pop()


def collect(runtime: Any, place: Callable[[int, int], str]) -> None:
    """Add what the runtime counted in a launch; place names a source line."""
    rows = (_Row * runtime.emu_counted(None, 0))()
    runtime.emu_counted(rows, len(rows))
    sums: dict[tuple[str, str, bool], list[int]] = {}
    for row in rows:  # of one line there may be several copies
        key = place(row.file, row.line), "shared" if row.shared else "global", bool(row.write)
        numbers = (getattr(row, name) for name in Requests._fields[3:])
        sums[key] = [a + b for a, b in zip(sums.get(key, [0] * 4), numbers, strict=True)]
    for traffic in open_counts:
        traffic += [Requests(*key, *numbers) for key, numbers in sums.items()]
