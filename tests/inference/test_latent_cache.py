"""Caches of latent rows: in order and in pages, equal to attention over one head of keys."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import KVCache, PagedKVCache, attention
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.inference.paged_rows import PagedRows

DIM, RANK = 24, 16
OPTIONS: Any = {"scale": 0.3}


def rows(rng: np.random.Generator, batch: int, tokens: int) -> np.ndarray:
    return rng.standard_normal((batch, tokens, 1, DIM), np.float32)


def test_caches_hold_one_row_of_a_token() -> None:
    """Half of the bytes of keys and values, and the attention of whole keys."""
    rng = np.random.default_rng(0)
    cache = KVCache(2, 2, 12, 1, DIM, dtype="float32", latent=RANK)
    pages = PagedKVCache(2, 6, 4, 1, DIM, dtype="float32", latent=RANK)
    assert sum(array.nbytes for array in cache.stored) == 2 * 2 * 12 * DIM * 4
    assert sum(array.nbytes for array in pages.stored) == 2 * 6 * 4 * DIM * 4
    sequences = [pages.allocate(0), pages.allocate(0)]
    in_pages = PagedRows("test", pages, sequences, 2)
    every = rows(rng, 2, 0)
    for new in (5, 1, 3):
        k, q = rows(rng, 2, new), rng.standard_normal((2, new, 4, DIM), np.float32)
        every = np.concatenate([every, k], axis=1)
        expected = attention(q, every, every[..., :RANK], causal=True, **OPTIONS)
        for layer in range(2):
            for held in (cache, in_pages):
                actual = held.attend(layer, q, k, None, **OPTIONS)
                np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(cache.values[0][:, :9], every[..., :RANK])


def test_rows_move_with_their_sequences() -> None:
    rng = np.random.default_rng(0)
    cache = KVCache(1, 2, 6, 1, DIM, dtype="float32", latent=RANK)
    k = rows(rng, 2, 4)
    cache.append(0, k, None)
    cache.reorder(np.array([1, 1]))
    np.testing.assert_array_equal(cache.keys[0][:, :4], k[[1, 1]])
    pages = PagedKVCache(1, 3, 4, 1, DIM, dtype="float32", latent=RANK)
    first = pages.allocate(0)
    pages.append(0, [first], k[:1, :2], None)
    second = pages.fork(first)
    pages.append(0, [second], k[1:, :1], None)  # writes to a copy of the page
    pages.append(0, [first], k[:1, 2:3], None)
    for sequence, last in ((first, k[0, 2]), (second, k[1, 0])):
        page = pages.keys[0, int(pages.page_table([sequence])[0, 0])]
        np.testing.assert_array_equal(page[:3], [*k[0, :2], last])


@pytest.mark.parametrize("new", [1, 2])
def test_windows_and_padding(new: int) -> None:
    """A ring of rows, after tokens of which some are padding, as a cache of keys and values."""
    rng = np.random.default_rng(0)
    sizes: Any = {"dtype": "float32", "window": 4, "sinks": 1}
    latent, whole = (KVCache(1, 2, 16, 1, DIM, latent=n, **sizes) for n in (RANK, None))
    for cache in (latent, whole):
        cache.note(np.array([[False, True, True], [True, True, True]]), 3)
    for tokens in (3, *[new] * 5):
        k, q = rows(rng, 2, tokens), rng.standard_normal((2, tokens, 4, DIM), np.float32)
        v = np.zeros_like(k)
        v[..., :RANK] = k[..., :RANK]
        expected = whole.attend(0, q, k, v, **OPTIONS)[..., :RANK]
        actual = latent.attend(0, q, k, None, **OPTIONS)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    for wrong, message in (
        ({"kv_heads": 2}, "kv_heads is 2; all heads read one row per token"),
        ({"latent": 25}, r"latent=25\): pass how many of the 24 numbers"),
        ({"latent": 0}, r"latent=0\): pass how many"),
        ({"dtype": "int8"}, "one scale per row does not fit both of its parts; pass a float dtype"),
    ):
        sizes: Any = {"kv_heads": 1, "dim": DIM, "dtype": "float32", "latent": RANK, **wrong}
        with pytest.raises(ConfigError, match=message):
            KVCache(1, 1, 4, **sizes)
        with pytest.raises(ConfigError, match=message):
            PagedKVCache(1, 1, 4, **sizes)
    with pytest.raises(ConfigError, match="latent attention has no window; leave it out"):
        PagedKVCache(1, 1, 4, 1, DIM, dtype="float32", latent=RANK, window=3)
    cache = KVCache(1, 1, 4, 1, DIM, dtype="float32", latent=RANK)
    k = np.ones((1, 1, 1, DIM), np.float32)
    with pytest.raises(ConfigError, match="the first 16 numbers of k are the values; pass None"):
        cache.append(0, k, k)
    with pytest.raises(ConfigError, match="scale is missing, which a latent cache needs"):
        cache.attend(0, k, k, None)
    with pytest.raises(ConfigError, match="a latent cache has no option 'softcap'"):
        cache.attend(0, k, k, None, scale=0.1, softcap=2.0)
    assert not cache.length
    pages = PagedKVCache(1, 1, 4, 1, DIM, dtype="float32", latent=RANK)
    held = PagedRows("test", pages, [pages.allocate(0)], 1)
    with pytest.raises(ConfigError, match="a latent cache has no option 'bias'"):
        held.attend(0, k, k, None, scale=0.1, bias=np.ones(1, np.float32))
