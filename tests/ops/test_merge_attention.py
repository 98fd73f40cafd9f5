from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Tape, attention, attention_forward, merge_attention
from unsloth_cupy.errors import DTypeError, ShapeError

from ..harness.parity import Case, Parity

# The public names, as other people's programs call them.
PUBLIC = ("merge_attention(out_a, lse_a, out_b, lse_b)",)

SIZES = {"batch": 2, "queries": 3, "heads": 2, "dim": 4}


def some_empty(rng: np.random.Generator) -> np.ndarray:
    lse = rng.standard_normal((2, 2, 3))
    lse[0, 0, 0] = lse[1, 1] = -np.inf
    return lse


def large(rng: np.random.Generator) -> np.ndarray:
    return 800 + rng.standard_normal((2, 2, 3))


class TestMergeAttention(Parity):
    op = "merge_attention"
    cases = (
        Case("plain", **SIZES),
        Case("large", **SIZES, arrays=dict.fromkeys(["lse_a", "lse_b"], large)),
        Case("one side empty", **SIZES, arrays={"lse_a": some_empty}),
        Case("both sides empty", **SIZES, arrays=dict.fromkeys(["lse_a", "lse_b"], some_empty)),
        Case("no queries", **SIZES | {"queries": 0}),
    )


def test_equals_attention_over_all_keys() -> None:
    """Two halves of the keys, the second hidden from the first rows, merge into the whole."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 6, 2, 4)) for _ in range(3))
    seed = rng.standard_normal(q.shape)

    def gradients(function: Any) -> list[Any]:
        tape = Tape()
        watched = [tape.watch(array) for array in (q, k, v)]
        out = function(*watched)
        return [out.value, *tape.gradients(out, watched, seed)]

    def halves(q: Any, k: Any, v: Any) -> Any:
        first = np.arange(6) < 3
        parts = [attention_forward(q, k, v, mask=mask, causal=True) for mask in (first, ~first)]
        return merge_attention(*parts[0], *parts[1])[0]

    whole = gradients(lambda q, k, v: attention(q, k, v, causal=True))
    for actual, expected in zip(gradients(halves), whole, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


def test_nothing_seen_on_either_side() -> None:
    """-inf and -inf give -inf and 0; the gradients are 0."""
    tape = Tape()
    arrays = [np.ones((1, 1, 1, 2)), np.full((1, 1, 1), -np.inf)] * 2
    watched = [tape.watch(array) for array in arrays]
    out, lse = merge_attention(*watched)
    assert lse.value == -np.inf
    assert not out.value.any()
    assert not any(grad.any() for grad in tape.gradients(out, watched, np.ones(out.shape)))


def test_wrong_arrays() -> None:
    out, lse = np.ones((1, 3, 2, 4), np.float16), np.ones((1, 2, 3), np.float32)
    with pytest.raises(ShapeError, match="lse_b has heads=3; it must be 2"):
        merge_attention(out, lse, out, lse.transpose(0, 2, 1))
    with pytest.raises(DTypeError, match="lse_a is float16; it must be float32"):
        merge_attention(out, lse.astype(np.float16), out, lse)
