"""Helpers shared by the tests of attention's kernels: sizes, random arrays, cases, error bounds."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from unsloth_cupy.bench.cases import Call

from ..harness.parity import Arrays, Case, _error, _size, launched, outputs_of

LEFT = {"window": (128, None)}
EVERY = LEFT | {"causal": True, "softcap": 50.0, "dropout": 0.1, "seed": 1}
GROUPED = {"batch": 2, "heads": 4, "kv_heads": 2}
KB = 1024
LEAST = np.finfo(np.float32).tiny / np.finfo(np.float32).eps
BUDGETS = [48 * KB, 64 * KB, 99 * KB, 163 * KB, 227 * KB]  # of a block: sm_75 .. sm_120


def tiles(*shape: int) -> Any:
    return lambda rng: rng.random(shape) < 0.6


def hides(keys: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.where(rng.random((4, 1, keys)) < 0.3, -np.inf, 1.0)


def some_sinks(rng: np.random.Generator) -> np.ndarray:
    """Return the sinks of four heads; the last one is -inf and has no effect: exp(-inf) is 0."""
    return np.append(rng.standard_normal(3), -np.inf)


def all_options(small: dict[str, int], **more: Any) -> Case:
    """Return a case with all options at once."""
    return Case(
        "all",
        **small | {"queries": 140, "keys": 150},
        given=["mask", "bias", "alibi", "sinks"],
        arrays={
            "key_lengths": np.array([150, 131], np.int32),
            "query_start": np.array([9, 2], np.int32),
            "block_mask": tiles(2, 4, 2, 2),
        },
        causal=True,
        window=(90, None),
        scale=0.7,
        softcap=3.0,
        **more,
    )


def assert_columns_are_read_where_they_lie(dtype: Any, dim: int, tokens: int = 70) -> None:
    """Keys and values that are columns of one product give the bits of packed ones, unpacked."""
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((2, tokens + 8, 8 * dim)).astype(dtype)
    q, k, v = (
        columns[:, :tokens, part * dim :][..., : heads * dim].reshape(2, tokens, heads, dim)
        for part, heads in ((0, 4), (4, 2), (6, 2))
    )
    pairs = rng.standard_normal((1, 4, tokens, tokens)).astype(dtype)
    offsets = np.array([0, 30, tokens])
    calls: list[tuple[str, Any, dict[str, Any]]] = [
        ("attention", (q, k, v), {"causal": True}),
        ("attention", (q, k, v), {"bias": pairs}),
        ("attention_varlen", (q[0], k[0], v[0], offsets, offsets), {"causal": True}),
        ("attention", (q[:1], k[:1].copy(), v[:1]), {}),
    ]
    for name, (strided, *arrays), options in calls:
        q, packed = strided.copy(), [array.copy() for array in arrays]
        dout, results = np.ones_like(q), []
        for those in (arrays, packed):
            results.append(launched(f"{name}_forward", q, *those, **options))
            back = dout, q, *those, *results[-1]
            results[-1] += tuple(launched(f"{name}_backward", *back, **options))
        for actual, same in zip(*results, strict=True):
            assert (actual is same is None) or actual.tobytes() == same.tobytes()


def option_cases(small: dict[str, int]) -> tuple[Case, ...]:
    """Return cases of the options that every attention kernel supports, with grouped heads."""
    return (
        Case("rows that see no key", **small, causal=True, arrays={"key_lengths": [0, 12]}),
        Case("bias and alibi", **small, given=["bias", "alibi"], causal=True),
        Case("mask", **small, given=["mask"], arrays={"alibi": [0.5, 0.3, 0.1, 0.2]}),
        Case("dropout", **small, dropout=0.4, seed=2**40 + 3, window=(30, 2)),
        all_options(small, dropout=0.1, seed=7),
    )


# positions beyond 32 bits, and slopes so small that float32 still distinguishes keys there
AFAR = {"alibi": 2.0 ** -np.arange(21, 25), "query_start": [2**40, -(2**33)]}


def beyond_denormals(actual: Arrays, exact: Arrays) -> Arrays:
    """Return the outputs whose values are 0 or normal in float32; a GPU flushes others to 0."""
    return {name: a for name, a in actual.items() if not 0 < _size(exact[name]) < LEAST}


def orders(call: Call) -> Iterator[tuple[Call, np.ndarray, np.ndarray]]:
    """Yield the call with the columns of q and k, and of v, in several orders; and both orders.

    The order does not change the exact result, but it changes the rounding errors if scores are
    large, or if dout v and dout out cancel.  With a single order, a kernel would have to be as
    accurate as BLAS happens to be in it.
    """
    values_of = next(call.arrays[name] for name in ("v", "v_pages") if name in call.arrays)
    sizes = call.arrays["q"].shape[-1], values_of.shape[-1]
    for seed in range(32):
        rng = np.random.default_rng(seed)
        own, values = (rng.permutation(size) if seed else np.arange(size) for size in sizes)
        by = dict.fromkeys(("q", "k", "k_pages"), own) | dict.fromkeys(("v", "v_pages"), values)
        yield call._replace(arrays=call.arrays | _ordered(call.arrays, by)), own, values


def _ordered(arrays: Arrays, by: dict[str, np.ndarray]) -> Arrays:
    """Return the arrays with these names, with their columns in another order."""
    return {n: np.ascontiguousarray(arrays[n][..., by[n]]) for n in by if n in arrays}


def worst_plain(call: Call, exact: Arrays) -> Arrays:
    """Return for each output the plain computation's worst result in any order of columns."""

    def results() -> Iterator[Arrays]:
        for moved, _, values in orders(call):
            plain = outputs_of(moved)
            yield plain | _ordered(plain, {"out": np.argsort(values)})

    return _worst(results(), exact)


def worst_gradients(call: Call, outputs: Arrays, seeds: Arrays, exact: Arrays) -> Arrays:
    """Return the same for gradients computed from this out and lse, which any rounding may have.

    Backward computes scores again, which differ by some roundings from those behind out and lse.
    If two large scores compete, delta then does not match their p, nor do sums of ds.
    """

    def gradients() -> Iterator[Arrays]:
        for moved, own, values in orders(call):
            both = (outputs, "out"), (seeds, "dout")
            inputs = ({**a, **_ordered(a, {n: values})} for a, n in both)
            results = outputs_of(moved.backward(*inputs))
            back = {"dq": np.argsort(own), "dk": np.argsort(own), "dv": np.argsort(values)}
            yield results | _ordered(results, back)

    return _worst(gradients(), exact)


def _worst(several: Iterable[Arrays], exact: Arrays) -> Arrays:
    every = [*several]
    return {
        name: max((one[name] for one in every), key=lambda result: _error(result, exact[name]))
        for name in exact
    }
