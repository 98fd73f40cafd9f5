"""The kernel of attention for few queries, over keys in order and in pages."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import KVCache, attention_forward, attention_paged_forward
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import Limits, using
from unsloth_cupy.ops.attention._decode import (
    DECODE,
    FEW,
    KEYS,
    STATIC,
    blocks_of,
    chunks_of,
    resolve,
)

from ..harness.parity import Case, KernelParity, _compare_kernels, emulator, launched, on_schedules
from ..machines.stand_in import gpu
from .attention_cases import AFAR, BUDGETS, EVERY, GROUPED, hides, some_sinks, tiles
from .test_attention_forward import _within

SMALL = GROUPED | {"queries": 3, "keys": 300, "dim": 8, "value_dim": 16}
PAGE = {"batch": 2, "heads": 6, "kv_heads": 2, "pages": 9}
THREES = PAGE | {"queries": 2, "page": 3, "max_pages": 3, "dim": 8, "value_dim": 16}


def hides_first(rng: np.random.Generator) -> np.ndarray:
    return np.arange(300) > 270


class TestAttentionDecode(KernelParity):
    op = "attention_forward"
    sides = ("forward",)  # test_attention_backward.py judges the other
    machine = {"processors": 132}  # noqa: RUF012
    test_gradient_matches_finite_differences = None  # test_attention.py proves the definition
    test_rounds_once = test_any_strides = None
    cases = (
        Case("one query", **GROUPED | {"queries": 1, "keys": 600, "dim": 40, "value_dim": 64}),
        Case(
            "two tiles of rows",
            **GROUPED | {"heads": 8, "queries": 7, "keys": 131, "dim": 128, "value_dim": 96},
            causal=True,
        ),
        Case(
            "rows of 32 chunks",
            **GROUPED | {"queries": 2, "keys": 41, "dim": 256, "value_dim": 200},
            arrays={"key_lengths": [41, 20]},
        ),
        Case(
            "a window that begins in the second chunk",
            **SMALL | {"keys": 700},
            window=(30, 9),
            arrays={"query_start": np.array([400, 330], np.int32)},
        ),
        Case(
            "more chunks than a thread reads at a time",
            **{"batch": 2, "heads": 1, "kv_heads": 1, "queries": 1, "dim": 8, "value_dim": 8},
            keys=32 * KEYS + 1,
            arrays={"key_lengths": [32 * KEYS + 1, KEYS + 1]},
        ),
        Case("left window", **SMALL, window=(20, None), scale=0.0, arrays={"query_start": 270}),
        Case(
            "rows that see no key",
            **SMALL,
            causal=True,
            arrays={"key_lengths": np.array([0, 2], np.int32)},
        ),
        Case("no key but a sink", **SMALL, arrays={"key_lengths": [0, 290], "sinks": some_sinks}),
        Case("a chunk that sees no key", **SMALL, arrays={"mask": hides_first}),
        Case("alibi from afar", **SMALL, arrays=AFAR),
        Case("softcap", **SMALL, softcap=2.0, scale=-0.4, arrays={"query_start": [60, -5]}),
        Case("bias and alibi", **SMALL, given=["bias", "alibi"], causal=True),
        Case("bias by key", **SMALL | {"keys": 90}, arrays={"bias": hides(90), "mask": tiles(90)}),
        Case(
            "all",
            **SMALL,
            given=["mask", "bias", "alibi", "sinks"],
            arrays={"key_lengths": [300, 261], "query_start": [290, 250]},
            causal=True,
            window=(270, None),
            scale=0.7,
            softcap=3.0,
        ),
    )


def pages(size: int, seed: int = 0) -> dict[str, Any]:
    """Return a table of nine pages in random order: two rows of three, three rest unused."""
    table = np.random.default_rng(seed).permutation(9)[:6].reshape(2, 3)
    return {"page_table": table, "lengths": np.array([2 * size + 1, size], np.int32)}


def left_out(rng: np.random.Generator) -> np.ndarray:
    seen = rng.random((2, 6, 1, 4)) < 0.6
    seen[:, :3, :, 1] = False  # no head of the first group
    seen[1, 5] = False
    return seen


class TestAttentionPaged(KernelParity):
    op = "attention_paged_forward"
    machine = {"processors": 132}  # noqa: RUF012
    sizes = (
        {"page": 1, "keys": 16, "queries": 19},
        {"queries": 19},
        {"queries": 512, "dropout": 0.0},  # pages are gathered, which dropout prevents
    )
    options = ({}, EVERY)
    test_gradient_matches_finite_differences = None  # it has none
    test_rounds_once = None  # test_attention_paged.py
    test_any_strides = None
    cases = (
        *(
            Case(
                f"pages of {page}",
                **PAGE,
                queries=queries,
                page=page,
                max_pages=3,
                dim=dim,
                value_dim=16,
                arrays=pages(page),
            )
            for page, queries, dim in ((1, 1, 8), (3, 2, 24), (16, 19, 64), (130, 1, 8))
        ),
        Case(
            "all",
            **PAGE,
            queries=2,
            page=16,
            max_pages=3,
            dim=8,
            value_dim=8,
            given=["alibi", "sinks"],
            arrays={k: np.asarray(v, np.int64) for k, v in pages(16).items()},
            causal=False,
            window=(20, 3),
            softcap=2.0,
            scale=0.3,
        ),
        Case("a mask of keys", **THREES, arrays=pages(3) | {"mask": tiles(9)}),
        Case("a bias of pairs", **THREES, keys=9, given=["bias"], arrays=pages(3)),
        Case("dropout", **THREES, arrays=pages(3), dropout=0.4, seed=2**40 + 3),
        Case(
            "tiles of keys left out, of one head or of all",
            **THREES | {"page": 130, "queries": 19},
            arrays=pages(130) | {"block_mask": left_out, "query_start": 200},
        ),
        Case(
            "everything",
            **THREES | {"page": 130},
            keys=390,
            given=["mask", "bias", "alibi", "sinks"],
            arrays=pages(130) | {"block_mask": left_out, "query_start": [250, 77]},
            window=(230, None),
            softcap=2.0,
            scale=0.3,
            dropout=0.3,
            seed=9,
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("number", [0, 3, 4, -1])
def test_random_schedules(number: int, seed: int) -> None:
    """Whatever order threads and blocks run in: equal bits on two random schedules."""
    run = on_schedules(seed, seed + 3, processors=132)
    case, dtype = TestAttentionDecode.cases[number], KERNEL_DTYPES[seed % 3]
    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["forward"])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("architecture", "itemsize", "width"), DECODE)
def test_tiles_fit_every_budget(architecture: int, itemsize: int, width: int, budget: int) -> None:
    """Every head dim has tiles in every budget, twice in an SM; they share out a chunk."""
    for dim in range(8, width + 1, 8):
        chosen = resolve(itemsize, dim, width, Limits(architecture, budget))
        if chosen is None:  # what a block takes beside does not fit: forward takes such calls
            least = DECODE[architecture, itemsize, width][-1].bytes(itemsize, dim, width)
            assert budget - STATIC < least <= budget
            continue
        size = chosen.bytes(itemsize, dim, width)
        assert (size if budget < 99 << 10 else 2 * size + 1024) <= budget
        assert KEYS % (2 * chosen.warps * chosen.keys) == 0


@pytest.mark.parametrize(
    ("sequences", "rows", "processors", "expected"),
    [
        (8, 4, 132, (16, 33)),  # two blocks of an SM at most
        (1, 4, 132, (128, 128)),  # as many as one block should merge
        (4, 16, 132, (32, 32)),
        (200, 1, 132, (1, 1)),
        (1, 1, 1, (1, 2)),
    ],
)
def test_chunks(sequences: int, rows: int, processors: int, expected: tuple[int, int]) -> None:
    assert chunks_of(sequences, rows, processors) == expected


def test_chunks_of_shorter_sequences_fit_the_grid() -> None:
    """Only the GPU knows lengths, and a shorter sequence may have more chunks than the longest."""
    for block_keys, (fewest, most) in itertools.product((32, 64, 128), [(16, 33), (1, 2), (5, 5)]):
        several = 0
        for keys in range(1, 12000):
            length = max(-(-keys // most), min(KEYS, -(-keys // fewest)), 2 * block_keys)
            several = max(several, -(-keys // (-(-length // block_keys) * block_keys)))
            assert several <= blocks_of(keys, block_keys, fewest, most) <= most


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:], ids=str)
@pytest.mark.parametrize(("budget", "dim"), [*itertools.product(BUDGETS[:3], (64, 128, 256))])
def test_kernels_of_every_budget(budget: int, dim: int, dtype: Any) -> None:
    case = Case("", **GROUPED, queries=2, keys=270, dim=dim, value_dim=dim, causal=True)
    run = lambda function: _within(function, check=False, shared_memory=budget)  # noqa: E731
    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["forward"])


def drawn(dtype: Any, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "processors"), [*zip(KERNEL_DTYPES, (132, 4, 2), strict=True)])
def test_a_sequence_gives_equal_bits_alone_and_in_any_batch(dtype: Any, processors: int) -> None:
    """The batch around it, the room behind its keys and pages change no bit."""
    lengths = np.array([333, 5, 700, 0])
    q, k, v = drawn(dtype, (4, 2, 6, 16), (4, 700, 2, 16), (4, 700, 2, 8))
    fast = {"check": False, "processors": processors}
    both = _within(lambda: attention_forward(q, k, v, causal=True, key_lengths=lengths), **fast)
    for row, length in enumerate(lengths[:3]):
        one = slice(row, row + 1)
        parts = q[one], k[one, :length], v[one, :length]
        alone = _within(lambda parts=parts: attention_forward(*parts, causal=True), **fast)
        assert alone[0].tobytes() == both[0][one].tobytes()
        assert alone[1].tobytes() == both[1][one].tobytes()
    for page in (1, 3, 16, 256):
        most = -(-700 // page)
        table = np.random.default_rng(page).permutation(4 * most).reshape(4, most)
        stored = [np.full((4 * most, page, *a.shape[2:]), np.nan, a.dtype) for a in (k, v)]
        for there, here in zip(stored, (k, v), strict=True):
            for row, length in enumerate(lengths):
                at = np.arange(length)
                there[table[row, at // page], at % page] = here[row, :length]
        paged = _within(
            lambda t=table, s=stored: attention_paged_forward(q, *s, t, lengths), **fast
        )
        assert paged[0].tobytes() == both[0].tobytes()
        assert paged[1].tobytes() == both[1].tobytes()


@pytest.mark.slow
def test_decode_equals_full_forward() -> None:
    """Token by token, the last rows of the kernel for many queries: to 1e-5 in float32."""
    q, k, v = drawn(np.float32, (1, 40, 4, 64), (1, 40, 2, 64), (1, 40, 2, 64))
    whole = _within(lambda: attention_forward(q, k, v, causal=True), check=False)
    for last in (0, 7, 39):
        parts = q[:, last : last + 1], k[:, : last + 1], v[:, : last + 1]
        actual = _within(lambda parts=parts: attention_forward(*parts, causal=True), check=False)
        np.testing.assert_allclose(actual[0][:, 0], whole[0][:, last], atol=1e-5)
        np.testing.assert_allclose(actual[1][..., 0], whole[1][..., last], atol=1e-5)


@pytest.mark.slow
def test_few_queries_go_one_way_and_many_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    from unsloth_cupy.ops.attention import _decode, _forward

    for module in (_decode, _forward):
        load = module.load
        monkeypatch.setattr(
            module, "load", lambda file, *rest, load=load: asked.append(file) or load(file, *rest)
        )
    k, v = drawn(np.float16, (1, 20, 1, 8), (1, 20, 1, 8))
    with emulator():
        for queries, options in ((FEW, {}), (FEW + 1, {}), (1, {"dropout": 0.1, "seed": 0})):
            attention_forward(k[:, :1].repeat(queries, axis=1), k, v, **options)
    assert asked == [f"attention_{name}.cu" for name in ("decode", "forward", "forward")]


@pytest.mark.slow
def test_pages_that_do_not_exist_are_not_read() -> None:
    """A length beyond the pages, a page outside the cache: on a GPU nobody reads them first."""
    q, k, v = drawn(np.float32, (2, 1, 2, 8), (4, 4, 1, 8), (4, 4, 1, 8))
    table = np.array([[1, 9], [2, -7]])
    run = functools.partial(launched, "attention_paged_forward", q, k, v)
    with emulator():
        out, _ = run(table, np.array([8, 6]))
        assert np.isfinite(out).all()
        out, _ = run(table[:, :1], np.array([9, -1]))
    assert np.isfinite(out).all()
    assert not out[1].any()


def test_replayed_counters() -> None:
    """The last block to arrive leaves its counter at 0, as a captured launch needs."""
    q, k = drawn(np.float16, (1, 1, 2, 8), (1, 700, 1, 8))
    made = []
    from unsloth_cupy.ops.attention import _decode

    def keep(count: int, like: np.ndarray) -> np.ndarray:
        made.append(np.zeros_like(like, np.uint32, shape=count))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, using(_emulator()):
        patch.setattr(_decode, "counters", keep)
        attention_forward(q, k, k)
    assert made
    assert not made[0].any()


def _emulator() -> Any:
    with emulator():
        from ..machines.cuda_on_cpu import Emulator

        return Emulator()


@pytest.mark.parametrize("queries", [2, 20])
def test_a_cache_is_read_where_it_lies(queries: int) -> None:
    """Keys are the first tokens of each row of the storage: no call packs them."""
    with gpu() as machine:
        cache = KVCache(1, 3, 4096, 2, 64, dtype="float16", like=machine.array((1,), "float16"))
        new = machine.array((3, queries, 2, 64), "float16")
        q = machine.array((3, queries, 4, 64), "float16")
        cache.append(0, *[machine.array((3, 1000, 2, 64), "float16")] * 2)
        k, v = cache.append(0, new, new)
        held, machine.peak = machine.held, machine.held
        attention_forward(q, k, v, causal=True)
        assert machine.peak - held < k.nbytes / 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("queries", [3, 20])
def test_parts_of_longer_arrays_give_equal_bits(queries: int, dtype: Any) -> None:
    """The first tokens of a cache, later ones, those of two caches, and what must be copied."""
    q, long, other = drawn(dtype, (2, queries, 4, 16), (2, 60, 2, 16), (2, 70, 2, 16))
    wide, odd = drawn(dtype, (2, 60, 2, 24), (2 * 60 * 2 * 16 + 1,))
    parts = [
        (long[:, :40], long[:, :40]),
        (long[:, 9:49], long[:, :40]),
        (long[:, :40], other[:, :40]),
        (long[:, :40], long[:, :40].copy()),
        (wide[:, :40, :, :16], wide[:, :40, :, 8:]),
        (long[:, :40], long[::-1, :40]),
        (odd[1:].reshape(2, 60, 2, 16)[:, :40], long[:, :40]),
        (long[:1, :40].repeat(2, axis=0), np.broadcast_to(long[:1, :40], (2, 40, 2, 16))),
    ]
    for k, v in parts:
        with emulator():
            there = attention_forward(q, k, v, causal=True)
            packed = attention_forward(q, k.copy(), v.copy(), causal=True)
        for actual, same in zip(there, packed, strict=True):
            assert actual.tobytes() == same.tobytes()
