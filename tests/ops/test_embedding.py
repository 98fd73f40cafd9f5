import importlib
import re
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import DTypeError, RangeError

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelAlone, KernelParity, emulator
from .golden_cases import agree, both_dtypes, cast, golden
from .test_cross_entropy import reported

# The public names, as other people's programs call them.
PUBLIC = ("embedding(tokens, weight)",)


class TestEmbedding(KernelParity):
    op = "embedding"
    sizes = ({"hidden": 4096, "rows": (128,)}, {"hidden": 7, "rows": (128,)})
    cases = (
        Case("repeated tokens", rows=[3, 7], vocab=5, hidden=13),
        Case("rare tokens", rows=[4], vocab=50, hidden=13),
        Case("one token", rows=[], vocab=5, hidden=13),
        Case("no tokens", rows=[0], vocab=5, hidden=2),
        Case("no columns", rows=[3], vocab=5, hidden=0),
        Case("two columns at a time", rows=[3], vocab=5, hidden=6),
        Case("four columns at a time", rows=[3], vocab=5, hidden=12),
        Case("two blocks a row", rows=[3], vocab=2, hidden=1032),
    )


class TestFrequentTokens(KernelParity):
    """Of a token that occurs often, the gradient is the sum of partial sums."""

    op = "embedding"
    cases = (Case("of three", rows=[400], vocab=3, hidden=8),)


@both_dtypes
@golden("layers", "embedding")
def test_golden(golden: OpCase, dtype: Any) -> None:
    inputs = cast(golden, dtype)
    agree(uc.embedding(inputs["ids"], inputs["weight"]), golden.outputs["y"])
    none, dweight = uc.embedding_backward(inputs["cotangent"], inputs["ids"], inputs["weight"])
    assert none is None
    agree(dweight, golden.grads["weight"])


def test_two_backward_runs_give_equal_bits() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, 1000)
    dx = rng.standard_normal((1000, 8)).astype(np.float32)
    weight = np.ones((3, 8), np.float32)
    first, second = (uc.embedding_backward(dx, tokens, weight)[1] for _ in range(2))
    assert first.tobytes() == second.tobytes()


class TestTokensOutsideTheVocabulary(KernelAlone):
    """A GPU's tokens are not read by the host: such a row is NaN, and no gradient."""

    op = "embedding"
    cases = (Case("before and behind"),)

    def prove(self, case: Case, dtype: Any) -> None:
        weight, tokens = np.arange(8).astype(dtype).reshape(2, 4), np.array([2, 1, -1])
        embedding = importlib.import_module("unsloth_cupy.ops.linear.embedding")
        with emulator():
            x = embedding._launch(tokens, weight)
            assert re.search(r"tokens holds (2 in row 0|-1 in row 2); it must be in 0", reported())
            assert reported() == ""
            _, dweight = embedding._launch_backward(np.ones((3, 4), dtype), tokens, weight)
        wide = [array.astype(np.float32) for array in (x, dweight)]
        np.testing.assert_array_equal(wide[0], [[np.nan] * 4, [4, 5, 6, 7], [np.nan] * 4])
        np.testing.assert_array_equal(wide[1], [[0] * 4, [1] * 4])


@pytest.mark.parametrize("token", [-1, 5])
def test_token_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(RangeError, match=rf"tokens holds {token}; it must be in 0 .. 4"):
        uc.embedding(np.array([0, token]), np.ones((5, 2), np.float32))


def test_tokens_are_integers() -> None:
    with pytest.raises(DTypeError, match="tokens is float32; it must be int32 or int64"):
        uc.embedding(np.ones(2, np.float32), np.ones((5, 2), np.float32))
