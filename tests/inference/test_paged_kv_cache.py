import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import KVCache, PagedKVCache, attention, attention_paged
from unsloth_cupy.errors import ConfigError, DeviceMemoryError, DTypeError, RangeError, ShapeError
from unsloth_cupy.inference.paged_rows import PagedRows
from unsloth_cupy.models import create

from ..harness.parity import emulator, within_rule

HEADS, DIM = 3, 4
PAGE_BYTES = 2 * 2 * 4 * HEADS * DIM * 4  # keys and values, two layers, four tokens of float32


def made(pages: int = 6, page: int = 4, dtype: Any = "float32") -> PagedKVCache:
    return PagedKVCache(2, pages, page, HEADS, DIM, dtype=dtype)


def draw(sequences: int, tokens: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    shape = (2, sequences, tokens, HEADS, DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def read(cache: PagedKVCache, sequence: int, layer: int) -> np.ndarray:
    """Return keys and values of a sequence: (2, tokens, heads, dim)."""
    table = cache.page_table([sequence])[0]
    length = int(cache.lengths([sequence], layer)[0])
    stored = [a[layer][table].reshape(-1, HEADS, DIM)[:length] for a in (cache.keys, cache.values)]
    return np.array(stored)


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_is_a_dictionary_of_arrays(page: int, seed: int) -> None:
    """Whatever is done in whatever order, each sequence holds its own tokens; none is lost."""
    rng = np.random.default_rng(seed)
    cache = made(pages=40 // page + 3, page=page)
    held: dict[int, list[np.ndarray]] = {}  # tokens by layer
    refused: list[DeviceMemoryError] = []
    for step in range(200):
        live = [*held]
        some = [int(s) for s in rng.permutation(live)[: rng.integers(1, 4)]]
        deed = rng.choice(["allocate", "append", "append", "append", "fork", "free"])
        try:
            if deed == "allocate":
                held[cache.allocate(int(rng.integers(0, 9)))] = [draw(1, 0)[:, 0]] * 2
            elif deed == "append" and some:
                tokens = int(rng.integers(0, 6))
                new = [draw(len(some), tokens, seed=step + layer) for layer in (0, 1)]
                before = [cache.append(0, some, *new[0])]
                for row, sequence in enumerate(some):
                    held[sequence] = [
                        np.concatenate([held[sequence][0], new[0][:, row]], axis=1),
                        held[sequence][1],
                    ]
                cache.append(1, some, *new[1])  # layers share pages: this one cannot fail
                for row, sequence in enumerate(some):
                    held[sequence][1] = np.concatenate([held[sequence][1], new[1][:, row]], axis=1)
                del before
            elif deed == "fork" and some:
                held[cache.fork(some[0])] = [*held[some[0]]]
            elif deed == "free" and some:
                cache.free(some[0])
                del held[some[0]]
        except DeviceMemoryError as error:
            refused.append(error)
        for sequence, layers in held.items():
            for layer, tokens in enumerate(layers):
                assert np.array_equal(read(cache, sequence, layer), tokens)
        used = {int(p) for s in held for p in cache.page_table([s])[0] if p >= 0}
        assert len(used) + len(cache.free_pages) == len(cache.uses)
    assert refused
    assert all(error.required > error.available for error in refused)
    for sequence in held:
        cache.free(sequence)
    assert sorted(cache.free_pages) == [*range(len(cache.uses))]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_attention_reads_what_was_appended(dtype: Any) -> None:
    cache = made(dtype=dtype)
    short, long = cache.allocate(2), cache.allocate(9)
    drawn = draw(2, 9, dtype=cache.keys.dtype)
    cache.append(1, [long], *drawn[:, 1:, :7])
    pages = cache.append(1, [short, long], *np.stack([drawn[:, 0, :2], drawn[:, 1, 7:]], axis=1))
    q = draw(2, 2, seed=1, dtype=cache.keys.dtype)[0]
    rows = [short, long]
    table, lengths = cache.page_table(rows), cache.lengths(rows, 1)
    assert lengths.tolist() == [2, 9]
    assert table.tolist() == [[0, -1, -1], [1, 2, 3]]
    out = attention_paged(q, *pages, table, lengths)
    for row, length in enumerate((2, 9)):
        inputs = q[row : row + 1], *drawn[:, row : row + 1, :length]
        plain = attention(*inputs, causal=True)
        exact = attention(*(array.astype(np.float64) for array in inputs), causal=True)
        within_rule({"out": plain}, {"out": exact}, {"out": out[row : row + 1]})


def test_a_fork_copies_only_what_it_writes_to() -> None:
    cache = made()
    one = cache.allocate(0)
    for layer in (0, 1):
        cache.append(layer, [one], *draw(1, 6, seed=layer))
    other = cache.fork(one)
    assert cache.page_table([one]).tolist() == cache.page_table([other]).tolist() == [[0, 1]]
    for layer in (0, 1):
        cache.append(layer, [one, other], *draw(2, 1, seed=2 + layer))
    first, second = cache.page_table([one, other]).tolist()
    assert first[0] == second[0] == 0
    assert first[1] != second[1]
    for row, sequence in enumerate((one, other)):
        for layer in (0, 1):
            parts = draw(1, 6, seed=layer)[:, 0], draw(2, 1, seed=2 + layer)[:, row]
            np.testing.assert_array_equal(
                read(cache, sequence, layer), np.concatenate(parts, axis=1)
            )
    cache.free(one)
    assert len(cache.free_pages) == 4


def test_out_of_pages_loses_nothing() -> None:
    cache = made()
    one = cache.allocate(8)
    cache.append(0, [one], *draw(1, 5))
    two = cache.fork(one)
    with pytest.raises(DeviceMemoryError, match="5 pages are needed, 4 of 6 are free") as caught:
        cache.allocate(17)
    assert caught.value.required == (2 + 5) * PAGE_BYTES
    assert caught.value.available == 6 * PAGE_BYTES
    with pytest.raises(DeviceMemoryError, match="5 pages are needed, 4"):  # one is a copy
        cache.append(0, [one, two], *draw(2, 11))
    assert len(cache.free_pages) == 4
    assert cache.page_table([one]).tolist() == cache.page_table([two]).tolist()
    for sequence in (one, two):
        np.testing.assert_array_equal(read(cache, sequence, 0), draw(1, 5)[:, 0])


def test_kernels_append() -> None:
    caches = made(), made()
    for cache in caches:
        cache.fork(cache.allocate(6))
    for tokens in (3, 1, 4):
        drawn = draw(2, tokens, seed=tokens)
        expected = caches[0].append(0, [0, 1], *drawn)
        with emulator():
            actual = caches[1].append(0, [0, 1], *drawn)
    assert caches[0].tables == caches[1].tables
    for sequence in (0, 1):
        np.testing.assert_array_equal(read(caches[1], sequence, 0), read(caches[0], sequence, 0))
    assert actual[0].shape == expected[0].shape


def test_bad_input() -> None:
    cache = made()
    one = cache.allocate(4)
    k, v = draw(1, 1)
    with pytest.raises(RangeError, match="layer 2"):
        cache.append(2, [one], k, v)
    for layer in (2, -1, 0.5, None):
        with pytest.raises(RangeError, match=f"layer {layer} is not in 0"):
            cache.lengths([one], layer)
    with pytest.raises(RangeError, match="no sequence 7"):
        cache.append(0, [7], k, v)
    with pytest.raises(RangeError, match="twice"):
        cache.append(0, [one, one], *draw(2, 1))
    with pytest.raises(ShapeError, match="k is"):
        cache.append(0, [one], *draw(2, 1))
    with pytest.raises(ShapeError, match="v is"):
        cache.append(0, [one], k, v[..., :2])
    with pytest.raises(DTypeError, match="float16"):
        cache.append(0, [one], k, v.astype(np.float16))
    with pytest.raises(ConfigError, match="tokens"):
        cache.allocate(-1)
    cache.free(one)
    for call in (cache.free, cache.fork, lambda s: cache.page_table([s])):
        with pytest.raises(RangeError, match="no sequence 0"):
            call(one)
    with pytest.raises(ConfigError, match="pass a list"):
        cache.append(0, one, k, v)
    with pytest.raises(ShapeError, match="v is None"):
        cache.append(0, [cache.allocate(1)], k, None)
    for tokens in ("4", 1.5, None):
        with pytest.raises(ConfigError, match="tokens"):
            cache.allocate(tokens)
    for dtype in ("int16", None):
        with pytest.raises(ConfigError, match="dtype"):
            PagedKVCache(1, 1, 1, 1, 1, dtype=dtype)
    with pytest.raises(DTypeError, match="like is not an array but str"):
        PagedKVCache(1, 1, 1, 1, 1, dtype="float32", like="cuda")
    for size in (0, -1, 1.5, None):
        with pytest.raises(ConfigError, match=r"and page 1 or more|page must be an integer"):
            PagedKVCache(1, 1, size, 1, 1, dtype="float32")


def generated(cache: Any, tokens: np.ndarray, **how: Any) -> np.ndarray:
    return MODEL.logits(tokens, cache=cache, **how)


CONFIG = {
    "model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
MODEL = create(CONFIG, seed=0)
TEXT = np.random.default_rng(0).integers(0, 50, (2, 30))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_before_the_window_become_free(dtype: str) -> None:
    """Whatever sequences use them then, attention is that over the window."""
    cache = PagedKVCache(1, 6, 4, HEADS, DIM, dtype=dtype, window=6)
    k, v = (a[0] for a in (draw(1, 60, 1), draw(1, 60, 2)))
    one, used = cache.allocate(0), []
    for start in range(0, 60, 3):
        new = slice(start, start + 3)
        pages = cache.append(0, [one], k[:, new], v[:, new])
        table, lengths = cache.page_table([one]), cache.lengths([one])
        scales = None if cache.scales is None else cache.scales[0]
        out = attention_paged(k[:, new], *pages, table, lengths, window=(5, 0), scales=scales)
        expected = attention(
            k[:, new], k[:, : new.stop], v[:, : new.stop], causal=True, window=(5, 0)
        )
        atol = 0.03 if dtype == "int8" else 1e-5  # half a step of codes, of numbers up to about 3
        np.testing.assert_allclose(out, expected, atol=atol)
        used.append(6 - len(cache.free_pages))
    assert max(used) == 3  # 5 tokens before 3 new ones
    other = cache.fork(one)
    cache.free(one)
    assert len(cache.free_pages) == 6 - used[-1]
    cache.free(other)
    assert sorted(cache.free_pages) == [*range(6)]


@pytest.mark.parametrize("chunk", [4, 5])
def test_pages_before_the_chunk_become_free(chunk: int) -> None:
    """A sequence has the pages of the chunk of its next token, and attends to these alone."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 24, 2, 8), np.float32)
    cache = PagedKVCache(1, 4, 2, 2, 8, dtype="float32", chunk=chunk)
    rows = PagedRows("test", cache, [cache.allocate(0)], 1)
    for start, stop in ((0, 3), (3, 4), (4, 5), (5, 10), *((n, n + 1) for n in range(10, 24))):
        new = slice(start, stop)
        actual = rows.attend(0, q[:, new], k[:, new], v[:, new], causal=True)
        place = np.arange(stop)
        same = place[new, None] // chunk == place // chunk
        expected = attention(q[:, new], k[:, :stop], v[:, :stop], causal=True, mask=same)
        np.testing.assert_allclose(actual, expected, atol=1e-6)
        assert len(cache.free_pages) >= 4 - (stop - start // chunk * chunk + 2) // 2
    with pytest.raises(ConfigError, match="without window and latent"):
        PagedKVCache(1, 4, 2, 2, 8, dtype="float32", chunk=chunk, window=3)
    with pytest.raises(ConfigError, match="pass a number of tokens, 1 or more"):
        PagedKVCache(1, 4, 2, 2, 8, dtype="float32", chunk=0)


def test_a_model_runs_beyond_its_pages() -> None:
    """A page stays until no layer sees it; results are those of a contiguous cache."""
    config = CONFIG | {"model_type": "mistral", "sliding_window": 7}
    model = create(config, seed=0)
    paged = PagedKVCache(2, 5, 4, 1, 16, dtype="float32", window=7)
    plain, sequence = KVCache(2, 1, 30, 1, 16, dtype="float32"), paged.allocate(0)
    for start in range(0, 30, 5):
        tokens = TEXT[:1, start : start + 5]
        actual = model.logits(tokens, cache=paged, sequences=[sequence])
        np.testing.assert_allclose(actual, model.logits(tokens, cache=plain), atol=1e-5)
    mixed = PagedKVCache(2, 5, 4, HEADS, DIM, dtype="float32", window=[4, None])
    sequence = mixed.allocate(0)
    for layer in (0, 1):
        mixed.append(layer, [sequence], *draw(1, 20))
    with pytest.raises(DeviceMemoryError):
        mixed.append(0, [sequence], *draw(1, 1))


def test_the_windows_of_call_and_cache_are_both_kept() -> None:
    wide, narrow = (PagedKVCache(2, 20, 4, 1, 16, dtype="float32", window=w) for w in (None, 5))
    model = create(CONFIG | {"model_type": "mistral", "sliding_window": 5}, seed=0)
    rows = [cache.allocate(0) for cache in (wide, narrow)]
    for start in (0, 11):
        tokens = TEXT[:1, start : start + 11]
        expected = model.logits(tokens, cache=wide, sequences=rows[:1])
        actual = MODEL.logits(tokens, cache=narrow, sequences=rows[1:])
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["contiguous", "window", "paged", "paged window"])
def test_truncate_is_as_if_never_appended(kind: str, dtype: str) -> None:
    """Also for a fork, which keeps its tokens; what stays has the same bits."""

    def made() -> tuple[Any, dict[str, Any]]:
        window = 64 if "window" in kind else None
        if "paged" not in kind:
            return KVCache(2, 2, 30, 1, 16, dtype=dtype, window=window), {}
        cache = PagedKVCache(2, 40, 4, 1, 16, dtype=dtype, window=window)
        return cache, {"sequences": [cache.allocate(0), cache.allocate(0)]}

    cache, how = made()
    generated(cache, TEXT[:, :9], **how)
    stored = bits(cache)
    forks = [cache.fork(each) for each in how.get("sequences", ())]
    generated(cache, TEXT[:, 20:29], **how)
    cache.truncate(9, *how.values())
    if forks:
        assert len(cache.free_pages) == 40 - 2 * 4  # the page in which forks differ is kept
        assert [*cache.lengths(forks)] == [9, 9]
    assert bits(cache, how.get("sequences")) == stored
    fresh, rows = made()
    generated(fresh, TEXT[:, :9], **rows)
    actual, expected = (generated(c, TEXT[:, 9:14], **w) for c, w in ((cache, how), (fresh, rows)))
    np.testing.assert_array_equal(actual, expected)
    for cache_, which in ((cache, how), (fresh, rows)):
        cache_.truncate(100)
        cache_.truncate(0)
        generated(cache_, TEXT[:, :3], **which)


def bits(cache: Any, sequences: Any = (0, 1)) -> list[bytes]:
    """Return the first 9 tokens of every layer."""
    if isinstance(cache, KVCache):
        return [a[:, :9].tobytes() for a in (*cache.keys, *cache.values)]
    tables = [[*cache.page_table([each])[0][:3]] for each in sequences]
    return [
        a[layer][table].reshape(12, -1)[:9].tobytes()
        for layer in (0, 1) for a in (cache.keys, cache.values) for table in tables
    ]  # fmt: skip


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_ring_is_shortened_by_one_token_or_to_its_sinks(sinks: int) -> None:
    def made(*stops: int) -> KVCache:
        """Return a cache of the tokens up to each stop, as a model's BLAS may round by lengths."""
        cache = KVCache(2, 2, 30, 1, 16, dtype="float32", window=6, sinks=sinks)
        for start, stop in itertools.pairwise((0, *stops)):
            if start < stop:
                generated(cache, TEXT[:, start:stop])
        return cache

    for tokens, length in ((20, 19), (20, 20), (20, sinks), (6 + sinks, 3), (20, 0)):
        cache = made(length, tokens)
        cache.truncate(length)
        actual, expected = (
            generated(each, TEXT[:, length : length + 4]) for each in (cache, made(length))
        )
        np.testing.assert_array_equal(actual, expected)
    cache = made(20)
    for length in (18, sinks + 1):
        with pytest.raises(RangeError, match=f"keeps {6 + sinks} of 20 tokens; pass 19"):
            cache.truncate(length)
    assert cache.filled == [20, 20]


def test_truncate_refuses_what_is_gone() -> None:
    cache = PagedKVCache(1, 9, 4, HEADS, DIM, dtype="float32", window=5)
    one, two = cache.allocate(0), cache.allocate(0)
    for _ in range(5):
        cache.append(0, [one, two], *draw(2, 4))
    cache.truncate(16, [one])
    assert [*cache.lengths([one, two])] == [16, 20]
    with pytest.raises(RangeError, match=r"truncate\(8\): the window has dropped 12 tokens"):
        cache.truncate(8)
    assert [*cache.lengths([one, two])] == [16, 20]
    cache.truncate(0)
    assert sorted(cache.free_pages) == [*range(9)]
    plain = KVCache(1, 1, 4, 1, 4, dtype="float32")
    for length in (-1, 1.5, True, None, "2"):
        for each in (cache, plain):
            with pytest.raises(RangeError, match="pass the number of tokens to keep"):
                each.truncate(length)  # type: ignore[arg-type]
    with pytest.raises(RangeError, match="no sequence 7"):
        cache.truncate(1, [7])
    for window in (0, -1, True, [1, 2], "5"):
        with pytest.raises(ConfigError, match=r"PagedKVCache\(window="):
            PagedKVCache(1, 2, 2, 1, 4, dtype="float32", window=window)  # type: ignore[arg-type]


def test_padding_after_a_truncation_is_that_of_the_new_tokens() -> None:
    cache, fresh = (KVCache(2, 2, 30, 1, 16, dtype="float32") for _ in range(2))
    mask = np.ones((2, 8), bool)
    mask[0, 4:] = False
    generated(cache, TEXT[:, :8], mask=mask)
    cache.truncate(4)
    generated(fresh, TEXT[:, :4], mask=mask[:, :4])
    actual, expected = (generated(each, TEXT[:, 4:9]) for each in (cache, fresh))
    # the keys of the first tokens are rows of a product of 8 rows and of one of 4 rows
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
