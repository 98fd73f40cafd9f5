"""What the tests of attention's kernels share: sizes, drawings of arrays, and option cases."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..parity import Case

GROUPED = {"batch": 2, "heads": 4, "kv_heads": 2}
KB = 1024
BUDGETS = [48 * KB, 64 * KB, 99 * KB, 163 * KB, 227 * KB]  # of a block: sm_75 .. sm_120


def tiles(*shape: int) -> Any:
    return lambda rng: rng.random(shape) < 0.6


def hides(keys: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.where(rng.random((4, 1, keys)) < 0.3, -np.inf, 1.0)


def option_cases(small: dict[str, int]) -> tuple[Case, ...]:
    """Return cases of options that every kernel of attention takes, at grouped sizes."""
    return (
        Case("rows that see no key", **small, causal=True, arrays={"key_lengths": [0, 12]}),
        Case("bias and alibi", **small, given=["bias", "alibi"], causal=True),
        Case("mask", **small, given=["mask"], arrays={"alibi": [0.5, 0.3, 0.1, 0.2]}),
        Case("dropout", **small, dropout=0.4, seed=2**40 + 3, window=(30, 2)),
        Case(
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
            dropout=0.1,
            seed=7,
        ),
    )
