import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import KVCache
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError


def draw(tokens, batch=2, dtype=np.float32, seed=0):
    shape = (2, batch, tokens, 3, 4)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_appends_in_order_by_layer(dtype):
    cache = KVCache(2, 2, 8, 3, 4, dtype=dtype)
    drawn = draw(7, dtype=dtype)
    for layer in (0, 1):
        for start, stop in ((0, 3), (3, 4), (4, 4), (4, 7)):
            k, v = cache.append(layer, *drawn[:, :, start:stop] * (layer + 1))
            np.testing.assert_array_equal(k, drawn[0, :, :stop] * (layer + 1))
            np.testing.assert_array_equal(v, drawn[1, :, :stop] * (layer + 1))
            assert np.shares_memory(k, cache.keys)
            assert np.shares_memory(v, cache.values)
    np.testing.assert_array_equal(cache.lengths, [7, 7])


def test_overflow_loses_nothing():
    cache = KVCache(1, 2, 4, 3, 4, dtype="float32")
    drawn = draw(3)
    cache.append(0, *drawn)
    with pytest.raises(RangeError, match="capacity=5"):
        cache.append(0, *draw(2))
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
    with pytest.raises(ConfigError, match="dtype"):
        KVCache(1, 1, 1, 1, 1, dtype="int8")
    with pytest.raises(ConfigError, match="negative"):
        KVCache(1, -1, 1, 1, 1, dtype="float32")
