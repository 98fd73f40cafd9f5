"""Log-probabilities of a head: TRL's numbers, the parity of kernels, rows that leave."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy import Tape
from unsloth_cupy.errors import ConfigError, RangeError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, KernelParity, emulator
from .golden_cases import both_dtypes

# The public names, as other people's programs call them.
PUBLIC = (
    "linear_log_probs(x, weight, labels, bias=None, *, ignore=-100, temperature=1.0, scale=1.0, "
    "softcap=None, max_bytes=None)",
)

CASES = [*op_cases(FOLDER / "losses", "token_logprobs")]
LABELS = np.array([[0, 12, -100], [5, -100, 5]])
SIZES: dict[str, Any] = {"rows": [2, 3], "hidden": 5, "vocab": 13, "arrays": {"labels": LABELS}}
EVERYTHING = {"temperature": 0.7, "scale": 1.3, "softcap": 2.0}


class TestLinearLogProbs(KernelParity):
    op = "linear_log_probs_forward"
    sizes = ({"hidden": 8}, {"hidden": 8, "vocab": 50257})
    options = ({}, {"softcap": 30.0})
    cases = (
        Case("one chunk", **SIZES),
        Case("chunks of one row", **SIZES, max_bytes=1, given=["bias"]),
        Case("a short last chunk", **SIZES, max_bytes=4 * 13 * 8, given=["bias"], **EVERYTHING),
        Case("a soft cap", **SIZES, softcap=0.5),
        Case("one row", rows=[], hidden=3, vocab=4, arrays={"labels": 3}),
        Case("threads of a block", rows=[2], hidden=3, vocab=1030, arrays={"labels": [7, 1029]}),
        Case("several vectors", rows=[1], hidden=2, vocab=4099, arrays={"labels": [4098]},
             given=["bias"], temperature=2.0),
        Case("no rows", rows=[0], hidden=3, vocab=4, arrays={"labels": np.zeros(0, int)}),
        Case("no labels", rows=[2], hidden=3, vocab=4, arrays={"labels": [-100, -100]}),
    )  # fmt: skip


@both_dtypes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_those_of_trl(case: OpCase, dtype: Any) -> None:
    given = dict(case.params)
    error = given.pop("float32_error")
    allowed = 1e-5 + 2 * error if dtype == np.float32 else 1e-10
    arrays = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in case.inputs.items()}
    tape = Tape()
    watched = {n: tape.watch(arrays[n]) for n in ("x", "weight", "bias") if n in arrays}
    inputs = [*watched.values()]
    result = uc.linear_log_probs(
        watched["x"], watched["weight"], arrays["labels"], watched.get("bias"), **given
    )
    for name, expected in case.outputs.items():
        actual = getattr(result, name)
        actual = np.asarray(getattr(actual, "value", actual))
        if name == "top1":
            np.testing.assert_array_equal(actual, expected)
            continue
        assert actual.dtype == dtype
        assert np.abs(actual - expected).max() <= allowed * max(1, np.abs(expected).max()), name
    loss = uc.sum(result.log_probs * arrays["dlog_probs"] + result.entropy * arrays["dentropy"])
    for name, gradient in zip(watched, tape.gradients(loss, inputs), strict=True):
        expected = case.grads[name]
        error = np.linalg.norm(gradient - expected)
        assert error <= 10 * allowed * max(np.linalg.norm(expected), 1e-30), name


def test_rows_without_a_label_may_hold_anything() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((4, 5)), rng.standard_normal((7, 5))
    labels = np.array([3, -100, 0, -100])
    dirty = x.copy()
    dirty[[1, 3]] = np.nan
    for context in (None, emulator()):
        kind = np.float64 if context is None else np.float32
        arrays = [a.astype(kind) for a in (x, dirty, weight)]
        with context or np.errstate():
            sides = []
            for rows in arrays[:2]:
                outputs = uc.linear_log_probs_forward(rows, arrays[2], labels)
                ones = np.ones(4, kind)
                sides.append((*outputs, *uc.linear_log_probs_backward(
                    ones, ones, ones, rows, arrays[2], labels, None, *outputs[1::4]
                )[:2]))  # fmt: skip
        for clean, other in zip(*sides, strict=True):
            np.testing.assert_array_equal(clean, other)
        assert not any(result[[1, 3]].any() for result in sides[1][:-1])


def test_towering_logits_lose_no_digits() -> None:
    """An lse near 1e4: entropy and log-probabilities are still exact to float32."""
    logits = np.array([[1e4, 1e4 - 1, 1e4 - 2, -1e4]])
    weight, x, labels = logits.T.copy(), np.ones((1, 1)), np.array([1])
    exact = uc.linear_log_probs(x, weight, labels)
    for context in (None, emulator()):
        with context or np.errstate():
            actual = uc.linear_log_probs(x.astype("f"), weight.astype("f"), labels)
        for name in ("log_probs", "entropy", "log_sum_squares"):
            np.testing.assert_allclose(getattr(actual, name), getattr(exact, name), rtol=1e-6)


def test_of_equal_logits_the_first_is_the_largest() -> None:
    weight = np.array([[1.0], [2.0], [2.0], [0.0]], np.float32)
    x, labels = np.ones((4, 1), np.float32), np.arange(4)
    for context in (None, emulator()):
        with context or np.errstate():
            result = uc.linear_log_probs(x, weight, labels)
        assert result.top1.tolist() == [False, True, False, False]


def test_a_label_outside_the_vocabulary() -> None:
    x, weight, labels = np.ones((2, 3), "f"), np.ones((4, 3), "f"), np.array([1, 4])
    with pytest.raises(RangeError, match=r"labels holds 4; it must be in 0 \.\. 3"):
        uc.linear_log_probs(x, weight, labels)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"scale": 0.0}, "all tokens would be as likely"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"max_bytes": 0}, "it must be positive"),
        ({"ignore": 2**63}, "ignore must be an integer of 64 bits"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    x, weight, labels = np.ones((2, 3)), np.ones((4, 3)), np.array([1, 3])
    with pytest.raises(ConfigError, match=words):
        uc.linear_log_probs(x, weight, labels, **options)
