"""Divergences from the tokens that were kept of a teacher: bits, exclusions, what is refused."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.replay import fixed_order
from unsloth_cupy.errors import ConfigError, RangeError

from ..code.programs.variants import ROWS
from ..harness.parity import Case, KernelAlone, KernelParity, emulator

EVERYTHING = {"temperature": 0.7, "scale": 1.3, "softcap": 2.0}
X = np.ones((2, 3))


def kept(vocab: int, *shape: int) -> dict[str, Any]:
    """Return tokens, each once in a row, and log-probabilities, of shape."""
    return {
        "tokens": lambda rng: rng.random((*shape[:-1], vocab)).argsort(-1)[..., : shape[-1]],
        "log_probs": lambda rng: np.log(rng.uniform(0.1, 0.9, shape) / shape[-1]),
    }


class TestLinearTopKDivergence(KernelParity):
    op = "linear_top_k_divergence_forward"
    sizes = tuple({"hidden": 8, "few": 5, "vocab": n} for n in (*ROWS, 50257))
    options = ({}, {"tail": False}, {"softcap": 30.0})
    few: Any = {"hidden": 5, "vocab": 7, "rows": [2, 3], "arrays": kept(7, 2, 3, 3)}  # noqa: RUF012
    cases = (
        Case("a tail", **few, max_bytes=4 * 7 * 2),
        Case("no tail", **few, tail=False),
        Case("every option", **few, given=("bias", "mask"), **EVERYTHING),
        Case("all tokens", rows=[3], hidden=2, vocab=4, arrays=kept(4, 3, 4)),
        Case("half a warp", rows=[5], hidden=3, vocab=256, arrays=kept(256, 5, 20)),
        Case("a block a row", rows=[3], hidden=3, vocab=1032, arrays=kept(1032, 3, 64),
             given=("mask",), softcap=2.0),
        Case("ragged, more tokens than threads", rows=[3], hidden=3, vocab=1031,
             arrays=kept(1031, 3, 150), given=("bias",), tail=False),
        Case("one row", rows=[], hidden=3, vocab=5, arrays=kept(5, 2)),
        Case("no rows", rows=[0], hidden=2, vocab=4, arrays=kept(4, 0, 2)),
        Case("no tokens", rows=[2], hidden=2, vocab=4, arrays=kept(4, 2, 0), tail=False),
        Case("no rows kept", **few | {"arrays": few["arrays"] | {"mask": np.zeros((2, 3), bool)}}),
    )  # fmt: skip


def test_all_tokens_kept_are_the_whole_divergence() -> None:
    rng = np.random.default_rng(0)
    x, weight, teacher = (rng.standard_normal(s) for s in ((3, 4), (6, 4), (3, 6)))
    logs = teacher - np.log(np.exp(teacher).sum(axis=1, keepdims=True))
    tokens = np.tile(np.arange(6), (3, 1))
    actual = uc.linear_top_k_divergence(x, weight, tokens, logs)
    np.testing.assert_allclose(actual, uc.divergence(x @ weight.T, teacher), rtol=1e-9)
    few = uc.linear_top_k_divergence(x, weight, tokens[:, :2], logs[:, :2])
    assert (few <= actual).all()


def test_a_row_of_top_k_has_the_same_bits_beside_others() -> None:
    rng = np.random.default_rng(0)
    case = kept(1031, 8, 40)
    tokens, logs = (case[name](rng) for name in ("tokens", "log_probs"))
    arrays = rng.standard_normal((8, 3), np.float32), tokens, logs.astype(np.float32)
    weight, ones = rng.standard_normal((1031, 3), np.float32), np.ones(8, np.float32)

    def both(part: slice) -> list[Any]:
        x, *teacher = (array[part].copy() for array in arrays)
        with emulator(), fixed_order():
            loss = uc.linear_top_k_divergence_forward(x, weight, *teacher)
            of_rows = ones[part], x, weight, *teacher, None, None
            dx, *_ = uc.linear_top_k_divergence_backward(*of_rows)
        return [loss, dx]

    together = both(slice(0, 8))
    for row in range(1, 8):
        for alone, beside in zip(both(slice(row, row + 1)), together, strict=True):
            np.testing.assert_array_equal(alone, beside[row : row + 1])


@pytest.mark.parametrize("kernel", [False, True])
def test_top_k_of_excluded_tokens(kernel: bool) -> None:
    """The student excludes one that was kept, one that was not, or all but those that were."""
    x, weight = np.ones((1, 1), np.float32), np.array([[0.0], [1.0], [2.0], [0.5]], np.float32)
    logs = np.log([[0.5, 0.3]]).astype(np.float32)
    for tokens, excluded in (([0, 1], [0]), ([0, 1], [3]), ([0, 1], [2, 3]), ([1, 2], [0, 3])):
        bias = np.zeros(4, np.float32)
        bias[excluded] = -np.inf
        with emulator() if kernel else np.errstate(all="ignore"):
            loss = uc.linear_top_k_divergence(x, weight, np.array([tokens]), logs, bias)
        p = np.exp(weight[:, 0] + bias) / np.exp(weight[:, 0] + bias).sum()
        with np.errstate(divide="ignore"):
            expected = (np.exp(logs) * (logs - np.log(p[tokens]))).sum()
            rest = 1 - p[tokens].sum() if len(excluded) == 1 else 0.0
            expected += 0.2 * np.log(0.2 / rest) if rest else 0.0
        np.testing.assert_allclose(loss, [expected], rtol=1e-5)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_nan_of_the_teacher_stays_one(kernel: bool) -> None:
    x, weight, logs = np.ones((1, 2), "f"), np.ones((4, 2), "f"), np.array([[-1.0, np.nan]], "f")
    for tail in (True, False):
        with emulator() if kernel else np.errstate():
            loss = uc.linear_top_k_divergence(x, weight, np.array([[0, 1]]), logs, tail=tail)
        assert np.isnan(loss).all()


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("share", [0.9, 1.0, 1.02, 1.1, 2.0, np.inf])
def test_probabilities_of_a_teacher_sum_to_1_but_for_rounding(share: float, tail: bool) -> None:
    """The definition refuses more, a kernel returns NaN; rows that are hidden may hold anything."""
    x, weight, ones = np.ones((3, 2), "f"), np.eye(4, 2, dtype="f"), np.ones(3, "f")
    tokens, logs = np.tile([2, 0], (3, 1)), np.log(np.full((3, 2), 0.25, "f"))
    logs[1:] = np.log(np.float32([0.6, 0.4]) * np.float32(share))
    mask = np.array([True, True, False])
    arrays = x, weight, tokens, logs, None, mask
    with emulator():
        loss = uc.linear_top_k_divergence_forward(*arrays[:5], mask=mask, tail=tail)
        dx, *_ = uc.linear_top_k_divergence_backward(ones, *arrays, tail=tail)
    refused = share > 1.05
    for result in (loss, dx.sum(axis=1)):
        assert np.isnan(result).tolist() == [False, refused, False]
    for call in (
        lambda: uc.linear_top_k_divergence(*arrays[:5], mask=mask, tail=tail),
        lambda: uc.linear_top_k_divergence_backward(ones, *arrays, tail=tail),
    ):
        with pytest.raises(ConfigError, match="sum to") if refused else nullcontext():
            call()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_a_whole_softmax_in_16_bits_is_no_fault(dtype: Any, spread: float) -> None:
    logits = spread * np.random.default_rng(0).standard_normal((8, 4096))
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    x, weight = np.ones((8, 1), "f"), np.ones((4096, 1), "f")
    tokens = np.tile(np.arange(4096), (8, 1))
    assert np.isfinite(uc.linear_top_k_divergence(x, weight, tokens, logs.astype(dtype))).all()


@pytest.mark.parametrize(
    ("token", "words"),
    [(2, r"tokens holds 2; it must be in 0 \.\. 1"), (-1, "tokens holds -1; it"),
     (0, "tokens holds 0 twice in a row; keep each token once")],
)  # fmt: skip
def test_tokens_that_no_row_has(token: int, words: str) -> None:
    with pytest.raises(RangeError, match=words):
        uc.linear_top_k_divergence(X, X, np.array([[0, 1], [0, token]]), np.zeros((2, 2)))


class TestTokensThatNoRowHas(KernelAlone):
    """A GPU's tokens are not read by the host: such rows are NaN, and are reported."""

    op = "linear_top_k_divergence_forward"
    cases = (Case("outside, or twice"),)

    def prove(self, case: Case, dtype: Any) -> None:
        rng = np.random.default_rng(0)
        x, weight = (rng.standard_normal(shape).astype(dtype) for shape in ((3, 4), (5, 4)))
        logs = np.log(np.full((3, 2), 0.3)).astype(dtype)
        for token in (-1, 5, 3):
            arrays = x, weight, np.array([[0, 1], [3, token], [1, 2]]), logs, None
            with emulator():
                loss = uc.linear_top_k_divergence_forward(*arrays)
                words = rf"tokens holds {token} in row 1; it must be in 0 \.\. 4, .* stand once"
                with pytest.raises(RangeError, match=words):
                    uc.check_errors()
                dx, *_ = uc.linear_top_k_divergence_backward(np.ones(3, "f"), *arrays, None)
            for result in (loss, dx.astype("f").sum(axis=1)):
                assert np.isnan(result).tolist() == [False, True, False]
