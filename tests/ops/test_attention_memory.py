"""What attention holds beyond its arguments and results: linear in the tokens, on GPU and host.

Beside it stands the unfused computation, which holds a number for every pair of a query and a key.
"""

import tracemalloc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AttentionConfig, attention_backward, attention_forward
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.memory.ledger import Ledger
from unsloth_cupy.memory.planned import Planned, recording_in
from unsloth_cupy.ops.attention._backward import workspace
from unsloth_cupy.ops.attention._backward_hopper import ONE_PASS
from unsloth_cupy.ops.common import threads

from ..machines.stand_in import GRAIN, gpu

HEADS, DIM = 16, 64  # of one batch
TOKENS = (1024, 2048, 4096)
NAMES = ("bias", "alibi")


def on_gpu(tokens: int, dtype: Any, **options: Any) -> tuple[int, int]:
    """Return the bytes that forward and backward kernels take beside arguments and results."""
    with gpu() as machine:
        taken = measured(machine, tokens, dtype, DIM, **options)
        assert all(launch.kernel.startswith("attention") for launch in machine.launches)
        return taken


def measured(machine: Any, tokens: int, dtype: Any, dim: int, **options: Any) -> tuple[int, int]:
    """Return what ``on_gpu`` returns, of a machine that is there."""
    q, k, v = (machine.array((1, tokens, HEADS, dim), dtype) for _ in range(3))
    inputs = {n: machine.array(s, np.float32) for n, s in options.items()}
    attention_forward(q, k, v, causal=True, **inputs)  # the stream gets its counters
    before = machine.peak = machine.held
    out, lse = attention_forward(q, k, v, causal=True, **inputs)
    forward = machine.peak - before - out.memory.size - lse.memory.size
    before = machine.peak = machine.held
    gradients = attention_backward(q, q, k, v, out, lse, causal=True, **inputs)
    backward = machine.peak - before
    return forward, backward - sum(a.memory.size for a in gradients if a is not None)


OPTIONS = ({}, {"alibi": (HEADS,)}, {"bias": (HEADS, 1, 1)})


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "".join(o) or "plain")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_kernels(dtype: Any, options: dict[str, Any]) -> None:
    """Forward takes nothing, backward its workspace; the unfused takes scores at the least."""
    taken = {}
    for tokens in TOKENS:
        forward, backward = on_gpu(tokens, dtype, **options)
        inputs = {name: np.empty(options[name]) if name in options else None for name in NAMES}
        planned = workspace(1, HEADS, tokens, tokens, dtype.itemsize, **inputs)
        assert forward == 0
        assert backward <= planned + 3 * GRAIN
        taken[tokens] = planned
        assert backward <= 0.3 * HEADS * tokens**2 * dtype.itemsize
    steps = np.diff([taken[tokens] for tokens in TOKENS])
    assert steps[1] == 2 * steps[0]  # so many bytes a token


@pytest.mark.parametrize("dim", [64, 72, 128])
def test_one_launch_on_warpgroups(dim: int) -> None:
    """Beside stats it takes dq in float32, as is planned: linear in the tokens."""
    width = 64 if dim == 64 else 128
    taken = []
    for tokens in (1000, 2024, 4072):  # 24 short of whole tiles
        with AttentionConfig(warpgroups=True, one_pass=True).use(), gpu("90") as machine:
            _, backward = measured(machine, tokens, BFLOAT16, dim)
            names = [launch.kernel for launch in machine.launches]
        assert names[-1] == "attention_dq_sm90"
        own = {"one_pass": ONE_PASS[width], "dim": dim}
        planned = workspace(1, HEADS, tokens, tokens, 2, bias=None, alibi=None, **own)
        assert planned <= backward < planned + 3 * GRAIN
        with AttentionConfig(warpgroups=True, one_pass=True).use():
            assert in_the_plan(tokens, dim) == backward + GRAIN  # a counter of its own
        taken.append(planned)
    assert taken[1] - taken[0] == (taken[2] - taken[1]) // 2
    assert taken[0] * 4 == taken[2]


def in_the_plan(tokens: int, dim: int) -> int:
    """Return the bytes that a plan of memory counts for the backward pass beside its results."""
    ledger = Ledger(GRAIN)
    with recording_in(ledger):
        q, k, v = (Planned.of((1, tokens, HEADS, dim), BFLOAT16) for _ in range(3))
        out, lse = attention_forward(q, k, v, causal=True)
        start = len(ledger.changes)
        gradients = attention_backward(q, q, k, v, out, lse, causal=True)
    sizes = ledger.sizes
    most = max(accumulate(sizes[n] if n >= 0 else -sizes[~n] for n in ledger.changes[start:]))
    return most - sum(-(-a.nbytes // GRAIN) * GRAIN for a in gradients if a is not None)


def peak(function: Callable[[], Any]) -> int:
    """Return the bytes that NumPy takes beside the results of a function."""
    tracemalloc.start()
    made = function()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most - sum(a.nbytes for a in made if a is not None)


def unfused(q: Any, k: Any, v: Any) -> tuple[np.ndarray]:
    """Return attention of equal heads with all scores at once, changed in place."""
    q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
    p = q @ k.swapaxes(2, 3)
    p *= DIM**-0.5
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return (p @ v,)


def unfused_backward(dout: Any, q: Any, k: Any, v: Any) -> tuple[np.ndarray, ...]:
    """Return the gradients in as little room: p and ds."""
    dout, q, k, v = (a.transpose(0, 2, 1, 3) for a in (dout, q, k, v))
    p = q @ k.swapaxes(2, 3)
    p *= DIM**-0.5
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    dv = p.swapaxes(2, 3) @ dout
    ds = dout @ v.swapaxes(2, 3)
    ds -= np.einsum("bhqk,bhqk->bhq", ds, p)[..., None]
    ds *= p
    return DIM**-0.5 * (ds @ k), DIM**-0.5 * (ds.swapaxes(2, 3) @ q), dv


@pytest.mark.slow
def test_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1024 tokens on at least 70 % less than the unfused, forward and backward."""
    monkeypatch.setattr(threads, "count", lambda: 2)
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 1024, HEADS, DIM), np.float32)
    (plain,) = unfused(q, k, v)
    out, lse = attention_forward(q, k, v)
    np.testing.assert_allclose(out, plain.transpose(0, 2, 1, 3), rtol=1e-4, atol=1e-5)
    forward = peak(lambda: attention_forward(q, k, v)), peak(lambda: unfused(q, k, v))
    backward = (
        peak(lambda: attention_backward(dout, q, k, v, out, lse)),
        peak(lambda: unfused_backward(dout, q, k, v)),
    )
    for ours, theirs in (forward, backward):
        assert theirs >= HEADS * 1024**2 * 4
        assert ours <= 0.3 * theirs, (ours, theirs)
