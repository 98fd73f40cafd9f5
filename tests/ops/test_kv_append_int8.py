"""Keys and values as integers of eight bits, and the kernel that puts them into a cache."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.errors import ShapeError
from unsloth_cupy.ops.attention.kv_append import kv_append_
from unsloth_cupy.ops.attention.kv_append_int8 import kv_append_int8_

from ..harness.parity import Case, KernelParity, emulator

ROWS = {"batch": 2, "pages": 2, "kv_heads": 2, "dim": 16}


class TestKvAppendInt8(KernelParity):
    op = "kv_append_int8_"
    sizes = ({"pages": 4, "page": 16, "batch": 4, "row_pages": 1},)
    cases = (
        Case("from the left", **ROWS, tokens=3, page=9, start=4),
        Case("the ring is full", **ROWS | {"dim": 24}, tokens=3, page=6, start=8, sinks=2),
        Case("more than the ring holds", **ROWS, tokens=9, page=5, start=0, sinks=1),
        Case("rows apart", **ROWS, tokens=4, page=7, sinks=2, arrays={"starts": [0, 31]}),
        Case(
            "before the first, odd",
            **ROWS | {"dim": 3},
            tokens=4,
            page=7,
            arrays={"starts": np.array([-2, 5], np.int32)},
        ),
        Case("a wide head", **ROWS | {"dim": 520}, tokens=1, page=2),
        Case(
            "pages, one start",
            **ROWS | {"pages": 4},
            tokens=3,
            page=4,
            start=2,
            arrays={"page_table": [[3, 1], [0, 2]]},
        ),
        *(
            Case(
                f"pages of {page}",
                **ROWS | {"dim": dim, "pages": 9},
                tokens=5,
                page=page,
                arrays={"page_table": table, "starts": starts},
            )
            for page, dim, table, starts in (
                (1, 3, [[8, 0, 6, 1, 5, -1], [2, 9, 7, 4, 3, -1]], [0, 1]),
                (3, 128, np.array([[2, 5, 8], [0, 4, 1]], np.int32), [2, -1]),
                (16, 8, [[3], [6]], np.array([13, 4], np.int32)),
            )
        ),
    )
    test_gradient_matches_finite_differences = None  # it changes a cache
    test_any_strides = None
    test_rounds_once = None  # at a tie of a code, float32 and float64 fall to different sides


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_equals_quantized_rows_in_their_slots(dtype: Any, gaps: bool) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 5, 2, 24)).astype(dtype)
    if gaps:  # columns of a longer row, as one projection gives them
        both = np.zeros((2, 5, 4, 24), dtype)
        both[:, :, :2], both[:, :, 2:] = k, v
        k, v = both[:, :, :2], both[:, :, 2:]
    expected = [np.zeros((2, 7, 2, 24), np.int8) for _ in "kv"]
    expected_scales = np.zeros((2, 2, 7, 2), np.float32)
    (k_codes, k_scales), (v_codes, v_scales) = uc.int8_quantize(k), uc.int8_quantize(v)
    kv_append_.definition(k_codes, v_codes, *expected, start=6, sinks=1)
    scales = [each[..., None] for each in expected_scales]
    kv_append_.definition(k_scales[..., None], v_scales[..., None], *scales, start=6, sinks=1)

    def run() -> None:
        keys, values = (np.zeros((2, 7, 2, 24), np.int8) for _ in "kv")
        actual = np.zeros((2, 2, 7, 2), np.float32)
        kv_append_int8_(k, v, keys, values, actual, start=6, sinks=1)
        np.testing.assert_array_equal(keys, expected[0])
        np.testing.assert_array_equal(values, expected[1])
        np.testing.assert_array_equal(actual, expected_scales)

    run()
    with emulator():
        run()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_is_never_hidden(bad: float) -> None:
    k = np.ones((1, 2, 2, 8), np.float16)
    k[0, 1, 0, 3] = bad

    def run() -> None:
        keys, values = (np.zeros((1, 2, 2, 8), np.int8) for _ in "kv")
        scales = np.zeros((2, 1, 2, 2), np.float32)
        kv_append_int8_(k, np.zeros_like(k), keys, values, scales)
        assert np.isnan(scales[0]).tolist() == [[[False, False], [True, False]]]
        assert not keys[0, 1, 0].any()
        assert (keys[0, 0] == 127).all()

    run()
    with emulator():
        run()


def test_rows_of_the_cache_are_those_of_new_tokens() -> None:
    """Without a page_table; a definition would repeat them, and a kernel write some."""
    k = np.ones((1, 4, 2, 16), np.float32)
    cache = np.zeros((3, 8, 2, 16), np.int8), np.zeros((3, 8, 2, 16), np.int8)
    with pytest.raises(ShapeError, match="keys have 3 rows and k has 1; pass a page_table"):
        kv_append_int8_(k, k, *cache, np.zeros((2, 3, 8, 2), np.float32))
