"""Time of attention at five fixed shapes and relative to torch, and memory of long sequences."""

import functools
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from unsloth_cupy import attention, attention_backward, attention_forward
from unsloth_cupy.bench.attention_shapes import SHAPES

HEADS, DIM = 8, 64
ROUNDS = 9


def arrays(tokens: int) -> list[np.ndarray]:
    """Return q, k and v of one sequence: (1, tokens, heads, dim) float32."""
    rng = np.random.default_rng(0)
    return list(rng.standard_normal((3, 1, tokens, HEADS, DIM), np.float32))


def seconds(call: Callable[[], Any]) -> float:
    """Return the time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Shapes:
    """Processor seconds of causal attention at the five shapes of ``bench attention``."""

    version, timer = "1", time.process_time
    repeat, warmup_time = (5, 20, 0.5), 0.05
    params = ([shape.name for shape in SHAPES], ["forward", "backward"])
    param_names = ("shape", "direction")
    timeout = 120

    def setup(self, name: str, direction: str) -> None:
        """Draw q, k and v; for backward, run forward once."""
        shape = next(shape for shape in SHAPES if shape.name == name)
        size = (4, shape.batch, shape.tokens, shape.heads, shape.dim)
        *qkv, dout = np.random.default_rng(0).standard_normal(size, np.float32)
        self.call = functools.partial(attention_forward, *qkv, causal=True)
        if direction == "backward":
            self.call = functools.partial(attention_backward, dout, *qkv, *self.call(), causal=True)

    def time_attention(self, name: str, direction: str) -> None:
        self.call()


class AgainstTorch:
    """Time divided by torch's, in alternating calls; below 1 this library is faster."""

    unit, version = "times torch", "1"
    params = (2048,)
    param_names = ("tokens",)
    timeout = 300

    def setup(self, tokens: int) -> None:
        """Pass torch views of the same arrays in its layout (batch, heads, tokens, dim)."""
        try:
            import torch
        except ImportError as error:
            raise NotImplementedError("torch is not installed") from error
        self.ours = arrays(tokens)
        theirs = [torch.from_numpy(array).transpose(1, 2) for array in self.ours]
        self.theirs = lambda: torch.nn.functional.scaled_dot_product_attention(*theirs)
        np.testing.assert_allclose(
            attention(*self.ours), self.theirs().transpose(1, 2).numpy(), rtol=1e-4, atol=1e-5
        )

    def track_ratio(self, tokens: int) -> float:
        both = [
            (seconds(lambda: attention(*self.ours)), seconds(self.theirs)) for _ in range(ROUNDS)
        ]
        ours, theirs = (statistics.median(column) for column in zip(*both, strict=True))
        return ours / theirs


class Long:
    """Bytes besides q, k and v: linear in the tokens, as no (queries, keys) array is stored."""

    unit, version = "bytes", "1"
    params = (2048, 8192)
    param_names = ("tokens",)
    timeout = 300

    def setup(self, tokens: int) -> None:
        """Draw q, k and v."""
        self.arrays = arrays(tokens)

    def track_peak(self, tokens: int) -> int:
        tracemalloc.start()
        attention(*self.arrays)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
