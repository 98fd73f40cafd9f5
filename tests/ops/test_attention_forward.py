"""The kernel of attention_forward against its definition, which test_attention.py proves."""

import asyncio
import itertools
import threading
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    AttentionConfig,
    Tape,
    attention,
    attention_backward,
    attention_forward,
    explain,
    shape,
)
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import Limits, using
from unsloth_cupy.errors import ConfigError, DeviceError, DTypeError, KernelError
from unsloth_cupy.ops.attention import _hopper
from unsloth_cupy.ops.attention._options import ANY, CAUSAL, HIDING
from unsloth_cupy.ops.attention._tiles import FORWARD, OWN, Start, fitting, resolve

from ..harness.parity import (
    Case,
    KernelAlone,
    KernelParity,
    _compare_kernels,
    emulator,
    launched,
    on_schedules,
)
from ..machines.cuda_on_cpu.traffic import counted
from ..machines.stand_in import LIMITS, gpu
from .attention_cases import (
    AFAR,
    BUDGETS,
    GROUPED,
    KB,
    LEFT,
    hides,
    option_cases,
    some_sinks,
    tiles,
)

# The public names, as other people's programs call them.
PUBLIC = (
    "attention_forward(q, k, v, *, causal=False, window=None, scale=None, softcap=None, "
    "mask=None, bias=None, alibi=None, sinks=None, key_lengths=None, query_start=None, "
    "block_mask=None, dropout=0.0, seed=None)",
)

SMALL = GROUPED | {"queries": 21, "keys": 90, "dim": 8, "value_dim": 16}


def large(rng: np.random.Generator) -> np.ndarray:
    return 10 * rng.standard_normal((2, 21, 2, 8))


HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))


class TestAttentionForward(KernelParity):
    op = "attention_forward"
    sizes = (
        *({"queries": n, "dim": dim, "value_dim": value} for dim, value in HEADS for n in (256, 1)),
        {"queries": 256, "dim": 512, "value_dim": 512},  # forward alone
    )
    options = ({}, {"causal": True}, LEFT, {"softcap": 50.0}, {"dropout": 0.1, "seed": 1})
    sides = ("forward",)
    test_gradient_matches_finite_differences = None  # test_attention.py proves the definition
    test_rounds_once = test_any_strides = None
    cases = (
        Case(
            "causal and padded in shared memory",
            **GROUPED | {"queries": 70, "keys": 133, "dim": 40, "value_dim": 64},
            causal=True,
        ),
        Case("full", batch=1, heads=2, kv_heads=1, queries=150, keys=70, dim=64, value_dim=8),
        Case(
            "window, rows of 16 chunks",
            **SMALL | {"batch": 1, "queries": 90, "dim": 128, "value_dim": 128},
            window=(30, 9),
        ),
        Case(
            "rows of 32 chunks",
            **GROUPED | {"queries": 19, "keys": 41, "dim": 256, "value_dim": 200},
            arrays={"key_lengths": [41, 20]},
        ),
        Case(
            "rows of 64 chunks in two slices",
            **GROUPED | {"queries": 19, "keys": 41, "dim": 512, "value_dim": 264},
            causal=True,
        ),
        Case("left window", **SMALL, window=(20, None), scale=0.0, arrays={"query_start": 3}),
        Case("no key but a sink", **SMALL, arrays={"key_lengths": [0, 64], "sinks": some_sinks}),
        Case("large scores", **SMALL | {"heads": 2}, arrays={"q": large}),
        Case("alibi from afar", **SMALL, arrays=AFAR),
        Case("softcap", **SMALL, softcap=2.0, scale=-0.4, arrays={"query_start": [60, -5]}),
        Case("bias and mask by key", **SMALL, arrays={"bias": hides(90), "mask": tiles(90)}),
        Case(
            "tiles",
            **SMALL | {"queries": 140, "keys": 300},
            arrays={"block_mask": [[[[True, False, True], [False, True, False]]]]},
            causal=True,
        ),
        *option_cases(SMALL),
    )


class TestOneStage(KernelParity):
    """Where a block has 99 KB, wide rows leave room for one tile of keys."""

    op, sides, machine = "attention_forward", ("forward",), {"shared_memory": 99 * KB}
    test_gradient_matches_finite_differences = None
    test_rounds_once = test_any_strides = None
    cases = (
        Case(
            "two slices that have 8 columns in common",
            **GROUPED | {"queries": 35, "keys": 41, "dim": 512, "value_dim": 264},
            causal=True,
        ),
    )


class TestStartOfPython(KernelAlone):
    """An int says where all queries start, as an array of it does, or one for each batch."""

    op, queries, dim = "attention_forward", 5, 8
    cases = (Case("causal"),)

    def prove(self, case: Case, dtype: Any) -> None:
        rng = np.random.default_rng(0)
        q, k = (rng.standard_normal((2, n, 2, self.dim)).astype(dtype) for n in (self.queries, 90))
        results = []
        for start in (40, np.array(40), np.array([40, 40])):
            options: dict[str, Any] = {"causal": True, "query_start": start}
            with emulator():
                made = attention_forward(q, k, k, **options)
                results.append([*made, *attention_backward(q, q, k, k, *made, **options)[:3]])
        for each in zip(*results, strict=True):
            assert len({array.tobytes() for array in each}) == 1


class TestLengthsThatAreNone(KernelAlone):
    """On a GPU nobody reads them first: a batch has no fewer keys than 0, and no more than all."""

    op, queries, dim = "attention_forward", 5, 8
    cases = (Case("beyond 32 bits"),)

    def prove(self, case: Case, dtype: Any) -> None:
        rng = np.random.default_rng(0)
        q, k = (rng.standard_normal((2, n, 2, self.dim)).astype(dtype) for n in (self.queries, 90))
        results = []
        for lengths in (np.array([0, 90]), np.array([70 - 2**32, 2**32 + 5])):
            with emulator():
                made = launched("attention_forward", q, k, k, key_lengths=lengths)
                inputs = q, q, k, k, *made
                back = launched("attention_backward", *inputs, key_lengths=lengths)
            results.append([*made, *back[:3]])
        for real, same in zip(*results, strict=True):
            assert real.tobytes() == same.tobytes()
            assert not np.isnan(same.astype(np.float32)).any()


class TestWarpsLeaveTilesOut(KernelAlone):
    """A warp reads no tile that its window hides, though other warps of the block work on it."""

    op = "attention_forward"
    cases = (Case("narrow window"),)

    def prove(self, case: Case, dtype: Any) -> None:
        tiles = resolve(dtype.itemsize, 8, 8, HIDING, Limits(90, 227 * KB))
        assert tiles is not None
        height, width = 16 * tiles.warp_tiles, tiles.keys
        queries = height * tiles.warps
        assert queries > width

        def bytes_read(keys: int, window: int) -> int:
            q, k = np.ones((1, queries, 1, 8), dtype), np.ones((1, keys, 1, 8), dtype)
            with counted() as traffic, emulator():
                attention_forward(q, k, k, window=(window, window), query_start=0)
            return traffic.of("shared", write=False).bytes

        once, all_pairs = bytes_read(width, 999), bytes_read(queries, 999)
        tile = (all_pairs - once) / (queries // width - 1) / tiles.warps
        seen = [
            row - 8 <= key + width - 1 and key <= row + height - 1 + 8
            for row in range(0, queries, height)
            for key in range(0, queries, width)
        ]
        hidden = len(seen) - sum(seen)
        assert hidden
        assert bytes_read(queries, 8) == all_pairs - hidden * tile


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("number", [0, -1])
def test_random_schedules(number: int, seed: int) -> None:
    """Whatever order threads and blocks run in: equal bits on two random schedules."""
    case, dtype = TestAttentionForward.cases[number], KERNEL_DTYPES[(seed - number) % 3]
    run = on_schedules(seed, seed + 2)
    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["forward"])


def _within(function: Any, **how: Any) -> Any:
    with emulator():
        from ..machines.cuda_on_cpu import Emulator

        with using(Emulator(**how)):
            return function()


ARCHITECTURES = [*map(int, LIMITS)]
WIDE = [(512, 512), (8, 264), (320, 24)]  # dim and value_dim


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("architecture", "itemsize", "width"), FORWARD)
def test_tiles_fit_every_budget(architecture: int, itemsize: int, width: int, budget: int) -> None:
    """Every head dim has tiles in every budget, and those match the tiles of block_mask."""
    there = Limits(architecture, budget)
    for dim, options in itertools.product(range(8, width + 1, 8), (CAUSAL, HIDING, ANY)):
        chosen = resolve(itemsize, dim, width, options, there)
        if width > 256 and budget < 64 * KB:
            continue  # 16 rows of 512 float32 and 8 keys fill 56 KB
        assert chosen is not None
        assert chosen.options >= options
        assert chosen.blocks * chosen.bytes(itemsize, dim, width) <= budget
        assert 128 % chosen.keys == 0
        for each in fitting(itemsize, dim, width, HIDING, there):
            assert 128 % each.rows == 0  # one row of block_mask


def test_every_row_of_the_tables_is_taken() -> None:
    """By an architecture, a budget, options, or a config that asks for it."""
    budgets = {int(arch): limits[3] for arch, limits in LIMITS.items()}
    taken = set()
    for architecture, room in budgets.items():
        for _, itemsize, width in FORWARD:
            for budget, options in itertools.product((*BUDGETS, room), (CAUSAL, HIDING, ANY)):
                there = Limits(architecture, budget)
                for start in (None, Start(256, 256)):
                    tiles = resolve(itemsize, width, width, options, there, start)
                    taken.add((itemsize, width, tiles))
    rows = {(key[1], key[2], tiles) for key, several in FORWARD.items() for tiles in several}
    assert rows <= taken
    assert OWN.keys() - {121} <= budgets.keys()  # 121 has the tables of 120
    assert {key[0] for key in FORWARD} <= {80, *itertools.chain(*OWN.values())}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:], ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
def test_kernels_of_every_budget(budget: int, dtype: Any) -> None:
    case = Case("", **GROUPED, queries=70, keys=75, dim=128, value_dim=96, causal=True)
    run = lambda function: _within(function, check=False, shared_memory=budget)  # noqa: E731
    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["forward"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:], ids=str)
@pytest.mark.parametrize(("budget", "dims"), [*zip(BUDGETS[1:], [*WIDE, WIDE[0]], strict=True)])
def test_wide_kernels_of_every_budget(budget: int, dims: tuple[int, int], dtype: Any) -> None:
    """Two stages or one, one slice of the value dim or two, of 8 columns in common or none."""
    dim, value_dim = dims
    case = Case("", **GROUPED, queries=35, keys=41, dim=dim, value_dim=value_dim, causal=True)
    run = lambda function: _within(function, check=False, shared_memory=budget)  # noqa: E731
    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["forward"])


def test_wide_heads_run_their_kernels_forward_alone() -> None:
    """With few queries too; the definition computes their gradients, on a GPU as on a host."""
    with gpu() as machine:
        q, k = (machine.array((1, n, 2, 512), "float16") for n in (40, 60))
        for queries in (40, 3):
            out, lse = attention_forward(q[:, :queries], k, k, causal=True)
        assert [launch.kernel for launch in machine.launches] == ["attention_forward"] * 2
        machine.launches.clear()
        dq, *_ = attention_backward(out, q[:, :3], k, k, out, lse, causal=True)
        assert not machine.launches
        assert dq.shape == (1, 3, 2, 512)


PRESETS = {
    "for_rtx_5080": (120, 99 * KB),
    "for_rtx_3090_ti": (86, 99 * KB),
    "for_datacenter": (90, 227 * KB),
}
SIZES = (16, 32, 64, 128, 256)


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS[1:])
@pytest.mark.parametrize("block", [32, 128, 256, 1024])
def test_a_tile_is_an_upper_limit(block: int, budget: int) -> None:
    """Of queries, keys and threads, on any device; a smaller one takes less memory, or is equal."""
    dims = itertools.product(range(8, 513, 56), repeat=2)
    for architecture, (dim, value_dim) in itertools.product(ARCHITECTURES, dims):
        for dtype, options in itertools.product(("float32", "float16"), (CAUSAL, HIDING, ANY)):
            there, size = (architecture, budget), 4 if dtype == "float32" else 2
            kinds: dict[str, Any] = {"dtype": dtype, "options": options, "value_dim": value_dim}
            before = None
            for tile in SIZES:
                actual = AttentionConfig(tile, block).resolve(there, dim=dim, **kinds)
                used = actual.bytes(size, dim, value_dim)
                assert max(actual.rows, actual.keys) <= tile
                assert actual.threads <= block
                assert actual.blocks * used <= budget
                assert options <= actual.options
                assert before in (None, actual) or before.bytes(size, dim, value_dim) < used
                before = actual


def test_presets_where_they_belong() -> None:
    rows = {
        name: [getattr(AttentionConfig, name)().resolve(there, dim=dim).rows for dim in (64, 128)]
        for name, there in PRESETS.items()
    }
    assert rows == {
        "for_rtx_5080": [128, 128],
        "for_rtx_3090_ti": [64, 64],
        "for_datacenter": [256, 128],  # the sums of 256 rows of 128 columns fill the registers
    }
    for tile in SIZES:
        config = AttentionConfig.for_rtx_5080().with_tile_size(tile)
        tiles = config.resolve((80, 163 * KB), dim=64)
        assert (tiles.rows, tiles.keys) == (tile, min(tile, 64))


def test_two_blocks_of_the_smaller_preset_share_an_sm() -> None:
    for dim, dtype in itertools.product((64, 128), ("float16", "float32")):
        one, two = (
            getattr(AttentionConfig, name)().resolve((86, 99 * KB), dim=dim, dtype=dtype)
            for name in ("for_rtx_5080", "for_rtx_3090_ti")
        )
        assert (one.rows, two.rows, two.threads) == (128, 64, 128)


def test_explain_shows_the_memory_of_a_tile() -> None:
    q = shape((1, 512, 8, 64), "bfloat16")
    seen = []
    for tile in SIZES:
        with AttentionConfig(tile).use():
            seen.append(explain(attention, q, q, q, device="a100").steps[0].launches[0].shared)
    assert seen == sorted(set(seen))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_attention_begins_where_a_config_says(name: str, dtype: Any) -> None:
    dims = dict.fromkeys(("dim", "value_dim"), 128 if "5080" in name else 64)
    case = Case("", **GROUPED, queries=270, keys=275, **dims, causal=True)
    architecture, budget = PRESETS[name]
    config: AttentionConfig = getattr(AttentionConfig, name)()

    def run(function: Any) -> Any:
        with config.use():
            how = {"architecture": architecture, "shared_memory": budget}
            return _within(function, check=False, **how)

    _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["forward"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(("tile", "dim"), [(16, 64), (32, 128), (64, 256), (16, 320)])
def test_tiles_that_are_cut_compute_the_same(tile: int, dim: int, dtype: Any) -> None:
    dims = dict.fromkeys(("dim", "value_dim"), dim)
    for options in ({"causal": True}, {"window": (20, 0)}):
        case = Case("", **GROUPED, queries=70, keys=75, **dims, **options)

        def run(function: Any) -> Any:
            with AttentionConfig(tile).use():
                return _within(function, check=False, architecture=80, shared_memory=163 * KB)

        _compare_kernels(OPS["attention_forward"], case, dtype, run, np.asarray, ["forward"])


def test_a_config_is_asked_for_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> tuple[str, tuple[int, ...]]:
        with gpu("90") as machine:
            q = machine.array((1, 512, 1, 64), "float16")
            attention_forward(q, q, q)
            return machine.launches[0].kernel, machine.launches[0].block

    monkeypatch.setattr(_hopper, "requested", True)  # as without tests
    before = asked()
    other = AttentionConfig(256, warpgroups=False)
    with AttentionConfig(tile=64, block=128).use(), other.use():
        assert asked() == ("attention_forward", (256,))
    with AttentionConfig().use():
        assert asked() == ("attention_forward_sm90", (512,))
    with pytest.raises(ZeroDivisionError), other.use():
        _ = 1 / 0
    assert asked() == before
    assert before[0] == "attention_forward_sm90"


def test_a_config_belongs_to_one_thread_and_task() -> None:
    with gpu("80") as machine:
        q = machine.array((1, 512, 1, 64), "float16")

        def rows() -> int:
            """Return the queries of a block, from the grid of a call that is soon replayed."""
            machine.launches.clear()
            attention_forward(q, q, q)
            return 512 // int(machine.launches[0].grid[0])

        async def task(tile: int) -> list[int]:
            seen = []
            with AttentionConfig(tile).use():
                for _ in range(4):
                    seen.append(rows())
                    await asyncio.sleep(0)
            return [*seen, rows()]

        async def both() -> list[list[int]]:
            return await asyncio.gather(task(32), task(256))

        assert asyncio.run(both()) == [[32] * 4 + [128], [256] * 4 + [128]]
        others: list[int] = []
        thread = threading.Thread(target=lambda: others.extend(rows() for _ in range(3)))
        with AttentionConfig(64).use():
            thread.start()
            thread.join()
            assert (others, rows()) == ([128] * 3, 64)
        assert rows() == 128


def test_configs_left_in_another_order_leave_nothing_behind() -> None:
    first, second = AttentionConfig(64).use(), AttentionConfig(32).use()
    with gpu("80") as machine:
        q = machine.array((1, 512, 1, 64), "float16")

        def rows() -> int:
            machine.launches.clear()
            attention_forward(q, q, q)
            return 512 // int(machine.launches[0].grid[0])

        seen = [rows()]
        for change in (first.__enter__, second.__enter__):
            change()
            seen.append(rows())
        for leave in (first.__exit__, second.__exit__):
            leave(None, None, None)
            seen.append(rows())
    assert seen == [128, 64, 32, 32, 128]


def test_gradients_use_the_config_of_their_forward() -> None:
    with gpu("90") as machine:
        q = machine.array((1, 512, 1, 64), "float16")
        for config, suffix in (
            (AttentionConfig(), "_sm90"),
            (AttentionConfig(warpgroups=False), ""),
        ):
            tape = Tape()
            x = tape.watch(q)
            with config.use():
                y = attention(x, x, x)
            machine.launches.clear()
            tape.gradients(y, [x], q)
            kernels = {launch.kernel for launch in machine.launches}
            assert f"attention_backward{suffix}" in kernels


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        (ConfigError, "tile=8", lambda: AttentionConfig(tile=8)),
        (ConfigError, "head_dim=0", lambda: AttentionConfig(head_dim=0)),
        (ConfigError, "tile=True", lambda: AttentionConfig(tile=True)),
        (ConfigError, "warpgroups=2", lambda: AttentionConfig(warpgroups=2)),  # type: ignore[arg-type]
        (ConfigError, "one_pass=1", lambda: AttentionConfig(warpgroups=True, one_pass=1)),  # type: ignore[arg-type]
        (
            ConfigError,
            "pass AttentionConfig.one_pass=True",
            lambda: AttentionConfig(warpgroups=False, one_pass=True),
        ),
        (ConfigError, "tile=8", lambda: AttentionConfig().with_tile_size(8)),
        (ConfigError, "dtype='int8'", lambda: AttentionConfig().shared_memory_bytes("int8")),
        (ConfigError, "block=1.5", lambda: AttentionConfig(block=1.5)),  # type: ignore[arg-type]
        (ConfigError, "options=3", lambda: AttentionConfig().resolve((90, 1), options=3)),
        (ConfigError, "device=None", lambda: AttentionConfig().resolve(None)),
        (ConfigError, "pass a GPU's number", lambda: AttentionConfig().resolve((86,))),
        (ConfigError, "options=True", lambda: AttentionConfig().resolve((90, 1), options=True)),
        (ConfigError, "pass a GPU's number", lambda: AttentionConfig().resolve(("90", 1))),
        (ConfigError, "dim='64'", lambda: AttentionConfig().resolve((90, 1), dim="64")),  # type: ignore[arg-type]
        (ConfigError, "value_dim=-8", lambda: AttentionConfig().resolve((90, 1), value_dim=-8)),
        (DeviceError, "no such GPU is found", lambda: AttentionConfig().resolve(10**6)),
        (DTypeError, "float64", lambda: AttentionConfig().resolve((90, 1), dtype="float64")),
        (DTypeError, "choose from float16", lambda: AttentionConfig().resolve(0, dtype="half_")),
        (KernelError, "dim=12", lambda: AttentionConfig().resolve((90, 2**18), dim=12)),
        (KernelError, "dim=520", lambda: AttentionConfig().resolve((90, 2**20), dim=520)),
        (KernelError, "shared=1000", lambda: AttentionConfig().resolve((90, 1000))),
        (KernelError, "NumPy", lambda: AttentionConfig().resolve(np.zeros(1))),
    ],
)
def test_configs_that_make_no_sense(error: Any, words: str, make: Any) -> None:
    with pytest.raises(error, match=words):
        make()


def test_shared_memory_of_square_tiles() -> None:
    config = AttentionConfig(tile=128, head_dim=64)
    assert config.shared_memory_bytes() == 164_864
    assert config.shared_memory_bytes("float16") == 82_432
    smaller = config.with_tile_size(64)
    assert (smaller.tile, smaller.head_dim, config.tile) == (64, 64, 128)
    # Each array that a block holds, one by one.
    shapes = [(64, 64)] * 3 + [(64, 64), (64,), (64,)]
    assert smaller.shared_memory_bytes() == sum(np.empty(s, np.float32).nbytes for s in shapes)
    assert AttentionConfig.rtx_5080_preset() == AttentionConfig.for_rtx_5080()
    assert AttentionConfig.rtx_3090ti_preset() == AttentionConfig.for_rtx_3090_ti()
    there = (90, 227 * KB)
    assert AttentionConfig(head_dim=256).resolve(there) == AttentionConfig().resolve(there, dim=256)


def test_a_config_asks_a_gpu() -> None:
    config = AttentionConfig.for_rtx_5080()
    with gpu("86") as machine:
        array = machine.array((1,), "float16")
        known = config.resolve((86, 99 * KB), dim=128)
        assert config.resolve(86, dim=128) == config.resolve(array, dim=128) == known


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


@pytest.mark.parametrize("dims", [(12, 8), (8, 12), (520, 8), (8, 520)])
def test_other_dims_run_the_definition(dims: tuple[int, int]) -> None:
    q, k, v = drawn((1, 5, 2, dims[0]), (1, 7, 2, dims[0]), (1, 7, 2, dims[1]))
    expected = attention_forward(q, k, v)
    for actual, same in zip(_within(lambda: attention_forward(q, k, v)), expected, strict=True):
        assert actual.tobytes() == same.tobytes()


def test_keys_beyond_lengths_and_future_keys_do_not_reach_back() -> None:
    """NaN beyond the lengths stays there; other future keys leave a row's bits alone."""
    q, k, v = drawn((2, 90, 2, 64), (2, 90, 1, 64), (2, 90, 1, 64))
    options: dict[str, Any] = {"key_lengths": np.array([90, 61]), "query_start": 0}
    before = _within(lambda: attention_forward(q, k, v, causal=True, **options))
    k[1, 61:], v[1, 61:] = np.nan, np.inf
    k[0, 40:], v[0, 40:] = 9 * k[0, 40:], -7
    after = _within(lambda: attention_forward(q, k, v, causal=True, **options))
    for actual, same, rows in zip(after, before, (0, 1), strict=True):
        actual_rows, same_rows = (np.moveaxis(a, 1 + rows, 1) for a in (actual, same))
        assert actual[1].tobytes() == same[1].tobytes()
        assert actual_rows[0, :40].tobytes() == same_rows[0, :40].tobytes()
        assert (actual_rows[0, 40:] != same_rows[0, 40:]).reshape(50, -1).any(axis=1).all()
