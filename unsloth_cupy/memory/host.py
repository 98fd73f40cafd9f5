"""Counts the bytes of NumPy arrays with tracemalloc: see ``pool.py``.

tracemalloc reports the allocated bytes and their peak quickly, but they include Python objects.  A
walk over all allocations separates arrays from objects.  Objects change slowly, so the result of
the last walk is reused until the peak has grown by a hundredth: until then, new objects count as
arrays.
"""

import threading
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..core import target
from ..core.target import Run
from ..errors import DeviceMemoryError
from ..machine import format_bytes
from ..ops.common.spans import Owner, forget_routes
from ..training import offload

GROWN = 1.01  # walk again if the peak has grown by this factor: plans promise 3 %


class Usage(NamedTuple):
    """Bytes on one device: held by arrays now, their peak, and reserved by the pool now."""

    allocated: int
    peak: int
    reserved: int


class HostCounter:
    """Counts the bytes of arrays: ``held`` at the start, plus all later allocations."""

    active: ClassVar[list["HostCounter"]] = []  # nested pools, and pools of other threads
    lock: ClassVar[Any] = threading.RLock()  # guards these attributes
    before_all: ClassVar[tuple[bool, Any]]  # before the first pool: is_tracing(), target.watch
    objects: ClassVar[int] = 0  # bytes of Python objects at the last walk
    walked: ClassVar[int] = 0  # traced bytes up to which the last walk is valid

    def __init__(self, limit: int | None, held: int = 0) -> None:
        self.limit, self.held, self.moved = limit, held, dict(offload.moved)
        self.before = self.most = 0
        self.last: tuple[int, int, Counter[int]] | None = None

    def start(self) -> None:
        """Start counting."""
        with self.lock:
            if not self.active:
                HostCounter.before_all = tracemalloc.is_tracing(), target.watch
                tracemalloc.start()
                target.targets, target.watch = (WATCHED, *target.targets), _watch
            self._settle()  # for pools around this one
            self.before, self.blocks = self._walk(), self.sizes
            self.active.append(self)
            self.reset_peak()

    def stop(self) -> None:
        """Stop counting, and store the final numbers."""
        with self.lock:
            self.last = self._now(), self.peak(), self.sizes - self.blocks
            self.active.remove(self)
            if self.active:  # another pool is still counting
                return
            traced, target.watch = self.before_all
            target.targets = tuple(each for each in target.targets if each is not WATCHED)
            forget_routes(WATCHED)
            if not traced:
                tracemalloc.stop()

    def _walk(self) -> int:
        """Return the bytes of arrays; all other bytes belong to Python objects."""
        traces, numpy = tracemalloc.take_snapshot().traces, np.lib.tracemalloc_domain
        self.sizes = Counter(trace.size for trace in traces if trace.domain == numpy)
        arrays = sum(size * count for size, count in self.sizes.items())
        del traces
        tracemalloc.reset_peak()  # the walk itself raised the peak
        HostCounter.walked = tracemalloc.get_traced_memory()[0]
        HostCounter.objects = HostCounter.walked - arrays
        return arrays

    def _settle(self) -> None:
        """Raise the peaks of all pools to the peak since the last call."""
        peak = tracemalloc.get_traced_memory()[1]
        if self.held + peak > GROWN * (self.held + HostCounter.walked):
            self._walk()
            HostCounter.walked = peak
        for pool in self.active:
            pool.most = max(pool.most, peak - HostCounter.objects)
        tracemalloc.reset_peak()  # objects of this peak may be freed before the next walk

    def _now(self) -> int:
        self._settle()
        return self._beyond(self._walk())

    def _beyond(self, arrays: int) -> int:
        return self.held + max(0, arrays - self.before)

    def usage(self) -> dict[str, Usage]:
        """Return the bytes of the host."""
        now, peak = self.last[:2] if self.last else (self._now(), self.peak())
        return {"cpu": Usage(now, peak, now)}

    def counts(self) -> Counter[int]:
        """Return the number of blocks by size that were allocated since the start and are held."""
        if self.last is not None:
            return self.last[2]
        self._now()
        return self.sizes - self.blocks

    def peak(self) -> int:
        """Return the peak of the held bytes."""
        if self.last is not None:
            return self.last[1]
        self._settle()
        return self._beyond(self.most)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are held now."""
        self._settle()  # for pools around this one
        self.most, HostCounter.walked = 0, tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    def check(self, op: str) -> None:
        """Raise if the limit is exceeded after an op."""
        self._settle()
        held = self._beyond(tracemalloc.get_traced_memory()[0] - self.objects)
        if self.limit is not None and held > self.limit:
            held = self._now()  # some bytes may belong to new Python objects
        if self.limit is not None and held > self.limit:
            raise DeviceMemoryError(
                f"memory_pool(limit={self.limit}): after {op} arrays hold {format_bytes(held)};"
                " raise the limit, or compute in smaller batches",
                held,
                self.limit,
            )


WATCHED: Any = Owner()


def _watch(op: Any, arrays: Sequence[Any], run: Run, defined: bool) -> Run:
    """Wrap a call of an op to check all pools after it."""
    run = HostCounter.before_all[1](op, arrays, run, defined)

    def checked(arrays: list[Any], options: dict[str, Any]) -> Any:
        result = run(arrays, options)
        _check_all(op.__name__)
        return result

    return run if defined else checked


def _check_all(op: str) -> None:
    """Check every pool, outer ones first."""
    with HostCounter.lock:
        for pool in [*HostCounter.active]:
            pool.check(op)
