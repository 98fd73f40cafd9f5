"""A row that sees one key among hidden ones gets exactly the values of that key."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.ops.attention import _hopper
from unsloth_cupy.ops.attention.attention_paged_int8 import attention_paged_int8_forward

from ..harness.parity import emulator

KEYS, LARGE = 70, 6.0  # LARGE: scores of dozens, whose roundings no softmax hides


def seen_by(rng: Any, batch: int, queries: int) -> tuple[Any, Any]:
    """Draw the key that each query sees; return it, and a mask (batch, 1, queries, keys)."""
    seen = rng.integers(0, KEYS, (batch, queries))
    return seen, np.arange(KEYS) == seen[:, None, :, None]


def rows_of(rng: Any, dtype: Any, queries: int, dim: int) -> tuple[Any, Any, Any]:
    shapes = (2, queries, 4, dim), (2, KEYS, 2, dim), (2, KEYS, 2, dim)
    q, k, v = (LARGE * rng.standard_normal(shape) for shape in shapes)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def values_of(v: Any, seen: Any) -> Any:
    """Return the values of the key that each query sees, for four heads of two groups."""
    return np.repeat(np.take_along_axis(v, seen[:, :, None, None], axis=1), 2, axis=2)


def by_mask(rng: Any, dtype: Any, queries: int, dim: int) -> tuple[Any, Any]:
    q, k, v = rows_of(rng, dtype, queries, dim)
    seen, mask = seen_by(rng, 2, queries)
    return uc.attention(q, k, v, mask=mask), values_of(v, seen)


def by_bias(rng: Any, dtype: Any, queries: int, dim: int) -> tuple[Any, Any]:
    q, k, v = rows_of(rng, dtype, queries, dim)
    seen, mask = seen_by(rng, 2, queries)
    bias = np.where(mask, 3.1, -np.inf).astype(dtype)
    return uc.attention(q, k, v, bias=bias, softcap=20.0), values_of(v, seen)


def by_window(rng: Any, dtype: Any, queries: int, dim: int) -> tuple[Any, Any]:
    q, k, v = rows_of(rng, dtype, queries, dim)
    seen = np.tile(np.arange(KEYS - queries, KEYS), (2, 1))
    return uc.attention(q, k, v, causal=True, window=(0, 0)), values_of(v, seen)


def packed(rng: Any, dtype: Any, queries: int, dim: int) -> tuple[Any, Any]:
    q, k, v = rows_of(rng, dtype, queries, dim)
    q, k, v = q[0], k[0], v[0]
    ends = np.array([0, queries // 3, queries])
    starts = np.array([0, 30, KEYS])
    out = uc.attention_varlen(q, k, v, ends, starts, causal=True, window=(0, None))
    seen = np.concatenate(
        [np.arange(30 - queries // 3, 30), np.arange(KEYS - (queries - queries // 3), KEYS)]
    )
    return out[None], values_of(v[None], seen[None])


def in_pages(rng: Any, dtype: Any, queries: int, dim: int) -> tuple[Any, Any]:
    q, k, v = rows_of(rng, dtype, queries, dim)
    k, v = (array[:, :64].reshape(8, 16, 2, dim) for array in (k, v))
    seen = rng.integers(0, 64, (2, queries))
    mask = np.arange(64) == seen[:, None, :, None]
    table = np.arange(8).reshape(2, 4)
    out = uc.attention_paged(q, k, v, table, np.array([64, 64]), causal=False, mask=mask)
    return out, values_of(v.reshape(2, 64, 2, dim), seen)


def in_codes(rng: Any, dtype: Any, queries: int, dim: int) -> tuple[Any, Any]:
    q, *_ = rows_of(rng, dtype, queries, dim)
    codes = rng.integers(-127, 128, (2, 8, 16, 2, dim), np.int8)
    scales = (rng.random((2, 8, 16, 2)) / 20).astype(np.float32)
    seen = rng.integers(0, 64, (2, queries))
    mask = np.arange(64) == seen[:, None, :, None]
    table = np.arange(8).reshape(2, 4)
    rest = table, np.array([64, 64])
    out, _ = attention_paged_int8_forward(q, *codes, scales, *rest, causal=False, mask=mask)
    v = (codes[1] * scales[1, ..., None]).astype(dtype)
    return out, values_of(v.reshape(2, 64, 2, dim), seen)


def latent(rng: Any, dtype: Any, queries: int, dim: int) -> tuple[Any, Any]:
    q = (LARGE * rng.standard_normal((2, queries, 4, dim))).astype(dtype)
    latents = (LARGE * rng.standard_normal((2, KEYS, dim))).astype(dtype)
    seen, mask = seen_by(rng, 2, queries)
    options: dict[str, Any] = {"rank": dim - 8, "scale": dim**-0.5, "causal": False}
    out = uc.latent_attention(q, latents, np.array([KEYS, KEYS]), mask=mask, **options)
    v = np.take_along_axis(latents, seen[:, :, None], axis=1)[:, :, None, : dim - 8]
    return out, np.broadcast_to(v, out.shape)


@contextmanager
def warpgroups() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, emulator():
        patch.setattr(_hopper, "requested", True)
        yield


ROUTES = (by_mask, by_bias, by_window, packed, in_pages, in_codes, latent)


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, np.dtype("float64")], ids=str)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_by_definition(route: Callable[..., Any], dtype: Any, queries: int) -> None:
    if route is in_codes and dtype == np.float64:
        pytest.skip("codes have no float64")
    np.testing.assert_array_equal(*route(np.random.default_rng(queries), dtype, queries, 32))


@pytest.mark.slow
@pytest.mark.parametrize("queries", [3, 40])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_by_kernel(route: Callable[..., Any], dtype: Any, queries: int) -> None:
    with emulator():
        actual, expected = route(np.random.default_rng(queries), dtype, queries, 32)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [d for d in KERNEL_DTYPES if d.itemsize == 2], ids=str)
@pytest.mark.parametrize("route", [by_mask, by_bias, packed], ids=lambda route: route.__name__)
def test_by_warpgroups(route: Callable[..., Any], dtype: Any) -> None:
    with warpgroups():
        actual, expected = route(np.random.default_rng(0), dtype, 60, 64)
    np.testing.assert_array_equal(actual, expected)
