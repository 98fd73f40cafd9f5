"""Scores in the hundreds: lse has no rounding but its own, and out none that grows with them.

Numbers are integers, and the scale of 64 columns is 1/8: scores are exact in float32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.bench.cases import Call
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS

from ..harness.parity import Arrays, emulator, outputs_of
from .test_attention_of_one_key import warpgroups

EPS = np.finfo(np.float32).eps
KEYS, PAGE = 320, 16  # keys of several chunks
SEEN = np.array([KEYS, 300])


def rows(queries: int) -> Arrays:
    """Return q, k and v whose scores are about 2 apart, and by query up to 400 from 0."""
    rng = np.random.default_rng(queries)
    shapes = (2, queries, 4, 64), (2, KEYS, 2, 64), (2, KEYS, 2, 64)
    q, k, v = (rng.integers(-2, 3, shape) for shape in shapes)
    q[..., 0], k[..., 0] = rng.integers(-200, 201, q.shape[:-1]), 16
    return {"q": q, "k": k, "v": v}


def call(op: str, arrays: Arrays, **options: Any) -> Call:
    return Call(OPS[op], dict.fromkeys(OPS[op].names) | arrays, options)


def plain(queries: int) -> Call:
    return call("attention_forward", rows(queries))


def with_bias(queries: int) -> Call:
    bias = 50 * (np.arange(4 * queries) % 9 - 4).reshape(4, queries, 1)
    return call("attention_forward", rows(queries) | {"bias": bias})


SINKS = {"sinks": np.array([-200, -50, 50, 200])}


def with_sinks(queries: int) -> Call:
    return call("attention_forward", rows(queries) | SINKS)


def with_both(queries: int) -> Call:
    return call("attention_forward", with_bias(queries).arrays | SINKS)


def packed(queries: int) -> Call:
    arrays = {name: array[0] for name, array in rows(queries).items()} | SINKS
    arrays |= {"q_offsets": np.array([0, 2, queries]), "k_offsets": np.array([0, 200, KEYS])}
    return call("attention_varlen_forward", arrays)


def in_pages(queries: int) -> Call:
    arrays = rows(queries)
    pages = {f"{name}_pages": arrays[name].reshape(-1, PAGE, 2, 64) for name in "kv"}
    table = np.arange(2 * KEYS // PAGE).reshape(2, -1)
    arrays = {"q": arrays["q"], **pages, **SINKS, "page_table": table, "lengths": SEEN}
    return call("attention_paged_forward", arrays, causal=False)


def in_codes(queries: int) -> Call:
    arrays = in_pages(queries).arrays
    codes = {name: arrays[name].astype(np.int8) for name in ("k_pages", "v_pages")}
    scales = {"scales": np.ones((2, *codes["k_pages"].shape[:3]))}
    return call("attention_paged_int8_forward", arrays | codes | scales, causal=False)


def latent(queries: int) -> Call:
    arrays = rows(queries)
    latents = np.ascontiguousarray(arrays["k"][:, :, 0])
    arrays = {"q": arrays["q"], "latents": latents, "lengths": SEEN}
    options = {"rank": 48, "scale": 0.125, "causal": False}
    return call("latent_attention_forward", arrays, **options)


ROUTES = (plain, with_bias, with_sinks, with_both, packed, in_pages, in_codes, latent)


def check(route: Callable[[int], Call], dtype: Any, queries: int) -> None:
    exact = outputs_of(route(queries).cast(np.float64))
    out, lse = route(queries).cast(dtype).launched()
    # its own rounding and that of log(sum), which is below 8; in 16 bits also that of a product
    roundings = 1 if dtype.itemsize == 4 else 2
    bound = roundings / 2 * np.spacing(np.abs(exact["lse"]).astype(np.float32)) + 4 * EPS
    assert np.all(np.abs(lse - exact["lse"]) <= bound)
    if dtype.itemsize == 4:
        off, size = np.abs(out - exact["out"]).max(), np.abs(exact["out"]).max()
        assert off <= 8 * EPS * size


@pytest.mark.slow
@pytest.mark.parametrize("queries", [3, 40])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_by_kernel(route: Callable[[int], Call], dtype: Any, queries: int) -> None:
    with emulator(check=False):
        check(route, dtype, queries)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [d for d in KERNEL_DTYPES if d.itemsize == 2], ids=str)
@pytest.mark.parametrize("route", ROUTES[:5], ids=lambda route: route.__name__)
def test_by_warpgroups(route: Callable[[int], Call], dtype: Any) -> None:
    with warpgroups():
        check(route, dtype, 60)
