import re
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, GradientError, RangeError, ShapeError
from unsloth_cupy.ops.losses.cross_entropy_in_place import cross_entropy_over_

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelAlone, KernelInPlace, emulator
from ..machines.cuda_on_cpu.traffic import counted
from .golden_cases import agree, both_dtypes, cast, golden
from .test_cross_entropy import (
    EVERYTHING,
    LABELS,
    OPTIONS,
    SMOOTH,
    VOCABULARIES,
    WEIGHTED,
    reported,
)


class TestCrossEntropyOver(KernelInPlace):
    op = "cross_entropy_over_"
    sizes = tuple({"vocab": n} for n in VOCABULARIES)
    options = OPTIONS
    apart = ("class_weights",)  # not with smoothing
    cases = (
        Case("odd", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, given=["dloss"]),
        Case("one number", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, scale=0.5),
        Case("both", rows=[2, 3], vocab=16, arrays={"labels": LABELS}, given=["dloss"], scale=2.0),
        Case("everything", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, **EVERYTHING),
        Case("weights", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, scale=0.5, **WEIGHTED),
        Case("and smoothing", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, **SMOOTH),
        Case("zero is ignored", rows=[3], vocab=16, arrays={"labels": [0, 4, 0]}, ignore=0),
        Case("one row", rows=[], vocab=13, arrays={"labels": 3}),
        Case("one word", rows=[2], vocab=1, arrays={"labels": [0, 0]}),
        Case("no rows", rows=[0], vocab=7, arrays={"labels": np.zeros(0, int)}),
    )


class TestCrossEntropyOverSharedRows(KernelInPlace):
    """2 to 32 threads of a warp share a row; its label is in the first access, in the last."""

    op = "cross_entropy_over_"
    cases = tuple(
        Case(f"{n} words", rows=[4], vocab=n, arrays={"labels": [0, n - 1, -100, n // 2]})
        for n in (5, 26, 30, 63, 127, 255, 511)
    )


class TestCrossEntropyOverLongRows(KernelInPlace):
    op = "cross_entropy_over_"
    cases = (
        Case("in registers", rows=[2], vocab=4200, arrays={"labels": [4199, -100]}),
        Case("ragged", rows=[3], vocab=2053, arrays={"labels": [7, 2052, 0]}, **EVERYTHING),
        Case("and shared memory", rows=[1], vocab=41001, arrays={"labels": [40960]}),
        Case("and read again", rows=[1], vocab=92001, arrays={"labels": [92000]}, smoothing=0.1),
    )


@both_dtypes
@golden("layers", "cross_entropy")
def test_golden(golden: OpCase, dtype: Any) -> None:
    if golden.name == "cross_entropy_shifted" and dtype == np.float32:
        pytest.skip("float32 rounds logits near 1000 to 6e-5 before the call")
    inputs, options = cast(golden, dtype), {}
    logits, labels = inputs["logits"].copy(), inputs["target"]
    options["smoothing"] = golden.params.get("label_smoothing", 0.0)
    options["softcap"] = golden.params.get("softcap")
    expected = uc.cross_entropy(logits, labels, **options)
    mean = golden.params.get("reduction", "mean") == "mean"
    share = inputs["cotangent"] / (max(1, int((labels != -100).sum())) if mean else 1)
    dloss = np.broadcast_to(share, labels.shape).astype(dtype)
    np.testing.assert_array_equal(uc.cross_entropy_(logits, labels, dloss, **options), expected)
    agree(logits, golden.grads["logits"])


def test_the_op_takes_a_number_and_an_array() -> None:
    logits = np.ones((2, 3), np.float32)
    cross_entropy_over_(logits, np.array([0, 1]), np.array([2, 0], np.float32), scale=1.5)
    np.testing.assert_allclose(logits, [[-2, 1, 1], [0, 0, 0]], rtol=2**-22)


def test_is_forward_and_backward() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 3, 13))
    loss, lse = uc.cross_entropy_forward(logits, LABELS, **EVERYTHING)
    dloss = np.random.default_rng(1).standard_normal((2, 3))
    dlogits, _ = uc.cross_entropy_backward(dloss, None, logits, LABELS, lse, **EVERYTHING)
    for seed in (dloss, 0.25):
        changed = logits.copy()
        actual = uc.cross_entropy_(changed, LABELS, seed, **EVERYTHING)
        np.testing.assert_array_equal(actual, loss)
        if seed is dloss:
            np.testing.assert_array_equal(changed, dlogits)
        else:
            ones, _ = uc.cross_entropy_backward(
                np.full_like(dloss, seed), None, logits, LABELS, lse, **EVERYTHING
            )
            np.testing.assert_array_equal(changed, ones)


@pytest.mark.parametrize("where", ["definition", "kernel"])
def test_any_strides_in_place(where: str) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 13, 3)).astype(np.float32).swapaxes(1, 2)
    plain = np.ascontiguousarray(logits)
    labels = np.asfortranarray(LABELS)
    if where == "kernel":
        with emulator():
            losses = [uc.cross_entropy_(array, labels) for array in (logits, plain)]
    else:
        losses = [uc.cross_entropy_(array, labels) for array in (logits, plain)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2**-22)
    np.testing.assert_allclose(logits, plain, rtol=2**-21)


class TestRowsThatHoldAnything(KernelAlone):
    """As for cross_entropy; and memory beside the logits, at any alignment, stays as it was."""

    op = "cross_entropy_over_"
    cases = (Case("on 16 bytes", shift=0), Case("off by one", shift=1), Case("off by 3", shift=3))

    def prove(self, case: Case, dtype: Any) -> None:
        inf, shift = np.inf, case.both["shift"]
        rows = [[np.nan, 1, 2], [0, -inf, 0], [-inf] * 3, [1e4, 0, -1e4], [1, 2, 3], [3, 2, 1]]
        room = np.full(18 + 2 * shift, 7, dtype)
        logits = room[shift : shift + 18].reshape(6, 3)
        logits[...] = rows
        with emulator():
            loss = uc.cross_entropy_(logits, np.array([-100, 0, 1, 0, 3, -1], np.int32))
            said = reported()
            assert reported() == ""
        assert re.search(r"labels holds (3 in row 4|-1 in row 5); it must be in 0 .. 2", said)
        np.testing.assert_allclose(loss, [0, np.log(2), inf, 0, np.nan, np.nan], rtol=1e-6)
        expected = [[0, 0, 0], [-0.5, 0, 0.5], [0, -1, 0], [0, 0, 0], [np.nan] * 3, [np.nan] * 3]
        np.testing.assert_allclose(logits.astype(np.float32), expected, rtol=1e-6)
        assert (np.delete(room, np.s_[shift : shift + 18]) == 7).all()


class TestEveryLogitMovesOnce(KernelAlone):
    """One read and one write of 16 bytes a lane, for an odd vocabulary too."""

    op = "cross_entropy_over_"
    cases = (Case("even", vocab=32768), Case("odd", vocab=50257))

    def prove(self, case: Case, dtype: Any) -> None:
        vocab = case.both["vocab"]
        logits = np.random.default_rng(0).standard_normal((2, vocab)).astype(dtype)
        with emulator(), counted() as traffic:
            uc.cross_entropy_(logits, np.array([0, vocab - 1]))
        for write in (False, True):
            moved = traffic.of("global", write=write).moved
            assert 0.98 * logits.nbytes <= 32 * moved <= 1.02 * logits.nbytes, write
        assert traffic.of("shared").efficiency == 1


def test_wrong_calls() -> None:
    logits = np.ones((2, 3), np.float32)
    with pytest.raises(RangeError, match=r"labels holds 3; it must be in 0 .. 2"):
        uc.cross_entropy_(logits, np.array([0, 3]))
    with pytest.raises(ShapeError, match="dloss has rows="):
        uc.cross_entropy_(logits, np.array([0, 1]), np.ones(3, np.float32))
    with pytest.raises(ConfigError, match="smoothing must be in"):
        uc.cross_entropy_(logits, np.array([0, 1]), smoothing=2.0)
    with pytest.raises(ConfigError, match="scale must be a finite number"):
        uc.cross_entropy_(logits, np.array([0, 1]), np.inf)
    assert (logits == 1).all()
    logits.flags.writeable = False
    with pytest.raises(ConfigError, match="logits is read-only; call cross_entropy"):
        uc.cross_entropy_(logits, np.array([0, 1]))
    with pytest.raises(GradientError, match="logits is on a tape; call cross_entropy"):
        uc.cross_entropy_(uc.Tape().watch(logits), np.array([0, 1]))
