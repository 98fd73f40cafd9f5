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
from unsloth_cupy.errors import (
    ConfigError,
    DeviceMemoryError,
    DTypeError,
    GradientError,
    RangeError,
    ShapeError,
)

# The public names, as other people's programs call them.
PUBLIC = (
    "attention_layer(x, q_weight, k_weight, v_weight, o_weight, cos, sin, positions=None, *, "
    "heads, causal=True, interleaved=False, cache=None, layer=0, **options)",
)

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
    actual = attention_layer(*arrays, cos, sin, positions, **options)
    np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-10, atol=1e-12)
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
    actual = tape.gradients(y, watched, dy)
    options = {"window": (3, 0), "softcap": 5.0}
    expected = attention_layer_backward(dy, *arrays, cos, sin, heads=HEADS, **options)
    for one, other in zip(actual, expected, strict=True):
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
        actual = np.concatenate(parts[layer::2], axis=1)
        np.testing.assert_allclose(actual, whole, rtol=1e-10, atol=1e-12)
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
    with pytest.raises(DTypeError, match="q_weight is not an array but list"):
        attention_layer(arrays[0], arrays[1].tolist(), *arrays[2:], cos, sin, heads=HEADS)
    cache, x = KVCache(1, BATCH, 8, KV_HEADS, DIM, dtype="float64"), Tape().watch(arrays[0])
    with pytest.raises(GradientError, match="cache"):
        attention_layer(x, *arrays[1:], cos, sin, heads=HEADS, cache=cache)
    with pytest.raises(ConfigError, match="softcap"):
        attention_layer(*arrays, cos, sin, heads=HEADS, softcap=0.0)
    for other in ({}, "cache", np.ones(3)):
        with pytest.raises(ConfigError, match="pass a KVCache or a PagedKVCache"):
            attention_layer(*arrays, cos, sin, heads=HEADS, cache=other)


def test_heads_may_be_a_number_of_numpy() -> None:
    arrays, (cos, sin) = drawn(), tables()
    heads: Any = np.int64(HEADS)
    actual = attention_layer(*arrays, cos, sin, heads=heads)
    np.testing.assert_array_equal(actual, attention_layer(*arrays, cos, sin, heads=HEADS))


BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")


def biases(*names: str, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    rng, sizes = np.random.default_rng(2), (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, HIDDEN)
    drawn = {n: rng.standard_normal(m).astype(dtype) for n, m in zip(BIASES, sizes, strict=True)}
    return {name: drawn[name] for name in names}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_without_tables_is_torch_multi_head_attention(causal: bool, bias: bool) -> None:
    """Values and gradients, biases included; as many heads of keys as of queries."""
    torch = pytest.importorskip("torch", reason="torch computes the reference")
    rng, wide = np.random.default_rng(0), HEADS * DIM
    x = rng.standard_normal((BATCH, TOKENS, wide))
    weights = [rng.standard_normal((wide, wide)) * 0.3 for _ in range(4)]
    added = {name: rng.standard_normal(wide) for name in BIASES} if bias else {}
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, *weights, *added.values())]
    tx, q, k, v, o, *own = leaves
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) if causal else None
    expected, _ = torch.nn.functional.multi_head_attention_forward(
        *(tx.transpose(0, 1),) * 3,
        *(wide, HEADS, torch.cat((q, k, v)), torch.cat(own[:3]) if bias else None),
        *(None, None, False, 0.0, o, own[3] if bias else None),
        attn_mask=hidden,
        need_weights=False,
    )
    expected = expected.transpose(0, 1)
    dy = rng.standard_normal(expected.shape)
    expected.backward(torch.tensor(dy))
    options: dict[str, Any] = {"heads": HEADS, "causal": causal, **added}
    actual = attention_layer(x, *weights, **options)
    np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-10, atol=1e-11)
    gradients = attention_layer_backward(dy, x, *weights, **options)
    assert len(gradients) == len(leaves)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("given", [BIASES, *((name,) for name in BIASES), ("q_bias", "o_bias")])
def test_any_bias_may_be_alone(given: tuple[str, ...]) -> None:
    """A bias is a column of the weight beside a constant 1 in x; gradients too."""
    x, *weights = drawn()
    cos, sin = tables()
    added = biases(*given)
    wide = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2)
    columns = [added.get(n, np.zeros(len(w))) for n, w in zip(BIASES, weights, strict=True)]
    whole = [
        np.concatenate([w, c[:, None]], axis=1) for w, c in zip(weights[:3], columns, strict=False)
    ]
    inside = attention_layer(wide, *whole, weights[3], cos, sin, heads=HEADS)
    actual = attention_layer(x, *weights, cos, sin, heads=HEADS, **added)
    np.testing.assert_allclose(actual, inside + columns[3], rtol=1e-10, atol=1e-12)
    dy = np.random.default_rng(1).standard_normal(actual.shape)
    gradients = attention_layer_backward(dy, x, *weights, cos, sin, heads=HEADS, **added)
    expected = attention_layer_backward(dy, wide, *whole, weights[3], cos, sin, heads=HEADS)
    for name, gradient, inner in zip(BIASES, gradients[5:], [*expected[1:4], None], strict=True):
        assert (gradient is None) == (name not in given)
        wanted = dy.sum(axis=(0, 1)) if inner is None else inner[:, -1]
        if gradient is not None:
            np.testing.assert_allclose(gradient, wanted, rtol=1e-9, atol=1e-11)


def test_tables_come_together() -> None:
    arrays, (cos, sin) = drawn(), tables()
    for wrong in ((cos,), (None, sin), (None, None, np.arange(TOKENS))):
        with pytest.raises(ConfigError, match="pass cos and sin, as rope_tables returns them"):
            attention_layer(*arrays, *wrong, heads=HEADS)
    with pytest.raises(ShapeError, match="bias"):
        attention_layer(*arrays, heads=HEADS, q_bias=np.ones(3))


# ---- a cache in pages --------------------------------------------------------------------------
def pages(count: int = 16, page: int = 4, dtype: str = "float64") -> PagedKVCache:
    return PagedKVCache(2, count, page, KV_HEADS, DIM, dtype=dtype)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pages_say_what_a_cache_in_order_says(dtype: str, rope: bool) -> None:
    """Token by token, several at a time, with positions of their own or none, for two layers."""
    x, *weights = drawn(dtype)
    turned = tables(dtype) if rope else []
    options: dict[str, Any] = {"heads": HEADS, "window": (4, 0), **biases(*BIASES, dtype=dtype)}
    ordered, paged = KVCache(2, BATCH, 8, KV_HEADS, DIM, dtype=dtype), pages(dtype=dtype)
    sequences = [paged.allocate(0) for _ in range(BATCH)]
    for part in (np.s_[:, :3], np.s_[:, 3:4], np.s_[:, 4:]):
        for layer in (0, 1):
            one, other = (
                attention_layer(x[part], *weights, *turned, cache=c, layer=layer, **more, **options)
                for c, more in ((ordered, {}), (paged, {"sequences": sequences}))
            )
            near = 64 * np.finfo(dtype).eps
            np.testing.assert_allclose(other, one, rtol=0, atol=near * np.abs(one).max())
    assert paged.lengths(sequences, 1).tolist() == [TOKENS] * BATCH


def test_rows_of_pages_may_hold_different_numbers_of_tokens() -> None:
    x, *weights = drawn()
    cache, (cos, sin) = pages(), tables()
    sequences = [cache.allocate(0), cache.allocate(0)]
    options: dict[str, Any] = {"heads": HEADS, "cache": cache}
    attention_layer(x[:1, :5], *weights, cos, sin, sequences=sequences[:1], **options)
    attention_layer(x[1:, :2], *weights, cos, sin, sequences=sequences[1:], **options)
    new = np.stack([x[0, 5:7], x[1, 2:4]])
    actual = attention_layer(new, *weights, cos, sin, sequences=sequences, **options)
    whole = attention_layer(x, *weights, cos, sin, heads=HEADS)
    np.testing.assert_allclose(actual, [whole[0, 5:7], whole[1, 2:4]], rtol=1e-10, atol=1e-12)


def test_forks_share_pages() -> None:
    x, *weights = drawn()
    cache = pages()
    first = cache.allocate(0)
    options: dict[str, Any] = {"heads": HEADS, "cache": cache}
    attention_layer(x[:1, :5], *weights, sequences=[first], **options)
    both = [first, cache.fork(first)]
    assert len(cache.free_pages) == 14
    new = np.stack([x[0, 5:6], x[1, 5:6]])
    actual = attention_layer(new, *weights, sequences=both, **options)
    assert len(cache.free_pages) == 13, "the page that they differ in"
    for row, last in zip(actual, new, strict=True):
        whole = np.concatenate([x[0, :5], last])[None]
        expected = attention_layer(whole, *weights, heads=HEADS)[0, 5:]
        np.testing.assert_allclose(row, expected, rtol=1e-10, atol=1e-12)


def test_bad_pages() -> None:
    x, *weights = drawn()
    cache = pages(count=2, page=2)
    options: dict[str, Any] = {"heads": HEADS, "cache": cache}
    with pytest.raises(ConfigError, match=r"pass sequences=\[...\]"):
        attention_layer(x, *weights, **options)
    one = cache.allocate(0)
    with pytest.raises(ShapeError, match="pass one for each row, of 2"):
        attention_layer(x, *weights, sequences=[one], **options)
    with pytest.raises(RangeError, match="there is no sequence 7"):
        attention_layer(x, *weights, sequences=[one, 7], **options)
    with pytest.raises(RangeError, match="has a sequence twice"):
        attention_layer(x, *weights, sequences=[one, one], **options)
    with pytest.raises(RangeError, match="layer 2"):
        attention_layer(x[:1], *weights, *tables(), sequences=[one], layer=2, **options)
    with pytest.raises(DeviceMemoryError, match="4 pages are needed, 2 of 2 are free"):
        attention_layer(x[:1], *weights, sequences=[one], **options)
    assert (cache.filled[one], cache.free_pages) == ([0, 0], [1, 0])
    with pytest.raises(ConfigError, match="no option 'key_lengths' of attention; choose from"):
        attention_layer(x[:1], *weights, sequences=[one], key_lengths=np.array([3]), **options)
    watched: Any = Tape().watch(x[:1])
    with pytest.raises(GradientError, match="cache"):
        attention_layer(watched, *weights, sequences=[one], **options)
    with pytest.raises(ConfigError, match="are sequences of a PagedKVCache"):
        attention_layer(x, *weights, heads=HEADS, sequences=[0, 1])
