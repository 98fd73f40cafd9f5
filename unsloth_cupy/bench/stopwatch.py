"""Times calls with the clock of the host, or with events on a GPU.

Calls take turns, so that a temporary slowdown of the machine affects all of them.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, Self

import numpy as np

from ..core.dtypes import KERNEL_DTYPES
from ..core.gpu import cupy

Calls = Sequence[Callable[[], Any]]

PERCENTILES = (5, 25, 75, 95)
RUNS = 25
HOST_SECONDS = 0.2  # time budget per call; slow calls run fewer times, at least HOST_RUNS
HOST_RUNS = 3
FLUSH_BYTES = 512 << 20  # writing takes 0.1 ms or more, so the host can queue the next call
COPY_BYTES = 1 << 30
PRODUCT_ROWS = 8192  # 1.1 TFLOP: long enough for the GPU to reach its sustained clock rate


class Seconds(float):
    """The median time of a call; ``runs`` holds the times of all runs."""

    runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[float]) -> Self:
        """Return the median of these times."""
        seconds = cls(median(runs))
        seconds.runs = tuple(runs)
        return seconds

    @property
    def percentiles(self) -> dict[str, float]:
        """Percentiles of the runs in microseconds; p25 and p75 are the quartiles."""
        values = np.percentile(self.runs, PERCENTILES) * 1e6
        return {f"p{share}": float(v) for share, v in zip(PERCENTILES, values, strict=True)}


class HostClock:
    """Measures the wall time of calls on the CPU."""

    method = (
        f"wall time on the CPU, median of {RUNS} runs after a warm-up, or of at least {HOST_RUNS}"
        f" runs if {RUNS} take more than {HOST_SECONDS} s; caches are not flushed"
    )

    def __call__(self, calls: Calls) -> tuple[list[Seconds], int]:
        """Return the times of the calls in seconds, and the number of runs."""
        for call in calls:
            call()
        times: list[list[float]] = []
        start, limit = perf_counter(), HOST_SECONDS * len(calls)
        while len(times) < RUNS and (len(times) < HOST_RUNS or perf_counter() - start < limit):
            row = []
            for call in calls:
                before = perf_counter()
                call()
                row.append(perf_counter() - before)
            times.append(row)
        return [Seconds.of(column) for column in zip(*times, strict=True)], len(times)


class DeviceClock:
    """Measures the time between two events on the current stream, with a flushed L2 cache."""

    method = (
        f"device events around each call, median of {RUNS} runs after 3 warm-up runs, a buffer"
        " larger than the L2 cache written before each, contestants taking turns"
    )

    def __init__(self) -> None:
        self.cupy = cupy()
        runtime, device = self.cupy.cuda.runtime, self.cupy.cuda.Device().id
        cache = runtime.deviceGetAttribute(runtime.cudaDevAttrL2CacheSize, device)
        self.buffer = self.cupy.zeros(max(FLUSH_BYTES, 4 * cache) // 4, np.float32)

    def __call__(self, calls: Calls) -> tuple[list[Seconds], int]:
        """Return the times of the calls in seconds, and the number of runs."""
        event = self.cupy.cuda.Event
        for call in calls:
            for _ in range(3):
                call()
        marks = [(event(), event()) for _ in calls]
        times = []
        for _ in range(RUNS):
            for call, (start, stop) in zip(calls, marks, strict=True):
                self.buffer += 1
                start.record()
                call()
                stop.record()
            marks[-1][1].synchronize()
            times.append([self.cupy.cuda.get_elapsed_time(*pair) / 1e3 for pair in marks])
        return [Seconds.of(column) for column in zip(*times, strict=True)], RUNS

    def copy_rate(self) -> float:
        """Return the bandwidth of a large copy in bytes per second, reads plus writes."""
        rng = self.cupy.random.default_rng(0)
        source = rng.integers(0, 2**32, COPY_BYTES // 4, np.uint32)
        target = self.cupy.empty_like(source)
        seconds = self([lambda: self.cupy.copyto(target, source)])[0][0]
        return 2 * source.nbytes / seconds

    def product_rate(self, dtype: str) -> float:
        """Return the operations per second of a large product of random square matrices."""
        rng = self.cupy.random.default_rng(0)
        kind = next(kind for kind in KERNEL_DTYPES if kind.name == dtype)
        size = (PRODUCT_ROWS, PRODUCT_ROWS)
        a, b = (rng.standard_normal(size, np.float32).astype(kind) for _ in "ab")
        seconds = self([lambda: a @ b])[0][0]
        return 2 * PRODUCT_ROWS**3 / seconds
