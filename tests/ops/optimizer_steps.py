"""The one launch of an optimizer's step, beside the definition: what tests of each share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Lion, ScheduleFreeAdamW
from unsloth_cupy.core.dtypes import BFLOAT16

from ..harness.parity import Case, emulator, on_gpu
from ..machines import stand_in
from ..machines.cuda_on_cpu.traffic import counted
from .test_adamw_step import SHAPES, judge

OPTIONS: dict[Any, dict[str, Any]] = {
    Lion: {"lr": 1e-2, "betas": (0.9, 0.97), "weight_decay": 0.1},
    ScheduleFreeAdamW: {
        "lr": 1e-2, "betas": (0.9, 0.97), "eps": 1e-3, "weight_decay": 0.1, "warmup": 3,
    },
}  # fmt: skip
LARGEST_RATE = 3e-2
GROUPS = ({"names": "few", "lr": LARGEST_RATE, "weight_decay": 0.0},)


class Arena:
    """An optimizer, its parameters, copies and gradients, all drawn from one seed."""

    def __init__(
        self, kind: Any, case: Case, dtype: Any, place: Callable[[Any], Any] = np.asarray
    ) -> None:
        both = {"master": False, "wide": False, "offset": "", "groups": False} | case.both
        dtype = np.dtype(dtype)
        if both["master"] and dtype == np.float32:
            dtype = BFLOAT16  # copies have 16 bits
        self.rng, self.place = np.random.default_rng(0), place
        self.shapes, self.offset = both.get("shapes", SHAPES), both["offset"]
        self.gradient = np.float32 if both["wide"] else dtype
        kept = np.float32 if both["master"] else dtype
        self.parameters = {n: self.draw("parameter", s, kept) for n, s in self.shapes.items()}
        groups = GROUPS if both["groups"] else ()
        self.optimizer = kind(self.parameters, **OPTIONS[kind], groups=groups)
        self.copies: dict[str, Any] = {}
        if both["master"]:
            self.copies = {n: self.draw("copy", s, dtype) for n, s in self.shapes.items()}
            self.optimizer.keep_copies(self.copies)

    def draw(self, kind: str, shape: Any, dtype: Any) -> Any:
        values = self.rng.standard_normal(shape).astype(np.float16).astype(dtype)
        if kind == self.offset:  # one value after a multiple of 16 bytes
            room = np.empty(values.size + 1, dtype)
            room[1:] = values.ravel()
            values = room[1:].reshape(shape)
        return self.place(values)

    def step(self, **options: Any) -> None:
        gradients = {n: self.draw("gradient", s, self.gradient) for n, s in self.shapes.items()}
        self.optimizer.step(gradients, **options)

    def steps(self) -> None:
        """Make steps, one of them skipped and some with a factor; the last ones are resumed."""
        place = self.place
        self.step()
        self.step(finite=place(np.array(False)), factor=place(np.array(2, np.float32)))
        self.step(finite=place(np.array(True)), factor=place(np.array(0.25, np.float32)))
        state = {n: np.array(a.get() if hasattr(a, "get") else a) for n, a in self.state().items()}
        self.optimizer.load_state({n: place(a) if "." in n else a for n, a in state.items()})
        self.step(lr=LARGEST_RATE, factor=0.5)
        self.step(finite=np.bool_(True), factor=np.float32(0.5))

    def state(self) -> Any:
        return self.optimizer.state()

    def everything(self) -> dict[str, np.ndarray]:
        """Return copies of all that a step may change, on the host."""
        copies = {f"copy.{name}": copy for name, copy in self.copies.items()}
        arrays = {**self.parameters, **copies, **self.state()}
        arrays.pop("groups", None)
        return {n: np.array(a.get() if hasattr(a, "get") else a) for n, a in arrays.items()}


CASES = (
    Case("several chunks"),
    Case("float32 gradients", wide=True),
    Case("master weights", master=True),
    Case("groups", groups=True, master=True, wide=True),
    *(  # one kind of arrays at a time: none hides another
        Case(f"{kind} off alignment", master=True, offset=kind, shapes={"a": (300,)})
        for kind in ("parameter", "copy", "gradient")
    ),
)


class Steps:
    kind: Any

    def prove(self, case: Case, dtype: Any) -> None:
        """Steps equal those of the definition, and those of another run in all bits."""
        plain = Arena(self.kind, case, dtype)
        plain.steps()
        made = []
        for _ in range(2):
            with emulator():
                actual = Arena(self.kind, case, dtype)
                assert len(actual.optimizer.launchers) == 1 + bool(case.both.get("groups"))
                actual.steps()
                made.append(actual.everything())
        self.judge(plain.everything(), made[0])
        for name, array in made[1].items():
            assert array.tobytes() == made[0][name].tobytes(), name

    def judge(self, plain: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> None:
        """Raise unless the same steps were made, within rounding."""
        assert actual["steps"] == plain["steps"] == 4
        judge(plain, actual)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
    def test_on_a_gpu(self, case: Case, dtype: Any) -> None:
        plain, actual = Arena(self.kind, case, dtype), Arena(self.kind, case, dtype, on_gpu)
        plain.steps()
        actual.steps()
        self.judge(plain.everything(), actual.everything())

    def test_a_sign_of_nothing_and_gradients_of_nan(self) -> None:
        """An element without a gradient stays, but for its decay; NaN is passed on."""
        with emulator():
            parameters = {"w": np.ones(4, np.float32)}
            optimizer = self.kind(parameters, lr=0.5, weight_decay=0.0)
            optimizer.step({"w": np.array([0, -0.0, 3, np.nan], np.float32)})
        assert parameters["w"][:2].tolist() == [1, 1]
        assert parameters["w"][2] < 1
        assert np.isnan(parameters["w"][3])

    @pytest.mark.slow
    @pytest.mark.parametrize(("wide", "master"), [(False, False), (True, True)])
    def test_moves_what_the_header_says_and_nothing_twice(self, wide: bool, master: bool) -> None:
        elements = 2 * 8192
        case = Case("", wide=wide, master=master, shapes={"w": (elements,)})
        with emulator():
            arena = Arena(self.kind, case, BFLOAT16)
            with counted() as traffic:
                arena.step()
        parameter, gradient, copy = 4 if master else 2, 4 if wide else 2, 2 * master
        states = 8 if self.kind is Lion else 16
        lines = [line for line in traffic if line.space == "global"]
        big = [line for line in lines if line.bytes >= elements]
        moved = 2 * parameter + gradient + copy + states
        assert sum(line.bytes for line in big) == elements * moved
        assert all(line.efficiency == 1 for line in big), big
        # the rest: the table of tensors, by every warp, and the numbers of a step
        assert sum(line.moved for line in lines if line not in big) * 32 <= 2 * 10 * 1024

    def test_one_launch_and_no_word_from_the_host(self) -> None:
        with stand_in.gpu() as machine:
            make = lambda shape, dtype=np.float16: machine.array(shape, dtype)  # noqa: E731
            parameters = {f"w{i}": make((65 + i, 128)) for i in range(40)}
            machine.strict = False  # the numbers, and the table of addresses, are sent once
            optimizer = self.kind(parameters)
            gradients = {name: make(array.shape) for name, array in parameters.items()}
            optimizer.step(gradients)
            machine.strict = True
            for _ in range(2):
                optimizer.step(gradients, finite=make((), np.bool_), factor=make((), np.float32))
            name = "lion_step" if self.kind is Lion else "schedule_free_step"
            assert [made.kernel for made in machine.launches] == [name] * 3
            with pytest.raises(stand_in.HostReadError):
                optimizer.steps  # noqa: B018 -- what its docstring says
