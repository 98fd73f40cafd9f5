"""Every op, forward and backward: time, and peak memory beyond its arguments.

Ops are not listed here: ``bench.cases`` draws arrays from each op's signature, here as in
``unsloth-cupy check`` and ``bench``.
"""

import time
import tracemalloc

from unsloth_cupy.bench.cases import Scale, draw, forward_ops
from unsloth_cupy.core.op import OPS


class OpSuite:
    """Benchmarks whose parameters are the op and the direction."""

    params = (forward_ops(), ["forward", "backward"])
    param_names = ("op", "direction")
    timeout = 120

    def setup(self, name: str, direction: str) -> None:
        """Draw the arguments; for backward, run forward once."""
        self.call = draw(OPS[name], Scale())
        if direction == "backward":
            if self.call.op.backward is None:
                raise NotImplementedError(f"{name} has no gradient")
            outputs = self.call.run()
            self.call = self.call.backward(outputs, self.call.seeds(outputs, every=True))


class Time(OpSuite):
    """Seconds of the processor for one call, in one thread: other programs do not count."""

    version, timer = "2", time.process_time
    repeat, warmup_time = (5, 20, 0.5), 0.05

    def time_call(self, name: str, direction: str) -> None:
        self.call()


class Memory(OpSuite):
    """Peak bytes that a call allocates, including its results."""

    unit, version = "bytes", "1"

    def track_peak(self, name: str, direction: str) -> int:
        tracemalloc.start()
        self.call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
