"""Every primitive against plain arithmetic, checked and fast."""

from typing import Any

import numpy as np
import pytest

from ..cuda_on_cpu import TensorMap
from ..hardware.primitives import PRIMITIVES
from . import RNG, kernel, primitive

pytestmark = pytest.mark.parametrize("check", [True, False], ids=["checked", "fast"])


def run(name: str, block: int, args: tuple[Any, ...], shared: int = 0, **how: Any) -> None:
    kernel("primitives.cu", name, **how)((1,), (block,), args, shared)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive(check: bool, name: str) -> None:
    """Bit by bit: the values are integers that every sum holds."""
    assert primitive(name, check=check, seed=len(name) % 3) == 0


def test_ldmatrix(check: bool) -> None:
    tiles = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((32, 8), np.uint32)
    run("ldmatrix_both", 32, (tiles.view(np.uint32), out), check=check)
    halves = out.view(np.uint16).reshape(32, 8, 2)
    for lane in range(32):
        i, j = lane // 4, lane % 4 * 2
        np.testing.assert_array_equal(halves[lane, :4], tiles[:, i, j : j + 2])
        np.testing.assert_array_equal(halves[lane, 4:], tiles[:, j : j + 2, i])


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_tma_load(check: bool, swizzle: int, rank: int) -> None:
    inner = (swizzle or 128) // 2
    box = {2: (inner, 16), 3: (inner, 8, 2), 4: (inner, 4, 3, 2)}[rank]
    corner = {2: (8, 9), 3: (-8, 16, 4), 4: (64, -2, 3, 2)}[rank]
    whole = RNG.integers(0, 65536, (3, 5, 20, 96)).astype(np.uint16)
    array = np.ascontiguousarray(whole[(0,) * (4 - rank)])
    expected = np.zeros(box[::-1], np.uint16)
    for index in np.ndindex(*expected.shape):
        at = tuple(np.add(index, corner[::-1]))
        if all(0 <= i < n for i, n in zip(at, array.shape, strict=True)):
            expected[index] = array[at]
    linear = np.arange(expected.size) * 2
    mask = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[swizzle]
    swizzled = np.zeros(expected.size, np.uint16)
    swizzled[(linear ^ ((linear >> 3) & mask)) // 2] = expected.reshape(-1)
    out = np.zeros(expected.nbytes, np.uint8)
    args = (TensorMap(array, box, swizzle), out, np.int32(out.size), *map(np.int32, corner))
    run(f"tma{rank}", 64, args, out.size, check=check, seed=rank)
    np.testing.assert_array_equal(out.view(np.uint16), swizzled)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_named_barriers(check: bool, seed: int) -> None:
    x = RNG.standard_normal((6, 32)).astype(np.float32)
    y = np.zeros_like(x)
    run("named", 128, (x, y, np.int32(6)), check=check, seed=seed)
    np.testing.assert_array_equal(y, x[:, ::-1])


def test_warp_moves(check: bool) -> None:
    v = RNG.integers(0, 100, 32).astype(np.int32)
    out = np.zeros((6, 32), np.int32)
    run("warp_moves", 32, (v, out), check=check)
    lane = np.arange(32)
    up, down = np.maximum(lane - 2, 0), lane + 7
    up[:2] = lane[:2]  # off the end: one's own
    down = np.where(down % 16 < 7, lane, down)
    votes = np.uint32(sum(1 << i for i in range(32) if v[i] % 3 == 0)).view(np.int32)
    expected = [np.full(32, v[5]), v[lane ^ 3], v[up], v[down], np.full(32, votes), np.ones(32)]
    np.testing.assert_array_equal(out, expected)


def test_atomics(check: bool) -> None:
    cells, total = np.zeros(5, np.int32), np.zeros(1, np.float32)
    run("atomics", 64, (cells, total), check=check)
    np.testing.assert_array_equal(cells[:4], [64, 63, -63, 255])
    assert total[0] == 32
