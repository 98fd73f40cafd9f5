"""Every kernel on a GPU: time by device events, and its ratio to a copy of as many bytes.

Calls use random arrays of the larger size of ``unsloth-cupy bench``, and are skipped without a GPU.
"""

import functools
from typing import Any

from unsloth_cupy import machine
from unsloth_cupy.bench import timing
from unsloth_cupy.bench.cases import draw, forward_ops
from unsloth_cupy.bench.stopwatch import DeviceClock
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS

OWNERS = {op.backward.__name__: op for op in OPS.values() if op.backward is not None}
KERNELS = sorted(name for name, op in OPS.items() if op.launch is not None)
FORWARD = set(forward_ops())


@functools.cache
def clock() -> tuple[Any, float]:
    """Return a clock of the GPU, and the bytes per second of a copy on it."""
    gpus, reason = machine.gpus()
    if not gpus:
        raise NotImplementedError(f"needs a GPU: {reason}")
    device_clock = DeviceClock()
    return device_clock, device_clock.copy_rate()


class Kernel:
    """One call of an op that has a kernel; lower is better."""

    version = "1"
    params = (KERNELS, [dtype.name for dtype in KERNEL_DTYPES])
    param_names = ("op", "dtype")
    timeout = 300

    def setup(self, name: str, dtype: str) -> None:
        """Place the arrays on the GPU; for backward, run forward once."""
        self.clock, self.copy_rate = clock()
        import cupy

        owner = OPS[name] if name in FORWARD else OWNERS[name]
        kind = next(kind for kind in KERNEL_DTYPES if kind.name == dtype)
        call = draw(owner, timing.DEVICE_SCALES[-1]).cast(kind).mapped(cupy.asarray)
        if owner is not OPS[name]:
            outputs = call.run()
            seeds = {k: cupy.asarray(a) for k, a in call.seeds(outputs, every=False).items()}
            call = call.backward(outputs, seeds)
        if not call.mapped(lambda a: a.copy()).launches():
            raise NotImplementedError("this call runs the definition, not a kernel")
        in_place = name.endswith("_")
        outputs = (call.mapped(lambda a: a.copy()) if in_place else call).run()
        self.call, self.bytes = call, timing.traffic(call, outputs)

    def track_microseconds(self, name: str, dtype: str) -> float:
        return self.clock([self.call])[0][0] * 1e6

    def track_times_a_copy(self, name: str, dtype: str) -> float:
        return self.clock([self.call])[0][0] * self.copy_rate / self.bytes

    track_microseconds.unit = "us"
    track_times_a_copy.unit = "times a copy"
