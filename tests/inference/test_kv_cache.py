import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import KVCache, PagedKVCache, attention
from unsloth_cupy.errors import ConfigError, DTypeError, FrameworkError, RangeError, ShapeError

from ..harness.parity import emulator


def draw(tokens, batch=2, dtype=np.float32, seed=0):
    shape = (2, batch, tokens, 3, 4)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_appends_in_order_by_layer(dtype):
    cache = KVCache(2, 2, 8, 3, 4, dtype=dtype)
    drawn = draw(7, dtype=dtype)
    for layer in (0, 1):
        own = (drawn * (layer + 1)).astype(dtype)  # NumPy 2.1 makes float32 of bfloat16 and 1
        for start, stop in ((0, 3), (3, 4), (4, 4), (4, 7)):
            k, v = cache.append(layer, *own[:, :, start:stop])
            np.testing.assert_array_equal(k, own[0, :, :stop])
            np.testing.assert_array_equal(v, own[1, :, :stop])
            assert np.shares_memory(k, cache.keys[layer])
            assert np.shares_memory(v, cache.values[layer])
    np.testing.assert_array_equal(cache.lengths, [7, 7])


def test_overflow_loses_nothing():
    cache = KVCache(1, 2, 4, 3, 4, dtype="float32")
    drawn = draw(3)
    cache.append(0, *drawn)
    with pytest.raises(RangeError, match=r"^KVCache\.append: 2 tokens do not fit: .*capacity=5"):
        cache.append(0, *draw(2))
    with pytest.raises(RangeError, match=r"^KVCache\.check_room: 2 tokens do not fit"):
        cache.check_room(2)
    k, v = cache.append(0, *drawn[:, :, :1])
    np.testing.assert_array_equal(k, np.concatenate([drawn[0], drawn[0, :, :1]], axis=1))
    np.testing.assert_array_equal(v, np.concatenate([drawn[1], drawn[1, :, :1]], axis=1))


def test_reset_forgets():
    cache = KVCache(1, 2, 4, 3, 4, dtype="float32")
    cache.append(0, *draw(4))
    cache.real[0, 0] = False
    cache.reset()
    assert not cache.lengths.any()
    assert cache.real.all()
    k, _ = cache.append(0, *draw(2, seed=1))
    np.testing.assert_array_equal(k, draw(2, seed=1)[0])


def test_reorder_moves_rows():
    cache = KVCache(2, 3, 4, 3, 4, dtype="float32")
    drawn = draw(2, batch=3)
    for layer in (0, 1):
        cache.append(layer, *drawn)
    cache.real[1, 0] = False
    cache.reorder(np.array([1, 1, 0]))
    for layer in (0, 1):
        k, v = cache.append(layer, *drawn[:, :, :0])
        np.testing.assert_array_equal(k, drawn[0][[1, 1, 0]])
        np.testing.assert_array_equal(v, drawn[1][[1, 1, 0]])
    np.testing.assert_array_equal(cache.real[:, 0], [False, False, True])


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize(
    "chunks", [[1] * 17, [9, 1, 1, 6], [2, 3, 4, 1, 1, 1, 5], [17], [0, 5, 0, 12]]
)
def test_window_keeps_the_first_and_the_last(chunks, sinks):
    """After a chunk: what its queries may see; attention over it is attention over everything."""
    window, capacity = 5, 8
    cache = KVCache(2, 2, capacity, 3, 4, dtype="float64", window=[window, None], sinks=sinks)
    drawn, q = draw(17, dtype=np.float64), draw(17, dtype=np.float64, seed=1)[0]
    stop = 0
    for tokens in chunks:
        start, stop = stop, stop + tokens
        k, v = cache.append(0, *drawn[:, :, start:stop])
        first = max(0, start - window + 1)
        kept = [t for t in range(stop) if t < sinks or t >= first or stop <= window + sinks]
        np.testing.assert_array_equal(k, drawn[0][:, kept])
        np.testing.assert_array_equal(v, drawn[1][:, kept])
        assert (cache.lengths == min(stop, sinks + window)).all()
        key, query = np.arange(stop), np.arange(start, stop)[:, None]
        seen = (key <= query) & ((key > query - window) | (key < sinks))
        actual = attention(q[:, start:stop], k, v, causal=True, mask=cache.mask(0, tokens))
        exact = attention(q[:, start:stop], *drawn[:, :, :stop], mask=seen)
        np.testing.assert_allclose(actual, exact, rtol=1e-12, atol=1e-14)
        if not sinks:
            actual = attention(q[:, start:stop], k, v, causal=True, window=(window - 1, 0))
            np.testing.assert_allclose(actual, exact, rtol=1e-12, atol=1e-14)
    assert cache.keys[0].shape[1] == window + sinks
    assert cache.keys[1].shape[1] == capacity
    with pytest.raises(RangeError, match="capacity=9"):
        cache.append(1, *draw(9, dtype=np.float64))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("reach", [None, 3, 9])
@pytest.mark.parametrize("sinks", [0, 2])
def test_attend_applies_both_windows_and_the_padding(sinks, reach, padded):
    """The narrower window hides keys, except sinks, which every query sees."""
    cache = KVCache(1, 2, 8, 3, 4, dtype="float64", window=5, sinks=sinks)
    keys, values = draw(16, dtype=np.float64)
    queries = draw(16, dtype=np.float64, seed=1)[0]
    real = np.ones((2, 4), bool)
    real[0, :1] = not padded
    cache.note(real if padded else None, 4)
    seen = np.ones((2, 16), bool)
    seen[:, :4] = real
    width = 5 if reach is None else min(reach, 5)
    key, query = np.arange(16), np.arange(16)[:, None]
    mask = (key <= query) & ((key > query - width) | (key < sinks)) & seen[:, None, None]
    expected = attention(queries, keys, values, mask=mask)
    window = None if reach is None else (reach - 1, 0)
    for start, stop in ((0, 4), (4, 5), (5, 12), (12, 13), (13, 16)):
        new = slice(start, stop)
        actual = cache.attend(0, queries[:, new], keys[:, new], values[:, new], window=window)
        np.testing.assert_allclose(actual, expected[:, new], rtol=1e-12, atol=1e-12)


def test_attend_refuses_a_window_that_attention_refuses():
    cache = KVCache(1, 2, 8, 3, 4, dtype="float32", window=5)
    keys, values = draw(2)
    for window in (5, (1, 2, 3), (-1, 0)):
        with pytest.raises(ConfigError, match="window="):
            cache.attend(0, keys, keys, values, window=window)


def test_a_window_that_capacity_does_not_reach_is_none():
    cache = KVCache(1, 2, 6, 3, 4, dtype="float32", window=5, sinks=2)
    drawn = draw(6)
    np.testing.assert_array_equal(cache.append(0, *drawn)[0], drawn[0])
    with pytest.raises(RangeError, match="capacity=7"):
        cache.append(0, *draw(1))


def test_reorder_moves_rings():
    cache = KVCache(1, 2, 4, 3, 4, dtype="float32", window=3, sinks=1)
    drawn, last = draw(9), draw(1, seed=1)
    for token in range(9):
        cache.append(0, *drawn[:, :, token : token + 1])
    cache.reorder(np.array([1, 1]))
    k, v = cache.append(0, *last)
    for actual, old, new in ((k, drawn[0], last[0]), (v, drawn[1], last[1])):
        np.testing.assert_array_equal(actual[:, :3], old[[1, 1]][:, [0, 7, 8]])
        np.testing.assert_array_equal(actual[:, 3:], new)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kernels_append(dtype):
    """The launch of the cache is that of the kernel: the same arrays, bit by bit."""
    caches = [KVCache(1, 2, 8, 3, 4, dtype=dtype, window=5, sinks=2) for _ in range(2)]
    drawn = draw(17, dtype=dtype)
    for start, stop in ((0, 6), (6, 7), (7, 16), (16, 17)):
        expected = caches[0].append(0, *drawn[:, :, start:stop])
        with emulator():
            actual = caches[1].append(0, *drawn[:, :, start:stop])
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(caches[1].keys, caches[0].keys)


def test_empty():
    cache = KVCache(0, 0, 0, 3, 4, dtype="float32")
    assert cache.lengths.shape == (0,)
    cache.reorder(np.zeros(0, int))


def test_bad_input():
    cache = KVCache(1, 2, 4, 3, 4, dtype="float32")
    k, v = draw(1)
    with pytest.raises(RangeError, match="layer 1"):
        cache.append(1, k, v)
    with pytest.raises(ShapeError, match="k is"):
        cache.append(0, k[:1], v)
    with pytest.raises(ShapeError, match="v is"):
        cache.append(0, k, v[:, :, :2])
    with pytest.raises(DTypeError, match="float16"):
        cache.append(0, k, v.astype(np.float16))
    with pytest.raises(ShapeError, match="index"):
        cache.reorder(np.zeros(3, int))
    with pytest.raises(DTypeError, match="index"):
        cache.reorder(np.zeros(2))
    with pytest.raises(RangeError, match="index"):
        cache.reorder(np.array([0, 2]))
    with pytest.raises(DTypeError, match="index is not an array but list"):
        cache.reorder([0, 1])
    with pytest.raises(ShapeError, match="k is None"):
        cache.append(0, None, v)
    with pytest.raises(DTypeError, match="v is not an array but list"):
        cache.append(0, k, v.tolist())
    with pytest.raises(RangeError, match=r"layer 0\.5"):
        cache.append(0.5, k, v)
    for layer in (1, -1, "0"):
        with pytest.raises(RangeError, match=f"mask: layer {layer} is not in 0"):
            cache.mask(layer, 1)
    for queries in (-1, 1, 1.0):
        with pytest.raises(RangeError, match=f"queries={queries} were not appended; layer 0 holds"):
            cache.mask(0, queries)
    for dtype in ("int16", "floating", None, 3, (1, 2, 3)):
        with pytest.raises(ConfigError, match=r"dtype=.*; choose from float16"):
            KVCache(1, 1, 1, 1, 1, dtype=dtype)
    with pytest.raises(DTypeError, match="like is not an array but str"):
        KVCache(1, 1, 1, 1, 1, dtype="float32", like="cuda")
    for size in (-1, 1.5, "2", None, True):
        with pytest.raises(ConfigError, match=r"none of them negative|must be an integer"):
            KVCache(1, size, 1, 1, 1, dtype="float32")
    for window in (0, 2.5, True, [3], [3, -1]):
        with pytest.raises(ConfigError, match="window"):
            KVCache(2, 1, 8, 1, 1, dtype="float32", window=window)
    for sinks in (-1, 1.5):
        with pytest.raises(ConfigError, match="sinks"):
            KVCache(2, 1, 8, 1, 1, dtype="float32", window=2, sinks=sinks)


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_a_cache_lives_where_kernels_reach_it(kind) -> None:
    torch = pytest.importorskip("torch", reason="whose arrays a cache cannot be made of")
    with pytest.raises(FrameworkError, match="like comes from torch; pass an array of NumPy"):
        kind(1, 1, 1, 1, 1, dtype="float32", like=torch.ones(1))


def test_a_cache_takes_arrays_of_its_library() -> None:
    torch = pytest.importorskip("torch", reason="whose arrays a cache cannot store")
    new = [torch.ones(1, 2, 1, 1)] * 2
    cache, paged = (kind(1, 1, 4, 1, 1, dtype="float32") for kind in (KVCache, PagedKVCache))
    for append in (cache.append, lambda _, *kv: paged.append(0, [paged.allocate(2)], *kv)):
        with pytest.raises(FrameworkError, match="the cache from numpy cpu, k from torch cpu"):
            append(0, *new)
    with pytest.raises(FrameworkError, match="reorder: index comes from torch"):
        cache.reorder(torch.zeros(1, dtype=torch.int64))
    assert cache.length == 0
