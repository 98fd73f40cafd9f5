"""Caches of eight bits: half the bytes, and what decodes from them within 1 %."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    KVCache,
    PagedKVCache,
    attention,
    attention_layer,
    attention_paged,
    models,
)
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError
from unsloth_cupy.inference import kv_cache
from unsloth_cupy.models.layers import attention_branch

from ..harness.parity import emulator

SHAPE = (2, 2, 40, 2, 64)  # layers, batch, capacity, kv_heads, dim
CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip


def new_tokens(rng: np.random.Generator, tokens: int, dtype: Any = np.float32) -> Any:
    return rng.standard_normal((2, 2, tokens, 2, 64)).astype(dtype)


def within_a_percent(actual: np.ndarray, expected: np.ndarray) -> bool:
    off = np.linalg.norm(actual.astype(np.float64) - expected.astype(np.float64))
    return bool(off <= 0.01 * np.linalg.norm(expected.astype(np.float64)))


def refuse(*_: Any) -> None:
    raise AssertionError("codes were read as floats")


def nbytes(cache: Any) -> int:
    arrays = [*cache.keys, *cache.values, *(s for s in cache.scales if s is not None)]
    return sum(array.nbytes for array in arrays)


def test_half_the_bytes() -> None:
    wide, codes = KVCache(*SHAPE, dtype="float16"), KVCache(*SHAPE, dtype="int8")
    assert nbytes(codes) / nbytes(wide) == (64 + 4) / (2 * 64)
    pages = PagedKVCache(2, 8, 16, 2, 64, dtype="int8")
    assert pages.keys.nbytes + pages.values.nbytes + pages.scales.nbytes == 2 * 8 * 16 * 2 * 2 * 68


@pytest.mark.slow
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_decodes_within_a_percent(dtype: Any, by_kernel: bool) -> None:
    """In order and in pages: of a prompt, and of tokens one by one."""

    def run() -> None:
        rng = np.random.default_rng(0)
        wide, codes = KVCache(*SHAPE, dtype=dtype), KVCache(*SHAPE, dtype="int8")
        pages = PagedKVCache(2, 12, 8, 2, 64, dtype="int8")
        sequences = [pages.allocate(0) for _ in range(2)]
        for tokens in (23, 1, 1, 9):
            k, v = new_tokens(rng, tokens, dtype)
            q = rng.standard_normal((2, tokens, 4, 64)).astype(dtype)
            expected = attention(q, *wide.append(1, k, v), causal=True)
            if codes.reads_codes(1, tokens):
                actual = codes.attend(1, q, k, v)
            else:
                kept = codes.append(1, k, v)
                assert kept[0].dtype == dtype
                actual = attention(q, *kept, causal=True)
            stored = pages.append(1, sequences, k, v)
            where = pages.page_table(sequences), pages.lengths(sequences, 1)
            paged = attention_paged(q, *stored, *where, scales=pages.scales[1])
            assert actual.dtype == paged.dtype == dtype
            assert within_a_percent(actual, expected)
            assert within_a_percent(paged, expected)

    if by_kernel:
        with emulator():
            run()
    else:
        run()


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_window_keeps_the_same_tokens(sinks: int) -> None:
    rng = np.random.default_rng(0)
    options = {"window": 7, "sinks": sinks}
    wide, codes = (KVCache(*SHAPE, dtype=d, **options) for d in ("float32", "int8"))
    for tokens in (3, 8, 1, 12, 1):
        k, v = new_tokens(rng, tokens)
        for expected, actual in zip(wide.append(0, k, v), codes.append(0, k, v), strict=True):
            assert within_a_percent(actual, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sinks", [0, 3])
def test_one_token_reads_the_codes_of_a_ring(sinks: int, padded: bool) -> None:
    """Around it more than once; what is padding in one row is seen by none of its queries."""
    rng = np.random.default_rng(0)
    options = {"window": 6, "sinks": sinks}
    wide, codes = (KVCache(*SHAPE, dtype=d, **options) for d in ("float32", "int8"))
    real = np.ones((2, 5), bool)
    real[0, :2] = not padded  # a sink, and later what a ring writes over
    for cache in (wide, codes):
        cache.note(real if padded else None, 5)
    for step, tokens in enumerate((5, *[1] * 17)):
        k, v = new_tokens(rng, tokens)
        q = rng.standard_normal((2, tokens, 4, 64), np.float32)
        noted, _ = (cache.note(None, tokens) for cache in (wide, codes))
        keys, values = wide.append(0, k, v)
        mask = None if noted is None else wide.held(0, tokens, noted)[:, None, None]
        expected = attention(q, keys, values, causal=True, mask=mask)
        if step == 0:
            assert not codes.reads_codes(0, tokens)
            codes.append(0, k, v)
        else:
            assert codes.reads_codes(0, 1)
            assert within_a_percent(codes.attend(0, q, k, v), expected)
    assert not codes.reads_codes(0, 1, window=5)  # of the model: slots are not in order


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_padded_model_decodes_from_codes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts padded on the left, with the window of the model and without one."""
    config = CONFIG | {"model_type": kind} | ({"sliding_window": 8} if kind == "mistral" else {})
    model = models.create(config, seed=0)
    tokens = np.random.default_rng(0).integers(3, 300, (2, 24))
    mask = np.ones((2, 12), bool)
    mask[0, :3] = False
    caches = [
        KVCache(2, 2, 24, 2, 16, dtype=d, window=8 if kind == "mistral" else None)
        for d in ("float32", "int8")
    ]
    for part, padding in [(slice(0, 12), mask), *((slice(n, n + 1), None) for n in range(12, 24))]:
        expected, actual = (
            model.logits(tokens[:, part], mask=padding, cache=cache) for cache in caches
        )
        real = slice(3 if padding is not None else 0, None)
        assert within_a_percent(actual[0, real], expected[0, real])
        assert within_a_percent(actual[1], expected[1])
        # after the prompt codes are read as they lie
        monkeypatch.setattr(kv_cache, "read", refuse)


def test_rows_and_pages_move_with_their_scales() -> None:
    rng = np.random.default_rng(0)
    cache, (k, v) = KVCache(*SHAPE, dtype="int8"), new_tokens(rng, 5)
    before = cache.append(0, k, v * np.array([1, 50], np.float32)[:, None, None, None])
    cache.reorder(np.array([1, 0]))
    k, v = new_tokens(rng, 1)
    after = cache.append(0, k, v)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[:, :5], old[::-1])
    pages = PagedKVCache(1, 4, 8, 2, 64, dtype="int8")
    first = pages.allocate(0)
    pages.append(0, [first], k[:1], v[:1])
    second = pages.fork(first)
    pages.append(0, [second], 9 * k[:1], v[:1])  # which gets a page of its own
    own, other = pages.page_table([first])[0, 0], pages.page_table([second])[0, 0]
    assert own != other
    np.testing.assert_array_equal(pages.scales[0][:, own, 0], pages.scales[0][:, other, 0])


def test_a_model_decodes_from_codes() -> None:
    model = models.create(CONFIG, seed=0)
    tokens = np.random.default_rng(0).integers(3, 300, (2, 20))
    expected = model.logits(tokens)
    cache = KVCache(2, 2, 32, 2, 16, dtype="int8")
    actual = [model.logits(tokens[:, part], cache=cache) for part in (slice(0, 17), slice(17, 18))]
    actual += [model.logits(tokens[:, n : n + 1], cache=cache) for n in (18, 19)]
    assert within_a_percent(np.concatenate(actual, axis=1), expected)
    pages = PagedKVCache(2, 8, 8, 2, 16, dtype="int8")
    own = [pages.allocate(0) for _ in range(2)]
    prompt = model.logits(tokens[:, :19], cache=pages, sequences=own)
    last = model.logits(tokens[:, 19:], cache=pages, sequences=own)
    assert within_a_percent(np.concatenate([prompt, last], axis=1), expected)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_layer_gives_what_a_block_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits, and after the prompt neither converts codes to floats."""
    config = CONFIG | {"model_type": kind} | ({"sliding_window": 8} if kind == "mistral" else {})
    model, rng = models.create(config, seed=0), np.random.default_rng(0)
    window, tables = 8 if kind == "mistral" else None, next(iter(model.tables.values()))
    caches = [KVCache(2, 2, 24, 2, 16, dtype="int8", window=window) for _ in "ab"]
    for tokens in (17, *[1] * 7):
        call = model.call(model.parameters, np.zeros((2, tokens), int), cache=caches[0])
        for layer in range(2):
            x = rng.standard_normal((2, tokens, 64), np.float32)
            prefix = f"model.layers.{layer}."
            weights = [model.parameters[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkvo"]
            expected = attention_branch.attention_branch(call, layer, prefix, x)
            actual = attention_layer(
                x, *weights, *tables(24), heads=4, cache=caches[1], layer=layer,
                window=None if window is None else (window - 1, 0),
            )  # fmt: skip
            np.testing.assert_array_equal(actual, expected)
        monkeypatch.setattr(kv_cache, "read", refuse)


def test_a_mask_of_the_call_is_applied_to_codes() -> None:
    rng = np.random.default_rng(0)
    caches = [KVCache(*SHAPE, dtype=dtype) for dtype in ("float32", "int8")]
    for tokens in (9, 1, 2):
        (k, v), q = new_tokens(rng, tokens), rng.standard_normal((2, tokens, 4, 64), np.float32)
        mask = rng.random((2, 1, tokens, caches[0].length + tokens)) < 0.5
        mask[..., 0] = True
        expected, actual = (cache.attend(0, q, k, v, mask=mask) for cache in caches)
        assert within_a_percent(actual, expected)


def test_wrong_calls() -> None:
    cache, (k, v) = KVCache(*SHAPE, dtype="int8"), new_tokens(np.random.default_rng(0), 1)
    with pytest.raises(DTypeError, match="k is float64, for a cache of int8; pass k and v of one"):
        cache.append(0, k.astype(np.float64), v)
    with pytest.raises(DTypeError, match="v is float16, for a cache of int8"):
        cache.attend(0, k, k, v.astype(np.float16))
    zeros = np.zeros((1, 1, 2, 64), np.int8), np.zeros((1, 1, 2, 64), np.int8)
    where = np.zeros((2, 1), np.int32), np.ones(2, np.int32)
    with pytest.raises(DTypeError, match="k_pages is int8; it must be float32"):
        attention_paged(k, *zeros, *where)
    seen, scales = np.ones((1, 1, 1, 1), bool), np.ones((2, 1, 1, 2), np.float32)
    with pytest.raises(ConfigError, match="block_mask does not go with scales"):
        attention_paged(k, *zeros, *where, scales=scales, block_mask=seen)
    with pytest.raises(ShapeError, match="scales"):
        attention_paged(k, *zeros, *where, scales=np.ones((2, 1, 2, 2), np.float32))
