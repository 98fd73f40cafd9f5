"""Overhead of a call in torch, on tensors so small that arithmetic takes almost no time."""

import timeit
from collections.abc import Callable
from typing import Any

from unsloth_cupy import rms_norm, swiglu

CALLS, ROUNDS = 200, 100


class TinyCall:
    """Ops on 4 x 64 float32 tensors, and the same computation with torch's functions."""

    unit, version = "us", "1"
    param_names = ("op", "library", "what")
    params = (
        ["swiglu", "rms_norm"],
        ["unsloth_cupy", "torch.ops.unsloth_cupy", "torch"],
        ["without gradient", "forward", "forward and backward"],
    )

    def setup(self, op: str, library: str, what: str) -> None:
        """Call once, because the first tensor loads the interop module."""
        try:
            import torch
        except ImportError as error:
            raise NotImplementedError("needs torch") from error
        torch.set_num_threads(1)
        torch.manual_seed(0)
        x = torch.randn(4, 64)
        second = torch.randn(4, 64) if op == "swiglu" else torch.ones(64)
        slope = torch.ones_like(x)
        for tensor in (x, second):
            tensor.requires_grad_(what != "without gradient")
        rms_norm(x.detach(), torch.ones(64))
        call = function(op, library)
        self.call = lambda: call(x, second)
        if what == "forward and backward":
            self.call = lambda: torch.autograd.grad(call(x, second), (x, second), slope)
        self.call()

    def track_microseconds(self, op: str, library: str, what: str) -> float:
        """Return the shortest time of a call over all rounds."""
        return min(timeit.repeat(self.call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def function(op: str, library: str) -> Callable[..., Any]:
    """Return one library's function for an op."""
    import torch

    own = torch.ops.unsloth_cupy
    return {
        ("swiglu", "unsloth_cupy"): swiglu,
        ("swiglu", "torch.ops.unsloth_cupy"): own.swiglu.default,
        ("swiglu", "torch"): lambda gate, up: torch.nn.functional.silu(gate) * up,
        ("rms_norm", "unsloth_cupy"): rms_norm,
        ("rms_norm", "torch.ops.unsloth_cupy"): lambda x, weight: own.rms_norm_forward.default(
            x, weight, None, None, 1e-6, 0.0
        )[0],
        ("rms_norm", "torch"): lambda x, weight: torch.nn.functional.rms_norm(x, (64,), weight),
    }[op, library]
