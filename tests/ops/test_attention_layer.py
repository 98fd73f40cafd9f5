from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    KVCache,
    PagedKVCache,
    Tape,
    attention_layer,
    attention_layer_backward,
    rope_tables,
)
from unsloth_cupy.errors import ConfigError, DTypeError, GradientError, ShapeError

BATCH, TOKENS, HIDDEN, HEADS, KV_HEADS, DIM = 2, 7, 12, 4, 2, 6


def drawn(dtype: Any = np.float64) -> list[np.ndarray]:
    """Return x and the four weights."""
    rng = np.random.default_rng(0)
    rows, kv_rows = HEADS * DIM, KV_HEADS * DIM
    shapes = [(BATCH, TOKENS, HIDDEN), (rows, HIDDEN), (kv_rows, HIDDEN), (kv_rows, HIDDEN)]
    return [rng.standard_normal(shape).astype(dtype) for shape in [*shapes, (HIDDEN, rows)]]


def tables(dtype: Any = np.float64) -> list[np.ndarray]:
    return [table.astype(dtype) for table in rope_tables(32, DIM)]


@pytest.mark.parametrize("positions", [None, np.array([3, 1, 4, 1, 5, 9, 2])])
@pytest.mark.parametrize("causal", [True, False])
def test_is_torch(causal: bool, positions: Any) -> None:
    """Values and gradients are those of torch's own parts."""
    torch = pytest.importorskip("torch", reason="torch computes the reference")
    functional = torch.nn.functional
    arrays = drawn()
    cos, sin = tables()
    x, *weights, o_weight = (torch.from_numpy(a).requires_grad_() for a in arrays)

    def turned(t: Any) -> Any:
        rows = np.arange(TOKENS) if positions is None else positions
        c, s = (torch.from_numpy(table[rows])[:, None] for table in (cos, sin))
        first, second = t.chunk(2, dim=-1)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    q, k, v = (functional.linear(x, w).reshape(BATCH, TOKENS, -1, DIM) for w in weights)
    q, k, v = (t.transpose(1, 2) for t in (turned(q), turned(k), v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected = functional.linear(out.transpose(1, 2).reshape(BATCH, TOKENS, -1), o_weight)
    dy = np.random.default_rng(1).standard_normal(expected.shape)
    expected.backward(torch.from_numpy(dy))

    options = {"heads": HEADS, "causal": causal}
    found = attention_layer(*arrays, cos, sin, positions, **options)
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    gradients = attention_layer_backward(dy, *arrays, cos, sin, positions, **options)
    for gradient, leaf in zip(gradients, (x, *weights, o_weight), strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_takes_part_in_a_larger_tape() -> None:
    """On a caller's tape it gives what its own backward gives."""
    arrays, (cos, sin) = drawn(np.float32), tables(np.float32)
    tape = Tape()
    watched = [tape.watch(array) for array in arrays]
    y = attention_layer(*watched, cos, sin, heads=HEADS, window=(3, 0), softcap=5.0)
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    found = tape.gradients(y, watched, dy)
    options = {"window": (3, 0), "softcap": 5.0}
    expected = attention_layer_backward(dy, *arrays, cos, sin, heads=HEADS, **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("window", [None, 3])
def test_goes_on_from_a_cache(window: int | None) -> None:
    arrays, (cos, sin) = drawn(), tables()
    cache = KVCache(2, BATCH, 8, KV_HEADS, DIM, dtype="float64", window=window)
    limits = {} if window is None else {"window": (window - 1, 0)}
    whole = attention_layer(*arrays, cos, sin, heads=HEADS, **limits)
    parts = [
        attention_layer(
            arrays[0][:, start:stop], *arrays[1:], cos, sin, heads=HEADS, cache=cache, layer=layer
        )
        for start, stop in ((0, 4), (4, 5), (5, 7))
        for layer in (0, 1)
    ]
    for layer in (0, 1):  # each counts the tokens of its own
        found = np.concatenate(parts[layer::2], axis=1)
        np.testing.assert_allclose(found, whole, rtol=1e-10, atol=1e-12)
    assert cache.filled == [7, 7]


def test_no_rows_give_no_rows() -> None:
    (x, *weights), (cos, sin) = drawn(), tables()
    assert attention_layer(x[:0], *weights, cos, sin, heads=HEADS).shape == x[:0].shape
    assert attention_layer(x[:, :0], *weights, cos, sin, heads=HEADS).shape == x[:, :0].shape


def test_bad_input() -> None:
    arrays, (cos, sin) = drawn(), tables()
    for heads in (0, 5, 2.0, 16):
        with pytest.raises(ConfigError, match="heads"):
            attention_layer(*arrays, cos, sin, heads=heads)
    with pytest.raises(ShapeError):
        attention_layer(arrays[0][..., :5], *arrays[1:], cos, sin, heads=HEADS)
    with pytest.raises(ConfigError, match="v_weight"):
        attention_layer(*arrays[:3], arrays[3][:-1], arrays[4], cos, sin, heads=HEADS)
    with pytest.raises(ShapeError, match=r"x is \(.*\); it must have \(batch, tokens, hidden\)"):
        attention_layer(arrays[0][0], *arrays[1:], cos, sin, heads=HEADS)
    with pytest.raises(ShapeError, match=r"o_weight is \(\); it must have 2 axes"):
        attention_layer(*arrays[:4], None, cos, sin, heads=HEADS)
    with pytest.raises(ShapeError, match="cos is"):
        attention_layer(*arrays, cos[0], sin, heads=HEADS)
    with pytest.raises(DTypeError, match="q_weight is no array but list"):
        attention_layer(arrays[0], arrays[1].tolist(), *arrays[2:], cos, sin, heads=HEADS)
    cache, x = KVCache(1, BATCH, 8, KV_HEADS, DIM, dtype="float64"), Tape().watch(arrays[0])
    with pytest.raises(GradientError, match="cache"):
        attention_layer(x, *arrays[1:], cos, sin, heads=HEADS, cache=cache)
    with pytest.raises(ConfigError, match="softcap"):
        attention_layer(*arrays, cos, sin, heads=HEADS, softcap=0.0)
    pages: Any = PagedKVCache(1, 2, 8, KV_HEADS, DIM, dtype="float64")
    with pytest.raises(ConfigError, match="cache is a PagedKVCache; pass a KVCache"):
        attention_layer(*arrays, cos, sin, heads=HEADS, cache=pages)


def test_heads_may_be_a_number_of_numpy() -> None:
    arrays, (cos, sin) = drawn(), tables()
    heads: Any = np.int64(HEADS)
    found = attention_layer(*arrays, cos, sin, heads=heads)
    np.testing.assert_array_equal(found, attention_layer(*arrays, cos, sin, heads=HEADS))
