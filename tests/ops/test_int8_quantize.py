from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.errors import DTypeError, ShapeError

from ..code.programs.variants import ROWS
from ..harness.parity import Case, KernelParity, emulator

# The public names, as other people's programs call them.
PUBLIC = ("int8_quantize(x)",)


class TestInt8Quantize(KernelParity):
    op = "int8_quantize_forward"
    sizes = tuple({"columns": n} for n in (*ROWS, 32768, 65536, 524296))
    cases = (
        Case("odd", rows=[2, 3], columns=13),
        Case("one row", rows=[], columns=13),
        Case("one column", rows=[3], columns=1),
        Case("slices", rows=[2, 3], columns=24, gaps=True),
        *(Case(f"{n} columns", rows=[3], columns=n) for n in (34, 68, 136, 264)),
        Case("a block a row", rows=[2], columns=1000),
        Case("a ragged block a row", rows=[2], columns=4104),
        Case("two blocks", rows=[1], columns=32776),
        Case("no rows", rows=[0], columns=4),
        Case("no columns", rows=[3], columns=0),
        Case("rows of zeros", arrays={"x": np.eye(5)[:, :3]}),
    )
    test_gradient_matches_finite_differences = None  # integers have none
    test_rounds_once = None  # at a tie, float32 and float64 fall to different sides: see plainly


class TestInt8QuantizeWithoutClusters(KernelParity):
    op = "int8_quantize_forward"
    machine = {"clusters": False}  # noqa: RUF012
    cases = (
        Case("all threads of a block", rows=[1], columns=32768),
        Case("read twice", rows=[1], columns=65544),
        Case("read twice, one by one", rows=[1, 2], columns=65537, gaps=True),
    )
    test_gradient_matches_finite_differences = None
    test_rounds_once = None
    test_any_strides = None


def plainly(row: np.ndarray) -> tuple[list[int], np.float32]:
    """Quantise one row value by value, each step rounded to float32."""
    top = np.float32(max(abs(float(value)) for value in row))
    factor = np.float32(127) / top
    return [round(float(np.float32(np.float32(value) * factor))) for value in row], top


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_codes_are_those_of_each_value_alone(dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((7, 129)).astype(dtype)
    x[0] = np.arange(-64, 65) * 0.5 * 127 / 64  # and ties, which go to even
    x[1, 3] = 127
    x[1, :3] = 0.5, 1.5, -2.5
    for run in (uc.int8_quantize, _by_kernel):
        codes, scales = run(x)
        for row, actual, scale in zip(x, codes, scales, strict=True):
            expected, top = plainly(row)
            assert actual.tolist() == expected
            assert scale == top / np.float32(127)
        assert codes[1, :3].tolist() == [0, 2, -2]
        assert np.abs(codes).max() == 127


def _by_kernel(x: np.ndarray) -> Any:
    with emulator():
        return uc.int8_quantize(x)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [5, 600])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_what_is_not_finite_is_never_hidden(bad: float, dtype: Any, columns: int) -> None:
    x = np.ones((3, columns), dtype)
    x[1, 2] = bad
    for run in (uc.int8_quantize, _by_kernel):
        codes, scales = run(x)
        assert np.isnan(scales).tolist() == [False, True, False]
        assert not codes[1].any()
        assert (codes[::2] == 127).all()


@pytest.mark.parametrize("dtype", [np.dtype("float32"), BFLOAT16], ids=str)
def test_the_ends_of_the_range(dtype: Any) -> None:
    """No quotient of a row overflows, and none is lost where a GPU flushes what is tiny."""
    largest = np.finfo(dtype).max if dtype == np.float32 else 3.38e38
    x = np.array([[largest, -1e38], [2.0**-119, 0], [2.0**-120, 2.0**-121], [1e-45, 0]], dtype)
    for run in (uc.int8_quantize, _by_kernel):
        codes, scales = run(x)
        assert codes[:, 0].tolist() == [127, 127, 0, 0]
        assert np.isfinite(scales).all()
        assert (scales[:2] > 0).all()
        assert not scales[2:].any()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_values_come_back_within_half_a_step(dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 50)).astype(dtype)
    codes, scales = uc.int8_quantize(x)
    off = np.abs(codes * scales[..., None] - x.astype(np.float32))
    assert (off <= scales[..., None] * (0.5 + 2.0**-15)).all()


def test_one_array_off_alignment() -> None:
    room = np.random.default_rng(0).standard_normal(1 + 3 * 64).astype(np.float16)
    x = room[1:].reshape(3, 64)
    codes, scales = _by_kernel(x)
    expected = uc.int8_quantize(x)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scales, expected[1])


def test_wrong_calls() -> None:
    with pytest.raises(DTypeError, match="x is int64; it must be float16"):
        uc.int8_quantize(np.ones((2, 3), np.int64))
    with pytest.raises(ShapeError, match="x has 0 axes"):
        uc.int8_quantize(np.ones(()))
