from typing import Any
from unittest import mock

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.errors import ConfigError, DTypeError, GradientError, ShapeError
from unsloth_cupy.ops.elements import cast as casts
from unsloth_cupy.ops.elements.cast import accumulate_over_, concatenate

from ..harness.parity import Case, KernelCompared, KernelInPlace, KernelParity, emulator

# The public names, as other people's programs call them.
PUBLIC = (
    "cast(x, dtype)",
    "accumulate_(total, x)",
)

CASES = (
    Case("odd", axes=[2, 3, 13]),
    Case("two blocks", axes=[5, 431]),
    Case("scalar", axes=[]),
    Case("empty", axes=[0, 4]),
)


class TestCastToFloat16(KernelParity):
    op = "cast_to_float16"
    cases = CASES
    test_gradient_matches_finite_differences = None  # a rounding has steps, not a slope


class TestCastToBfloat16(TestCastToFloat16):
    op = "cast_to_bfloat16"


class TestCastToFloat32(TestCastToFloat16):
    op = "cast_to_float32"


class TestBeside(KernelCompared):
    """Columns of arrays side by side: the very values."""

    op = "cast_to_bfloat16"
    cases = (
        Case("three", rows=3, columns=(16, 8, 64)),
        Case("two of odd columns", rows=2, columns=(3, 4)),
        Case("several tiles", rows=2, columns=(2056, 8, 2048)),
        Case("columns of a wider array", rows=4, columns=(8, 24, 8), apart=True),
    )

    def compare(self, case: Case, dtype: Any, place: Any, running: Any) -> None:
        rows, columns = case.both["rows"], case.both["columns"]
        values = np.arange(rows * 2 * sum(columns)).reshape(rows, -1).astype(dtype)
        starts = [sum(columns[:n]) for n in range(len(columns))]
        parts = [values[:, n : n + size] for n, size in zip(starts, columns, strict=True)]
        expected = np.concatenate(parts, axis=-1)
        whole = place(values)
        there = [whole[:, n : n + size] for n, size in zip(starts, columns, strict=True)]
        if not case.both.get("apart"):
            there = [part.copy() for part in there]
        out = place(np.zeros_like(expected))
        with running(), mock.patch.object(casts, "contiguous", side_effect=AssertionError):
            concatenate(there, out)
        actual = out if isinstance(out, np.ndarray) else out.get()
        np.testing.assert_array_equal(actual, expected)


class TestAccumulate(KernelInPlace):
    op = "accumulate_over_"
    cases = CASES


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bits in float32, with one NaN for all."""
    wide = array.astype(np.float32)
    return np.where(np.isnan(wide), np.float32(np.nan), wide).view(np.uint32)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("to", KERNEL_DTYPES, ids=str)
def test_kernels_round_as_numpy_does(dtype: Any, to: Any) -> None:
    """Denormals, ties, infinities and zeros, to the bit; in the gradient, back."""
    edges = np.array([0.0, -0.0, 1.0009765625, 3e-8, 70000.0, -1e39, np.inf, np.nan, 1 / 3])
    with np.errstate(over="ignore"):
        x = np.repeat(edges.astype(np.float32).astype(dtype), 3)
        dy, expected = x[::-1].astype(to), x.astype(to)
        back = dy.astype(dtype)
    with emulator():
        y = uc.cast(x, to)
        tape = uc.Tape()
        watched = tape.watch(x)
        (dx,) = tape.gradients(uc.cast(watched, to), [watched], dy)
    np.testing.assert_array_equal(_bits(y), _bits(expected))
    assert dx.dtype == x.dtype
    np.testing.assert_array_equal(dx.astype(np.float32), back.astype(np.float32))


def test_dtypes_by_any_name() -> None:
    x = np.ones(3, np.float32)
    for name in ("bfloat16", BFLOAT16, BFLOAT16.type, "torch.bfloat16"):
        assert uc.cast(x, name).dtype == BFLOAT16
    assert uc.cast(x, "float32") is x
    for wrong in ("float64", "int32", int, None, "half a float"):
        with pytest.raises(ConfigError, match="choose from float16, bfloat16, float32"):
            uc.cast(x, wrong)
    with pytest.raises(DTypeError, match="x is int64"):
        uc.cast(np.ones(3, int), "float32")


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_accumulate(dtype: Any) -> None:
    """In place, strided too, and where total starts off 16 bytes."""
    rng = np.random.default_rng(0)
    x, start = rng.standard_normal((2, 37)).astype(dtype), rng.standard_normal((2, 37))
    start = start.astype(np.float32)
    room = np.empty(75, np.float32)
    shifted, strided = room[1:].reshape(2, 37), np.empty((37, 2), np.float32).T
    for total in (start.copy(), shifted, strided):
        total[...] = start
        assert uc.accumulate_(total, x) is total
        np.testing.assert_array_equal(total, start + x)
        total[...] = start
        with emulator():
            assert uc.accumulate_(total, x) is total
        np.testing.assert_array_equal(total, start + x)


def test_accumulate_returns_what_it_was_given() -> None:
    total = np.ones(3, np.float32)
    assert accumulate_over_(total, total.astype(BFLOAT16)) is total


def test_accumulate_refuses() -> None:
    total, x = np.ones(3, np.float32), np.ones(3, np.float16)
    with pytest.raises(GradientError, match="total is on a tape; call add"):
        uc.accumulate_(uc.Tape().watch(total), x)
    with pytest.raises(DTypeError, match="total is float16; it must be float32"):
        uc.accumulate_(x, x)
    with pytest.raises(ShapeError, match="x has axes"):
        uc.accumulate_(total, x[:2])
    total.flags.writeable = False
    with pytest.raises(ConfigError, match="total is read-only; call add"):
        uc.accumulate_(total, x)


def test_arrays_of_jax_never_change() -> None:
    jax = pytest.importorskip("jax", reason="whose arrays are given")
    ones = jax.numpy.ones(3)
    with pytest.raises(ConfigError, match="total is read-only; call add"):
        uc.accumulate_(ones, ones)
    np.testing.assert_array_equal(ones, 1)
