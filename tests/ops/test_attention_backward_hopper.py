"""The backward kernel of Hopper against the definition, which test_attention.py proves."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    attention_backward,
    attention_forward,
    attention_varlen_backward,
    attention_varlen_forward,
)
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.op import OPS
from unsloth_cupy.ops.attention import _backward_hopper, _warpgroups
from unsloth_cupy.ops.attention._backward import PADDING
from unsloth_cupy.ops.attention._backward_hopper import CHANGED, ONE_PASS, TABLE

from ..harness.parity import (
    Case,
    KernelAlone,
    _compare_kernels,
    _seeds,
    emulator,
    on_schedules,
    outputs_of,
    within_rule,
)
from ..machines.stand_in import LIMITS, gpu
from .attention_cases import GROUPED, some_sinks, tiles
from .test_attention_hopper import (
    APART,
    GROUPS,
    LONG,
    MANY,
    NARROW,
    PAIR,
    SMALL,
    OnWarpgroups,
    _asked_for,
    asked_for,
    clean_bits,
    common_cases,
)
from .test_attention_hopper import TestBeyondTheLengths as BeyondTheLengths
from .test_attention_hopper import TestTilesAreLeftOut as TilesAreLeftOut

__all__ = ["_asked_for"]
KERNEL = "attention_backward_sm90"
TURNS = (130, 2), (260, 2)  # tokens and heads of queries, of keys
SUMS = {"attention_sum", "attention_bias"}  # of what is broadcast


@contextmanager
def launches(one: bool) -> Iterator[None]:
    """Let the backward pass be one launch where it can be, or two."""
    with asked_for(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backward_hopper, "one_pass", one)
        yield


@pytest.fixture(autouse=True)
def _two_launches() -> Iterator[None]:
    with launches(one=False):
        yield


class BackOnWarpgroups(OnWarpgroups):
    """What a GPU of sm_90 runs on warpgroups, several jobs a block."""

    sides, context = ("backward",), staticmethod(partial(launches, one=False))

    def test_it_is_the_kernel_of_warpgroups(self, case: Case) -> None:
        call = case.draw(OPS[self.op], BFLOAT16)
        actual = outputs_of(call)
        back = call.backward(actual, _seeds(call.op, actual, np.random.default_rng(1)))
        with gpu("90") as machine:
            back.mapped(lambda array: array if array is None else machine.place(array)).run()
            names = {launch.kernel for launch in machine.launches}
        assert KERNEL in names
        assert "attention_backward" not in names


class InOnePass(BackOnWarpgroups):
    """What one launch does, of blocks side by side that wait for each other's turns."""

    context = staticmethod(partial(launches, one=True))
    machine = {"processors": 3, "together": 3}  # noqa: RUF012

    def test_it_is_the_kernel_of_warpgroups(self, case: Case) -> None:
        with launches(one=True), gpu("90") as machine:
            call = case.draw(OPS[self.op], BFLOAT16)
            actual = outputs_of(call)
            back = call.backward(actual, _seeds(call.op, actual, np.random.default_rng(1)))
            back.mapped(lambda array: array if array is None else machine.place(array)).run()
            names = [launch.kernel for launch in machine.launches]
        assert names[:3] == ["attention_delta", KERNEL, "attention_dq_sm90"]

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_emulated_kernels(self, case: Case, dtype: Any) -> None:
        """Cases take turns at dtypes: the same code multiplies both."""
        if dtype == NARROW[self.cases.index(case) % 2]:
            super().test_emulated_kernels(case, dtype)


def normal(*shape: int) -> Any:
    return lambda rng: rng.standard_normal(shape)


class TestBackward(BackOnWarpgroups):
    cases = common_cases(
        (96, 104),
        Case(
            "full, rings that come round",
            **PAIR | {"heads": 1},
            queries=300,
            keys=650,
            dim=128,
            value_dim=128,
        ),
        Case("wide", **PAIR, queries=65, keys=150, dim=192, value_dim=136, causal=True),
        Case("wide, capped", **PAIR, queries=64, keys=70, dim=136, value_dim=64, softcap=3.0),
        Case("by query", **SMALL, arrays={"bias": normal(2, 1, 70, 1)}, window=(9, 9)),
    )


class TestPacked(BackOnWarpgroups):
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
            arrays=APART | {"block_mask": tiles(3, 4, 2, 2), "bias": normal(3, 4, 1, 200)},
            softcap=3.0,
        ),
    )


class TestOnePass(InOnePass):
    cases = (
        Case("full, three stages", **PAIR, queries=80, keys=260, dim=128, value_dim=128),
        Case(
            "causal",
            **GROUPED
            | {"batch": 1, "heads": 2, "queries": 130, "keys": 260, "dim": 64, "value_dim": 64},
            causal=True,
        ),
        Case("window", **SMALL | {"batch": 1, "queries": 130, "keys": 140}, window=(30, 9)),
        Case(
            "lengths and a sink, panels that are not full",
            **GROUPED | {"queries": 64, "keys": 140, "dim": 96, "value_dim": 104},
            arrays={"key_lengths": [140, 97], "sinks": some_sinks},
        ),
        Case("no key but a sink", **SMALL, arrays={"key_lengths": [0, 64], "sinks": some_sinks}),
        Case("starts", **SMALL, window=(20, None), causal=True, arrays={"query_start": [60, -5]}),
    )


class TestPackedInOnePass(InOnePass):
    """Sequences end to end, of which some have no queries."""

    op = "attention_varlen_forward"
    cases = (TestPacked.cases[0], MANY)


class TestBeyondTheLengths(BeyondTheLengths):
    """The same of gradients."""

    def prove(self, case: Case, dtype: Any) -> None:
        for one in (False, True):
            with launches(one):
                super().prove(case, dtype)

    def computed(self, *arrays: np.ndarray) -> Callable[[], Iterable[np.ndarray]]:
        q, k, v = arrays
        lengths = {"key_lengths": self.lengths}
        out, lse = attention_forward(q, k, v, **lengths)
        return lambda: attention_backward(out, q, k, v, out, lse, **lengths)[:3]


class TestTilesAreLeftOut(TilesAreLeftOut):
    """The same of gradients: what owns keys, what owns queries, and both in one pass."""

    tokens = 256

    def judge(self, *arrays: np.ndarray) -> None:
        inputs, (by_key, by_query, _) = self.hidden(), CHANGED[self.dim]
        for one, own in ((False, (by_key, by_query)), (True, (ONE_PASS[self.dim],))):
            inputs |= {"softcap": None if one else 9.0}  # narrow tiles
            made = attention_forward(*arrays, **inputs)
            back = partial(attention_backward, made[0], *arrays, *made, **inputs)
            with launches(one):
                assert self.brought(back) == sum(self.bytes_of(each, 2) for each in own)


class TestBetweenSequences(KernelAlone):
    """Nor do the neighbours: what one sequence overflows to stays in it."""

    op = "attention_varlen_forward"
    cases = (Case("queries and keys in the middle of a tile"),)

    def prove(self, case: Case, dtype: Any) -> None:
        if dtype not in NARROW:
            return
        rng = np.random.default_rng(0)
        draw = lambda n: rng.standard_normal((n, 2, 64)).astype(dtype)  # noqa: E731
        q, k, v, dout = (draw(n) for n in (150, 200, 200, 150))
        inputs = np.array([0, 70, 150]), np.array([0, 90, 200])
        out, lse = attention_varlen_forward(q, k, v, *inputs)

        def fill(value: float) -> None:
            for other, first in ((q, 70), (dout, 70), (k, 90), (v, 90)):
                other[first:] = value

        def run() -> tuple[np.ndarray, ...]:
            gradients = attention_varlen_backward(dout, q, k, v, *inputs, out, lse)
            return gradients[0][:70], gradients[1][:90], gradients[2][:90]

        for one in (False, True):
            with launches(one):
                clean_bits(fill, run)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "processors"), [(1, 1), (3, 2)])
def test_random_schedules(number: int, processors: int) -> None:
    """Whatever order threads, blocks and copies run in: equal bits on two random schedules."""
    case, dtype = TestBackward.cases[number], NARROW[processors % 2]
    run = on_schedules(processors, processors + 2, processors=processors)
    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["backward"])


@pytest.mark.slow
@pytest.mark.parametrize("one", [False, True])
def test_every_length(one: bool) -> None:
    """Around each edge of a tile, of queries and of keys; one compilation serves all."""
    edges = [64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257]
    rng = np.random.default_rng(0)
    for number, keys in enumerate(edges):
        queries = edges[number * 5 % len(edges)]
        sizes = {"queries": queries, "keys": keys, "dim": 64, "value_dim": 64}
        lengths = {"key_lengths": rng.integers(0, keys + 1, 2)}
        case = Case("", **GROUPED | {"heads": 2} | sizes, arrays=lengths, causal=True)
        call = case.draw(OPS["attention_forward"], BFLOAT16)
        made = outputs_of(call)
        seeds = _seeds(call.op, made, rng)
        back, wide = call.backward(made, seeds), call.cast(np.float64)
        exact = wide.backward(outputs_of(wide), {n: a.astype(np.float64) for n, a in seeds.items()})
        with launches(one), emulator(check=False, processors=3, together=1 + 2 * one):
            actual = outputs_of(back)
        within_rule(outputs_of(back), outputs_of(exact), actual)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_turns_give_equal_bits(causal: bool) -> None:
    """Whoever runs which job, in whatever order, beside whom: also of other heads."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, heads, 64)).astype(np.float16) for n, heads in TURNS)
    out, lse = attention_forward(q, k, k, causal=causal)
    results = []
    for seed, together in ((0, 1), (1, 5), (0, 8)):
        machine = {"seed": seed, "processors": together, "together": together}
        with launches(one=True), emulator(**machine, check=False):
            results.append(attention_backward(out, q, k, k, out, lse, causal=causal)[:3])
    for first, *others in zip(*results, strict=True):
        assert {each.tobytes() for each in others} == {first.tobytes()}


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 3 * 130 * 128 * 2])
def test_heads_take_turns_in_l2(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of heads, the last one smaller, whoever runs which job: the same bits."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, n, heads, 64)).astype(np.float16) for n, heads in GROUPS)
    out, lse = attention_forward(q, k, k, causal=True)
    results = []
    for bytes_of_l2, processors in ((1 << 30, 1), (room, 3)):
        monkeypatch.setattr(_warpgroups, "L2", bytes_of_l2)
        OPS["attention_backward"].routes.clear()
        with emulator(check=False, processors=processors):
            results.append(attention_backward(out, q, k, k, out, lse, causal=True)[:3])
    for first, second in zip(*results, strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("table", [TABLE, CHANGED, {n: (own,) for n, own in ONE_PASS.items()}])
def test_blocks_fit_an_sm(table: Any) -> None:
    """Shared memory; registers of warpgroups, handed out by 8; tiles that stats are padded to."""
    *_, shared, _ = LIMITS["90"]
    for width, chosen in table.items():
        for own in filter(None, chosen):
            assert own.bytes(width, width) <= shared
            assert own.registers % 8 == own.producer % 8 == 0
            registers = 65536 // own.threads // 8 * 8  # of a thread, when a block starts
            assert own.producer <= registers <= own.registers
            assert own.consumers * own.registers + own.producer <= registers * (own.consumers + 1)
            assert max(own.rows, own.tile) <= 256
        assert PADDING % chosen[0].tile == 0
    assert all(128 % own.rows == 128 % own.tile == 0 for own in chain(*CHANGED.values()) if own)


def test_calls_that_the_other_kernel_takes() -> None:
    """Few keys, wide heads, what needs registers of wide heads: the launch says so by itself."""

    def kernels(keys: int, dim: int, **options: Any) -> set[str]:
        with gpu("90") as machine:
            q, k = (machine.array((1, n, 2, dim), "bfloat16") for n in (128, keys))
            for name in {"alibi", "bias"} & {*options}:
                options[name] = machine.array(options[name], "float32")
            out, lse = attention_forward(q, k, k, **options)
            machine.launches.clear()
            attention_backward(out, q, k, k, out, lse, **options)
            return {x.kernel for x in machine.launches} - {"attention_delta"}

    assert kernels(64, 64) == kernels(64, 192) == kernels(64, 128, softcap=3.0) == {KERNEL}
    assert kernels(64, 136, softcap=3.0, window=(9, None)) == {KERNEL}
    assert kernels(64, 192, alibi=(2,)) - SUMS == {KERNEL}
    others = kernels(63, 64), kernels(64, 200), kernels(64, 136, softcap=3.0, alibi=(2,)) - SUMS
    assert others == ({"attention_backward"},) * 3
    assert kernels(64, 136, bias=(1, 2, 128, 64)) - SUMS == {"attention_backward"}
