import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, GradientError, RangeError, ShapeError
from unsloth_cupy.ops.losses._head import chunk_rows, head_bytes
from unsloth_cupy.ops.losses._rows import CACHED

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelAlone, KernelParity, emulator, within_rule
from ..machines.stand_in import gpu
from .golden_cases import agree, both_dtypes, cast, golden
from .test_cross_entropy import SMOOTH, WEIGHTED, reported

# The public names, as other people's programs call them.
PUBLIC = (
    "linear_cross_entropy_gradients(x, weight, labels, dloss=None, *, class_weights=None, "
    "scale=1.0, ignore=-100, smoothing=0.0, z_loss=0.0, softcap=None, max_bytes=None, wanted=None)",
    "linear_cross_entropy(x, weight, labels, *, ignore=-100, smoothing=0.0, z_loss=0.0, "
    "softcap=None, class_weights=None, max_bytes=None)",
)

LABELS = np.array([[0, 12, -100], [5, -100, 5]])
SIZES: dict[str, Any] = {"rows": [2, 3], "hidden": 5, "vocab": 13, "arrays": {"labels": LABELS}}
NAMES = ("loss", "dx", "dweight")
EVERYTHING = {"smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}


class TestLinearCrossEntropy(KernelParity):
    op = "linear_cross_entropy_forward"
    sizes = ({"hidden": 8}, {"hidden": 8, "vocab": 50257})
    cases = (
        Case("one chunk", **SIZES),
        Case("chunks of one row", **SIZES, max_bytes=1),
        Case("a short last chunk", **SIZES, max_bytes=4 * 13 * 8, **EVERYTHING),
        Case("weights", **SIZES, max_bytes=4 * 13 * 8, **WEIGHTED),
        Case("and smoothing", **SIZES, max_bytes=4 * 13 * 8, **SMOOTH),
        Case("one row", rows=[], hidden=3, vocab=4, arrays={"labels": 3}),
        Case("no rows", rows=[0], hidden=3, vocab=4, arrays={"labels": np.zeros(0, int)}),
        Case("no columns", rows=[2], hidden=0, vocab=4, arrays={"labels": [0, 1]}),
    )


class TestLinearCrossEntropyGradients(KernelParity):
    op = "linear_cross_entropy_gradients"
    cases = (
        Case("one chunk", **SIZES, given=["dloss"], scale=0.5),
        Case("chunks of one row", **SIZES, max_bytes=1, scale=0.25),
        Case("a short last chunk", **SIZES, max_bytes=4 * 13 * 8, given=["dloss"], **EVERYTHING),
        Case("weights", **SIZES, max_bytes=4 * 13 * 8, scale=0.5, **WEIGHTED),
        Case("and smoothing", **SIZES, max_bytes=4 * 13 * 8, **SMOOTH),
        Case("one row", rows=[], hidden=3, vocab=4, arrays={"labels": 3}),
        Case("no rows", rows=[0], hidden=3, vocab=4, arrays={"labels": np.zeros(0, int)}),
        Case("no columns", rows=[2], hidden=0, vocab=4, arrays={"labels": [0, 1]}),
    )
    test_gradient_matches_finite_differences = None  # it returns gradients: see the next test


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("seeded", [False, True])
def test_gradients_are_those_of_the_tape(options: dict[str, Any], seeded: bool) -> None:
    rng = np.random.default_rng(0)
    shapes = (9, 6), (13, 6), (9,)
    x, weight, dloss = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    dloss, labels = dloss if seeded else np.ones_like(dloss), np.arange(9)
    options = options | {"max_bytes": 300}

    def taped(x: np.ndarray, weight: np.ndarray, dloss: np.ndarray) -> dict[str, Any]:
        tape = uc.Tape()
        watched = tape.watch(x), tape.watch(weight)
        loss = uc.linear_cross_entropy(*watched, labels, **options)
        gradients = tape.gradients(loss, watched, dloss / 2)
        return dict(zip(NAMES, (loss.value, *gradients), strict=True))

    actual = uc.linear_cross_entropy_gradients(
        x, weight, labels, dloss if seeded else None, scale=0.5, **options
    )
    wide = (array.astype(np.float64) for array in (x, weight, dloss))
    within_rule(taped(x, weight, dloss), taped(*wide), dict(zip(NAMES, actual, strict=True)))


@pytest.mark.parametrize("wanted", [{"x"}, {"weight"}, set()])
def test_no_gradient_that_nobody_asks_for(wanted: set[str]) -> None:
    x, weight, labels = np.ones((3, 2)), np.ones((4, 2)), np.array([0, 1, 3])
    loss, lse = uc.linear_cross_entropy_forward(x, weight, labels)
    everything = uc.linear_cross_entropy_backward(loss, None, x, weight, labels, lse)
    for some in (
        uc.linear_cross_entropy_backward(loss, None, x, weight, labels, lse, wanted=wanted),
        uc.linear_cross_entropy_gradients(x, weight, labels, loss, wanted=wanted)[1:],
    ):
        for name, actual, full in zip(("x", "weight"), some, everything, strict=False):
            assert (actual is None) == (name not in wanted)
            if actual is not None:
                np.testing.assert_array_equal(actual, full)


def test_weights_of_classes_may_be_apart() -> None:
    """These ops take arrays as they are: kernels read weights without the space between them."""
    x, weight = np.random.default_rng(0).standard_normal((2, 3, 4), np.float32)
    apart, labels = np.array([0.5, 9, 2, 9, 4, 9], np.float32)[::2], np.arange(3)
    found: list[Any] = []
    with emulator():
        for options in ({"class_weights": apart}, {"class_weights": apart.copy()}):
            loss, lse = uc.linear_cross_entropy_forward(x, weight, labels, **options)
            arrays = np.ones_like(loss), None, x, weight, labels, lse
            results = *uc.linear_cross_entropy_backward(*arrays, **options)[:2], loss
            both = uc.linear_cross_entropy_gradients(x, weight, labels, **options)
            found.append([*results, *both])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("op", ["linear_cross_entropy", "linear_log_probs"])
def test_a_quantized_head_is_frozen(op: str) -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((5, 64)).astype(np.float32), np.array([0, 3, 30, -100, 8])
    head = uc.nf4_quantize(rng.standard_normal((40, 64)).astype(np.float32))
    seed, found = np.array([0.5, 1, 2, 3, -1], np.float32), []
    for weight in (head, head.dequantize()):
        tape = uc.Tape()
        watched = tape.watch(x)
        result: Any = getattr(uc, op)(watched, weight, labels)
        loss = getattr(result, "log_probs", result)
        found.append((loss.value, *tape.gradients(loss, [watched], seed)))
    for actual, expected in zip(*found, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    with pytest.raises(GradientError, match="a quantized weight is frozen; train an adapter"):
        uc.linear_cross_entropy_gradients(x, head, labels, wanted={"weight"})


def test_a_frozen_head_costs_no_sums() -> None:
    """On a tape a head that is not watched has no gradient, nor memory for one."""
    x, weight, labels = np.ones((4, 500)), np.ones((1000, 500)), np.zeros(4, int)
    tape = uc.Tape()
    watched = tape.watch(x)
    loss = uc.linear_cross_entropy(watched, weight, labels)
    tracemalloc.start()
    tape.gradients(loss, [watched], loss.value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 < weight.nbytes


class TestLabelsThatAHostDoesNotRead(KernelAlone):
    """On a GPU a label outside the vocabulary gives NaN; check_errors tells which."""

    op = "linear_cross_entropy_forward"
    cases = (Case("the last row of three chunks"),)

    def prove(self, case: Case, dtype: Any) -> None:
        x, weight = np.ones((3, 2), dtype), np.ones((4, 2), dtype)
        with emulator():
            loss = uc.linear_cross_entropy(x, weight, np.array([0, -100, 4]), max_bytes=1)
            assert "labels holds 4" in reported()
            again, dx, dweight = uc.linear_cross_entropy_gradients(x, weight, np.array([0, 0, 4]))
            assert "labels holds 4" in reported()
        np.testing.assert_array_equal(np.isnan(loss), [False, False, True])
        np.testing.assert_array_equal(np.isnan(again), [False, False, True])
        assert np.isnan(dx.astype(np.float32)).any(axis=1).tolist() == [False, False, True]
        assert np.isnan(dweight.astype(np.float32)).all()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_memory_is_what_head_bytes_says(frozen: bool, dtype: Any) -> None:
    """The arrays to the byte; beside them some rows that are computed at a time, or widened."""
    rows, hidden, vocab, max_bytes = 600, 16, 5000, 2**22
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, hidden)).astype(dtype)
    weight = rng.standard_normal((vocab, hidden)).astype(dtype)
    labels, options = rng.integers(0, vocab, rows), {"max_bytes": max_bytes}
    said = head_bytes(rows, hidden, vocab, dtype, **options, frozen=frozen, kernels=False)
    narrow, step = dtype != np.float32, chunk_rows(rows, vocab, dtype, max_bytes)
    assert step == max_bytes // (vocab * (6 if narrow else 4))
    assert said == step * vocab * 4 + (vocab * hidden * 4 if narrow and not frozen else 0)
    wanted = {"x"} if frozen else None
    uc.linear_cross_entropy_gradients(x, weight, labels, **options, wanted=wanted)
    tracemalloc.start()
    _, dx, dweight = uc.linear_cross_entropy_gradients(x, weight, labels, **options, wanted=wanted)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 16-bit results of the weight appear when the chunk has gone
    results = dx.nbytes + (0 if frozen or narrow else dweight.nbytes)
    beside = 3 * CACHED * 4 + weight.size * 4 * (1 + narrow)
    assert 0 <= peak - results - said <= beside + 50_000


def test_a_trained_head_has_chunks_of_2048_rows() -> None:
    """Fewer only by ``max_bytes``; a frozen head has no sums of dweight, and less memory."""
    for vocab, rows in ((128_256, 697), (32_000, 2796)):
        given: Any = (8192, vocab, ml_dtypes.bfloat16)
        assert chunk_rows(*given) == rows
        assert chunk_rows(*given, trained=True) == max(2048, rows)
        assert chunk_rows(*given, 2**29, trained=True) == rows
        assert chunk_rows(100, *given[1:], trained=True) == 100
        sums = 4 * vocab * 4096
        assert head_bytes(8192, 4096, *given[1:]) == max(2048, rows) * vocab * 6 + sums
        assert head_bytes(8192, 4096, *given[1:], frozen=True) == rows * vocab * 6


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_gpu_holds_what_head_bytes_says(frozen: bool, dtype: Any) -> None:
    """To the byte, for a stand-in that counts; every size is a multiple of what pools round to."""
    rows, hidden, vocab, options = 512, 64, 4096, {"max_bytes": 2**22}
    said = head_bytes(rows, hidden, vocab, dtype, **options, frozen=frozen)
    with gpu() as machine:
        x, weight = machine.array((rows, hidden), dtype), machine.array((vocab, hidden), dtype)
        labels = machine.array(rows, np.int64)
        inputs = options | {"wanted": {"x"} if frozen else None}
        loss, lse = uc.linear_cross_entropy_forward(x, weight, labels, **options)
        before = machine.peak = machine.held
        dx, dweight, _ = uc.linear_cross_entropy_backward(
            loss, None, x, weight, labels, lse, **inputs
        )
        # a 16-bit gradient of the weight is made when the chunk has gone
        results = dx.nbytes + (dweight.nbytes if dtype == np.float32 and not frozen else 0)
        assert machine.peak - before == said + results
        chunks = -(-rows // chunk_rows(rows, vocab, dtype, **options))
        assert len(machine.products) == chunks * (3 if frozen else 4), "one of them forward"
        del dx, dweight
        before = machine.peak = machine.held
        actual = uc.linear_cross_entropy_gradients(x, weight, labels, **inputs)
        assert machine.peak - before == said + results + actual[0].nbytes


@both_dtypes
@golden("layers", "linear_cross_entropy")
def test_golden(golden: OpCase, dtype: Any) -> None:
    inputs = cast(golden, dtype)
    x, weight, labels = inputs["x"], inputs["weight"], inputs["target"]
    counted = int((labels != -100).sum())
    loss, lse = uc.linear_cross_entropy_forward(x, weight, labels, max_bytes=100)
    agree(loss.sum() / counted, golden.outputs["y"])
    dloss = np.full_like(loss, inputs["cotangent"] / counted)
    grads = uc.linear_cross_entropy_backward(dloss, None, x, weight, labels, lse, max_bytes=100)
    agree(grads[0], golden.grads["x"])
    agree(grads[1], golden.grads["weight"])
    assert grads[2] is None


@pytest.mark.parametrize("options", [{}, EVERYTHING])
def test_equals_linear_then_cross_entropy(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 6), (13, 6)))
    labels = rng.integers(0, 13, 9)
    plain, exact = (
        uc.cross_entropy(uc.linear(x.astype(kind), weight.astype(kind)), labels, **options)
        for kind in (np.float32, np.float64)
    )
    actual = uc.linear_cross_entropy(x, weight, labels, max_bytes=300, **options)
    within_rule({"loss": plain}, {"loss": exact}, {"loss": actual})


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
