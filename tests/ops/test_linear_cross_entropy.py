import tracemalloc
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, RangeError, ShapeError

from ..golden.golden import OpCase
from ..parity import Case, Parity
from .golden_cases import agree, both_dtypes, cast, golden

LABELS = np.array([[0, 12, -100], [5, -100, 5]])
SIZES: dict[str, Any] = {"rows": [2, 3], "hidden": 5, "vocab": 13, "arrays": {"labels": LABELS}}
EVERYTHING = {"smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}


class TestLinearCrossEntropy(Parity):
    op = "linear_cross_entropy_forward"
    cases = (
        Case("one chunk", **SIZES),
        Case("chunks of one row", **SIZES, max_bytes=1),
        Case("a short last chunk", **SIZES, max_bytes=4 * 13 * 8, **EVERYTHING),
        Case("one row", rows=[], hidden=3, vocab=4, arrays={"labels": 3}),
        Case("no rows", rows=[0], hidden=3, vocab=4, arrays={"labels": np.zeros(0, int)}),
        Case("no columns", rows=[2], hidden=0, vocab=4, arrays={"labels": [0, 1]}),
    )


@both_dtypes
@golden("layers", "linear_cross_entropy")
def test_golden(golden: OpCase, dtype: Any) -> None:
    given = cast(golden, dtype)
    x, weight, labels = given["x"], given["weight"], given["target"]
    counted = int((labels != -100).sum())
    loss, lse = uc.linear_cross_entropy_forward(x, weight, labels, max_bytes=100)
    agree(loss.sum() / counted, golden.outputs["y"])
    dloss = np.full_like(loss, given["cotangent"] / counted)
    grads = uc.linear_cross_entropy_backward(dloss, None, x, weight, labels, lse, max_bytes=100)
    agree(grads[0], golden.grads["x"])
    agree(grads[1], golden.grads["weight"])
    assert grads[2] is None


@pytest.mark.parametrize("options", [{}, EVERYTHING])
def test_equals_linear_then_cross_entropy(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((9, 6)), rng.standard_normal((13, 6))
    labels = rng.integers(0, 13, 9)
    expected = uc.cross_entropy(uc.linear(x, weight), labels, **options)
    found = uc.linear_cross_entropy(x, weight, labels, max_bytes=300, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits_never_exist_as_a_whole(softcap: float | None) -> None:
    rows, hidden, vocab, max_bytes = 2000, 8, 1000, 2**19
    x, weight = np.ones((rows, hidden), np.float32), np.ones((vocab, hidden), np.float32)
    labels, options = np.zeros(rows, np.int64), {"max_bytes": max_bytes, "softcap": softcap}
    loss, lse = uc.linear_cross_entropy_forward(x, weight, labels, **options)
    tracemalloc.start()
    uc.linear_cross_entropy_forward(x, weight, labels, **options)
    uc.linear_cross_entropy_backward(loss, None, x, weight, labels, lse, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max_bytes < peak < 2 * max_bytes < rows * vocab * 4 / 4


def test_wrong_calls() -> None:
    x, weight = np.ones((2, 3), np.float32), np.ones((5, 3), np.float32)
    with pytest.raises(RangeError, match=r"labels holds 5; it must be in 0 .. 4"):
        uc.linear_cross_entropy(x, weight, np.array([0, 5]))
    with pytest.raises(ConfigError, match="it must be positive"):
        uc.linear_cross_entropy(x, weight, np.array([0, 1]), max_bytes=0)
    with pytest.raises(ConfigError, match="smoothing must be in"):
        uc.linear_cross_entropy(x, weight, np.array([0, 1]), smoothing=-0.1)
    with pytest.raises(ShapeError, match="weight has hidden=4; it must be 3"):
        uc.linear_cross_entropy(x, np.ones((5, 4), np.float32), np.array([0, 1]))
