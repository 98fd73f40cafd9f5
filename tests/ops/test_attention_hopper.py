"""The forward kernel of Hopper against the definition, which test_attention.py proves."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import TestCase

import numpy as np
import pytest

from unsloth_cupy import attention_forward
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import using
from unsloth_cupy.ops.attention import _backward_hopper, _hopper, _warpgroups
from unsloth_cupy.ops.attention._hopper import CHANGED, TABLE
from unsloth_cupy.ops.attention._warpgroups import Warpgroups
from unsloth_cupy.ops.common import tensor_map

from ..harness.parity import (
    Case,
    KernelAlone,
    KernelParity,
    _compare_kernels,
    emulator,
    launched,
    on_schedules,
    outputs_of,
    within_rule,
)
from ..machines.cuda_on_cpu import Emulator
from ..machines.cuda_on_cpu.traffic import counted
from ..machines.stand_in import LIMITS, gpu
from .attention_cases import (
    AFAR,
    GROUPED,
    all_options,
    assert_columns_are_read_where_they_lie,
    hides,
    some_sinks,
    tiles,
)
from .test_attention_forward import TestLengthsThatAreNone as LengthsThatAreNone
from .test_attention_forward import TestStartOfPython as StartOfPython
from .test_attention_varlen import NO_OFFSETS, alone
from .test_attention_varlen import TestNothingIsReadPastASequence as NothingIsReadPastASequence
from .test_attention_varlen import TestSequencesLongerThanTheirMasks as LongerThanTheirMasks

GROUPS = (300, 10), (130, 5)  # tokens and heads of queries, of keys
NARROW = tuple(dtype for dtype in KERNEL_DTYPES if dtype.itemsize == 2)
PAIR = {"batch": 1, "heads": 2, "kv_heads": 1}
SMALL = GROUPED | {"queries": 70, "keys": 90, "dim": 64, "value_dim": 64}


@contextmanager
def asked_for() -> Iterator[None]:
    """Let calls go to warpgroups, for those too who run a class of this module themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hopper, "requested", True)
        yield


@pytest.fixture(autouse=True)
def _asked_for() -> Iterator[None]:
    with asked_for():
        yield


class OnWarpgroups(KernelParity):
    """What a GPU of sm_90 runs on warpgroups, several jobs a block."""

    op, cases, sides = "attention_forward", (), ("forward",)
    machine = {"processors": 2}  # noqa: RUF012
    context = staticmethod(asked_for)
    test_gradient_matches_finite_differences = None  # test_attention.py proves the definition
    test_rounds_once = test_any_strides = None

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_emulated_kernels(self, case: Case, dtype: Any) -> None:
        """The kernel, run on the CPU, agrees with the definition; two runs give equal bits."""
        if dtype in NARROW:
            super().test_emulated_kernels(case, dtype)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_gpu_kernels(self, case: Case, dtype: Any) -> None:
        """The same on a GPU."""
        super().test_gpu_kernels(case, dtype)

    def test_it_is_the_kernel_of_warpgroups(self, case: Case) -> None:
        call = case.draw(OPS[self.op], BFLOAT16)
        with gpu("90") as machine:
            call.mapped(lambda array: array if array is None else machine.place(array)).run()
            assert [launch.kernel for launch in machine.launches] == ["attention_forward_sm90"]


def large(rng: np.random.Generator) -> np.ndarray:
    return 10 * rng.standard_normal((2, 70, 2, 64))


def common_cases(value_dims: tuple[int, int], *more: Case) -> tuple[Case, ...]:
    """Return cases that both passes have, two of which have these columns of values."""
    few, some = value_dims
    return (
        Case("two tiles", **PAIR | {"heads": 1}, queries=64, keys=200, dim=64, value_dim=64),
        Case(
            "causal, three blocks of warpgroups, jobs that take turns",
            **GROUPED | {"batch": 1, "queries": 200, "keys": 290, "dim": 64, "value_dim": 64},
            causal=True,
        ),
        Case("window", **SMALL | {"queries": 150, "value_dim": 72}, window=(30, 9)),
        Case(
            "lengths and a sink, panels that are not full",
            **GROUPED | {"queries": 64, "keys": 140, "dim": 96, "value_dim": some},
            arrays={"key_lengths": [140, 97], "sinks": some_sinks},
        ),
        Case("causal, from the last key", **SMALL, arrays={"key_lengths": [72, 90]}, causal=True),
        Case("no key but a sink", **SMALL, arrays={"key_lengths": [0, 64], "sinks": some_sinks}),
        Case("large scores", **SMALL | {"heads": 2}, arrays={"q": large, "sinks": [-200.0, 200.0]}),
        Case("alibi from afar", **SMALL, arrays=AFAR, causal=True),
        Case("starts", **SMALL, window=(20, None), causal=True, arrays={"query_start": [60, -5]}),
        Case(
            "edges that some rows of a whole tile cross: the last ones, or the first",
            **SMALL | {"queries": 64, "keys": 128},
            window=(127, None),
            causal=True,
            arrays={"query_start": [127, 64]},
        ),
        Case(
            "tiles",
            **SMALL | {"queries": 140, "keys": 300, "dim": 128, "value_dim": few},
            arrays={"block_mask": [[[[True, False, True], [False, True, False]]]]},
            causal=True,
        ),
        Case(
            "a bias by key, a mask by query",
            **SMALL,
            arrays={"bias": hides(90), "mask": tiles(70, 1)},
        ),
        all_options(SMALL | {"dim": 72}),
        *more,
    )


class TestForward(OnWarpgroups):
    cases = common_cases(
        (192, 200),
        Case("full, rings that come round", **PAIR, queries=129, keys=650, dim=128, value_dim=128),
        Case(
            "a window of several tiles",
            **PAIR,
            queries=200,
            keys=400,
            dim=64,
            value_dim=64,
            window=(330, 20),
        ),
        Case("wide", **PAIR, queries=65, keys=150, dim=256, value_dim=248, causal=True),
        Case("wide, capped", **PAIR, queries=64, keys=70, dim=200, value_dim=64, softcap=3.0),
        Case("tiles of 96 keys", **PAIR, queries=65, keys=200, dim=136, value_dim=160, causal=True),
    )


LONG = {"heads": 4, "kv_heads": 2, "tokens": 150, "key_tokens": 200, "dim": 64, "value_dim": 64}
APART = {"q_offsets": [0, 11, 11, 150], "k_offsets": [0, 189, 189, 200]}
MANY = Case("many sequences", **LONG | {"key_tokens": 75}, arrays=alone(70))


class TestPacked(OnWarpgroups):
    """Sequences end to end, of which some have no queries."""

    op = "attention_varlen_forward"
    cases = (
        Case(
            "causal", **LONG, sequences=3, max_queries=150, max_keys=200, arrays=APART, causal=True
        ),
        Case(
            "softcap and block mask",
            **LONG,
            sequences=3,
            max_queries=150,
            max_keys=200,
            arrays=APART | {"block_mask": tiles(3, 4, 2, 2)},
            softcap=3.0,
        ),
        MANY,
    )


class Both(KernelAlone):
    """What another module holds of a call and its gradient, held of kernels on warpgroups."""

    queries = dim = 64

    def prove(self, case: Case, dtype: Any) -> None:
        if dtype in NARROW:
            with asked_for():
                super().prove(case, dtype)


class TestSequencesLongerThanTheirMasks(Both, LongerThanTheirMasks):
    """Of sequences that mask, bias or block_mask are too short for."""


class TestNothingIsReadPastASequence(Both, NothingIsReadPastASequence):
    """Of a bias of packed sequences."""


class TestStartOfPython(Both, StartOfPython):
    """Of numbers and arrays that say where queries start."""


class TestLengthsThatAreNone(Both, LengthsThatAreNone):
    """Of lengths of no batch."""


def clean_bits(change: Callable[[float], None], run: Callable[[], Iterable[np.ndarray]]) -> None:
    """Hold that what `change` fills with a number, or with NaN, is nowhere in what runs."""
    results = []
    for value in (0, np.nan):
        change(value)
        with asked_for(), emulator():
            results.append(run())
    for clean, same in zip(*results, strict=True):
        assert clean.tobytes() == same.tobytes()
        assert np.isfinite(clean.astype(np.float32)).all()


class TestBeyondTheLengths(KernelAlone):
    """What lies there does not count: nobody filled that cache, and NaN times 0 is NaN."""

    op = "attention_forward"
    cases = (Case("in the middle of a tile, and at its end"),)
    lengths = np.array([70, 256])

    def prove(self, case: Case, dtype: Any) -> None:
        if dtype not in NARROW:
            return
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((2, n, 2, 64)).astype(dtype) for n in (64, 300, 300))

        def fill(value: float) -> None:
            for beyond in (k, v):
                for batch, length in enumerate(self.lengths):
                    beyond[batch, length:] = value

        fill(0)
        clean_bits(fill, self.computed(q, k, v))

    def computed(self, *arrays: np.ndarray) -> Callable[[], Iterable[np.ndarray]]:
        """Return what runs the kernel."""
        return lambda: attention_forward(*arrays, key_lengths=self.lengths)


class TestTilesAreLeftOut(KernelAlone):
    """TMA brings no tile that a window hides, and every other one once."""

    op = "attention_forward"
    cases = (Case("narrow window"),)
    tokens, reach, dim = 384, 8, 64

    def prove(self, case: Case, dtype: Any) -> None:
        if dtype == NARROW[0]:
            arrays = np.random.default_rng(0).standard_normal((3, 1, self.tokens, 1, self.dim))
            self.judge(*arrays.astype(dtype))

    def judge(self, *arrays: np.ndarray) -> None:
        """Raise where a launch brings another number of bytes than the window says."""
        with asked_for():
            brought = self.brought(lambda: attention_forward(*arrays, **self.hidden()))
        assert brought == self.bytes_of(TABLE[self.dim], 1)

    def hidden(self) -> dict[str, Any]:
        return {"window": (self.reach, self.reach), "query_start": 0}

    def brought(self, call: Callable[[], Any]) -> int:
        with counted() as traffic, emulator():
            call()
        reads = (x for x in traffic if x.space == "global" and not x.write)
        return sum(x.bytes for x in reads if "jobs.cuh" in x.where)

    def bytes_of(self, own: Warpgroups, pairs: int) -> int:
        """Return those of so many arrays of own rows, and of two of rows that pass by."""
        near = sum(
            own.tile
            for first in range(0, self.tokens, own.rows)
            for row in range(0, self.tokens, own.tile)
            if first - self.reach < row + own.tile and row < first + own.rows + self.reach
        )
        return (pairs * self.tokens + 2 * near) * self.dim * 2


@pytest.mark.slow
@pytest.mark.parametrize("processors", [1, 2])
@pytest.mark.parametrize("number", [1, 3])
def test_random_schedules(number: int, processors: int) -> None:
    """Whatever order threads, blocks and copies run in: equal bits on two random schedules."""
    case, dtype = TestForward.cases[number], NARROW[processors % 2]
    run = on_schedules(processors, processors + 2, processors=processors)
    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["forward"])


@pytest.mark.slow
def test_every_length() -> None:
    """Around each edge of a tile, of queries and of keys; one compilation serves all."""
    edges = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]
    rng = np.random.default_rng(0)
    for number, keys in enumerate(edges):
        queries = max(64, edges[number * 5 % len(edges)])
        sizes = {"queries": queries, "keys": keys, "dim": 64, "value_dim": 64}
        lengths = {"key_lengths": rng.integers(0, keys + 1, 2)}
        case = Case("", **GROUPED | {"heads": 2} | sizes, arrays=lengths, causal=True)
        call = case.draw(OPS["attention_forward"], BFLOAT16)
        with emulator(check=False, processors=3):
            actual = outputs_of(call)
        within_rule(outputs_of(call), outputs_of(call.cast(np.float64)), actual)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 3 * 130 * 128 * 2])
def test_heads_take_turns_in_l2(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of heads, the last one smaller, whoever runs which job: the same bits."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, n, heads, 64)).astype(np.float16) for n, heads in GROUPS)
    results = []
    for bytes_of_l2, processors in ((1 << 30, 1), (room, 3)):
        monkeypatch.setattr(_warpgroups, "L2", bytes_of_l2)
        OPS["attention_forward"].routes.clear()
        with emulator(check=False, processors=processors):
            results.append(attention_forward(q, k, k, causal=True))
    for first, second in zip(*results, strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("offsets", NO_OFFSETS)
def test_offsets_that_are_none_are_not_followed(offsets: list[int]) -> None:
    """On a GPU nobody reads them first: no access leaves the arrays."""
    q, k = np.random.default_rng(0).standard_normal((2, 150, 2, 64)).astype(np.float16)
    both = np.array(offsets), np.array(offsets[::-1])
    with emulator():
        out, lse = launched("attention_varlen_forward", q, k, k, *both, causal=True)
        launched("attention_varlen_backward", q, q, k, k, *both, out, lse, causal=True)


@pytest.mark.slow
def test_keys_of_a_longer_cache_are_read_where_they_lie() -> None:
    rng = np.random.default_rng(0)
    q, cache = (rng.standard_normal((2, n, 2, 64)).astype(np.float16) for n in (64, 200))
    with emulator():
        actual = attention_forward(q, cache[:, 20:150], cache[:, 30:160], causal=True)
        packed = attention_forward(q, cache[:, 20:150].copy(), cache[:, 30:160].copy(), causal=True)
    for first, second in zip(actual, packed, strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.slow
def test_columns_of_a_product_are_read_where_they_lie() -> None:
    with emulator():
        assert_columns_are_read_where_they_lie(np.float16, 64)


@pytest.mark.parametrize("one_pass", [False, True])
def test_the_counter_of_jobs_is_zero_after_a_launch(
    one_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream keeps it: the next launch finds what this one leaves."""
    counter, launches = np.zeros(1, np.uint32), []

    def kept(count: int, like: Any) -> np.ndarray:
        launches.append(count)
        return counter

    monkeypatch.setattr(_hopper, "counters", kept)
    monkeypatch.setattr(_backward_hopper, "counters", kept)
    monkeypatch.setattr(_backward_hopper, "one_pass", one_pass)
    q = np.random.default_rng(0).standard_normal((1, 200, 2, 64)).astype(np.float16)
    with emulator(processors=3):
        out, lse = attention_forward(q, q, q, causal=True)
        assert counter == 0
        launched("attention_backward", q, q, q, q, out, lse, causal=True)
    assert counter == 0
    assert launches == [1] * (2 if one_pass else 3)


@pytest.mark.parametrize("table", [TABLE, CHANGED])
def test_blocks_fit_an_sm(table: Any) -> None:
    """Shared memory; registers of all warpgroups, handed out by 8; a box of at most 256 rows."""
    *_, shared, _ = LIMITS["90"]
    for width, own in table.items():
        assert own.bytes(width, width) <= shared
        assert own.registers % 8 == own.producer % 8 == 0
        registers = 65536 // own.threads // 8 * 8  # of a thread, when a block starts
        assert own.producer <= registers <= own.registers
        assert own.consumers * own.registers + own.producer <= registers * (own.consumers + 1)
        assert max(own.rows, own.tile) <= 256
    assert all(128 % own.rows == 128 % own.tile == 0 for own in CHANGED.values())


@pytest.mark.slow
def test_a_grid_is_no_wider_than_its_jobs() -> None:
    q = np.ones((1, 64, 1, 64), np.float16)
    with using(Emulator(processors=132)):
        out, lse = attention_forward(q, q, q)
    assert np.array_equal(out, q)
    assert np.allclose(lse, 8 + np.log(64))


def test_calls_that_the_other_kernel_takes() -> None:
    """What would spill beside sums of wide heads; an old compiler, of which the log tells once."""

    def kernel(dim: int, maps: bool = True, **options: Any) -> str:
        with gpu("90") as machine:
            if not maps:
                monkeypatch.setattr(tensor_map, "available", lambda like: False)
            q = machine.array((1, 64, 2, dim), "bfloat16")
            for name in {"alibi", "bias"} & {*options}:
                options[name] = machine.array(options[name], "float32")
            attention_forward(q, q, q, **options)
            return machine.launches[0].kernel

    new, old = "attention_forward_sm90", "attention_forward"
    with TestCase().assertNoLogs("unsloth_cupy"):
        assert kernel(192, softcap=3.0, alibi=(2,), window=(9, 9)) == new
        assert kernel(200, softcap=3.0, causal=True) == kernel(256, alibi=(2,)) == new
        assert kernel(200, softcap=3.0, alibi=(2,)) == old
        assert kernel(200, softcap=3.0, window=(9, 0)) == old
        assert kernel(200, bias=(1, 2, 64, 64)) == kernel(64, dropout=0.5, seed=1) == old
    with pytest.MonkeyPatch.context() as monkeypatch, TestCase().assertLogs("unsloth_cupy") as log:
        tensor_map._warn_once.cache_clear()
        assert kernel(64, maps=False) == kernel(72, maps=False) == old
    (record,) = log.records
    assert "they need NVRTC 12.9 or newer" in record.getMessage()
