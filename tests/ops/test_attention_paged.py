from typing import Any

import numpy as np
import pytest

from unsloth_cupy import attention_forward, attention_paged, attention_paged_forward
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError

from .test_attention import Device

# The public names, as other people's programs call them.
PUBLIC = (
    "attention_paged(q, k_pages, v_pages, page_table, lengths, *, causal=True, window=None, "
    "scale=None, softcap=None, alibi=None, sinks=None, mask=None, bias=None, "
    "query_start=None, block_mask=None, dropout=0.0, seed=None)",
)

LENGTHS = [9, 0, 4, 12]
PAGE = 4


def paged(
    rng: np.random.Generator, dtype: Any = np.float64, queries: int = 3
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the arguments of a paged call and q, k, v of the contiguous one.

    Pages lie in random order; what no sequence uses is NaN, unused entries of the table -1.
    """
    batch, room = len(LENGTHS), 3
    q = rng.standard_normal((batch, queries, 4, 5)).astype(dtype)
    k = rng.standard_normal((batch, room * PAGE, 2, 5)).astype(dtype)
    v = rng.standard_normal((batch, room * PAGE, 2, 3)).astype(dtype)
    table = rng.permutation(20)[: batch * room].reshape(batch, room).astype(np.int32)
    pages = [np.full((20, PAGE, *a.shape[2:]), np.nan, dtype) for a in (k, v)]
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            for there, here in zip(pages, (k, v), strict=True):
                there[table[row, token // PAGE], token % PAGE] = here[row, token]
        table[row, -(-length // PAGE) :] = -1
    return [q, *pages, table, np.array(LENGTHS)], [q, k, v]


OPTIONS = [
    {},
    {"causal": False},
    {"window": (4, 0)},
    {"scale": 0.2, "softcap": 1.5},
    {"alibi": np.linspace(0.1, 1, 4), "sinks": np.linspace(-1, 1, 4)},
    {"alibi": np.linspace(0, 1, 16).reshape(4, 4)},
    {"mask": np.arange(12) % 5 != 1},
    {"mask": np.arange(48).reshape(4, 1, 1, 12) % 7 != 2, "query_start": 2},
    {"bias": np.where(np.arange(48) % 5, np.linspace(-2, 2, 48), -np.inf).reshape(4, 1, 12)},
    {"query_start": np.array([3, 0, 9, 1]), "window": (3, 1)},
    {"block_mask": np.array([True, False, True, True]).reshape(4, 1, 1, 1), "causal": False},
    {"block_mask": np.array([True, False, False, True]).reshape(1, 4, 1, 1)},
    {"dropout": 0.4, "seed": 7},
]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_contiguous(options: Any, queries: int, on_host: bool) -> None:
    """Pages in any order give what keys in order give; nothing else in the cache is read."""
    call, (q, k, v) = paged(np.random.default_rng(0), queries=queries)
    if not on_host:
        call = [call[0].view(Device), *call[1:]]
    expected = attention_forward(
        q, k, v, key_lengths=np.array(LENGTHS), **{"causal": True} | options
    )
    actual = attention_paged_forward(*call, **options)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    assert attention_paged(*call, **options).tobytes() == actual[0].tobytes()


def test_rounds_once() -> None:
    """float16 pages: one rounding of the exact result, and lse in float32."""
    call, _ = paged(np.random.default_rng(0), np.float16)
    wide = [a.astype(np.float64) if a.dtype == np.float16 else a for a in call]
    out, lse = attention_paged_forward(*call)
    exact, exact_lse = attention_paged_forward(*wide)
    assert (out.dtype, lse.dtype) == (np.float16, np.float32)
    assert np.abs(out - exact).max() <= 2.0**-11 * np.abs(exact).max()
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)


def test_no_pages() -> None:
    q, empty = np.ones((2, 1, 2, 3)), np.ones((0, 4, 1, 3))
    table, lengths = np.ones((2, 0), np.int64), np.zeros(2, np.int64)
    assert not attention_paged(q, empty, empty, table, lengths).any()
    assert attention_paged(q[:0], empty, empty, table[:0], lengths[:0]).shape == (0, 1, 2, 3)


def test_wrong_arrays() -> None:
    call, _ = paged(np.random.default_rng(0))
    q, k, v, table, lengths = call
    with pytest.raises(RangeError, match=r"lengths holds 0 .. 13; it must be in 0 .. 12"):
        attention_paged(q, k, v, table, lengths + (lengths == 12))
    with pytest.raises(RangeError, match="lengths holds -1"):
        attention_paged(q, k, v, table, lengths - (lengths == 0))
    with pytest.raises(RangeError, match=r"page_table holds 20; it must be in 0 .. 19"):
        attention_paged(q, k, v, np.where(table == table[0, 0], 20, table), lengths)
    with pytest.raises(RangeError, match="page_table holds -1"):
        attention_paged(q, k, v, table, np.full(4, 9))
    with pytest.raises(ShapeError, match="v_pages has page=3; it must be 4"):
        attention_paged(q, k, v[:, :3], table, lengths)
    with pytest.raises(DTypeError, match="page_table is float64"):
        attention_paged(q, k, v, table.astype(np.float64), lengths)
    with pytest.raises(ConfigError, match="softcap"):
        attention_paged(q, k, v, table, lengths, softcap=-1.0)
    with pytest.raises(ConfigError, match="seed"):
        attention_paged(q, k, v, table, lengths, dropout=0.5)
    with pytest.raises(ShapeError, match=r"mask has heads\|1=3; it must be 4"):
        attention_paged(q, k, v, table, lengths, mask=np.ones((3, 1, 12), bool))
    with pytest.raises(ShapeError, match="block_mask has queries/128=2; it must be 1"):
        attention_paged(q, k, v, table, lengths, block_mask=np.ones((1, 1, 2, 1), bool))
    for name, array, cure in (
        ("mask", np.ones(9, bool), "9 for keys; it must be 1 or 12"),
        ("bias", np.ones((1, 13)), "13 for keys; it must be 1 or 12"),
        ("block_mask", np.ones((1, 1, 1, 2), bool), "2 for keys; it must be 1"),
    ):
        with pytest.raises(ShapeError, match=f"{name} of shape .* has {cure}: .* 12 keys"):
            attention_paged(q, k, v, table, lengths, **{name: array})
