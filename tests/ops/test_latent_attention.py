"""Attention over latent rows, in order and in pages: definition, kernel, what is refused."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import attention_forward, latent_attention, latent_attention_forward
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import Limits
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError
from unsloth_cupy.ops.attention._latent import FAN, TILES, resolve

from ..harness.parity import Case, KernelParity, _compare_kernels, emulator, on_schedules
from .test_attention import Device

PUBLIC = (
    "latent_attention(q, latents, lengths, page_table=None, *, rank, scale, causal=True, "
    "mask=None)",
)
SMALL = {"batch": 2, "heads": 6, "queries": 1, "dim": 24, "rank": 16, "scale": 0.3}
ORDERED = SMALL | {"pages": 2, "page": 150}
PAGED = SMALL | {"pages": 9, "max_pages": 3}


def pages(size: int) -> dict[str, Any]:
    """Return a table of nine pages in random order: two rows of three, three rest unused."""
    table = np.random.default_rng(0).permutation(9)[:6].reshape(2, 3)
    table[1, 1:] = -1
    return {"page_table": table, "lengths": np.array([2 * size + 1, size], np.int32)}


class TestLatentAttention(KernelParity):
    op = "latent_attention_forward"
    sizes = tuple(
        {"batch": 1, "heads": 16, "dim": 576, "pages": 1, "page": 256, "max_pages": 1}
        | {"keys": 256, "queries": queries}
        for queries in (1, 2, 4)
    )
    options = ({"rank": 512, "scale": 0.07}, {"rank": 512, "scale": 0.07, "causal": False})
    test_gradient_matches_finite_differences = None  # it has none
    test_any_strides = None
    cases = (
        Case("one token", **ORDERED, arrays={"lengths": [150, 3]}),
        Case("three tokens", **ORDERED | {"page": 70, "queries": 3}, arrays={"lengths": [70, 70]}),
        Case(
            "DeepSeek's rows",
            **ORDERED | {"page": 40, "heads": 16, "dim": 576, "rank": 512},
            arrays={"lengths": [40, 33]},
        ),
        Case(
            "two blocks of rows",
            **ORDERED | {"page": 33, "heads": 10, "queries": 7, "dim": 40, "rank": 32},
            arrays={"lengths": [33, 20]},
        ),
        Case(
            "two blocks of rows, each of three chunks",
            **ORDERED | {"page": 1030, "heads": 33, "queries": 2, "dim": 8, "rank": 8},
            arrays={"lengths": [1030, 513]},
        ),
        Case(
            "columns of no warp",
            **ORDERED | {"page": 9, "dim": 80, "rank": 72},
            arrays={"lengths": [9, 5]},
        ),
        Case(
            "MiniCPM's rows",
            **ORDERED | {"page": 40, "heads": 40, "dim": 288, "rank": 256},
            arrays={"lengths": [40, 40]},
        ),
        Case("no order", **ORDERED | {"queries": 4}, causal=False, arrays={"lengths": [0, 9]}),
        Case("rows that see nothing", **ORDERED | {"queries": 5}, arrays={"lengths": [2, 0]}),
        Case(
            "more chunks than a block merges",
            **ORDERED | {"heads": 2, "page": FAN * 128 + 1, "dim": 16, "rank": 8},
            arrays={"lengths": [FAN * 128 + 1, 129]},
        ),
        Case(
            "a mask",
            **ORDERED | {"page": 40, "queries": 2},
            keys=40,
            given=["mask"],
            arrays={"lengths": [40, 17]},
        ),
        Case(
            "a mask of padding",
            **ORDERED,
            arrays={
                "lengths": [150, 150],
                "mask": lambda rng: (np.arange(300) % 150 > 20).reshape(2, 1, 1, 150),
            },
        ),
        *(
            Case(f"pages of {page}", **PAGED | {"queries": queries}, page=page, arrays=pages(page))
            for page, queries in ((1, 1), (3, 2), (64, 3))
        ),
    )


@pytest.mark.parametrize("on_host", [True, False])
def test_equals_attention_with_one_head_of_keys(on_host: bool) -> None:
    """What lies after the rows of a sequence is never read."""
    rng = np.random.default_rng(0)
    q, rows = rng.standard_normal((2, 3, 4, 12)), rng.standard_normal((2, 9, 12))
    lengths = np.array([9, 5])
    mask = rng.random((2, 1, 1, 9)) < 0.8
    k = rows[:, :, None]
    expected = attention_forward(
        q, k, k[..., :8], mask=mask, key_lengths=lengths, causal=True, scale=0.4
    )
    stored = np.full((7, 3, 12), np.nan)
    table = np.array([[4, 0, 6], [2, 5, -1]])
    for row, (numbers, length) in enumerate(zip(table, lengths, strict=True)):
        for token in range(length):
            stored[numbers[token // 3], token % 3] = rows[row, token]
    rows[1, 5:] = np.nan
    q = q if on_host else q.view(Device)
    for call in ((q, rows, lengths), (q, stored, lengths, table)):
        options: Any = {"rank": 8, "scale": 0.4, "mask": mask}
        for one, other in zip(latent_attention_forward(*call, **options), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
        out = latent_attention(*call, **options)
        np.testing.assert_array_equal(out, latent_attention_forward(*call, **options)[0])


def test_no_rows() -> None:
    q, none = np.ones((2, 1, 2, 8)), np.ones((0, 4, 8))
    table, lengths = np.ones((2, 0), np.int64), np.zeros(2, np.int64)
    options: Any = {"rank": 4, "scale": 1.0}
    assert not latent_attention(q, none, lengths, table, **options).any()
    assert not latent_attention(q, np.ones((2, 0, 8)), lengths, **options).any()
    assert latent_attention(q[:0], none, lengths[:0], table[:0], **options).shape == (0, 1, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float32")], ids=str)
@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_of_every_gpu(shared: int, dtype: Any) -> None:
    """Rows of 16, 32 and 64 heads and queries, in any order of threads: equal bits."""
    sizes = {**PAGED, "pages": 8, "page": 24, "dim": 576, "rank": 512}
    for heads, queries in ((16, 1), (10, 3), (32, 2)):
        call = {**sizes, "batch": 1, "heads": heads, "queries": queries}
        arrays = {"page_table": [[5, 2, 7]], "lengths": [70]}
        case = Case("every tile", **call, arrays=arrays)
        run = on_schedules(0, 5, shared_memory=shared)
        _compare_kernels(OPS["latent_attention_forward"], case, dtype, run, np.copy)


def test_a_cache_of_which_a_part_is_filled() -> None:
    """The first rows of each sequence are read where they lie."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((2, 40, 24), np.float32)
    q, lengths = rng.standard_normal((2, 1, 6, 24), np.float32), np.array([9, 7])
    options: Any = {"rank": 16, "scale": 0.3}
    results = []
    for rows in (cache[:, :9], cache[:, :9].copy()):
        with emulator():
            results.append(latent_attention(q, rows, lengths, **options))
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0], latent_attention(q, rows, lengths, **options), rtol=1e-4)


@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles(shared: int) -> None:
    """Every GPU has tiles for rows of 576; of heads and queries one block takes as it can."""
    limits = Limits(80, shared)
    for size in (2, 4):
        for rows in (1, 16, 17, 64, 200):
            tiles = resolve(size, 576, 512, rows, limits)
            assert tiles is not None
            room = tiles.bytes(size, 576) * tiles.resident(tiles.bytes(size, 576), shared)
            assert room <= shared
            least = min(t.rows for t in TILES[size])
            assert (tiles.rows == least) == (rows <= least or size == 4)
    assert resolve(2, 576, 512, 64, limits).rows == (64 if shared > 2**17 else 32)  # type: ignore[union-attr]
    assert resolve(2, 4096, 4096, 16, limits) is None


def test_wrong_arrays() -> None:
    q, rows = np.ones((2, 1, 4, 12)), np.ones((5, 3, 12))
    table, lengths = np.zeros((2, 2), np.int32), np.array([6, 2])
    options: Any = {"rank": 8, "scale": 0.1}
    with pytest.raises(ConfigError, match=r"rank=13; pass how many of a row's 12 numbers"):
        latent_attention(q, rows, lengths, table, rank=13, scale=0.1)
    with pytest.raises(ConfigError, match=r"scale=0.0; pass a number above 0"):
        latent_attention(q, rows, lengths, table, rank=8, scale=0.0)
    with pytest.raises(
        ShapeError, match="latents has 5 sequences for 2 of q; pass as many, or a p"
    ):
        latent_attention(q, rows, lengths, **options)
    with pytest.raises(ShapeError, match="latents has dim=11; it must be 12"):
        latent_attention(q, rows[..., :11], lengths, table, **options)
    with pytest.raises(RangeError, match=r"lengths holds 2 .. 7; it must be in 0 .. 6, the rows"):
        latent_attention(q, rows, np.array([7, 2]), table, **options)
    with pytest.raises(RangeError, match=r"page_table holds 5; it must be in 0 .. 4, the pages"):
        latent_attention(q, rows, lengths, table + 5, **options)
    with pytest.raises(DTypeError, match="page_table is float64"):
        latent_attention(q, rows, lengths, table.astype(float), **options)
    with pytest.raises(ShapeError, match="5 for keys; it must be 6, for which there is room"):
        latent_attention(q, rows, lengths, table, mask=np.ones(5, bool), **options)
