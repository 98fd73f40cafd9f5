"""The kernel of attention_forward against its definition, which test_attention.py proves."""

import itertools
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import attention_forward
from unsloth_cupy._jit import KERNEL_DTYPES, using
from unsloth_cupy._op import OPS
from unsloth_cupy.ops._attention_launch import ANY, CAUSAL, FORWARD, HIDING, resolve

from ..parity import Case, KernelParity, _compare_kernels, emulator

GROUPED = {"batch": 2, "heads": 4, "kv_heads": 2}
SMALL = GROUPED | {"queries": 21, "keys": 90, "dim": 8, "value_dim": 16}
KB = 1024
BUDGETS = [48 * KB, 64 * KB, 99 * KB, 163 * KB, 227 * KB]  # of a block: sm_75 .. sm_90


def tiles(*shape: int) -> Any:
    return lambda rng: rng.random(shape) < 0.6


def hides(rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random((4, 1, 90)) < 0.3, -np.inf, 1.0)


def large(rng: np.random.Generator) -> np.ndarray:
    return 10 * rng.standard_normal((2, 21, 2, 8))


class TestAttentionForward(KernelParity):
    op = "attention_forward"
    test_gradient_matches_finite_differences = None  # test_attention.py proves the definition
    test_rounds_once = test_any_strides = None
    cases = (
        Case(
            "causal and padded in shared memory",
            **GROUPED | {"queries": 70, "keys": 133, "dim": 40, "value_dim": 64},
            causal=True,
        ),
        Case("full", batch=1, heads=2, kv_heads=1, queries=150, keys=70, dim=64, value_dim=8),
        Case(
            "window, rows of 16 chunks",
            **SMALL | {"batch": 1, "queries": 90, "dim": 128, "value_dim": 128},
            window=(30, 9),
        ),
        Case(
            "rows of 32 chunks",
            **GROUPED | {"queries": 3, "keys": 41, "dim": 256, "value_dim": 200},
            arrays={"key_lengths": [41, 20]},
        ),
        Case("left window", **SMALL, window=(20, None), scale=0.0, arrays={"query_start": 3}),
        Case("rows that see no key", **SMALL, causal=True, arrays={"key_lengths": [0, 12]}),
        Case("no key but a sink", **SMALL, given=["sinks"], arrays={"key_lengths": [0, 64]}),
        Case("large scores", **SMALL | {"heads": 2}, arrays={"q": large}),
        Case("softcap", **SMALL, softcap=2.0, scale=-0.4, arrays={"query_start": [60, -5]}),
        Case("bias and alibi", **SMALL, given=["bias", "alibi"], causal=True),
        Case("bias and mask by key", **SMALL, arrays={"bias": hides, "mask": tiles(90)}),
        Case("mask", **SMALL, given=["mask"], arrays={"alibi": [0.5, 0.3, 0.1, 0.2]}),
        Case("dropout", **SMALL, dropout=0.4, seed=2**40 + 3, window=(30, 2)),
        Case(
            "tiles",
            **SMALL | {"queries": 140, "keys": 300},
            arrays={"block_mask": [[[[True, False, True], [False, True, False]]]]},
            causal=True,
        ),
        Case(
            "all",
            **SMALL | {"queries": 140, "keys": 150},
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
            dropout=0.1,
            seed=7,
        ),
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("number", [0, -1])
def test_random_schedules(number: int, seed: int) -> None:
    """Whatever order threads and blocks run in."""
    run = lambda function: _within(function, seed=seed)  # noqa: E731
    case = TestAttentionForward.cases[number]
    _compare_kernels(OPS["attention_forward"], case, KERNEL_DTYPES[seed % 3], run, np.asarray)


def _within(function: Any, **how: Any) -> Any:
    with emulator():
        from ..cuda_on_cpu import Emulator

        with using(Emulator(**how)):
            return function()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("itemsize", "width"), FORWARD)
def test_tiles_fit_every_budget(itemsize: int, width: int, budget: int) -> None:
    """Every head dim has tiles in every budget, and those match the tiles of block_mask."""
    for dim, options in itertools.product(range(8, width + 1, 8), (CAUSAL, HIDING, ANY)):
        chosen = resolve(itemsize, dim, width, options, budget)
        assert chosen is not None
        assert chosen.options >= options
        assert chosen.blocks * chosen.bytes(itemsize, dim, width) <= budget
        assert 128 % (chosen.warps * chosen.warp_tiles * 16) == 0  # one row of block_mask
        assert 128 % chosen.keys == 0


@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:], ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
def test_kernels_of_every_budget(budget: int, dtype: Any) -> None:
    case = Case("", **GROUPED, queries=70, keys=75, dim=128, value_dim=96, causal=True)
    run = lambda function: _within(function, check=False, shared_memory=budget)  # noqa: E731
    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray)


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


@pytest.mark.parametrize("dims", [(12, 8), (8, 12), (264, 8), (8, 264)])
def test_other_dims_run_the_definition(dims: tuple[int, int]) -> None:
    q, k, v = drawn((1, 5, 2, dims[0]), (1, 7, 2, dims[0]), (1, 7, 2, dims[1]))
    expected = attention_forward(q, k, v)
    for found, same in zip(_within(lambda: attention_forward(q, k, v)), expected, strict=True):
        assert found.tobytes() == same.tobytes()


def test_keys_beyond_lengths_and_future_keys_do_not_reach_back() -> None:
    """NaN beyond the lengths stays there; other future keys leave a row's bits alone."""
    q, k, v = drawn((2, 90, 2, 64), (2, 90, 1, 64), (2, 90, 1, 64))
    options: dict[str, Any] = {"key_lengths": np.array([90, 61]), "query_start": 0}
    before = _within(lambda: attention_forward(q, k, v, causal=True, **options))
    k[1, 61:], v[1, 61:] = np.nan, np.inf
    k[0, 40:], v[0, 40:] = 9 * k[0, 40:], -7
    after = _within(lambda: attention_forward(q, k, v, causal=True, **options))
    for found, same, rows in zip(after, before, (0, 1), strict=True):
        found_rows, same_rows = (np.moveaxis(a, 1 + rows, 1) for a in (found, same))
        assert found[1].tobytes() == same[1].tobytes()
        assert found_rows[0, :40].tobytes() == same_rows[0, :40].tobytes()
        assert (found_rows[0, 40:] != same_rows[0, 40:]).reshape(50, -1).any(axis=1).all()
