"""Rows in eight bits by a weight in eight bits: LLM.int8()."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import FLOATS, KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import Limits
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError
from unsloth_cupy.ops.quantized._int8_tiles import TABLE, resolve
from unsloth_cupy.ops.quantized.int8 import Int8

from ..harness.parity import Case, KernelParity, emulator, within_rule
from ..machines.stand_in import LIMITS, gpu

# The public names, as other people's programs call them.
PUBLIC = ("int8_linear(x, weight, *, threshold=None)",)


def spiked(rows: int, inputs: int, *columns: int) -> Any:
    """Return how to draw x with outliers in some columns, in some rows of each."""

    def drawn(rng: np.random.Generator) -> Any:
        x = np.clip(rng.standard_normal((rows, inputs)), -3, 3)
        for i, column in enumerate(columns):
            x[i % rows :: 3, column] = 8 * (-1) ** i
        return x

    return drawn


class TestInt8Linear(KernelParity):
    op = "int8_linear_forward"
    sizes = (
        {"rows": (4,), "inputs": 4096, "outputs": 512},
        {"rows": (48,), "inputs": 4096, "outputs": 512},
        {"rows": (4096,), "inputs": 4096, "outputs": 4096},
        {"rows": (4,), "inputs": 7, "outputs": 9},
        {"rows": (48,), "inputs": 7, "outputs": 9},
        {"rows": (4096,), "inputs": 7, "outputs": 8191},
    )
    options = ({"threshold": None}, {"threshold": 6.0})
    sides = ("forward",)  # its gradient is a product of cuBLAS: see below
    cases = (
        Case("odd", rows=[2, 3], inputs=13, outputs=7),
        Case("one row", rows=[], inputs=32, outputs=2),
        Case("sixteen to a copy", rows=[5], inputs=48, outputs=33),
        Case("several stages", rows=[3], inputs=1040, outputs=34),
        Case("two tiles of rows", rows=[70], inputs=144, outputs=65),
        Case("no rows", rows=[2, 0], inputs=5, outputs=2),
        Case("no inputs", rows=[3], inputs=0, outputs=2),
        Case("no outputs", rows=[3], inputs=2, outputs=0),
        Case("no outliers", rows=[4], inputs=16, outputs=6, threshold=100.0),
        Case(
            "outliers", arrays={"x": spiked(5, 48, 0, 7, 47)}, inputs=48, outputs=9, threshold=6.0
        ),
        Case(
            "outliers, odd",
            arrays={"x": spiked(37, 53, 5, 50)},
            inputs=53,
            outputs=13,
            threshold=6.0,
        ),
        Case("all are outliers", rows=[3], inputs=16, outputs=4, threshold=1e-6),
        Case(
            "outliers in the second 1024 columns",
            arrays={"x": spiked(3, 1040, 5, 1030)},
            inputs=1040,
            outputs=3,
            threshold=6.0,
        ),
        Case("a row of zeros", arrays={"x": np.eye(4)[:, :3]}, inputs=3, outputs=3),
    )
    test_gradient_matches_finite_differences = None  # rounding has none: see below
    test_rounds_once = None  # at a tie of a code, float32 and float64 fall to different sides


class TestInt8LinearLarge(TestInt8Linear):
    """The tiles of many rows, where there are enough for the one processor of this machine."""

    cases = (
        Case("large tiles", rows=[130], inputs=208, outputs=129),
        Case("large tiles, odd", rows=[129], inputs=77, outputs=131),
        Case(
            "outliers", arrays={"x": spiked(140, 96, 3, 64)}, inputs=96, outputs=130, threshold=6.0
        ),
    )
    test_any_strides = None


def test_every_row_of_the_table_runs() -> None:
    seen = set()
    for arch, (*_, shared, _) in LIMITS.items():
        limits = Limits(int(arch), shared, 132)
        chosen = [resolve(rows, 4096, limits) for rows in (1, 16, 17, 64, 4096)]
        assert chosen[0] == chosen[1] != chosen[2] == chosen[3] != chosen[4]
        assert resolve(256, 256, limits) == chosen[2], "4 blocks leave 128 processors idle"
        assert all(2 * (tiles.bytes + 1024) <= shared + 1024 for tiles in chosen)
        seen |= {*chosen}
    assert seen == {each for _, several in TABLE for each in several}


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [None, 6.0])
@pytest.mark.parametrize("rows", [1, 20])
def test_equals_integers_one_by_one(rows: int, threshold: float | None) -> None:
    """By Python's integers, as LLM.int8() says: outliers leave the scale, their columns the sum."""
    rng = np.random.default_rng(0)
    x = spiked(rows, 40, 3, 11)(rng).astype(np.float32)
    weight = uc.int8_weight(rng.standard_normal((6, 40)).astype(np.float32))
    beyond = np.abs(x) >= (np.inf if threshold is None else threshold)
    columns = beyond.any(axis=0)
    expected = np.zeros((rows, 6))
    for r in range(rows):
        top = np.abs(np.where(beyond[r], 0, x[r])).max()
        factor = np.float32(127) / top
        codes = [round(float(np.float32(value * factor))) for value in x[r]]
        for o in range(6):
            row = [int(code) for code in weight.codes[o]]
            exact = sum(c * w for c, w, out in zip(codes, row, columns, strict=True) if not out)
            kept = sum(float(v) * w for v, w, out in zip(x[r], row, columns, strict=True) if out)
            expected[r, o] = (exact * float(top) / 127 + kept) * float(weight.absmax[o]) / 127
    actual = uc.int8_linear(x, weight, threshold=threshold)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    with emulator():
        actual = uc.int8_linear(x, weight, threshold=threshold)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_threshold_keeps_what_outliers_would_drown() -> None:
    rng = np.random.default_rng(0)
    x, w = spiked(32, 256, 17)(rng).astype(np.float32), rng.standard_normal((64, 256))
    x[:, 17] *= 50
    weight = uc.int8_weight(w.astype(np.float32))
    exact = uc.linear(x, weight)
    errors = [np.abs(uc.int8_linear(x, weight, threshold=t) - exact).mean() for t in (None, 6.0)]
    assert errors[1] * 10 < errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient_is_that_of_the_dense_weight(dtype: Any) -> None:
    """Of x: rounding counts for none.  Codes and scales are frozen."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, 3, n)).astype(np.float16).astype(dtype) for n in (24, 10))
    weight = uc.int8_weight(rng.standard_normal((10, 24)).astype(np.float32))

    def gradient(kind: Any, quantized: bool) -> dict[str, np.ndarray]:
        tape = uc.Tape()
        xs = tape.watch(x.astype(kind))
        y = uc.int8_linear(xs, weight) if quantized else uc.linear(xs, weight.dequantize(kind))
        return {"dx": tape.gradients(y, [xs], dy.astype(kind))[0]}

    within_rule(gradient(dtype, False), gradient(np.float64, False), gradient(dtype, True))
    if dtype in KERNEL_DTYPES:
        with emulator():
            actual = gradient(dtype, True)
        within_rule(gradient(dtype, False), gradient(np.float64, False), actual)


@pytest.mark.slow
@pytest.mark.parametrize("off", ["x", "codes"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_one_array_off_alignment(dtype: Any, off: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 48)).astype(dtype)
    weight = uc.int8_weight(rng.standard_normal((9, 48)).astype(np.float32))
    arrays = {"x": x, "codes": weight.codes}
    room = np.zeros(arrays[off].size + 1, arrays[off].dtype)
    arrays[off] = room[1:].reshape(arrays[off].shape)
    arrays[off][...] = x if off == "x" else weight.codes
    forward = OPS["int8_linear_forward"]
    with emulator():
        expected = forward(x, weight.codes, weight.absmax)
        actual = forward(arrays["x"], arrays["codes"], weight.absmax)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("threshold", [None, 6.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_never_hidden(bad: float, threshold: float | None) -> None:
    x = np.ones((3, 32), np.float32)
    x[1, 2] = bad
    weight = uc.int8_weight(np.random.default_rng(0).random((4, 32)).astype(np.float32) + 1)
    for run in (_plainly, _by_kernel):
        y = run(x, weight, threshold)
        assert np.isfinite(y[::2]).all()
        assert not np.isfinite(y[1]).any()


def _plainly(x: np.ndarray, weight: Any, threshold: float | None) -> np.ndarray:
    return uc.int8_linear(x, weight, threshold=threshold)


def _by_kernel(x: np.ndarray, weight: Any, threshold: float | None) -> np.ndarray:
    with emulator():
        return uc.int8_linear(x, weight, threshold=threshold)


@pytest.mark.slow
def test_sums_are_exact() -> None:
    """Of more codes of 127 than float32 adds one by one."""
    inputs = 4096 + 1
    weight = uc.int8_weight(np.ones((1, inputs), np.float32))
    x = np.ones((1, inputs), np.float32)
    x[0, 0] = 1 - 1 / 127  # the sum is odd
    for run in (_plainly, _by_kernel):
        total = np.float32(127 * (127 * (inputs - 1) + 126))
        one = np.float32(1) / np.float32(127)
        assert run(x, weight, None)[0, 0] == pytest.approx(float(total * one * one), rel=2e-7)


def test_wrong_calls() -> None:
    x, weight = np.ones((2, 8), np.float32), uc.int8_weight(np.ones((3, 8), np.float32))
    with pytest.raises(DTypeError, match="weight is ndarray, not an Int8; pass int8_weight"):
        uc.int8_linear(x, np.ones((3, 8), np.float32))
    with pytest.raises(ConfigError, match="threshold=0"):
        uc.int8_linear(x, weight, threshold=0.0)
    with pytest.raises(ConfigError, match="threshold"):
        uc.int8_linear(x, weight, threshold=float("nan"))
    with pytest.raises(ShapeError, match="inputs=8; it must be 7"):
        uc.int8_linear(x[:, :7], weight)
    with pytest.raises(DTypeError, match="x is int64"):
        uc.int8_linear(np.ones((2, 8), np.int64), weight)
    wide = np.ones((1, 133_145), np.float32)
    with pytest.raises(ShapeError, match="133145 inputs; 32-bit sums allow 133144"):
        uc.int8_linear(wide, uc.int8_weight(wide))


def test_what_a_call_launches() -> None:
    with gpu() as machine:
        weight = Int8(machine.array((128, 64), np.int8), machine.array((128,), np.float32))
        x = machine.array((32, 64), "bfloat16")
        uc.int8_linear(x, weight)
        assert [launch.kernel for launch in machine.launches] == ["int8_quantize", "int8_linear"]
        machine.launches.clear()
        uc.int8_linear(x, weight, threshold=6.0)
        assert [launch.kernel for launch in machine.launches] == [
            "int8_outliers", "int8_outlier_list", "int8_quantize", "int8_linear",
        ]  # fmt: skip
        assert machine.functions == []
