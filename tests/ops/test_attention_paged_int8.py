"""Attention over pages of codes: its kernel, and what eight bits cost."""

import contextlib
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.ops.attention.attention_paged_int8 import attention_paged_int8_forward

from ..harness.parity import Case, KernelParity, emulator
from .test_attention_decode import PAGE, pages


def scaled(count: int, page: int) -> Any:
    """Return how to draw scales that make keys and values about 1 in size."""
    return lambda rng: (rng.random((2, count, page, 2)) + 0.5) / 100


class TestAttentionPagedInt8(KernelParity):
    op = "attention_paged_int8_forward"
    machine = {"processors": 132}  # noqa: RUF012
    sizes = tuple(
        {"page": page, "dim": dim, "value_dim": dim, "queries": queries, **more}
        for page, dim, queries, more in (
            (1, 128, 19, {"keys": 16}),
            (16, 64, 19, {}),
            (16, 128, 19, {}),
            (16, 128, 512, {}),  # pages are gathered
            (16, 256, 19, {}),
        )
    )
    options = ({},)
    test_gradient_matches_finite_differences = None  # it has none
    test_rounds_once = None  # test_attention_paged.py
    test_any_strides = None
    cases = (
        *(
            Case(
                f"pages of {page}, {dim} wide",
                **PAGE,
                queries=queries,
                page=page,
                max_pages=3,
                dim=dim,
                value_dim=value_dim,
                arrays={**pages(page), "scales": scaled(9, page)},
            )
            for page, queries, dim, value_dim in (
                (1, 1, 16, 16), (3, 2, 48, 32), (16, 19, 64, 64), (32, 1, 128, 96),
                (16, 2, 256, 208),
            )
        ),
        Case(
            "several chunks, in three pages",
            **PAGE, queries=1, page=208, max_pages=3, dim=32, value_dim=64,
            arrays={**pages(208), "scales": scaled(9, 208)},
        ),
        Case(
            "options",
            **PAGE, queries=2, page=16, max_pages=3, dim=32, value_dim=16, keys=48,
            given=["mask", "bias", "alibi", "sinks"],
            arrays={**pages(16), "scales": scaled(9, 16)},
            window=(20, None), softcap=3.0,
        ),
        Case(
            "no kernel for such heads",
            **PAGE, queries=1, page=3, max_pages=3, dim=24, value_dim=8,
            arrays={**pages(3), "scales": scaled(9, 3)},
        ),
    )  # fmt: skip


def attention_paged_int8(q: Any, codes: Any, scales: Any, table: Any, lengths: Any) -> Any:
    """Attend as attention_paged does with scales, and return lse too."""
    return attention_paged_int8_forward(q, *codes, scales, table, lengths)


@pytest.mark.parametrize("dim", [24, 40, 56])
def test_explain_tells_why_heads_have_no_kernel(dim: int) -> None:
    sizes = (2, 1, 4, dim), (6, 16, 2, dim), (6, 16, 2, dim), (2, 3), (2,), (2, 6, 16, 2)
    dtypes = ("float16", "int8", "int8", "int32", "int32", "float32")
    *arrays, scales = map(uc.shape, sizes, dtypes)
    actual = str(uc.explain(uc.attention_paged, *arrays, scales=scales, device="h100"))
    assert f"definition: head dims {dim}, {dim} are not multiples of 16" in actual


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_equals_attention_over_the_dequantized_pages(dtype: Any, queries: int) -> None:
    """By the kernel for few queries, and over gathered pages."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, queries, 4, 64)).astype(dtype)
    codes = rng.integers(-127, 128, (2, 6, 16, 2, 64), np.int8)
    scales = (rng.random((2, 6, 16, 2)) / 100).astype(np.float32)
    k, v = codes * scales[..., None]
    table, lengths = np.array([[5, 0, 2], [1, 4, 3]]), np.array([40, 17])
    expected = uc.attention_paged(q.astype(np.float32), k, v, table, lengths)
    for context in (None, emulator):
        if context is None:
            out, _ = attention_paged_int8(q, codes, scales, table, lengths)
        else:
            with context():
                out, _ = attention_paged_int8(q, codes, scales, table, lengths)
        eps = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}[np.dtype(dtype).name]
        assert np.abs(out.astype(np.float32) - expected).max() <= eps * np.abs(expected).max()


@pytest.mark.parametrize("garbage", [np.inf, np.nan, 3e38])
def test_what_lies_beyond_lengths_is_not_seen(garbage: float) -> None:
    """Fresh memory holds anything: by definition and by kernel, the same bits and no warning."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 4, 32)).astype(np.float32)
    codes = rng.integers(-127, 128, (2, 6, 16, 2, 32), np.int8)
    scales = (rng.random((2, 6, 16, 2)) / 100).astype(np.float32)
    table, lengths = np.array([[5, 0, 2], [1, 4, 3]]), np.array([40, 17])
    beyond = scales.copy()
    beyond[:, 2, 8:] = beyond[:, 4, 1:] = beyond[:, 3] = garbage
    for context in (contextlib.nullcontext, emulator):
        with context():
            made, expected = (
                attention_paged_int8(q, codes, each, table, lengths) for each in (beyond, scales)
            )
        for one, other in zip(made, expected, strict=True):
            assert one.tobytes() == other.tobytes()
