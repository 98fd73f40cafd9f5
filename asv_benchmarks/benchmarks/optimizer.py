"""A step of the optimizer over a model's tensors: on the host, and on a GPU beside a copy.

The tensors are the matrices and norms of four layers of a model with 1.2 billion parameters, in
bfloat16 with float32 masters.
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from unsloth_cupy import AdamW, LossScaler, clip_gradients, compute_copies, measure_gradients
from unsloth_cupy.core.dtypes import BFLOAT16

from .kernels import clock

HIDDEN, INNER, LAYERS = 2048, 8192, 4
SHAPES = {
    **{name: (HIDDEN, HIDDEN) for name in ("q", "o")},
    **{name: (HIDDEN // 4, HIDDEN) for name in ("k", "v")},
    **{name: (INNER, HIDDEN) for name in ("gate", "up")},
    "down": (HIDDEN, INNER),
    **{name: (HIDDEN,) for name in ("before", "after")},
}


class Calls:
    """The parts of a step as methods; ``bytes`` has the bytes that each moves."""

    def __init__(
        self, layers: int, bits: int, place: Callable[[Any], Any], names: Collection[str] = SHAPES
    ) -> None:
        rng = np.random.default_rng(0)
        masters = {
            f"{layer}.{name}": place(rng.standard_normal(shape, np.float32))
            for layer in range(layers)
            for name, shape in SHAPES.items()
            if name in names
        }
        self.optimizer = AdamW(masters, state_bits=bits)
        copies = compute_copies(masters, "bfloat16")
        self.optimizer.keep_copies(copies)
        models = masters | copies
        self.gradients = {n: place(np.ones(a.shape, a.dtype)) for n, a in models.items()}
        self.scaler = LossScaler()
        sizes = [(a.size, a.dtype == BFLOAT16) for a in self.gradients.values()]
        states = 16 if bits == 32 else 4
        gradients = sum(size * (2 if narrow else 4) for size, narrow in sizes)
        written = sum(
            size * (8 + 2 * narrow + (states if narrow else 16)) for size, narrow in sizes
        )
        self.bytes = {"measure": gradients, "clip": gradients, "step": gradients + written}

    def measure(self) -> None:
        measure_gradients(self.gradients, 1.0, scaler=self.scaler)

    def clip(self) -> None:
        clip_gradients(self.gradients, 1e9)  # measures the norm and changes nothing

    def step(self) -> None:
        self.optimizer.step(self.gradients, lr=1e-4)


class Host:
    """Seconds on the host, for the attention of one layer."""

    version = "1"
    params = ([32, 8], ["measure", "clip", "step"])
    param_names = ("bits", "part")
    timeout = 120

    def setup(self, bits: int, part: str) -> None:
        self.call = getattr(Calls(1, bits, np.asarray, ("q", "k", "v", "o", "before")), part)

    def time_part(self, bits: int, part: str) -> None:
        self.call()


class Device:
    """Time on a GPU divided by that of a copy of as many bytes; lower is better."""

    unit, version = "times a copy", "1"
    params = ([32, 8], ["measure", "clip", "step"])
    param_names = ("bits", "part")
    timeout = 300

    def setup(self, bits: int, part: str) -> None:
        self.clock, self.copy_rate = clock()
        import cupy

        calls = Calls(LAYERS, bits, cupy.asarray)
        self.call, self.bytes = getattr(calls, part), calls.bytes[part]

    def track_times_a_copy(self, bits: int, part: str) -> float:
        return self.clock([self.call])[0][0] * self.copy_rate / self.bytes
