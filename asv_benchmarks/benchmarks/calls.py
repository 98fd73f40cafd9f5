"""What a checked call costs beyond its definition, once a call of its kind has been seen."""

import statistics
import timeit

import numpy as np

from unsloth_cupy import rms_norm_forward

CALLS, ROUNDS = 2000, 15


class CheckedCall:
    """The op and its bare definition taking turns, on arrays too small to matter."""

    unit, version = "us", "1"

    def setup(self) -> None:
        """Let the op see its call once."""
        self.arrays = np.ones((1, 4), np.float32), np.ones(4, np.float32)
        rms_norm_forward(*self.arrays)

    def track_microseconds(self) -> float:
        calls = (
            lambda: rms_norm_forward(*self.arrays, eps=1e-6),
            lambda: rms_norm_forward.definition(*self.arrays, eps=1e-6),
        )
        rounds = [[timeit.timeit(call, number=CALLS) for call in calls] for _ in range(ROUNDS)]
        checked, bare = (statistics.median(column) for column in zip(*rounds, strict=True))
        return (checked - bare) / CALLS * 1e6
