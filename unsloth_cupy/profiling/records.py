"""Timed calls of ops, with nested calls, phase and layer."""

import re
import time
from functools import cache
from typing import Any, NamedTuple

from ..core import gpu
from ..core.op import OPS

PHASES = ("forward", "backward", "optimizer")


class Record(NamedTuple):
    """One call of an op."""

    op: str
    phase: str
    layer: str
    ran_as: str
    start: float  # seconds since the start of the block
    seconds: float  # including nested calls
    own: float  # seconds without nested calls
    moved: int  # bytes
    operations: int
    thread: int


class Ended(NamedTuple):
    """A finished call: its host times, GPU events (or None), and nested calls."""

    record: Record
    events: Any
    inside: "list[Ended]"

    @property
    def seconds(self) -> float:
        """The seconds between the GPU events, or on the host without events."""
        if self.events is None:
            return self.record.seconds
        begin, end = self.events
        end.synchronize()
        return float(gpu.cupy().cuda.get_elapsed_time(begin, end)) / 1e3

    def timed(self) -> Record:
        """Return the record with its final ``seconds`` and ``own``."""
        seconds = self.seconds
        own = max(0.0, seconds - sum(each.seconds for each in self.inside))
        return self.record._replace(seconds=seconds, own=own)


class Open:
    """A running call: kernel or definition, start time, and finished nested calls."""

    def __init__(self, events: Any) -> None:
        self.ran_as, self.inside = "kernel", list[Ended]()
        self.begin, self.start, self.seconds = events, time.perf_counter(), 0.0
        self.end: Any = None


def rate(count: int, seconds: float, unit: float) -> str:
    """Return a count per second in a unit as text; "-" without a count or a time."""
    return f"{count / seconds / unit:.3g}" if count and seconds else "-"


def phase_of(name: str) -> str:
    """Return the phase of an op or a span: "forward", "backward" or "optimizer"."""
    if name not in OPS or ".ops.optimizers." in OPS[name].__module__:
        return "optimizer"
    return "backward" if name in backward_ops() else "forward"


@cache
def backward_ops() -> frozenset[str]:
    """Return the names of all backward ops."""
    return frozenset(op.backward.__name__ for op in OPS.values() if op.backward is not None)


def layer_of(name: str) -> str:
    """Return the layer of a parameter: "layer 3", "embedding" or "head"."""
    number = re.search(r"\blayers\.(\d+)\.", name)
    if number is not None:
        return f"layer {number[1]}"
    return "embedding" if "embed" in name else "head"
