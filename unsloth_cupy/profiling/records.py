"""A call that was timed, with the calls inside of it, and what it belongs to."""

import re
import time
from functools import cache
from typing import Any, NamedTuple

from ..core import gpu
from ..core.op import OPS

PHASES = ("forward", "backward", "optimizer")


class Record(NamedTuple):
    """One call of an op: seconds since the block began, and what it took, all and by itself."""

    op: str
    phase: str
    layer: str
    ran_as: str
    start: float
    seconds: float
    own: float
    moved: int
    operations: int
    thread: int


class Ended(NamedTuple):
    """A call by the clock of the host, with events of a GPU, or None, and the calls inside."""

    record: Record
    events: Any
    inside: "list[Ended]"

    @property
    def seconds(self) -> float:
        """Seconds of the device, where the call ran on one; of the host elsewhere."""
        if self.events is None:
            return self.record.seconds
        begin, end = self.events
        end.synchronize()
        return float(gpu.cupy().cuda.get_elapsed_time(begin, end)) / 1e3

    def timed(self) -> Record:
        """Return the record with these seconds, its own without those of the calls inside."""
        seconds = self.seconds
        own = max(0.0, seconds - sum(each.seconds for each in self.inside))
        return self.record._replace(seconds=seconds, own=own)


class Open:
    """A call that runs: what has ended inside of it, how it runs, and when it began."""

    def __init__(self, events: Any) -> None:
        self.ran_as, self.inside = "kernel", list[Ended]()
        self.begin, self.start, self.seconds = events, time.perf_counter(), 0.0
        self.end: Any = None


def rate(count: int, seconds: float, unit: float) -> str:
    """Return how many units a second a count is."""
    return f"{count / seconds / unit:.3g}" if count and seconds else "-"


def phase_of(name: str) -> str:
    """Return which part of a step an op belongs to, or work of none."""
    if name not in OPS or ".ops.optimizers." in OPS[name].__module__:
        return "optimizer"
    return "backward" if name in backward_ops() else "forward"


@cache
def backward_ops() -> frozenset[str]:
    """Return the names of the ops that are backward ops of others."""
    return frozenset(op.backward.__name__ for op in OPS.values() if op.backward is not None)


def layer_of(name: str) -> str:
    """Return the layer of a parameter: layer 3, embedding or head."""
    number = re.search(r"\blayers\.(\d+)\.", name)
    if number is not None:
        return f"layer {number[1]}"
    return "embedding" if "embed" in name else "head"
