from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import PagedKVCache, attention, attention_paged
from unsloth_cupy.errors import ConfigError, DeviceMemoryError, DTypeError, RangeError, ShapeError

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
