"""The one launch of an optimizer's step; tests/training/test_optimizer.py judges the definition."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AdamW
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.ops.common import dynamic_codes, many
from unsloth_cupy.ops.common.dynamic_codes import BLOCK, dynamic_map
from unsloth_cupy.ops.optimizers import adamw_step

from ..harness.parity import EPS, Case, KernelAlone, emulator, on_gpu
from ..machines import stand_in
from ..machines.cuda_on_cpu.traffic import counted

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
# several chunks, tails in a span and in an access, one value, none; from 4096 on there are codes
SHAPES = {"chunks": (3, 5001), "span": (4400,), "few": (3,), "one": (), "none": (0, 4)}


class Arena:
    """An optimizer, its parameters, copies and gradients, all drawn from one seed."""

    def __init__(self, case: Case, dtype: Any, place: Callable[[Any], Any] = np.asarray) -> None:
        both = {"bits": 32, "master": False, "wide": False, "offset": ()} | case.both
        dtype = np.dtype(dtype)
        if both["master"] and dtype == np.float32:
            dtype = BFLOAT16  # copies have 16 bits
        self.rng, self.place = np.random.default_rng(0), place
        self.shapes = both.get("shapes", SHAPES)
        self.gradient = np.float32 if both["wide"] else dtype
        self.offset = both["offset"]
        kept = np.float32 if both["master"] else dtype
        self.parameters = {
            name: self.draw("parameter", shape, kept) for name, shape in self.shapes.items()
        }
        self.optimizer = AdamW(self.parameters, **OPTIONS, state_bits=both["bits"])
        self.copies: dict[str, Any] = {}
        if both["master"]:
            self.copies = {n: self.draw("copy", s, dtype) for n, s in self.shapes.items()}
            self.optimizer.keep_copies(self.copies)

    def draw(self, kind: str, shape: Any, dtype: Any) -> Any:
        values = self.rng.standard_normal(shape).astype(np.float16).astype(dtype)
        if kind in self.offset:  # one value after a multiple of 16 bytes
            room = np.empty(values.size + 1, dtype)
            room[1:] = values.ravel()
            values = room[1:].reshape(shape)
        return self.place(values)

    def step(self, **options: Any) -> None:
        # sizes over twelve decades, so that every part of a map is met
        gradients = {n: self.draw("gradient", s, self.gradient) for n, s in self.shapes.items()}
        for name, shape in self.shapes.items():
            gradients[name] *= self.place(
                (10.0 ** self.rng.integers(-3, 1, shape)).astype(gradients[name].dtype)
            )
        self.optimizer.step(gradients, **options)

    def everything(self) -> dict[str, np.ndarray]:
        """Return copies of all that a step may change, on the host."""
        arrays = {
            **self.parameters,
            **{f"copy.{name}": copy for name, copy in self.copies.items()},
            **self.optimizer.state(),
        }
        return {n: np.array(a.get() if hasattr(a, "get") else a) for n, a in arrays.items()}


def judge(plain: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> None:
    """Raise unless the same steps were made: within rounding, or a code beside a midpoint."""
    assert actual.keys() == plain.keys()
    for name, expected in plain.items():
        array = actual[name]
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        if array.dtype == np.uint8:
            field, _, tensor = name.partition(".")
            values = dynamic_map(field == "mean")
            scales = [
                np.repeat(state[f"{field}_scale.{tensor}"], BLOCK)[: array.size]
                for state in (plain, actual)
            ]
            one, other = (
                values[codes.ravel()] * scale
                for codes, scale in zip((expected, array), scales, strict=True)
            )
            assert np.abs(array.astype(int) - expected.astype(int)).max() <= 1, name
            assert (array != expected).mean() < 1e-3, name  # beside a midpoint
            same = (array == expected).ravel()
            np.testing.assert_allclose(other[same], one[same], rtol=1e-5)
        elif name == "steps":
            assert array == expected
        elif array.size:
            eps = EPS[array.dtype.name]
            error = np.abs(array.astype(np.float64) - expected.astype(np.float64)).max()
            assert error <= 4 * eps * np.abs(expected.astype(np.float64)).max(), name


class TestAdamWStep(KernelAlone):
    op = "adamw_"
    cases = (
        Case("float32 states"),
        Case("float32 gradients", wide=True),
        Case("master weights", master=True),
        Case("codes", bits=8),
        Case("master weights and codes", bits=8, master=True, wide=True),
        *(  # one kind of arrays at a time: none hides another
            Case(f"{kind} off alignment", master=True, offset=kind, shapes={"a": (300,)})
            for kind in ("parameter", "copy", "gradient")
        ),
        Case("codes off alignment", bits=8, offset="gradient", shapes={"a": (4099,), "b": (7, 3)}),
    )

    def prove(self, case: Case, dtype: Any) -> None:
        """Steps, one of them skipped and one with a factor, equal those of the definition."""
        plain = Arena(case, dtype)
        self.steps(plain)
        with emulator():
            actual = Arena(case, dtype)
            assert len(actual.optimizer.launchers) == 1
            self.steps(actual)
            judge(plain.everything(), actual.everything())
            again = Arena(case, dtype)
            self.steps(again)
        for name, array in again.everything().items():
            assert array.tobytes() == actual.everything()[name].tobytes(), name

    def steps(self, arena: Arena, place: Callable[[Any], Any] = np.array) -> None:
        arena.step()
        arena.step(finite=place(False), factor=place(np.float32(2)))
        arena.step(finite=place(True), factor=place(np.float32(0.25)))
        arena.step(lr=3e-2, factor=0.5)
        arena.step(finite=np.bool_(True), factor=np.float32(0.5))

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
    def test_on_a_gpu(self, case: Case, dtype: Any) -> None:
        plain, actual = Arena(case, dtype), Arena(case, dtype, on_gpu)
        self.steps(plain)
        self.steps(actual, on_gpu)
        judge(plain.everything(), actual.everything())


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_skipped_step_changes_no_bit(bits: int, bad: float) -> None:
    with emulator():
        arena = Arena(Case("", bits=bits, master=True), np.float16)
        arena.step()
        before = arena.everything()
        arena.step(finite=np.array(False), factor=np.array(bad, np.float32))
        for name, array in arena.everything().items():
            assert array.tobytes() == before[name].tobytes(), name
        assert arena.optimizer.steps == 1
        arena.step()
        assert arena.optimizer.steps == 2


@pytest.mark.parametrize("scale", [1.2e38, 8.6e37, 2.0**126, 1e-30])
def test_codes_keep_values_of_any_size(scale: float) -> None:
    """The reciprocal of what is beyond 2^126 is below float32's normal numbers.

    The largest mean overflows where its bias is corrected.
    """
    actual = []
    for within in (contextlib.nullcontext(), emulator()):
        with within:
            arena = Arena(Case("", bits=8, shapes={"a": (4400,)}), np.float32)
            arena.step()
            state = {n: a.copy() for n, a in arena.optimizer.state().items()}
            state |= {n: np.full_like(a, scale) for n, a in state.items() if "scale" in n}
            arena.optimizer.load_state(state)
            with np.errstate(over="ignore", invalid="ignore"):
                arena.optimizer.step({"a": np.zeros(4400, np.float32)})
            actual.append(arena.everything())
    judge(*actual)
    for field, beta in zip(("mean", "square"), OPTIONS["betas"], strict=True):
        sizes = dynamic_map(field == "mean").astype(np.float64) * scale
        before, after = (sizes[codes[f"{field}.a"].ravel()] for codes in (state, actual[1]))
        spread = np.diff(sizes).max()
        assert np.abs(after * beta - before * beta).max() <= spread, field


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 8])
def test_a_resumed_run_has_equal_bits(bits: int) -> None:
    case = Case("", bits=bits)
    with emulator():
        straight, resumed = Arena(case, np.float32), Arena(case, np.float32)
        for _ in range(3):
            straight.step()
        for name, array in straight.parameters.items():
            resumed.parameters[name][...] = array
        resumed.optimizer.load_state({n: a.copy() for n, a in straight.optimizer.state().items()})
        resumed.rng = np.random.default_rng(7)
        straight.rng = np.random.default_rng(7)
        for _ in range(2):
            straight.step()
            resumed.step()
        for name, array in straight.everything().items():
            assert array.tobytes() == resumed.everything()[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "wide", "master"),
    [(32, False, False), (32, True, True), (8, False, False), (8, False, True)],
)
def test_moves_what_the_header_says_and_nothing_twice(bits: int, wide: bool, master: bool) -> None:
    elements = 2 * 8192
    case = Case("", bits=bits, wide=wide, master=master, shapes={"w": (elements,)})
    with emulator():
        arena = Arena(case, BFLOAT16)
        with counted() as traffic:
            arena.step()
    parameter, gradient, copy = 4 if master else 2, 4 if wide else 2, 2 * master
    states = 16 if bits == 32 else 4
    lines = [line for line in traffic if line.space == "global"]
    big = [line for line in lines if line.bytes >= elements]
    assert sum(line.bytes for line in big) == elements * (2 * parameter + gradient + copy + states)
    assert all(line.efficiency == 1 for line in big), big
    # the rest: the table of tensors, by every warp; the scales of codes; the maps, by every block
    assert sum(line.moved for line in lines if line not in big) * 32 <= 2 * 10 * 1024


def test_one_launch_and_no_word_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in.gpu() as machine:
        sent: list[Any] = []
        send = lambda array, like: sent.append(array) or machine.place(array)  # noqa: E731
        for module in (adamw_step, dynamic_codes, many):
            monkeypatch.setattr(module, "to_device_of", send)
        make = lambda shape: machine.array(shape, np.float16)  # noqa: E731
        parameters = {f"w{i}": make((65 + i, 128)) for i in range(40)}
        optimizer = AdamW(parameters, state_bits=8)
        gradients = {name: make(array.shape) for name, array in parameters.items()}
        finite, factor = machine.array((), np.bool_), machine.array((), np.float32)
        optimizer.step(gradients)
        before = len(sent)
        for _ in range(3):
            optimizer.step(gradients, finite=finite, factor=factor)
        assert len(sent) == before  # the table of addresses is sent once
        (*_, launch) = machine.launches
        assert [made.kernel for made in machine.launches] == ["adamw_step"] * 4
        assert math.prod(launch.grid) == sum(-(-a.size // 8192) for a in parameters.values())
        with pytest.raises(stand_in.HostReadError):
            optimizer.steps  # noqa: B018 -- what its docstring says
