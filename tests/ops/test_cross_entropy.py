import re
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, RangeError, ShapeError

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelAlone, KernelParity, emulator
from ..machines.cuda_on_cpu.traffic import counted
from .golden_cases import agree, both_dtypes, cast, golden

# The public names, as other people's programs call them.
PUBLIC = (
    "cross_entropy(logits, labels, *, ignore=-100, smoothing=0.0, z_loss=0.0, softcap=None, "
    "class_weights=None)",
    "cross_entropy_(logits, labels, dloss=1.0, *, ignore=-100, smoothing=0.0, z_loss=0.0, "
    "softcap=None, class_weights=None)",
)

LABELS = np.array([[0, 12, -100], [5, -100, 5]])
EVERYTHING = {"smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}
WEIGHTED: dict[str, Any] = {"given": ["class_weights"], "z_loss": 0.1, "softcap": 1.5}


SMOOTH = WEIGHTED | {"smoothing": 0.2}  # the definition runs on a GPU too

VOCABULARIES = (7, 32000, 50257, 262144)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"softcap": 30.0}, {"smoothing": 0.1})


class TestCrossEntropy(KernelParity):
    op = "cross_entropy_forward"
    sizes = tuple({"vocab": n} for n in VOCABULARIES)
    options = OPTIONS
    apart = ("class_weights",)  # not with smoothing
    cases = (
        Case("odd", rows=[2, 3], vocab=13, arrays={"labels": LABELS}),
        Case("smoothing", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, smoothing=0.1),
        Case("z loss", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, z_loss=0.1),
        Case("soft cap", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, softcap=1.5),
        Case("everything", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, **EVERYTHING),
        Case("weights", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, **WEIGHTED),
        Case("and smoothing", rows=[2, 3], vocab=13, arrays={"labels": LABELS}, **SMOOTH),
        Case("zero is ignored", rows=[3], vocab=13, arrays={"labels": [0, 4, 0]}, ignore=0),
        Case("one row", rows=[], vocab=13, arrays={"labels": 3}),
        Case("one word", rows=[2], vocab=1, arrays={"labels": [0, 0]}),
        Case("no rows", rows=[0], vocab=7, arrays={"labels": np.zeros(0, int)}),
    )


class TestCrossEntropySharedRows(KernelParity):
    """2 to 32 threads of a warp share a row; its label is in the first access, in the last."""

    op = "cross_entropy_forward"
    cases = tuple(
        Case(f"{n} words", rows=[4], vocab=n, arrays={"labels": [0, n - 1, -100, n // 2]})
        for n in (5, 26, 30, 63, 127, 255, 511)
    )


class TestCrossEntropyLongRows(KernelParity):
    op = "cross_entropy_forward"
    cases = (
        Case("a block a row", rows=[2], vocab=4200, arrays={"labels": [4199, -100]}),
        Case("walked", rows=[2], vocab=16400, arrays={"labels": [7, 16399]}, **EVERYTHING),
    )
    test_any_strides = None  # NumPy adds pairwise along contiguous axes only: 4 eps do not hold


@both_dtypes
@golden("layers", "cross_entropy")
def test_golden(golden: OpCase, dtype: Any) -> None:
    if golden.name == "cross_entropy_shifted" and dtype == np.float32:
        pytest.skip("float32 rounds logits near 1000 to 6e-5 before the call: see the next test")
    inputs, options = cast(golden, dtype), {}
    logits, labels = inputs["logits"], inputs["target"]
    options["smoothing"] = golden.params.get("label_smoothing", 0.0)
    options["softcap"] = golden.params.get("softcap")
    loss, lse = uc.cross_entropy_forward(logits, labels, **options)
    np.testing.assert_array_equal(loss, uc.cross_entropy(logits, labels, **options))
    reduction = golden.params.get("reduction", "mean")
    counted = max(1, int((labels != -100).sum()))
    expected = {"none": loss, "sum": loss.sum(), "mean": loss.sum() / counted}[reduction]
    agree(expected, golden.outputs["y"])
    share = inputs["cotangent"] / (counted if reduction == "mean" else 1)
    dloss = np.broadcast_to(share, labels.shape).astype(dtype)
    dlogits, none = uc.cross_entropy_backward(dloss, None, logits, labels, lse, **options)
    assert none is None
    agree(dlogits, golden.grads["logits"])


@golden("layers", "cross_entropy_shifted")
def test_golden_shifted_in_float32(golden: OpCase) -> None:
    """The loss does not change when all logits of a row are shifted alike."""
    logits, labels = golden.inputs["logits"].astype(np.float32), golden.inputs["target"]
    near_zero = (logits.astype(np.float64) - 1000).astype(np.float32)  # exact
    dloss = np.ones(labels.shape, np.float32)
    results = []
    for values in (logits, near_zero):
        loss, lse = uc.cross_entropy_forward(values, labels)
        dlogits, _ = uc.cross_entropy_backward(dloss, None, values, labels, lse)
        results.append((loss, dlogits))
    (loss, dlogits), (plain_loss, plain_dlogits) = results
    np.testing.assert_allclose(loss, plain_loss, rtol=2**-22)
    np.testing.assert_allclose(dlogits, plain_dlogits, rtol=1024 * 2**-23, atol=1e-7)  # lse's ulp
    agree(results[1][0].mean(), golden.outputs["y"])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{"z_loss": 0.1}, EVERYTHING], ids=["z loss", "everything"])
def test_equals_torch(options: dict[str, Any], weighted: bool) -> None:
    """What the golden cases lack: the square of lse, and weights of classes, with other options."""
    torch = pytest.importorskip("torch", reason="the peer of cross_entropy")
    logits, labels = np.random.default_rng(0).standard_normal((2, 3, 13)), LABELS
    weights = np.linspace(0, 3, 13) if weighted else None
    x, target = torch.tensor(logits, requires_grad=True), torch.tensor(labels)
    cap = options.get("softcap")
    z = cap * torch.tanh(x / cap) if cap else x
    expected = torch.nn.functional.cross_entropy(
        *(z.mT, target, None if weights is None else torch.tensor(weights)),
        reduction="none",
        label_smoothing=options.get("smoothing", 0.0),
    )
    expected = expected + options["z_loss"] * z.logsumexp(-1) ** 2 * (target != -100)
    options = options | {"class_weights": weights}
    loss, lse = uc.cross_entropy_forward(logits, labels, **options)
    dlogits, _ = uc.cross_entropy_backward(np.ones_like(loss), None, logits, labels, lse, **options)
    agree(loss, expected.detach().numpy())
    agree(dlogits, torch.autograd.grad(expected.sum(), x)[0].numpy())


WEIGHTED_LOSSES: tuple[tuple[str, Any], ...] = (
    ("cross_entropy", lambda x, y, w, **o: uc.cross_entropy(x, y, class_weights=w, **o)),
    ("cross_entropy_", lambda x, y, w, **o: uc.cross_entropy_(x.copy(), y, class_weights=w, **o)),
    (
        "linear_cross_entropy",
        lambda x, y, w, **o: uc.linear_cross_entropy(
            x, np.eye(len(w), dtype=x.dtype), y, class_weights=w, **o
        ),
    ),
    (
        "linear_cross_entropy_gradients",
        lambda x, y, w, **o: uc.linear_cross_entropy_gradients(
            x, np.eye(len(w), dtype=x.dtype), y, class_weights=w, **o
        )[0],
    ),
    (
        "cross_entropy_backward",
        lambda x, y, w, **o: uc.cross_entropy_backward(
            np.ones(len(y), "f"), None, x, y, np.zeros(len(y), "f"), class_weights=w, **o
        )[0].sum(axis=1),
    ),
)


@pytest.mark.parametrize("wrong", [-1.0, -1e-30, np.nan, np.inf])
@pytest.mark.parametrize(("name", "call"), WEIGHTED_LOSSES, ids=[n for n, _ in WEIGHTED_LOSSES])
def test_weights_of_classes_are_finite_and_not_negative(name: str, call: Any, wrong: float) -> None:
    """By a kernel, which the host does not wait for, the rows of such a class are not finite."""
    x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    labels, weights = np.array([0, 3, 4]), np.array([1, 2, 0, 0, 1.5], np.float32)
    assert np.isfinite(call(x, labels, weights)).all()
    weights[3] = wrong
    for smoothing in (0.0, 0.1):
        words = rf"{name}: class_weights holds {weights[3]} for class 3"
        with pytest.raises(ConfigError, match=re.escape(words)):
            call(x, labels, weights, smoothing=smoothing)
    with emulator(), np.errstate(all="ignore"):
        assert np.isfinite(call(x, labels, weights)).tolist() == [True, False, True]


def test_ignored_rows_may_hold_anything() -> None:
    logits = np.array([[np.nan, 1], [1, 2]], np.float32)
    labels = np.array([-100, 0])
    loss, lse = uc.cross_entropy_forward(logits, labels)
    dlogits, _ = uc.cross_entropy_backward(np.ones_like(loss), None, logits, labels, lse)
    assert loss[0] == 0
    assert not dlogits[0].any()
    assert dlogits[1].any()


def test_huge_and_infinite_logits() -> None:
    logits = np.array([[1e30, 0, -1e30], [0, -np.inf, 0]], np.float32)
    labels = np.array([0, 0])
    loss, lse = uc.cross_entropy_forward(logits, labels)
    np.testing.assert_allclose(loss, [0, np.log(2)], rtol=1e-6)
    dlogits, _ = uc.cross_entropy_backward(np.ones_like(loss), None, logits, labels, lse)
    np.testing.assert_allclose(dlogits, [[0, 0, 0], [-0.5, 0, 0.5]], rtol=1e-6)


def test_a_row_of_nothing_but_minus_infinity() -> None:
    loss, lse = uc.cross_entropy_forward(np.full((1, 3), -np.inf), np.array([1]))
    assert (loss[0], lse[0]) == (np.inf, -np.inf)


def reported() -> str:
    """Return what check_errors raises; nothing where it does not."""
    try:
        uc.check_errors()
    except RangeError as error:
        return str(error)
    return ""


class TestRowsThatHoldAnything(KernelAlone):
    """A label outside the vocabulary, which no host reads, gives NaN; so may an ignored row."""

    op = "cross_entropy_forward"
    cases = (Case("five rows"),)

    def prove(self, case: Case, dtype: Any) -> None:
        inf = np.inf
        logits = np.array([[np.nan, 1, 2], [0, -inf, 0], [-inf] * 3, [1e4, 0, -1e4], [1, 2, 3]])
        logits = logits.astype(dtype)
        labels, ones = np.array([-100, 0, 1, 0, 3], np.int32), np.ones(5, np.float32)
        with emulator():
            loss, lse = uc.cross_entropy_forward(logits, labels)
            dlogits, _ = uc.cross_entropy_backward(ones, None, logits, labels, lse)
            assert "labels holds 3 in row 4; it must be in 0 .. 2" in reported()
            assert reported() == ""
        np.testing.assert_allclose(loss, [0, np.log(2), inf, 0, np.nan], rtol=1e-6)
        np.testing.assert_array_equal(lse[2:4], [-inf, logits[3, 0]])
        expected = [[0, 0, 0], [-0.5, 0, 0.5], [0, -1, 0], [0, 0, 0], [np.nan] * 3]
        np.testing.assert_allclose(dlogits.astype(np.float32), expected, rtol=1e-6)


class TestEveryLogitMovesOnce(KernelAlone):
    """Forward reads each, backward reads and writes each, 16 bytes a lane."""

    op = "cross_entropy_forward"
    cases = (Case("even", vocab=32768), Case("odd", vocab=50257))

    def prove(self, case: Case, dtype: Any) -> None:
        vocab = case.both["vocab"]
        logits = np.random.default_rng(0).standard_normal((2, vocab)).astype(dtype)
        labels, ones = np.array([0, vocab - 1]), np.ones(2, np.float32)
        with emulator(), counted() as forward:
            _, lse = uc.cross_entropy_forward(logits, labels)
        with emulator(), counted() as backward:
            uc.cross_entropy_backward(ones, None, logits, labels, lse)
        wide = [
            32 * sum(r.moved for r in traffic if r.space == "global" and r.write is write)
            for traffic, write in ((forward, False), (backward, True))
        ]
        for moved in wide:
            assert 0.98 * logits.nbytes <= moved <= 1.02 * logits.nbytes
        read = [r for r in backward if r.space == "global" and not r.write and r.bytes > 4096]
        assert 32 * max(r.moved for r in read) <= 1.02 * logits.nbytes


@pytest.mark.gpu
def test_a_gpu_reports_a_label() -> None:
    import cupy

    logits, labels = cupy.ones((3, 4), np.float32), cupy.asarray([0, 1, 4])
    loss = uc.cross_entropy(logits, labels)
    with pytest.raises(RangeError, match="cross_entropy: labels holds 4 in row 2; it must be in 0"):
        uc.check_errors()
    uc.check_errors()
    assert cupy.isnan(loss).tolist() == [False, False, True]


def test_no_words() -> None:
    loss, lse = uc.cross_entropy_forward(np.ones((2, 0), np.float32), np.array([-100, -100]))
    assert (loss.tolist(), lse.tolist()) == ([0, 0], [-np.inf, -np.inf])
    dlogits, _ = uc.cross_entropy_backward(
        loss, None, np.ones((2, 0), np.float32), lse=lse, labels=np.array([-100, -100])
    )
    assert dlogits.shape == (2, 0)


def test_losses_of_narrow_logits_are_float32() -> None:
    assert uc.cross_entropy(np.ones((2, 3), np.float16), np.array([0, 1])).dtype == np.float32


@pytest.mark.parametrize("label", [-1, 3])
def test_label_outside_the_vocabulary(label: int) -> None:
    with pytest.raises(RangeError, match=rf"labels holds {label}; it must be in 0 .. 2"):
        uc.cross_entropy(np.ones((2, 3), np.float32), np.array([0, label]))


@pytest.mark.parametrize("option", [{"smoothing": 1.5}, {"z_loss": -1.0}, {"softcap": 0.0}])
def test_options_out_of_range(option: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))} must be"):
        uc.cross_entropy(np.ones((2, 3), np.float32), np.array([0, 1]), **option)


def test_one_label_per_row() -> None:
    with pytest.raises(ShapeError, match="labels has rows="):
        uc.cross_entropy(np.ones((2, 3), np.float32), np.array([0, 1, 2]))
