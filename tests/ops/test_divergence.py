"""Divergences from a teacher: TRL's numbers, finite differences, rows that leave."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy import Tape
from unsloth_cupy.core.replay import fixed_order
from unsloth_cupy.errors import ConfigError

from ..code.programs.variants import ROWS
from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, KernelParity, emulator
from .golden_cases import both_dtypes

# The public names, as other people's programs call them.
PUBLIC = (
    "divergence(logits, teacher_logits, *, kind='jsd', beta=None, temperature=1.0)",
    "linear_divergence(x, weight, teacher_x, teacher_weight, bias=None, teacher_bias=None, *, "
    "mask=None, kind='jsd', beta=None, temperature=1.0, scale=1.0, softcap=None, "
    "teacher_scale=1.0, teacher_softcap=None, max_bytes=None)",
    "linear_top_k_divergence(x, weight, tokens, log_probs, bias=None, *, mask=None, tail=True, "
    "temperature=1.0, scale=1.0, softcap=None, max_bytes=None)",
)

CASES = [*op_cases(FOLDER / "losses", "distillation")]
OPTIONS = ({"kind": "jsd", "beta": 0.0}, {"kind": "jsd", "beta": 0.3}, {"kind": "jsd", "beta": 1.0},
           {"kind": "tvd"}, {"kind": "cosine"})  # fmt: skip
HEADS: dict[str, Any] = {"rows": [2, 3], "hidden": 5, "inner": 4, "vocab": 7}
EVERYTHING = {"temperature": 0.7, "scale": 1.3, "softcap": 2.0}


class TestDivergence(KernelParity):
    op = "divergence_forward"
    sizes = tuple({"vocab": n} for n in (*ROWS, 50257))
    options = OPTIONS
    cases = (
        *(Case(f"{o}", rows=[2, 3], vocab=7, temperature=0.8, **o) for o in OPTIONS),
        *(Case(f"a block a row {o}", rows=[2], vocab=1032, **o) for o in OPTIONS),
        *(Case(f"ragged, several vectors {o}", rows=[3], vocab=4099, **o) for o in OPTIONS),
        Case("half a warp", rows=[5], vocab=256, beta=0.5),
        Case("one token", rows=[2], vocab=1),
        Case("no rows", rows=[0], vocab=3),
    )


class TestLinearDivergence(KernelParity):
    op = "linear_divergence_forward"
    sizes = ({"hidden": 8, "inner": 8}, {"hidden": 8, "inner": 8, "vocab": 50257})
    options = ({}, {"softcap": 30.0}, {"teacher_softcap": 30.0})
    cases = (
        *(Case(f"{o}", **HEADS, max_bytes=4 * 7 * 2, **o) for o in OPTIONS),
        Case("every option", **HEADS, given=("bias", "teacher_bias", "mask"), beta=0.3,
             teacher_scale=0.4, teacher_softcap=3.0, **EVERYTHING),
        *(Case(f"threads of a block {o}", rows=[2], hidden=3, inner=2, vocab=1030,
               given=("bias",), softcap=2.0, **o) for o in OPTIONS),
        Case("no rows", rows=[0], hidden=2, inner=3, vocab=4),
        Case("no rows kept", **HEADS, arrays={"mask": np.zeros((2, 3), bool)}),
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
    heads = watched["x"], watched["weight"]
    if given["kind"] == "top_k":
        given = {n: value for n, value in given.items() if n not in ("kind", "k")}
        kept_of_teacher = arrays["tokens"], arrays["log_probs"]
        loss = uc.linear_top_k_divergence(*heads, *kept_of_teacher, watched.get("bias"), **given)
    else:
        teacher = arrays["teacher_x"], arrays["teacher_weight"]
        biases = watched.get("bias"), arrays.get("teacher_bias")
        loss = uc.linear_divergence(*heads, *teacher, *biases, **given)
    expected = case.outputs["loss"]
    assert loss.value.dtype == dtype
    assert np.abs(loss.value - expected).max() <= allowed * max(1, np.abs(expected).max())
    total = uc.sum(loss * arrays["dloss"])
    for name, gradient in zip(watched, tape.gradients(total, [*watched.values()]), strict=True):
        difference = np.linalg.norm(gradient - case.grads[name])
        assert difference <= 10 * allowed * np.linalg.norm(case.grads[name]), name


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("top_k", [False, True])
def test_hidden_rows_may_hold_anything(top_k: bool, kernel: bool) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 4), np.float32), rng.standard_normal((6, 4), np.float32)
    mask = np.arange(3) != 1
    dirty = np.where(mask[:, None], x, np.float32(np.nan))
    sides = []
    for rows in (x, dirty):
        tape = Tape()
        watched, head = tape.watch(rows), tape.watch(weight)
        with emulator() if kernel else np.errstate():
            if top_k:
                kept = np.array([[0, 5]] * 3), np.full((3, 2), -0.9, np.float32)
                if rows is dirty:
                    kept[0][1], kept[1][1] = -7, np.nan
                loss = uc.linear_top_k_divergence(watched, head, *kept, mask=mask)
            else:
                loss = uc.linear_divergence(watched, head, rows[:, :2], weight[:, :2], mask=mask)
            sides.append((loss.value, *tape.gradients(uc.sum(loss), [watched, head])))
    for clean, other in zip(*sides, strict=True):
        np.testing.assert_array_equal(clean, other)
    assert sides[1][0][1] == 0
    assert not sides[1][1][1].any()


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("kernel", [False, True])
def test_excluded_tokens(options: Any, kernel: bool) -> None:
    """The teacher excludes one, both exclude one, and the student excludes one."""
    teacher = np.array([[0.0, -np.inf, 1.0, -np.inf, 0.5]], np.float32)
    for student in (-1.0, -np.inf):
        logits = np.array([[1.0, 2.0, -1.0, -np.inf, student]], np.float32)
        with emulator() if kernel else np.errstate():
            loss = uc.divergence_forward(logits, teacher, **options)
            gradient, _ = uc.divergence_backward(np.ones(1, "f"), logits, teacher, **options)
        s, t = (np.exp(a.astype(float)) / np.exp(a.astype(float)).sum() for a in (logits, teacher))
        if options["kind"] == "tvd":
            np.testing.assert_allclose(loss, [np.abs(s - t).sum() / 2], rtol=1e-6)
            continue
        beta = options["beta"]
        m = (1 - beta) * s + beta * t
        with np.errstate(divide="ignore", invalid="ignore"):
            from_t, from_s = (np.where(p > 0, p * np.log(p / m), 0).sum() for p in (t, s))
            expected = {0: from_t, 1: from_s}.get(beta, beta * from_t + (1 - beta) * from_s)
        np.testing.assert_allclose(loss, [expected], rtol=1e-6)
        assert np.isfinite(gradient).all() == (beta != 1)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [40, 1032, 4099])
def test_maxima_that_grow_along_a_row(vocab: int, beta: float) -> None:
    """The kernel rescales its sum as both maxima grow, whichever grows first and how far."""
    rng = np.random.default_rng(vocab)
    noise, up = rng.standard_normal((2, vocab)), np.linspace(-300, 300, vocab)
    late = np.where(np.arange(vocab) < vocab // 2, -200, 0)  # below the range of probabilities
    sides = [(up, up), (up, -up), (-up, up), (up + 1000, up - 500), (late, late), (up, late)]
    rows = np.array(sides).transpose(1, 0, 2) + noise[:, None]
    rows[:, -1, 1::2] = -np.inf  # of both
    student, teacher = rows.astype("f")
    expected = uc.divergence_forward(*rows.astype("f").astype(float), beta=beta)
    divisor = student if beta == 0 else teacher
    divisor[4, :2] = -np.inf  # excluded, where the other distribution has probability 0
    with emulator():
        loss = uc.divergence_forward(student, teacher, beta=beta)
    limit = np.finfo("f").eps * np.log2(vocab)  # of sums by a tree
    assert (np.abs(loss - expected) <= limit * np.maximum(1, expected)).all()


SIZES = (0.0, 1e-40, 1e-30, 1e-20, 1e-12, 3e-9, 3e-8, 1e-3, 1.0, 1e12, 1e19, 1e30, 3e37)


@pytest.mark.parametrize("vocab", [5, 40, 1031])
@pytest.mark.parametrize("kernel", [False, True])
def test_a_cosine_is_right_for_rows_of_any_size(vocab: int, kernel: bool) -> None:
    """Within 0 .. 2, with finite gradients: those of rows divided by max(length, 1e-8)."""
    rng = np.random.default_rng(vocab)
    rows = 2 * rng.random((2, 3, vocab)) - 1
    rows[1, 1:] = rows[0, 1:] * np.array([[1.0], [-1.0]])
    sides = [each.ravel() for each in np.meshgrid(SIZES, SIZES)]
    z, t = (np.concatenate([rows[i] * size for size in sides[i]]).astype("f") for i in (0, 1))
    ones = np.ones(len(z), "f")
    with emulator() if kernel else np.errstate():
        loss = uc.divergence_forward(z, t, kind="cosine")
        gradient, _ = uc.divergence_backward(ones, z, t, kind="cosine")
    assert ((loss >= 0) & (loss <= 2)).all()
    flushed = [np.where(np.abs(a) < np.finfo("f").tiny, 0, a).astype(float) for a in (z, t)]
    lengths = [np.linalg.norm(a, axis=1, keepdims=True) for a in flushed]
    one, two = (a / np.maximum(n, 1e-8) for a, n in zip(flushed, lengths, strict=True))
    cosine = (one * two).sum(axis=1, keepdims=True)
    expected = np.where(lengths[0] > 1e-8, cosine * one, 0) - two
    limit = 64 * np.finfo("f").eps  # sums of a thousand products, and what is made of them
    np.testing.assert_allclose(loss, 1 - cosine[:, 0], rtol=0, atol=limit)
    scaled = gradient.astype(float) * np.maximum(lengths[0], 1e-8)
    tiny = np.finfo("f").tiny * np.maximum(lengths[0], 1)  # of what is flushed to 0
    assert (np.abs(scaled - expected) <= limit + tiny).all()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_has_the_same_bits_beside_others(options: Any) -> None:
    """In a fixed order, also where rows begin between the boundaries of two accesses."""
    rng = np.random.default_rng(0)
    rows, ones = rng.standard_normal((2, 4, 1031), np.float32), np.ones(4, np.float32)
    with emulator(), fixed_order():
        loss = uc.divergence_forward(*rows, **options)
        gradient, _ = uc.divergence_backward(ones, *rows, **options)
        alone = rows[:, 1:2].copy()
        np.testing.assert_array_equal(uc.divergence_forward(*alone, **options), loss[1:2])
        actual, _ = uc.divergence_backward(ones[1:2], *alone, **options)
    np.testing.assert_array_equal(actual, gradient[1:2])


X = np.ones((2, 3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: uc.divergence(X, X, kind="kl"), "kind='kl'; choose from jsd, tvd, cosine"),
        (lambda: uc.divergence(X, X, kind="tvd", beta=0.5), "does not use beta; leave it out"),
        (lambda: uc.divergence(X, X, beta=1.5), r"beta must be in \[0, 1\]"),
        (lambda: uc.divergence(X, X, temperature=0.0), "temperature must be above 0"),
        (lambda: uc.linear_divergence(X, X, X, X, teacher_softcap=-1.0), "must be positive"),
        (lambda: uc.linear_divergence(X, X, X, X, scale=0.0), "all tokens would be as likely"),
        (lambda: uc.linear_divergence(X, X, X, X, max_bytes=0), "it must be positive"),
    ],
)
def test_bad_options(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()
