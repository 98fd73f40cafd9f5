"""The kernel that quantizes to 4 bits: its bytes are those of the definition."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.errors import RangeError
from unsloth_cupy.ops.quantized.nf4 import BLOCKS

from ..harness.parity import Case, KernelParity, emulator

KINDS = pytest.mark.parametrize("kind", ["nf4", "fp4"])


class TestNf4Quantize(KernelParity):
    op = "nf4_quantize_forward"
    sizes = ({"outputs": 64, "inputs": 64}, {"outputs": 64, "inputs": 64, "shift": 1})
    options = tuple(
        {"block": block, "kind": ("nf4", "fp4")[block == 4096]} for block in (64, *BLOCKS)
    )
    cases = (
        Case("odd", outputs=3, inputs=43),
        Case("one value", outputs=1, inputs=1, kind="fp4"),
        Case("whole blocks", outputs=4, inputs=64, kind="fp4"),
        Case("slices", outputs=5, inputs=24, gaps=True, block=32),
        *(Case(f"blocks of {n}", outputs=3, inputs=n // 2 + 5, block=n) for n in BLOCKS),
        Case("several blocks of threads", outputs=5, inputs=4096, block=1024, kind="fp4"),
        Case("no rows", outputs=0, inputs=4),
        Case("zeros", arrays={"w": np.eye(9)[:, :8]}, block=32),
        Case("short zeros", arrays={"w": np.zeros((3, 5))}),
    )
    test_gradient_matches_finite_differences = None  # integers have none
    test_rounds_once = None  # at a tie, float32 and float64 fall to different sides
    test_any_strides = None  # blocks run over the flat matrix


def by_kernel(w: np.ndarray, **options: Any) -> Any:
    with emulator():
        return uc.nf4_quantize(w, **options)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_levels_and_what_lies_between_them(dtype: Any, kind: str) -> None:
    """Each bound itself, and its neighbours: the lower level of two as near."""
    levels = np.unique(uc.nf4_quantize(np.linspace(-1, 1, 4001)[None], block=4096, kind=kind)[:])
    bounds = ((levels[1:] + levels[:-1]) / np.float32(2)).astype(dtype)
    near = [np.nextafter(bounds, dtype.type(to)) for to in (-2, 2)]
    w = np.concatenate([bounds, *near, levels.astype(dtype), np.array([1, -1, 0], dtype)])[None]
    for scale in (1, 0.37):
        inputs = (w * dtype.type(scale)).astype(dtype)
        for block in (64, 128):
            actual = by_kernel(inputs, kind=kind, block=block)
            expected = uc.nf4_quantize(inputs, kind=kind, block=block)
            assert actual.packed.tobytes() == expected.packed.tobytes()
            assert actual.absmax.tobytes() == expected.absmax.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(1, 8))
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_off_alignment(dtype: Any, shift: int) -> None:
    room = np.random.default_rng(0).standard_normal(shift + 7 * 67).astype(dtype)
    w = room[shift:].reshape(7, 67)
    actual, expected = by_kernel(w, block=32), uc.nf4_quantize(w, block=32)
    assert actual.packed.tobytes() == expected.packed.tobytes()
    assert actual.absmax.tobytes() == expected.absmax.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (4, 77), (6, 99)])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("block", [32, 4096])
def test_not_finite_is_named(block: int, dtype: Any, place: tuple[int, int], bad: float) -> None:
    w = np.random.default_rng(0).standard_normal((7, 100)).astype(dtype)
    w[place] = bad
    with pytest.raises(RangeError, match=rf"w\[{place[0]}, {place[1]}\] is {abs(bad)}|-inf"):
        by_kernel(w, block=block)


@KINDS
def test_the_ends_of_the_range(kind: str) -> None:
    """Where float32 has no reciprocal, and where a GPU takes what is tiny for zero."""
    w = np.array([[3.4e38, -1.7e38, 1e38, 0.0], [1.2e-38, -1.3e-38, 0, 0]], np.float32)
    for row in (w[:1], w[1:], np.tile(w[:1], (8, 4)), np.tile(w[1:], (8, 4))):
        actual, expected = (
            by_kernel(row, kind=kind, block=32),
            uc.nf4_quantize(row, kind=kind, block=32),
        )
        assert actual.packed.tobytes() == expected.packed.tobytes()
        assert actual.absmax.tobytes() == expected.absmax.tobytes()
    for tiny in (np.full((1, 3), 1e-39, np.float32), np.full((8, 4), 1e-39, np.float32)):
        actual = by_kernel(tiny, kind=kind, block=32)
        assert not actual.dequantize().any()
        assert (
            actual.absmax.tobytes() == uc.nf4_quantize(tiny, kind=kind, block=32).absmax.tobytes()
        )
