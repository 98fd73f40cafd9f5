"""A cache in pages under a model: the logits and tokens of a cache in order."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import KVCache, PagedKVCache
from unsloth_cupy.errors import ConfigError, DeviceMemoryError, DTypeError, RangeError, ShapeError
from unsloth_cupy.models import create
from unsloth_cupy.models.generation import decoding

from ..harness.parity import emulator
from .peers import SIZES

LAYERS, HEADS, DIM = 3, 2, 8
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 9))
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "head_dim": DIM, "query_pre_attn_scalar": 8},
    "qwen3": {"head_dim": DIM},
}


def model_of(kind: str) -> Any:
    return create({**SIZES, "model_type": kind, **KINDS[kind]}, seed=0)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("mistral")


def pages(count: int = 24, page: int = 3, dtype: Any = "float32") -> PagedKVCache:
    return PagedKVCache(LAYERS, count, page, HEADS, DIM, dtype=dtype)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_cache_in_order(kind: str, page: int) -> None:
    """Prompts to the bit; after that by another order of sums."""
    model = model_of(kind)
    ordered, paged = KVCache(LAYERS, 2, 9, HEADS, DIM, dtype="float32"), pages(page=page)
    sequences = [paged.allocate(0), paged.allocate(9)]
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        part = TOKENS[:, start:stop]
        expected = model.logits(part, cache=ordered)
        actual = model.logits(part, cache=paged, sequences=sequences)
        if start == 0:
            np.testing.assert_array_equal(actual, expected)
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert [paged.lengths(sequences, layer).tolist() for layer in range(LAYERS)] == [[9, 9]] * 3


def test_rows_may_hold_different_numbers_of_tokens(model: Any) -> None:
    cache = pages()
    one, other = cache.allocate(0), cache.allocate(0)
    model.logits(TOKENS[:1, :6], cache=cache, sequences=[one])
    model.logits(TOKENS[1:, :2], cache=cache, sequences=[other])
    new = np.stack([TOKENS[0, 6:8], TOKENS[1, 2:4]])
    actual = model.logits(new, cache=cache, sequences=[one, other])
    whole = model.logits(TOKENS)
    np.testing.assert_allclose(actual, [whole[0, 6:8], whole[1, 2:4]], atol=1e-5)


def test_a_prompt_is_shared_by_its_forks(model: Any) -> None:
    """One system prompt, two questions: pages are copied where the texts part."""
    cache = pages()
    system = cache.allocate(0)
    model.logits(TOKENS[:1, :7], cache=cache, sequences=[system])
    held = len(cache.free_pages)
    both = [cache.fork(system), cache.fork(system)]
    assert len(cache.free_pages) == held
    new = TOKENS[:, 7:]
    actual = model.logits(new, cache=cache, sequences=both)
    assert held - len(cache.free_pages) == 2, "the third page, which is partly filled, for each"
    texts = np.concatenate([np.repeat(TOKENS[:1, :7], 2, axis=0), new], axis=1)
    np.testing.assert_allclose(actual, model.logits(texts)[:, 7:], atol=1e-5)
    assert cache.lengths([system, *both]).tolist() == [7, 9, 9]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_generates_what_a_cache_in_order_generates(kind: str, padded: bool) -> None:
    model = model_of(kind)
    mask = np.ones(TOKENS.shape, bool)
    mask[1, :3] = mask[0, 8:] = not padded
    cache, options = pages(), {"mask": mask, "max_new_tokens": 12, "stop": ()}
    options |= {"temperature": 0.8, "top_k": 20, "seed": 0}
    expected = model.generate(TOKENS, **options)
    np.testing.assert_array_equal(model.generate(TOKENS, cache=cache, **options), expected)
    assert len(cache.free_pages) == 24
    assert cache.tables == {}


def test_goes_on_from_sequences(model: Any) -> None:
    """What the sequences hold stands before the prompts; they keep all but the last new token."""
    cache = pages()
    system = cache.allocate(0)
    model.logits(TOKENS[:1, :5], cache=cache, sequences=[system])
    both = [cache.fork(system), cache.fork(system)]
    new = TOKENS[:, 5:]
    texts = np.concatenate([np.repeat(TOKENS[:1, :5], 2, axis=0), new], axis=1)
    expected = model.generate(texts, max_new_tokens=6, stop=())[:, 5:]
    actual = model.generate(new, max_new_tokens=6, stop=(), cache=cache, sequences=both)
    np.testing.assert_array_equal(actual, expected)
    assert cache.lengths([system, *both]).tolist() == [5, 14, 14]
    more = model.generate(actual[:, -1:], max_new_tokens=3, stop=(), cache=cache, sequences=both)
    longer = model.generate(texts, max_new_tokens=9, stop=())
    np.testing.assert_array_equal(more[:, 1:], longer[:, -3:])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_ends_keeps_its_own_tokens(ahead: bool, model: Any, monkeypatch: Any) -> None:
    """Its sequence has no token of the steps in which other rows went on."""
    monkeypatch.setattr(decoding, "captures", lambda *_: ahead)
    free = model.generate(TOKENS, max_new_tokens=8, stop=())
    end, cache = int(free[0, 11]), pages()
    assert end not in (*free[0, 9:11], *free[1, 9:])
    rows = [cache.allocate(0), cache.allocate(0)]
    options = {"max_new_tokens": 8, "stop": end, "cache": cache, "sequences": rows}
    np.testing.assert_array_equal(model.generate(TOKENS, **options)[1], free[1])
    assert cache.lengths(rows).tolist() == [9 + 2, 9 + 7]


def test_stopping_early_frees_the_pages(model: Any) -> None:
    cache = pages()
    steps = model.stream(TOKENS, max_new_tokens=12, stop=(), cache=cache)
    next(steps)
    assert len(cache.free_pages) == 24 - 2 * 3, "of 9 tokens each, three to a page"
    steps.close()
    assert len(cache.free_pages) == 24
    ends = int(model.generate(TOKENS[:1], max_new_tokens=1, stop=())[0, -1])
    model.generate(TOKENS[:1], max_new_tokens=12, stop=ends, cache=cache)
    assert len(cache.free_pages) == 24


def test_too_few_pages_change_nothing(model: Any) -> None:
    cache = pages(count=8)
    kept = cache.allocate(0)
    expected = model.generate(TOKENS, max_new_tokens=12, stop=())
    actual = model.generate(TOKENS, max_new_tokens=12, stop=(), cache=cache)  # one row waits
    np.testing.assert_array_equal(actual, expected)
    with pytest.raises(DeviceMemoryError, match="1 pages are needed, 0 of 8 are free"):
        model.generate(TOKENS, max_new_tokens=17, stop=(), cache=cache)
    assert (len(cache.free_pages), [*cache.tables]) == (8, [kept])
    model.logits(TOKENS[:1], cache=cache, sequences=[kept])
    with pytest.raises(DeviceMemoryError, match="6 pages are needed, 5 of 8 are free"):
        model.logits(np.repeat(TOKENS[:1], 2, axis=1), cache=cache, sequences=[kept])
    assert cache.filled[kept] == [9] * LAYERS
    assert len(cache.free_pages) == 5
    model.logits(TOKENS[:1, :6], cache=cache, sequences=[kept])  # and it goes on


def test_bad_calls(model: Any) -> None:
    cache, mask = pages(), np.ones(TOKENS.shape, bool)
    one, other = cache.allocate(0), cache.allocate(0)
    with pytest.raises(ConfigError, match=r"cache is a PagedKVCache; pass sequences=\[...\]"):
        model.logits(TOKENS, cache=cache)
    for call in (model.logits, lambda *args, **more: model.generate(*args, **more, **NEW)):
        with pytest.raises(ShapeError, match="pass one for each row, of 2"):
            call(TOKENS, cache=cache, sequences=[one])
        with pytest.raises(RangeError, match="there is no sequence 9"):
            call(TOKENS, cache=cache, sequences=[one, 9])
        with pytest.raises(ConfigError, match="sequences are 0"):
            call(TOKENS, cache=cache, sequences=0)
        with pytest.raises(RangeError, match="has a sequence twice"):
            call(TOKENS, cache=cache, sequences=[one, one])
        with pytest.raises(ConfigError, match="are sequences of a PagedKVCache; pass"):
            call(TOKENS, sequences=[one, other])
        with pytest.raises(ConfigError, match=r"cache is a dict; pass a \w*KVCache"):
            call(TOKENS, cache={})
    with pytest.raises(ConfigError, match="not hold padding; leave mask out"):
        model.logits(TOKENS, mask=mask, cache=cache, sequences=[one, other])
    with pytest.raises(ConfigError, match="leave cache out"):
        model.logits(TOKENS, offsets=np.array([0, 18]), cache=cache, sequences=[one, other])
    with pytest.raises(ConfigError, match="generate: cache is a KVCache; pass a PagedKVCache"):
        model.generate(TOKENS, cache=KVCache(3, 2, 30, HEADS, DIM, dtype="float32"), **NEW)
    for few in (PagedKVCache(2, 24, 3, HEADS, DIM, dtype="float32"),):
        with pytest.raises(ShapeError, match="the cache has 2 layers, and the model 3"):
            model.logits(TOKENS[:1], cache=few, sequences=[few.allocate(0)])
    with pytest.raises(ShapeError, match="the cache has 1 layers, and the model 3"):
        model.logits(TOKENS, cache=KVCache(1, 2, 30, HEADS, DIM, dtype="float32"))
    assert len(cache.free_pages) == 24
    for heads, dim, dtype in ((1, DIM, "float32"), (HEADS, 4, "float32"), (HEADS, DIM, "float64")):
        other = PagedKVCache(LAYERS, 24, 3, heads, dim, dtype=dtype)
        with pytest.raises((ShapeError, DTypeError), match="generate: the cache"):
            model.generate(TOKENS, cache=other, **NEW)


NEW = {"max_new_tokens": 2, "stop": ()}


def test_angles_that_change_for_all_positions_have_no_pages() -> None:
    factors = [1.0] * (DIM // 2)
    scaling = {"type": "longrope", "short_factor": factors, "long_factor": [2.0] * (DIM // 2)}
    more = {"original_max_position_embeddings": 12, "rope_scaling": scaling}
    model = create({**SIZES, "model_type": "phi3", "max_position_embeddings": 64, **more}, seed=0)
    with pytest.raises(ConfigError, match="from 13 tokens on, the rotary angles of this model"):
        model.generate(TOKENS, cache=pages(), **NEW)


@pytest.mark.slow
def test_emulated_kernels_read_pages() -> None:
    model = model_of("llama")
    cache = pages(page=4)
    sequences = [cache.allocate(0), cache.allocate(0)]
    expected = model.logits(TOKENS)
    with emulator():
        model.logits(TOKENS[:, :7], cache=cache, sequences=sequences)
        actual = model.logits(TOKENS[:, 7:], cache=cache, sequences=sequences)
    np.testing.assert_allclose(actual, expected[:, 7:], atol=1e-5)
