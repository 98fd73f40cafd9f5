"""The kernels of attention_backward against its definition, which test_attention.py proves.

A sample of the pairs of options runs; ``--sample all`` runs them all.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from unsloth_cupy import attention_backward, attention_forward
from unsloth_cupy.bench.cases import Call
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import Limits, using
from unsloth_cupy.ops.attention._backward import workspace
from unsloth_cupy.ops.attention._backward_tiles import KEYS, PAIRS, QUERIES, resolve
from unsloth_cupy.ops.attention._options import ANY, CAUSAL, HIDING

from ..harness.parity import (
    Arrays,
    Case,
    KernelAlone,
    KernelParity,
    _equal_bits,
    _seeds,
    emulator,
    outputs_of,
    within_rule,
)
from ..harness.sampling import Sample
from ..machines.cuda_on_cpu.traffic import counted
from ..machines.stand_in import LIMITS
from .attention_cases import (
    BUDGETS,
    GROUPED,
    KB,
    assert_columns_are_read_where_they_lie,
    hides,
    option_cases,
    tiles,
    worst_gradients,
)

# The public names, as other people's programs call them.
PUBLIC = (
    "attention_backward(dout, q, k, v, out, lse, *, causal=False, window=None, scale=None, "
    "softcap=None, mask=None, bias=None, alibi=None, sinks=None, key_lengths=None, "
    "query_start=None, block_mask=None, dropout=0.0, seed=None)",
)

SMALL = GROUPED | {"queries": 21, "keys": 45, "dim": 8, "value_dim": 16}
ALONE = {"batch": 1, "heads": 1, "kv_heads": 1, "dim": 8, "value_dim": 8}


def normal(*shape: int) -> Any:
    return lambda rng: rng.standard_normal(shape)


class TestAttentionBackward(KernelParity):
    op = "attention_forward"
    sides = ("backward",)
    test_gradient_matches_finite_differences = None  # test_attention.py proves the definition
    test_rounds_once = test_any_strides = None
    cases = (
        Case(
            "causal",
            **GROUPED | {"queries": 37, "keys": 70, "dim": 40, "value_dim": 24},
            causal=True,
        ),
        Case("several blocks", **ALONE | {"heads": 2}, queries=150, keys=140, causal=True),
        Case("window", **ALONE | {"value_dim": 40}, queries=150, keys=170, window=(20, 9)),
        Case("left window", **SMALL, window=(9, None), scale=0.0, arrays={"query_start": 3}),
        Case("rows of 16 chunks", **ALONE | {"dim": 128, "value_dim": 72}, queries=20, keys=40),
        Case("rows of 32 chunks", **ALONE | {"dim": 72, "value_dim": 256}, queries=20, keys=20),
        Case("no key but a sink", **SMALL, given=["sinks"], arrays={"key_lengths": [0, 40]}),
        Case("softcap", **SMALL, softcap=2.0, scale=-0.4, arrays={"query_start": [20, -5]}),
        Case("no key for a query", **SMALL, arrays={"mask": np.arange(21)[:, None] != [5] * 45}),
        Case("bias by key", **SMALL, arrays={"bias": hides(45), "mask": tiles(45)}),
        Case("bias by query", **SMALL, arrays={"bias": normal(2, 1, 21, 1)}, window=(9, 9)),
        Case("one bias", **SMALL, arrays={"bias": normal(1)}, softcap=3.0),
        Case("bias of all batches", **SMALL, arrays={"bias": normal(4, 21, 45)}, causal=True),
        Case("bias of all heads", **SMALL, arrays={"bias": normal(2, 1, 21, 45)}, window=(9, 2)),
        Case(
            "tiles",
            **ALONE | {"heads": 4, "kv_heads": 2, "queries": 140, "keys": 300},
            arrays={"block_mask": [[[[True, False, True], [False, True, False]]]]},
            causal=True,
        ),
        *option_cases(SMALL),
    )


class TestOneStage(KernelParity):
    """Where a block has 48 KB, a tile is loaded when the one before is done with."""

    op, sides, machine = "attention_forward", ("backward",), {"shared_memory": 48 * KB}
    test_gradient_matches_finite_differences = None
    test_rounds_once = test_any_strides = None
    cases = (
        Case("dim 128", **ALONE | {"dim": 128, "value_dim": 104}, queries=40, keys=45),
        Case("dim 256", **ALONE | {"dim": 256, "value_dim": 200}, queries=20, keys=20, causal=True),
    )


class TestTilesAreLeftOut(KernelAlone):
    """No block loads a tile that its window hides, and no warp of it reads one."""

    op = "attention_forward"
    cases = (Case("narrow window"),)

    def prove(self, case: Case, dtype: Any) -> None:
        tokens, reach = 256, 8
        chosen = resolve(dtype.itemsize, 8, 8, ANY, Limits(90, 227 * KB))
        assert chosen is not None
        rng = np.random.default_rng(0)
        q, k, dout = (rng.standard_normal((1, tokens, 1, 8)).astype(dtype) for _ in range(3))
        bias = np.zeros((tokens, tokens), dtype)

        def traffic(window: int, **options: Any) -> np.ndarray:
            options |= {"window": (window, window), "query_start": 0, "softcap": 9.0}
            made = attention_forward(q, k, k, **options)
            with counted() as requests, emulator():
                attention_backward(dout, q, k, k, *made, **options)
            return np.array([requests.of("shared", write=w).bytes for w in (False, True)])

        def near(rows: int, others: int) -> int:
            return sum(
                row - reach <= other + others - 1 and other <= row + rows - 1 + reach
                for row in range(0, tokens, rows)
                for other in range(0, tokens, others)
            )

        pair = 2 * 16 * dtype.itemsize  # bytes of a row of x and of y
        by_key, by_query, by_pair = chosen
        assert by_key.warp_tiles == by_query.warp_tiles  # their shares of the reads are alike
        assert by_key.tile == by_query.tile
        read, written = traffic(reach)
        every, _ = traffic(tokens)
        height, width = 16 * by_key.warp_tiles, by_key.tile
        assert read * (tokens // height) * (tokens // width) == every * near(height, width)
        assert written == pair * sum(
            tokens + near(own.rows, own.tile) * own.tile for own in (by_key, by_query)
        )
        # what the kernel of pairs adds
        in_reach, all_pairs = traffic(reach, bias=bias), traffic(tokens, bias=bias)
        visited, blocks = (
            near(by_pair.rows, by_pair.tile),
            (tokens // by_pair.rows) * (tokens // by_pair.tile),
        )
        assert (in_reach[0] - read) * blocks == (all_pairs[0] - every) * visited
        assert in_reach[1] - written == visited * (by_pair.rows + by_pair.tile) * pair


class TestRoundedLse(KernelAlone):
    """An lse that is off by some roundings of a score changes no gradient by more than one."""

    op = "attention_forward"
    cases = (
        Case("sinks", **SMALL, given=["sinks"]),
        Case("bias by query", **SMALL, given=["alibi"], arrays={"bias": normal(2, 1, 21, 1)}),
        Case("bias", **SMALL, given=["bias"]),
    )

    def prove(self, case: Case, dtype: Any) -> None:
        call = case.draw(OPS[self.op], dtype)
        wide, plain = call.cast(np.float64), outputs_of(call)
        seeds = _seeds(call.op, plain, np.random.default_rng(0))
        wide_seeds = {name: seed.astype(np.float64) for name, seed in seeds.items()}
        gradients = outputs_of(call.backward(plain, seeds))
        exact = outputs_of(wide.backward(outputs_of(wide), wide_seeds))
        off = plain["lse"] + 2.0**-19 * (1 + np.abs(plain["lse"]))
        turned = call.backward(plain | {"lse": off}, seeds)
        within_rule(gradients, exact, _within(lambda: outputs_of(turned)))


MIDDLE = GROUPED | {"queries": 37, "keys": 70, "dim": 40, "value_dim": 24}
EXACT = (  # how many drawings, by how much q, k and v are larger, and the call
    (12, 1, Case("as they are", **MIDDLE, causal=True)),
    (12, 1, Case("wide", **ALONE | {"heads": 2, "dim": 128, "value_dim": 96}, queries=40, keys=40)),
    (1, 1, Case("long rows", **ALONE, queries=1400, keys=1400)),
    (12, 10, Case("times 10", **MIDDLE, given=["sinks"])),
    (6, 1, Case("options", **MIDDLE, given=["bias", "sinks"], softcap=3.0)),
)


class Drawn(NamedTuple):
    """A call, who rounded its out and lse, and its gradients in float32 and in float64."""

    call: Call
    own: Arrays
    plain: Arrays
    seeds: Arrays
    gradients: Arrays
    exact: Arrays


def times(size: int, case: Case, seed: int) -> Drawn:
    """Draw q, k and v of a case in float32, and multiply them."""
    rng = np.random.default_rng(seed)
    call = case.draw(OPS["attention_forward"], np.dtype("float32"))
    drawn = {n: rng.standard_normal(call.arrays[n].shape, np.float32) for n in "qkv"}
    call = call._replace(arrays=call.arrays | {n: size * a for n, a in drawn.items()})
    wide, own = call.cast(np.float64), _within(lambda: outputs_of(call), check=False)
    plain, seeds = outputs_of(call), _seeds(call.op, own, rng)
    wide_seeds = {name: seed.astype(np.float64) for name, seed in seeds.items()}
    exact = outputs_of(wide.backward(outputs_of(wide), wide_seeds))
    return Drawn(call, own, plain, seeds, outputs_of(call.backward(plain, seeds)), exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawings", "size", "case"), [pytest.param(*e, id=e[2].label) for e in EXACT]
)
def test_float32_loses_no_more_than_the_definition(drawings: int, size: int, case: Case) -> None:
    """Of any drawing, in long rows, and where scores are large and lse is rounded as they are."""
    for seed in range(drawings):
        call, own, plain, seeds, gradients, exact = times(size, case, seed)
        for made in (own, plain):
            turned = call.backward(made, seeds)
            actual = _within(lambda turned=turned: outputs_of(turned), check=False)
            allowed = gradients
            if made is plain and size > 1:
                allowed = worst_gradients(call, made, seeds, exact) | {"dv": gradients["dv"]}
            within_rule(allowed, exact, actual)


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "keys"), [(5, 70), (5, 300), (37, 70)])
def test_backward_makes_the_scores_of_forward_again(queries: int, keys: int) -> None:
    """Those of few queries too, by one block or several: else rows of ds do not sum to 0."""
    bias = {"bias": normal(2, 1, queries, 1)}
    case = Case("", **MIDDLE | {"queries": queries, "keys": keys}, arrays=bias)
    for seed in range(4):
        call, own, _, seeds, gradients, exact = times(10, case, seed)
        actual = _within(call.backward(own, seeds).run, check=False)
        within_rule(gradients, exact, {"dbias": actual["dbias"]})


# One way to give each option of a call of SMALL.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (11, 5)},
    "scale": {"scale": -0.6},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout": 0.3, "seed": 5},
    "mask": {"given": ["mask"]},
    "bias": {"given": ["bias"]},
    "alibi": {"given": ["alibi"]},
    "sinks": {"given": ["sinks"]},
    "key_lengths": {"arrays": {"key_lengths": [45, 30]}},
    "query_start": {"arrays": {"query_start": [10, 24]}},
    "block_mask": {"arrays": {"block_mask": [[[[True]]], [[[False]]]]}},
}


def together(*names: str, **sizes: int) -> Case:
    """Return the case of some options together."""
    merged: dict[str, Any] = {"given": [], "arrays": {}}
    for name in names:
        for key, value in OPTIONS[name].items():
            both = {"given": list.__add__, "arrays": dict.__or__}.get(key)
            merged[key] = both(merged[key], value) if both else value
    return Case(" and ".join(names), **SMALL | sizes, **merged)


COUPLES = list(enumerate(itertools.combinations(OPTIONS, 2)))


@pytest.mark.parametrize(("number", "names"), Sample.one_in(11, COUPLES), ids=str)
def test_two_options_together(number: int, names: tuple[str, str]) -> None:
    _prove(together(*names), KERNEL_DTYPES[number % 3])


@pytest.mark.parametrize("seed", Sample.one_in(10, range(40)))
def test_some_options_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [name for name in OPTIONS if rng.random() < 0.5]
    kv_heads, group = (int(n) for n in rng.integers(1, 3, 2))
    sizes = {"kv_heads": kv_heads, "heads": kv_heads * group, "queries": int(rng.integers(1, 80))}
    if "key_lengths" not in names:
        sizes["keys"] = int(rng.integers(1, 80))
    sizes |= {name: 8 * int(rng.integers(1, 6)) for name in ("dim", "value_dim")}
    case = together(*(name for name in names if name != "block_mask"), **sizes)
    _prove(case, KERNEL_DTYPES[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, -1])
def test_equal_bits_on_random_schedules(number: int) -> None:
    """Whatever order threads and blocks run in."""
    case, op = TestAttentionBackward.cases[number], OPS["attention_forward"]
    call = case.draw(op, KERNEL_DTYPES[number])
    made = outputs_of(call)
    backward = call.backward(made, _seeds(op, made, np.random.default_rng(1)))
    first, *others = (_within(lambda: outputs_of(backward), seed=seed) for seed in range(4))
    for other in others:
        _equal_bits(first, other)


def _prove(case: Case, dtype: Any, **how: Any) -> None:
    """Judge gradients by what the definition loses in any order of columns, not by one's luck.

    lse is rounded, so that rows of ds do not sum to 0, and a sum over them shows it: dalibi.
    """
    call = case.draw(OPS["attention_forward"], dtype)
    wide, made = call.cast(np.float64), outputs_of(call)
    seeds = _seeds(call.op, made, np.random.default_rng(1))
    wide_seeds = {name: seed.astype(np.float64) for name, seed in seeds.items()}
    exact = outputs_of(wide.backward(outputs_of(wide), wide_seeds))
    turned = call.backward(made, seeds)
    allowed = worst_gradients(call, made, seeds, exact) | {"dv": outputs_of(turned)["dv"]}
    first, second = (_within(lambda: outputs_of(turned), **how) for _ in range(2))
    within_rule(allowed, exact, first)
    _equal_bits(first, second)


def _within(function: Any, **how: Any) -> Any:
    with emulator():
        from ..machines.cuda_on_cpu import Emulator

        with using(Emulator(**how)):
            return function()


ARCHITECTURES = {int(arch): limits[3] for arch, limits in LIMITS.items()}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("architecture", "itemsize", "width"), KEYS)
def test_tiles_fit_every_budget(architecture: int, itemsize: int, width: int, budget: int) -> None:
    """Every head dim has tiles in every budget, and those match the tiles of block_mask."""
    there = Limits(architecture, budget)
    for dim, options in itertools.product(range(8, width + 1, 8), (CAUSAL, HIDING, ANY)):
        chosen = resolve(itemsize, dim, width, options, there)
        assert chosen is not None
        for table in chosen:
            assert table.options >= options
            assert table.blocks * table.bytes(itemsize, dim, width) <= budget
            assert 128 % table.rows == 0  # one row of block_mask, or one column
            assert 128 % table.tile == 0


def test_every_row_of_the_tables_is_taken() -> None:
    """By an architecture, a budget or options."""
    for number, table in enumerate((KEYS, QUERIES, PAIRS)):
        taken = set()
        for (_, itemsize, width), (architecture, room) in itertools.product(
            table, ARCHITECTURES.items()
        ):
            for budget, options in itertools.product((*BUDGETS, room), (CAUSAL, HIDING, ANY)):
                chosen = resolve(itemsize, width, width, options, Limits(architecture, budget))
                assert chosen is not None
                taken.add((itemsize, width, chosen[number]))
        assert {(*key[1:], tiles) for key, several in table.items() for tiles in several} <= taken


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"given": ["bias"]}, {"causal": True}], ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:], ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
def test_kernels_of_every_budget(budget: int, dtype: Any, options: dict[str, Any]) -> None:
    case = Case("", **ALONE | {"dim": 128, "value_dim": 96}, queries=40, keys=45, **options)
    _prove(case, dtype, check=False, shared_memory=budget)


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def gradients(dout: np.ndarray, *qkv: np.ndarray, **options: Any) -> Any:
    def both() -> Any:
        return attention_backward(dout, *qkv, *attention_forward(*qkv, **options), **options)

    return _within(both)


@pytest.mark.slow
def test_keys_beyond_lengths_and_future_keys_do_not_reach_back() -> None:
    """NaN beyond the lengths stays there; other future keys leave the bits of dq alone."""
    dout, q, k, v = drawn((2, 90, 2, 64), (2, 90, 2, 64), (2, 90, 1, 64), (2, 90, 1, 64))
    options: dict[str, Any] = {"key_lengths": np.array([90, 61]), "query_start": 0, "causal": True}
    before = gradients(dout, q, k, v, **options)[:3]
    k[1, 61:], v[1, 61:] = np.nan, np.inf
    k[0, 40:], v[0, 40:] = 9 * k[0, 40:], -7
    after = gradients(dout, q, k, v, **options)[:3]
    for actual, same in zip(after, before, strict=True):
        assert actual[1].tobytes() == same[1].tobytes()
    assert after[0][0, :40].tobytes() == before[0][0, :40].tobytes()
    assert (after[0][0, 40:] != before[0][0, 40:]).reshape(50, -1).any(axis=1).all()
    assert not after[1][1, 61:].any()
    assert not after[2][1, 61:].any()


@pytest.mark.slow
def test_workspace_is_what_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array that the launch makes is a result or part of the workspace."""
    from unsloth_cupy.ops.attention import _backward as launch

    made: list[np.ndarray] = []

    def empty(*args: Any, **options: Any) -> Any:
        made.append(allocate(*args, **options))
        return made[-1]

    allocate = launch.empty
    monkeypatch.setattr(launch, "empty", empty)
    dout, q, k, v = drawn((2, 7, 4, 8), (2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    for bias, alibi in (((4, 1, 9), None), ((7, 1), (2, 4))):
        options = {
            name: np.ones(shape, np.float32)
            for name, shape in (("bias", bias), ("alibi", alibi))
            if shape is not None
        }
        made.clear()
        results = [a for a in gradients(dout, q, k, v, **options) if a is not None]
        beside = [a for a in made if not any(a is result for result in results)]
        planned = workspace(2, 4, 7, 9, 2, bias=options.get("bias"), alibi=options.get("alibi"))
        assert sum(a.nbytes for a in beside) == planned


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_columns_of_a_product_are_read_where_they_lie(dtype: Any) -> None:
    with emulator():
        assert_columns_are_read_where_they_lie(dtype, 16)
