"""Every op, forward and backward: time, and peak memory beyond its arguments.

An op needs no line here: its arrays are drawn from its signature, as the tests draw them, with the
sizes of one table.
"""

import tracemalloc
from typing import Any

import numpy as np

from tests.parity import Case
from unsloth_cupy._op import OPS, Op

HALF = 32  # of a head's dim: what a rotation pairs

# Sizes of axes, and options that an op cannot do without.
SIZES: dict[str, Any] = {
    "rows": [1024],
    "axes": [1024, 1024],
    "columns": 1024,
    "start": 0,
    "stop": 512,
    "shape": (-1,),
    "factor": 0.5,
    "batch": 1,
    "tokens": 1024,
    "queries": 1024,
    "keys": 1024,
    "key_tokens": 1024,
    "max_queries": 512,
    "max_keys": 512,
    "sequences": 2,
    "heads": 8,
    "kv_heads": 2,
    "dim": 2 * HALF,
    "value_dim": 2 * HALF,
    "half": HALF,
    "length": 1024,
    "pages": 64,
    "page": 16,
    "max_pages": 64,
    "hidden": 1024,
    "inner": 2816,
    "inputs": 1024,
    "outputs": 1024,
    "vocab": 8192,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "step": 1,
}
# Arrays with a meaning that a signature does not tell.
ARRAYS: dict[str, Any] = {
    "labels": lambda rng: rng.integers(0, SIZES["vocab"], SIZES["rows"]),
    "q_offsets": np.array([0, 512, 1024]),
    "k_offsets": np.array([0, 512, 1024]),
    "positions": np.arange(1024)[None],
    "page_table": np.arange(64)[None],
    "lengths": np.array([1024]),
    "square": lambda rng: rng.random(SIZES["axes"]),
}


def forward_ops() -> list[str]:
    """Return the ops that are nobody's backward op."""
    backward = {op.backward.__name__ for op in OPS.values() if op.backward is not None}
    return sorted(OPS.keys() - backward)


class OpSuite:
    """One parameter of each benchmark is the op, one the direction."""

    params = (forward_ops(), ["forward", "backward"])
    param_names = ("op", "direction")
    timeout = 120

    def setup(self, name: str, direction: str) -> None:
        """Draw the arguments; for backward, run forward once."""
        op = OPS[name]
        case = Case("standard", arrays=ARRAYS, **SIZES)
        inputs = {
            key: array if array is None else array.copy()  # writable, for ops in place
            for key, array in case.draw(op, np.float32).items()
        }
        self.op: Op[..., Any] = op
        self.options = case.options(op)
        self.arrays = [inputs[key] for key in op.names]
        if direction == "backward":
            self._turn(inputs)

    def _turn(self, inputs: dict[str, Any]) -> None:
        if self.op.backward is None:
            raise NotImplementedError(f"{self.op.__name__} has no gradient")
        found = self.op.call(list(self.arrays), dict(self.options))
        found = found if isinstance(found, tuple) else (found,)
        names = [operand.name for operand in self.op.contract.outputs]
        outputs = dict(zip(names, found, strict=True))
        seeds = {"d" + key: np.ones_like(a) for key, a in outputs.items() if a is not None}
        wired = inputs | outputs | seeds
        self.op = self.op.backward
        self.options = {k: v for k, v in self.options.items() if k in self.op.options}
        self.arrays = [wired.get(key) for key in self.op.names]

    def call(self) -> None:
        """Run the op once."""
        self.op.call(list(self.arrays), dict(self.options))


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
