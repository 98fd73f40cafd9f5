"""What a checked call costs beyond its definition, once a call of its form has been seen."""

import timeit

import numpy as np

from unsloth_cupy import add, rms_norm_forward

CALLS, ROUNDS = 200, 100


class CheckedCall:
    """The op and its bare definition taking turns, on arrays too small to matter."""

    unit, version = "us", "2"
    param_names = ("operands",)
    params = (2, 4)  # add(a, b); rms_norm_forward with every array and option: three results

    def setup(self, operands: int) -> None:
        """Let the op see its call once."""
        rows, columns = np.ones((2, 8), np.float32), np.ones(8, np.float32)
        if operands == 2:
            self.op, self.arrays, self.options = add, (rows, rows), {}
        else:
            self.op, self.arrays = rms_norm_forward, (rows, columns, rows, columns)
            self.options = {"eps": 1e-6, "offset": 0.0}
        self.op(*self.arrays, **self.options)

    def time_call(self, operands: int) -> None:
        self.op(*self.arrays, **self.options)

    def track_microseconds_beyond_the_definition(self, operands: int) -> float:
        """Return the difference of the least times, which leaves the noise out."""
        checked = timeit.Timer(lambda: self.op(*self.arrays, **self.options))
        bare = timeit.Timer(lambda: self.op.definition(*self.arrays, **self.options))
        rounds = [(checked.timeit(CALLS), bare.timeit(CALLS)) for _ in range(ROUNDS)]
        least, least_bare = (min(column) for column in zip(*rounds, strict=True))
        return (least - least_bare) / CALLS * 1e6
