"""Where new keys and values go, token by token, and the kernels that put them there."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.ops.attention.kv_append import kv_append_, kv_append_paged_

from ..harness.parity import Case, KernelParity, emulator
from ..machines.stand_in import gpu

SMALL = {"batch": 2, "kv_heads": 2, "dim": 8}


class TestKvAppend(KernelParity):
    op = "kv_append_"
    cases = (
        Case("from the left", **SMALL, tokens=3, slots=9, start=4),
        Case("the ring is full", **SMALL, tokens=3, slots=6, start=8, sinks=2),
        Case("more than the ring holds", **SMALL, tokens=9, slots=5, start=0, sinks=1),
        Case("rows apart", **SMALL, tokens=4, slots=7, sinks=2, arrays={"starts": [0, 31]}),
        Case(
            "before the first",
            **SMALL | {"dim": 3},
            tokens=4,
            slots=7,
            arrays={"starts": np.array([-2, 5], np.int32)},
        ),
        Case("sinks alone", **SMALL, tokens=4, slots=3, sinks=3, start=1),
    )
    test_gradient_matches_finite_differences = None  # it changes a cache
    test_any_strides = None  # below


class TestKvAppendPaged(KernelParity):
    op = "kv_append_paged_"
    cases = tuple(
        Case(
            f"pages of {page}",
            **SMALL | {"dim": dim},
            tokens=5,
            pages=9,
            page=page,
            arrays={"page_table": table, "starts": starts},
        )
        for page, dim, table, starts in (
            (1, 3, [[8, 0, 6, 1, 5, -1], [2, 9, 7, 4, 3, -1]], [0, 1]),
            (3, 8, np.array([[2, 5, 8], [0, 4, 1]], np.int32), [2, -1]),
            (16, 8, [[3], [6]], np.array([13, 4], np.int32)),
        )
    )
    test_gradient_matches_finite_differences = None
    test_any_strides = None


def slow(new: np.ndarray, stored: np.ndarray, starts: Any, sinks: int) -> np.ndarray:
    """Append token by token, as a reader would."""
    stored = stored.copy()
    for row, first in enumerate(starts):
        for i, token in enumerate(new[row]):
            position, ring = first + i, stored.shape[1] - sinks
            if 0 <= position < sinks:
                stored[row, position] = token
            elif position >= sinks and ring:
                stored[row, sinks + (position - sinks) % ring] = token
    return stored


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 4, 11])
@pytest.mark.parametrize("start", [0, 2, 5, 13])
def test_equals_token_by_token(start: int, tokens: int, sinks: int) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, tokens, 2, 3)).astype(np.float32)
    keys, values = rng.standard_normal((2, 2, 6, 2, 3)).astype(np.float32)
    for starts in (None, np.array([start, start + 2])):
        places = [start, start] if starts is None else starts
        actual = kv_append_(k, v, keys.copy(), values.copy(), starts, start=start, sinks=sinks)
        np.testing.assert_array_equal(actual[0], slow(k, keys, places, sinks))
        np.testing.assert_array_equal(actual[1], slow(v, values, places, sinks))


@pytest.mark.parametrize("page", [1, 3, 16])
def test_pages_equal_token_by_token(page: int) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 7, 2, 3)).astype(np.float32)
    table = rng.permutation(2 * 12)[:24].reshape(2, 12)
    k_pages, v_pages = rng.standard_normal((2, 24, page, 2, 3)).astype(np.float32)
    expected = k_pages.copy(), v_pages.copy()
    starts = np.array([4, 0])
    for row in range(2):
        for i in range(7):
            index, slot = divmod(starts[row] + i, page)
            for stored, new in zip(expected, (k, v), strict=True):
                stored[table[row, index], slot] = new[row, i]
    actual = kv_append_paged_(k, v, k_pages, v_pages, table, starts)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_emulated_kernels_of_arrays_as_they_lie(dtype: Any) -> None:
    """New tokens may be columns of a fused projection; a cache may be a part of another array."""
    rng = np.random.default_rng(0)
    both = rng.standard_normal((2, 3, 2, 24)).astype(dtype)
    fused = rng.standard_normal((2, 3, 52)).astype(dtype)
    _append(dtype, both[..., 8:16], both[..., 16:])  # packed first
    _append(dtype, *(fused[..., n : n + 16].reshape(2, 3, 2, 8) for n in (16, 36)))
    _append(dtype, *(fused[:, ::-1, n : n + 16].reshape(2, 3, 2, 8) for n in (16, 32)))
    one = (fused[:1, :, n : n + 16].reshape(1, 3, 2, 8) for n in (0, 4))
    _append(dtype, *(np.broadcast_to(each, (2, 3, 2, 8)) for each in one))


def _append(dtype: Any, k: np.ndarray, v: np.ndarray) -> None:
    packed, strided = np.zeros((2, 2, 9, 2, 8), dtype), np.zeros((2, 2, 9, 2, 16), dtype)
    for keys, values in (packed, strided[..., ::2]):
        with emulator():
            kv_append_(k, v, keys, values, start=6)
            kv_append_paged_(v, k, keys, values, np.array([[0], [1]]), np.array([1, 2]))
        np.testing.assert_array_equal(keys[:, 6:], k)
        np.testing.assert_array_equal(values[:, 6:], v)
        np.testing.assert_array_equal(keys[1, 2:5], v[1])
        np.testing.assert_array_equal(values[0, 1:4], k[0])


def test_emulated_kernel_of_starts_with_gaps() -> None:
    """A kernel reads positions end to end, and its arguments are checked at the first launch."""
    k = np.ones((2, 1, 2, 8), np.float32)
    for starts in (np.array([1, 4]), np.array([1, 7, 4, 7])[::2]):
        keys, values = np.zeros((2, 2, 9, 2, 8), np.float32)
        with emulator():
            kv_append_(k, k, keys, values, starts)
        assert np.argwhere(keys[..., 0, 0]).tolist() == [[0, 1], [1, 4]]


def test_columns_of_a_fused_projection_are_not_copied() -> None:
    with gpu() as machine:
        fused = machine.array((2, 3, 4 * 16), "float16")
        k, v = (fused[..., n : n + 16].reshape(2, 3, 2, 8) for n in (16, 40))
        storage = [machine.array((2, 9, 2, 8), "float16") for _ in range(2)]
        for _ in range(3):
            kv_append_(k, v, *storage, start=2)
        assert len(machine.launches) == 3
        assert not machine.functions
