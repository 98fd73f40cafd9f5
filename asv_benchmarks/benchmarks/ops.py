"""Every op, forward and backward: time, and peak memory beyond its arguments.

An op needs no line here: ``bench.cases`` draws its arrays from its signature, for this and
for ``unsloth-cupy check`` and ``bench``.
"""

import tracemalloc

from unsloth_cupy.bench.cases import Scale, draw, forward_ops
from unsloth_cupy.core.op import OPS


class OpSuite:
    """One parameter of each benchmark is the op, one the direction."""

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
    """Seconds of one call."""

    version = "1"

    def time_call(self, name: str, direction: str) -> None:
        self.call()


class Memory(OpSuite):
    """Bytes that a call holds at most, results included, arguments not."""

    unit, version = "bytes", "1"

    def track_peak(self, name: str, direction: str) -> int:
        tracemalloc.start()
        self.call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
