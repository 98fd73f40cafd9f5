"""A thousand random calls of attention: any options together, any lengths, inputs times 10.

The definition is judged on all of them against attention with all scores at once.  Of the kernels
a sample runs; ``--sample all`` runs them all.
"""

import itertools
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import attention_backward, attention_forward
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS

from ..harness.parity import Case, _equal_bits, emulator, outputs_of, within_rule
from ..harness.sampling import Sample
from .attention_cases import beyond_denormals, worst_plain
from .dense_attention import dense

COUNT = 1000
A_RUN = 3  # calls that the kernels are asked for: each is two more to compile
OPTIONS = (
    *("causal", "window", "scale", "softcap", "mask", "bias", "alibi", "sinks", "key_lengths"),
    *("query_start", "block_mask", "dropout"),
)
MOST = 257  # one more than two tiles of 128


def broadcast(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts to another: some axes are 1, some of the first are absent."""
    kept = [int(n) if rng.random() < 0.7 else 1 for n in shape]
    return tuple(kept[rng.integers(0, 3) :])


def made(number: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return float32 arrays and options of one call; q, k and v are times 10 in some.

    Pairs of options take turns; each of the others joins them with a chance of its own.
    """
    rng = np.random.default_rng(number)
    pairs = [*itertools.combinations(OPTIONS, 2)]
    share = rng.choice([0.0, 0.15, 0.5])
    chosen = {*pairs[number % len(pairs)]} | {n for n in OPTIONS if rng.random() < share}
    batch, kv_heads, group = (int(n) for n in rng.integers(1, 3, 3))
    heads = kv_heads * group
    queries, keys = (  # every odd length, else any, and few or none often
        1 + number // turn * 2 % (MOST + 1)
        if number % turn == 0
        else int(rng.choice([0, 1, rng.integers(1, 40), MOST], p=[0.05, 0.15, 0.7, 0.1]))
        for turn in (2, 3)
    )
    dim, value_dim = (int(n) for n in rng.choice([8, 16, 40], 2))
    size = 10 if rng.random() < 0.3 else 1
    arrays: dict[str, Any] = {
        name: size * rng.standard_normal((batch, tokens, of, width))
        for name, tokens, of, width in (
            ("q", queries, heads, dim),
            ("k", keys, kv_heads, dim),
            ("v", keys, kv_heads, value_dim),
        )
    }
    scores = (batch, heads, queries, keys)
    options: dict[str, Any] = {}
    if "causal" in chosen:
        options["causal"] = True
    if "window" in chosen:
        options["window"] = tuple(
            None if rng.random() < 0.2 else int(n) for n in rng.integers(0, 80, 2)
        )
    if "scale" in chosen:
        options["scale"] = float(rng.choice([0.0, -0.3, 0.3]))
    if "softcap" in chosen:
        options["softcap"] = float(rng.choice([0.5, 30.0]))
    if "mask" in chosen:
        arrays["mask"] = rng.random(broadcast(rng, scores)) < rng.choice([0.1, 0.7])
    if "bias" in chosen:
        bias = rng.standard_normal(broadcast(rng, scores))
        arrays["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias)
    if "alibi" in chosen:
        arrays["alibi"] = rng.random((batch, heads) if rng.random() < 0.5 else heads)
    if "sinks" in chosen:
        arrays["sinks"] = rng.standard_normal(heads)
    if "key_lengths" in chosen:
        arrays["key_lengths"] = rng.integers(0, keys + 1, batch) * (rng.random(batch) < 0.8)
    if "query_start" in chosen:
        arrays["query_start"] = rng.integers(-40, keys + 40, batch)
    if "block_mask" in chosen:
        tiles = -(-queries // 128), -(-keys // 128)
        some = [1 if rng.random() < 0.5 else n for n in (batch, heads)]
        arrays["block_mask"] = rng.random((*some, *tiles)) < 0.6
    if "dropout" in chosen:
        options |= {"dropout": float(rng.choice([0.1, 0.9])), "seed": int(rng.integers(2**62))}
    floats = {n: a.astype(np.float32) for n, a in arrays.items() if a.dtype.kind == "f"}
    return arrays | floats, options


def test_every_pair_of_options_is_among_them() -> None:
    seen, sizes = set(), set()
    for number in range(COUNT):
        arrays, options = made(number)
        names = sorted((arrays.keys() | options.keys()) & {*OPTIONS})
        seen.update(itertools.combinations(names, 2))
        sizes.add((arrays["q"].shape[1], arrays["k"].shape[1]))
    assert len(seen) == len(OPTIONS) * (len(OPTIONS) - 1) // 2
    for side in zip(*sizes, strict=True):
        assert {0, *range(1, MOST + 1, 2)} <= {*side}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, COUNT, 100))
def test_the_definition(first: int) -> None:
    """In float32, out and lse are as near as float32 lets them; no number is NaN, no gradient."""
    hidden = 0
    for number in range(first, first + 100):
        arrays, options = made(number)
        q, k, v = (arrays.pop(name) for name in "qkv")
        inputs = arrays | options
        out, lse = attention_forward(q, k, v, **inputs)
        wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in arrays.items()}
        exact, exact_lse = dense(q, k, v, **wide, **options)
        none = exact_lse == -np.inf
        assert (lse[none] == -np.inf).all()
        assert not out.transpose(0, 2, 1, 3)[none].any()
        error = (out - exact) / max(1, v.std() if v.size else 0)  # inputs times 10 are outputs too
        if error.size:
            assert np.abs(error).mean() < 1e-5, number
            assert np.sqrt(np.square(error).mean()) < 1e-4, number
        # sums of n terms lose n roundings of the largest sum of their magnitudes at most
        terms = q.shape[-1] + k.shape[1]
        largest = np.sqrt(np.square(q).sum(-1).max(initial=0) * np.square(k).sum(-1).max(initial=0))
        largest = 1 + largest + np.abs(exact_lse[~none]).max(initial=0)
        lost = terms * np.finfo(np.float32).eps / 2 * largest
        assert np.abs(lse[~none] - exact_lse[~none]).max(initial=0) <= lost, number
        gradients = attention_backward(out, q, k, v, out, lse, **inputs)
        assert all(np.isfinite(each).all() for each in gradients if each is not None), number
        hidden += int(none.sum())
    assert hidden


@pytest.mark.parametrize("number", range(COUNT) if Sample.all else range(A_RUN))
def test_kernels_of_random_calls(number: int) -> None:
    number = number if Sample.all else (Sample.day * A_RUN + number) % COUNT
    arrays, options = made(number)
    call = Case(f"random call {number}", arrays=arrays, **options).draw(
        OPS["attention_forward"], KERNEL_DTYPES[number % len(KERNEL_DTYPES)]
    )
    exact = outputs_of(call.cast(np.float64))
    with emulator(check=False):
        first, second = outputs_of(call), outputs_of(call)
    within_rule(worst_plain(call, exact), exact, beyond_denormals(first, exact))
    _equal_bits(first, second)
