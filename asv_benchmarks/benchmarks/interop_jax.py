"""Overhead of a call in JAX, on arrays so small that arithmetic takes almost no time."""

import timeit
from typing import Any

from unsloth_cupy import rms_norm, swiglu

CALLS, ROUNDS = 200, 60
CHAIN = 50  # consecutive calls in one compiled function


class TinyCall:
    """Ops on 4 x 64 float32 arrays, and the same computation with JAX's functions."""

    unit, version = "us", "1"
    param_names = ("op", "library", "what")
    params = (
        ["swiglu", "rms_norm"],
        ["unsloth_cupy", "jax"],
        ["outside of a jit", "in a jit", "in a jit, with gradient"],
    )

    def setup(self, op: str, library: str, what: str) -> None:
        """Compile; outside a jit, each of JAX's functions is jitted separately."""
        try:
            import jax
        except ImportError as error:
            raise NotImplementedError("needs JAX") from error
        x = jax.random.normal(jax.random.key(0), (4, 64))
        second = jax.random.normal(jax.random.key(1), (4, 64) if op == "swiglu" else (64,))
        call = {"swiglu": swiglu, "rms_norm": rms_norm}[op]
        if library == "jax":
            call = jax.jit({"swiglu": jax_swiglu, "rms_norm": jax_rms_norm}[op])

        def chain(x: Any, second: Any) -> Any:
            for _ in range(CHAIN):
                x = call(x, second)
            return x

        step, self.calls = call, 1
        if what != "outside of a jit":
            step, self.calls = jax.jit(chain), CHAIN
        if what == "in a jit, with gradient":
            step = jax.jit(jax.grad(lambda x, second: chain(x, second).sum(), (0, 1)))
        self.call = lambda: jax.block_until_ready(step(x, second))
        self.call()

    def track_microseconds(self, op: str, library: str, what: str) -> float:
        """Return the shortest time of a call over all rounds, with its gradient if requested."""
        number = max(CALLS // self.calls, 1)
        rounds = timeit.repeat(self.call, number=number, repeat=ROUNDS)
        return min(rounds) / number / self.calls * 1e6


def jax_swiglu(gate: Any, up: Any) -> Any:
    """Return ``swiglu`` in JAX's functions."""
    import jax

    return jax.nn.silu(gate) * up


def jax_rms_norm(x: Any, weight: Any) -> Any:
    """Return ``rms_norm`` in JAX's functions."""
    import jax

    return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight
