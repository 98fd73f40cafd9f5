"""Attention of many queries over pages: they are gathered, and a kernel for many queries runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import attention_forward, attention_paged_forward
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.replay import fixed_order
from unsloth_cupy.ops.attention import _pages
from unsloth_cupy.ops.attention.attention_paged_int8 import attention_paged_int8_forward

from ..harness.parity import Case, KernelParity, emulator, general_attention, launched
from ..machines.stand_in import gpu
from .test_attention_decode import PAGE, left_out, pages
from .test_attention_hopper import asked_for

MANY = PAGE | {"queries": 67, "max_pages": 3, "page": 50, "dim": 64, "value_dim": 64}
LONG = {"page_table": pages(50)["page_table"], "lengths": np.array([149, 101], np.int32)}


def kernels_of(op: str, case: Case, dtype: Any, processors: int = 3) -> list[str]:
    """Return the kernels that a call launches on an H100 with so many SMs."""
    call = case.draw(OPS[op], dtype)
    with gpu("90") as machine, pytest.MonkeyPatch.context() as patch:
        limits = _pages.limits
        patch.setattr(_pages, "limits", lambda like: limits(like)._replace(processors=processors))
        call.mapped(lambda array: array if array is None else machine.place(array)).run()
        return [launch.kernel for launch in machine.launches]


@contextmanager
def gathered() -> Iterator[None]:
    """Let calls of few rows gather pages too, on a GPU with many SMs."""
    with asked_for(), pytest.MonkeyPatch.context() as patch:
        limits = _pages.limits
        patch.setattr(_pages, "limits", lambda like: limits(like)._replace(processors=3))
        yield


class TestAttentionGathered(KernelParity):
    op = "attention_paged_forward"
    machine = {"processors": 3}  # noqa: RUF012
    context = staticmethod(gathered)
    test_gradient_matches_finite_differences = None  # it has none
    test_rounds_once = None  # test_attention_paged.py
    test_any_strides = None
    cases = (
        Case("on warpgroups", **MANY, arrays=LONG),
        Case("pages of 1", **MANY | {"page": 1}, arrays=pages(1), causal=False),
        Case(
            "values with other columns, not on warpgroups",
            **MANY | {"dim": 24, "value_dim": 8},
            arrays=LONG | {"query_start": 80},
        ),
        Case(
            "a window, far from the first key",
            **MANY | {"page": 120},
            arrays={"page_table": np.array([[3, 8, 1]] * 2), "lengths": np.array([350, 300])},
            window=(20, None),
        ),
        Case(
            "all",
            **MANY | {"dim": 72},
            keys=150,
            given=["mask", "bias", "alibi", "sinks"],
            arrays=LONG | {"block_mask": lambda rng: left_out(rng)[..., :2],
                           "query_start": [80, 9]},
            window=(90, None),
            scale=0.3,
            softcap=2.0,
        ),
    )  # fmt: skip

    def test_pages_are_gathered(self, case: Case) -> None:
        with asked_for():
            kernels = kernels_of(self.op, case, BFLOAT16)
        warpgroups = case.both["dim"] >= 64
        assert kernels == ["gather_pages", "attention_forward" + "_sm90" * warpgroups]


def stored(
    rng: np.random.Generator, dtype: Any, lengths: list[int], page: int, codes: bool = False
) -> tuple[list[Any], list[np.ndarray]]:
    """Return (k_pages, v_pages, page_table, lengths), and the keys and values in order.

    What no sequence uses is NaN, or the code -128; unused entries of the table are -1.
    """
    room = -(-max(lengths) // page)
    draw = lambda *shape: rng.integers(-127, 128, shape) if codes else rng.standard_normal(shape)  # noqa: E731
    ordered = [draw(len(lengths), room * page, 2, dim).astype(dtype) for dim in (64, 72)]
    table = rng.permutation(len(lengths) * room).reshape(len(lengths), room).astype(np.int32)
    unused = -128 if codes else np.nan
    cache = [np.full((table.size, page, *a.shape[2:]), unused, a.dtype) for a in ordered]
    for there, here in zip(cache, ordered, strict=True):
        for row, length in enumerate(lengths):
            at = np.arange(length)
            there[table[row, at // page], at % page] = here[row, :length]
    for row, length in enumerate(lengths):
        table[row, -(-length // page) :] = -1
    return [*cache, table, np.array(lengths)], ordered


@pytest.mark.parametrize("warpgroups", [True, False])
@pytest.mark.parametrize("options", [{}, {"window": (40, 0)}, {"query_start": 30}], ids=str)
def test_bits_are_those_of_contiguous_keys(options: Any, warpgroups: bool) -> None:
    """Of all sequences together, or of few at a time; and of each one alone, with less room."""
    rng, lengths = np.random.default_rng(0), [150, 0, 64, 97]
    call, (k, v) = stored(rng, BFLOAT16, lengths, 7)
    q = rng.standard_normal((4, 66, 4, 64)).astype(BFLOAT16)
    chosen = asked_for() if warpgroups else general_attention()
    with chosen, emulator(check=False, processors=1), pytest.MonkeyPatch.context() as patch:
        expected = attention_forward(q, k, v, key_lengths=call[3], causal=True, **options)
        results = [attention_paged_forward(q, *call, **options)]
        patch.setattr(_pages, "WORKSPACE", 3 * k[0].nbytes + 3 * v[0].nbytes)
        results.append(attention_paged_forward(q, *call, **options))
        for row in (0, 2):
            pages = -(-lengths[row] // 7)
            one = call[2][row : row + 1, :pages], call[3][row : row + 1]
            alone = attention_paged_forward(q[row : row + 1], *call[:2], *one, **options)
            for actual, same in zip(alone, expected, strict=True):
                assert actual.tobytes() == same[row : row + 1].tobytes()
    for each in results:
        for actual, same in zip(each, expected, strict=True):
            assert actual.tobytes() == same.tobytes()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_codes_are_the_values_of_a_cache_of_floats(dtype: Any) -> None:
    rng, lengths = np.random.default_rng(0), [70, 33]
    call, _ = stored(rng, np.int8, lengths, 16, codes=True)
    q = rng.standard_normal((2, 64, 4, 64)).astype(dtype)
    scales = (rng.random((2, *call[0].shape[:3])) / 100).astype(np.float32)
    floats = [(a * s[..., None]).astype(dtype) for a, s in zip(call[:2], scales, strict=True)]
    with emulator(check=False, processors=1):
        expected = attention_paged_forward(q, *floats, *call[2:])
        actual = attention_paged_int8_forward(q, *call[:2], scales, *call[2:])
    for one, same in zip(actual, expected, strict=True):
        assert one.tobytes() == same.tobytes()


def test_which_calls_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough queries of a sequence, whatever the batch; no fixed order, dropout, or long room."""
    op, sizes = "attention_paged_forward", MANY | {"heads": 32, "kv_heads": 8}
    arrays = lambda batch: {"page_table": np.zeros((batch, 3), int), "lengths": [9] * batch}  # noqa: E731
    gathers = lambda case: kernels_of(op, case, BFLOAT16, 132)[0] == "gather_pages"  # noqa: E731
    for batch, queries, expected in ((1, 264, True), (1, 263, False), (9, 263, False)):
        case = Case("", **sizes | {"batch": batch, "queries": queries}, arrays=arrays(batch))
        assert gathers(case) == expected
    case = Case("", **sizes | {"queries": 264}, arrays=arrays(2))
    with fixed_order():
        assert not gathers(case)
    with general_attention():
        assert gathers(case)
    assert not gathers(Case("", **case.both, arrays=case.arrays, dropout=0.1, seed=0))
    monkeypatch.setattr(_pages, "WORKSPACE", 150 * 8 * 128 * 2)
    assert gathers(case)
    monkeypatch.setattr(_pages, "WORKSPACE", 150 * 8 * 128 * 2 - 1)
    assert not gathers(case)


@pytest.mark.parametrize("window", [None, (10, 0)])
def test_pages_that_do_not_exist_hold_zeros(window: Any) -> None:
    """A length beyond the pages, a page outside the cache: on a GPU nobody reads them first."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 64, 2, 64)).astype(BFLOAT16) for _ in range(3))
    table, lengths = np.array([[1, 9], [-7, 0]]), np.array([999, 101])
    with emulator(processors=1):
        out, lse = launched("attention_paged_forward", q, k, v, table, lengths, window=window)
        zeros = np.zeros_like(k[0])
        keys, values = (
            np.stack([np.concatenate([a[1], zeros]), np.concatenate([zeros, a[0]])]) for a in (k, v)
        )
        options = {"key_lengths": lengths, "causal": True, "window": window}
        expected = launched("attention_forward", q, keys, values, **options)
    assert out.tobytes() == expected[0].tobytes()
    assert lse.tobytes() == expected[1].tobytes()
