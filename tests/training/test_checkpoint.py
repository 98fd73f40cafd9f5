"""Checkpoints: gradients equal to the last bit, and less memory while the tape is full."""

import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from unsloth_cupy import (
    CheckpointConfig,
    Tape,
    add,
    attention,
    checkpoint,
    linear,
    rms_norm,
    rms_norm_forward,
    swiglu,
)
from unsloth_cupy.core.op import OPS, op
from unsloth_cupy.errors import ConfigError, GradientError

TOKENS, HEADS, DIM, INNER = 24, 2, 8, 40
HIDDEN = HEADS * DIM


class Weights(NamedTuple):
    """Of one layer."""

    norm: Any
    qkv: Any
    out: Any
    mlp: tuple[Any, Any, Any]


def layer(x: Any, w: Weights, *, seed: int) -> Any:
    """A layer that uses x twice, and draws random numbers."""
    y = linear(rms_norm(x, w.norm), w.qkv)
    q, k, v = (
        y[..., i * HIDDEN : (i + 1) * HIDDEN].reshape(1, TOKENS, HEADS, DIM) for i in range(3)
    )
    y = attention(q, k, v, causal=True, dropout=0.25, seed=seed)
    x = add(x, linear(y.reshape(1, TOKENS, HIDDEN), w.out))
    gate, up, down = w.mlp
    return add(x, linear(swiglu(linear(x, gate), linear(x, up)), down))


def weights(rng: np.random.Generator, dtype: str) -> Weights:
    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 8).astype(dtype)

    mlp = draw(INNER, HIDDEN), draw(INNER, HIDDEN), draw(HIDDEN, INNER)
    return Weights(draw(HIDDEN), draw(3 * HIDDEN, HIDDEN), draw(HIDDEN, HIDDEN), mlp)


def gradients(through: Callable[..., Any], layers: int = 3, dtype: str = "float32") -> list[bytes]:
    """Return the bytes of the result and of every gradient of a small model."""
    rng = np.random.default_rng(0)
    tape = Tape()
    x = first = tape.watch(rng.standard_normal((1, TOKENS, HIDDEN)).astype(dtype))
    wrt = [first]
    for number in range(layers):
        norm, qkv, out, mlp = weights(rng, dtype)
        watched = [tape.watch(a) for a in (norm, qkv, out, *mlp)]
        wrt += watched
        x = through(layer, x, Weights(*watched[:3], tuple(watched[3:])), seed=number)
    x = add(x, first)  # the first one is used by a part, and again after all parts
    grads = tape.gradients(x, wrt, np.ones_like(x.value))
    return [array.tobytes() for array in (x.value, *grads)]


def plainly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


def nested(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(checkpoint, function, *args, **options)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "through",
    [
        checkpoint,
        nested,
        lambda *call, **seed: checkpoint(*call, keep=("attention_forward",), **seed),
        lambda *call, **seed: checkpoint(*call, keep=("linear", "swiglu"), offload=True, **seed),
    ],
    ids=["whole", "nested", "attention kept", "products kept"],
)
def test_gradients_are_equal_to_the_last_bit(through: Callable[..., Any], dtype: str) -> None:
    assert gradients(through, dtype=dtype) == gradients(plainly, dtype=dtype)


@pytest.fixture
def _forget_ops():
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


@pytest.mark.usefixtures("_forget_ops")
def test_only_what_is_kept_is_not_computed_again() -> None:
    calls = []

    def doubled(x):
        calls.append("x")
        return 2 * x

    twice = op("x(n) -> y(n)")(doubled)

    @twice.gradient
    def doubled_backward(dy):
        return 2 * dy

    for keep, expected in (((), 4), (("doubled",), 2), (("add",), 4)):
        calls.clear()
        tape = Tape()
        x = tape.watch(np.ones(3))
        y = checkpoint(lambda x: add(twice(twice(x)), x), x, keep=keep)
        assert tape.gradients(y, [x], np.ones(3))[0].tolist() == [5, 5, 5]
        assert len(calls) == expected


def test_without_a_tape_it_is_a_call() -> None:
    x = np.ones((2, 3), np.float32)
    assert checkpoint(rms_norm, x, x[0], eps=1e-3).tolist() == rms_norm(x, x[0], eps=1e-3).tolist()


def test_results_may_be_arguments_absent_or_used_in_part() -> None:
    def part(x: Any, w: Any) -> Any:
        y, h, rstd = rms_norm_forward(x, w)
        return {"y": y, "same": x, "none": None, "unused": [h, rstd]}

    grads = []
    for through in (plainly, checkpoint):
        tape = Tape()
        x, w = (tape.watch(np.arange(1.0, 4.0)) for _ in range(2))
        made = through(part, x, w)
        assert made["none"] is None
        grads.append(tape.gradients(add(made["y"], made["same"]), [x, w], np.ones(3)))
    np.testing.assert_array_equal(grads[0], grads[1])


def peak_and_kept(through: Callable[..., Any], layers: int) -> tuple[int, int]:
    """Return the bytes that a tape holds after the way forward, and the peak until the end."""
    rng = np.random.default_rng(1)
    tape = Tape()
    x = first = tape.watch(rng.standard_normal((1, TOKENS, HIDDEN)).astype("float32"))
    given = [weights(rng, "float32") for _ in range(layers)]
    tracemalloc.start()
    for number, (norm, qkv, out, mlp) in enumerate(given):
        watched = [tape.watch(a) for a in (norm, qkv, out, *mlp)]
        x = through(layer, x, Weights(*watched[:3], tuple(watched[3:])), seed=number)
    kept = sum(array_bytes(trace) for trace in tracemalloc.take_snapshot().traces)
    tape.gradients(x, [first], np.ones_like(x.value))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return kept, peak


def array_bytes(trace: Any) -> int:
    return trace.size if trace.domain == np.lib.tracemalloc_domain else 0


@pytest.mark.slow
def test_the_tape_keeps_one_input_a_part() -> None:
    whole, _ = peak_and_kept(plainly, 12)
    parts, _ = peak_and_kept(checkpoint, 12)
    assert parts <= 13 * TOKENS * HIDDEN * 4
    assert parts < whole / 5


@pytest.mark.parametrize("bad", ["attention", "attention_forward", ("nothing",), None, 1, ([],)])
def test_names_that_are_no_ops(bad: Any) -> None:
    with pytest.raises(ConfigError, match="pass names of ops"):
        checkpoint(rms_norm, np.ones(2), np.ones(2), keep=bad)
    with pytest.raises(ConfigError, match="pass names of ops"):
        CheckpointConfig(keep=bad)


def test_vars_must_be_arguments_of_one_tape() -> None:
    one, two = Tape().watch(np.ones(2)), Tape().watch(np.ones(2))
    with pytest.raises(GradientError, match="on two tapes"):
        checkpoint(add, one, two)
    with pytest.raises(GradientError, match="on two tapes"):
        checkpoint(lambda x: add(x, two), one)
    with pytest.raises(GradientError, match="is not an argument; pass it"):
        checkpoint(lambda x: two, one)


def test_a_function_that_changes_its_mind() -> None:
    tape, turn = Tape(), iter([False, True])
    x = tape.watch(np.ones(2))
    y = checkpoint(lambda x: (add(x, x), x) if next(turn) else add(x, x), x)
    with pytest.raises(GradientError, match="second call of the function returned other results"):
        tape.gradients(y, [x], np.ones(2))


def test_config() -> None:
    assert CheckpointConfig() == CheckpointConfig(enabled=True, recompute_every=1)
    assert CheckpointConfig(recompute_every=4).memory_reduction_factor(32) == 0.25
    for layers in range(1, 20):
        for every in range(1, 24):
            kept = len(range(0, layers, every))  # the first layer of each part
            factor = CheckpointConfig(recompute_every=every).memory_reduction_factor(layers)
            assert factor == kept / layers
    assert CheckpointConfig(enabled=False).memory_reduction_factor(32) == 1
    assert CheckpointConfig(recompute_every=99).memory_reduction_factor(1) == 1
    for every in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="recompute_every="):
            CheckpointConfig(recompute_every=every)
    for layers in (0, -3, "12", None, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="1 layer or more"):
            CheckpointConfig().memory_reduction_factor(layers)
