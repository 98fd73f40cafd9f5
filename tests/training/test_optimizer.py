import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

from unsloth_cupy import AdamW, clip_gradients
from unsloth_cupy.errors import ConfigError, DTypeError, FrameworkError, ShapeError
from unsloth_cupy.ops.common.dynamic_codes import bounds, decode, dynamic_map, encode

from ..conftest import FOLDER
from ..golden.generate_adamw8 import OPTIONS
from ..golden.golden import OpCase, op_cases
from ..harness.parity import emulator

PEERS = [c for c in op_cases(FOLDER / "ops", "training") if c.name in ("adamw", "adamw_betas")]
DTYPES = [np.dtype(t) for t in ("float16", ml_dtypes.bfloat16, "float32", "float64")]


def draw(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_step_equals_torch(peer: OpCase, dtype: type) -> None:
    parameters = {"w": peer.inputs["start"].astype(dtype)}
    optimizer = AdamW(parameters, **peer.params)
    for gradient, expected in zip(peer.inputs["grads"], peer.outputs["trace"], strict=True):
        optimizer.step({"w": gradient.astype(dtype)})
        np.testing.assert_allclose(parameters["w"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", [contextlib.nullcontext, emulator], ids=["host", "emulated"])
def test_every_8_bit_step_equals_bitsandbytes(where) -> None:
    """Codes equal byte for byte, after every step."""
    with np.load(FOLDER / "ops/adamw8.npz") as peer, where():
        parameters = {"w": peer["start"].astype(np.float32)}
        optimizer = AdamW(parameters, **OPTIONS, state_bits=8)
        for step, gradient in enumerate(peer["gradients"]):
            optimizer.step({"w": gradient.astype(np.float32)})
            state = optimizer.state()
            np.testing.assert_array_equal(state["mean.w"], peer["state1"][step])
            np.testing.assert_array_equal(state["square.w"], peer["state2"][step])
            for ours, theirs in (("mean_scale", "absmax1"), ("square_scale", "absmax2")):
                np.testing.assert_allclose(state[f"{ours}.w"], peer[theirs][step], rtol=3e-7)
            np.testing.assert_allclose(parameters["w"], peer["parameter"][step], rtol=0, atol=5e-7)


def test_the_maps_equal_those_of_bitsandbytes() -> None:
    with np.load(FOLDER / "ops/adamw8.npz") as peer:
        assert dynamic_map(True).tobytes() == peer["signed_map"].tobytes()
        assert dynamic_map(False).tobytes() == peer["unsigned_map"].tobytes()


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_the_nearest_but_of_small_squares_the_next(signed: bool) -> None:
    values = draw(1000) ** 5 if signed else draw(1000) ** 10
    values[256:512] = 0
    values[512:768] *= np.float32(1e-38)  # below float32's normal numbers there is no reciprocal
    codes, scale = encode(values, signed=signed)
    assert scale.tolist() == [np.abs(values[i : i + 256]).max() for i in range(0, 1000, 256)]
    if not signed:
        assert ((codes > 0) == (values > 0)).all()
    spread = np.repeat(scale, 256)[:1000]
    decoded = decode(codes, scale, signed=signed)
    error, normal = np.abs(decoded - values), scale.repeat(256)[:1000] > 1e-37
    distance = np.abs(dynamic_map(signed) * spread[:, None] - values[:, None])
    small = (values < 1.28e-4 * spread) & (not signed)  # the first value above 1e-4
    assert (error <= distance.min(1) + spread * 1e-7 + 1e-38)[~small & (normal | signed)].all()
    assert (decoded >= (1 - 2e-5) * values)[small & normal].all()
    below = decode(np.maximum(codes, 1) - 1, scale, signed=signed)
    assert (below <= values)[small & normal].all()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_a_binary_search(signed: bool) -> None:
    """Of every number of 16 bits, of bounds and of their neighbours."""
    ends = bounds(signed)
    coarse = (np.arange(0x3F80, dtype=np.uint32) << 16).view(np.float32)  # 0 to 1
    sizes = [coarse, ends, *(np.nextafter(ends, np.float32(to)) for to in (-1, 1))]
    values = np.concatenate([side * np.concatenate(sizes) for side in (1, -1)])
    blocks = np.ones((-(-values.size // 255), 256), np.float32)  # of scale 1
    blocks[:, 1:] = np.resize(values, blocks[:, 1:].shape)
    codes, scale = encode(blocks.ravel(), signed=signed)
    assert (scale == 1).all()
    np.testing.assert_array_equal(codes, np.searchsorted(ends, blocks.ravel()))


SPARSE = [  # the axis that sizes differ along, their spread, the share of rows with a gradient
    ("element", 1.0, 0.02), ("element", 3.0, 0.3), ("element", 3.0, 1.0), ("row", 3.0, 0.1),
    ("row", 2.0, 1.0), ("column", 3.0, 0.5), ("column", 1.0, 1.0), ("element", 6.0, 0.1),
]  # fmt: skip


def longest_steps(axis: str, spread: float, share: float, beta2: float, where: Any) -> list[float]:
    """Return the longest move of each of 50 steps with 8 bits, in those of float64.

    Some rows have no gradient; the sizes of the others are log-normal.
    """
    rng, shape = np.random.default_rng(5), (40, 128)
    sizes = 1e-3 * rng.lognormal(
        0, spread, {"element": shape, "row": (40, 1), "column": (1, 128)}[axis]
    )
    weights = {bits: np.zeros(shape, "f8" if bits == 64 else "f4") for bits in (64, 8)}
    ratios = []
    with where():
        options = {"betas": (0.9, beta2), "weight_decay": 0.0}
        narrow = AdamW({"w": weights[8]}, state_bits=8, **options)
        wide = AdamW({"w": weights[64]}, **options)
        for step in range(50):
            rows = rng.random((40, 1)) < share
            rows[0] |= step == 0
            gradient = (rng.standard_normal(shape) * sizes * rows).astype(np.float32)
            before = {bits: weight.copy() for bits, weight in weights.items()}
            narrow.step({"w": gradient})
            wide.step({"w": gradient.astype(np.float64)})
            moves = {bits: np.abs(weights[bits] - old).max() for bits, old in before.items()}
            ratios.append(moves[8] / moves[64])
    return ratios


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize(("axis", "spread", "share"), SPARSE, ids=str)
def test_8_bit_steps_are_not_longer_than_those_of_float64(axis, spread, share, beta2) -> None:
    assert max(longest_steps(axis, spread, share, beta2, contextlib.nullcontext)) <= 1.5


@pytest.mark.parametrize(("axis", "spread", "share"), SPARSE[:4:2], ids=str)
def test_8_bit_steps_of_the_kernel_are_not_longer_either(axis, spread, share) -> None:
    assert max(longest_steps(axis, spread, share, 0.95, emulator)) <= 1.5


def test_small_parameters_keep_wide_averages_and_codes_take_a_quarter() -> None:
    optimizer = AdamW({"small": draw(4095), "large": draw((64, 64))}, state_bits=8)
    state = optimizer.state()
    assert state["mean.small"].dtype == np.float32
    assert "mean_scale.small" not in state
    assert state["mean.large"].dtype == np.uint8
    assert state["mean.large"].shape == (64, 64)
    assert sum(state[f"{n}.large"].nbytes for n in ("mean", "mean_scale")) == 4096 + 4 * 16


def test_whole_names_keep_wide_averages() -> None:
    def created(**options) -> AdamW:
        parameters = {n: draw((64, 64)) for n in ("a.table", "b.table", "w")}
        return AdamW(parameters, state_bits=8, **options)

    for whole, coded in (
        (("w",), {"a.table", "b.table"}),
        ("*.table", {"w"}),
        (["w", "a*"], {"b.table"}),
    ):
        state = created(whole=whole).state()
        assert {n for n in state if state[n].dtype == np.uint8} == {
            f"{field}.{name}" for field in ("mean", "square") for name in coded
        }
    for wrong, words in ((["head"], "no parameter is named 'head'"), (5, "names of parameters")):
        with pytest.raises(ConfigError, match=words):
            created(whole=wrong)


@pytest.mark.parametrize("where", [contextlib.nullcontext, emulator], ids=["host", "emulated"])
def test_a_state_of_earlier_codes_continues(where) -> None:
    """Its squares of code 0, beside a mean above 0, must not make a step of mean / eps."""
    gradient = draw((64, 64)) * np.random.default_rng(1).lognormal(0, 4, (64, 64)).astype("f")
    for whole in ((), ("w",)):
        with where():
            first = AdamW({"w": np.zeros((64, 64), "f")}, state_bits=8)
            first.step({"w": gradient})
            state = {name: array.copy() for name, array in first.state().items()}
            small = state["square.w"] == 1  # nearest codes of shares below 1.6e-7 were 0
            assert small.any()
            state["square.w"][small] = 0
            optimizer = AdamW(
                {"w": np.zeros((64, 64), "f")}, state_bits=8, whole=whole, weight_decay=0
            )
            optimizer.load_state(state)
            assert ("mean_scale.w" in optimizer.state()) == (not whole)
            optimizer.step({"w": np.zeros_like(gradient)})
            assert np.abs(optimizer.parameters["w"]).max() < 1.5e-3, whole
    with pytest.raises(ShapeError, match="square_scale"):
        first.load_state(state | {"square_scale.w": np.ones(3, "f")})


def test_8_bits_end_where_32_do() -> None:
    """Least squares of 64 x 64 weights from noisy gradients."""
    ends = {}
    for bits in (32, 8):
        target, parameters = draw((64, 64)), {"w": draw((64, 64), seed=1)}
        rng, optimizer = (
            np.random.default_rng(2),
            AdamW(parameters, weight_decay=0, state_bits=bits),
        )
        for step in range(200):
            x = rng.standard_normal((16, 64)).astype(np.float32)
            error = x @ (parameters["w"] - target)
            optimizer.step({"w": x.T @ error / 16}, lr=0.05 * (1 - step / 200))
        ends[bits] = np.square(parameters["w"] - target).mean()
    assert ends[32] < 0.05
    assert ends[8] < 1.5 * ends[32] + 0.01


@pytest.mark.parametrize("layout", ["C", "F"])
def test_any_layout_gives_the_same_codes(layout: str) -> None:
    parameters = {"w": np.array(draw((65, 64)), order=layout)}
    optimizer = AdamW(parameters, state_bits=8)
    optimizer.step({"w": draw((65, 64), seed=1)})
    straight = {"w": draw((65, 64))}
    other = AdamW(straight, state_bits=8)
    other.step({"w": draw((65, 64), seed=1)})
    np.testing.assert_array_equal(parameters["w"], straight["w"])
    np.testing.assert_array_equal(optimizer.state()["mean.w"], other.state()["mean.w"])


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("finite", [False, np.bool_(False), np.array(False)], ids=repr)
def test_a_skipped_step_changes_no_bit(bits: int, finite) -> None:
    parameters = {"w": draw((70, 64)), "b": draw(3)}
    optimizer = AdamW(parameters, state_bits=bits)
    gradients = {name: draw(array.shape, seed=1) for name, array in parameters.items()}
    optimizer.step(gradients)
    before = {n: a.tobytes() for n, a in (parameters | optimizer.state()).items()}
    gradients["w"][0] = np.nan
    optimizer.step(gradients, finite=finite, factor=np.float32(np.nan))
    assert {n: a.tobytes() for n, a in (parameters | optimizer.state()).items()} == before


def test_a_factor_scales_gradients() -> None:
    one, other = {"w": draw(30)}, {"w": draw(30)}
    AdamW(one, eps=1.0).step({"w": draw(30, seed=1)}, factor=0.25)
    AdamW(other, eps=1.0).step({"w": draw(30, seed=1) * np.float32(0.25)})
    np.testing.assert_array_equal(one["w"], other["w"])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_copies_of_master_weights_follow_every_step(dtype: np.dtype) -> None:
    masters, alone = {"w": draw((5, 3)), "b": draw(3)}, {"w": draw((5, 3)), "b": draw(3)}
    copies = {"w": np.zeros((5, 3), dtype)}
    optimizer, other = AdamW(masters), AdamW(alone)
    optimizer.keep_copies(copies)
    assert (copies["w"] == masters["w"].astype(dtype)).all()
    for seed in range(3):
        gradients = {"w": draw((5, 3), dtype, seed), "b": draw(3, seed=seed)}
        optimizer.step(gradients)
        other.step({name: array.astype(np.float32) for name, array in gradients.items()})
    assert copies["w"].tobytes() == masters["w"].astype(dtype).tobytes()
    assert all(masters[name].tobytes() == alone[name].tobytes() for name in alone)


@pytest.mark.parametrize(
    ("copies", "error", "cure"),
    [
        ({"v": draw(3, np.float16)}, ConfigError, r"unknown \['v'\]"),
        ({"w": draw(4, np.float16)}, ShapeError, r"it must be \(3,\)"),
        ({"w": draw(3)}, DTypeError, "it must be float16 or bfloat16"),
        ({"h": draw(3, np.float16)}, DTypeError, "parameter is float16; it must be float32"),
        ([], DTypeError, "pass {name: array}"),
    ],
    ids=["name", "shape", "dtype", "master", "list"],
)
def test_bad_copies_raise(copies, error, cure) -> None:
    optimizer = AdamW({"w": draw(3), "h": draw(3, np.float16)})
    with pytest.raises(error, match=cure):
        optimizer.keep_copies(copies)


def test_nothing_to_update_is_a_step_too() -> None:
    with emulator():
        for parameters in ({}, {"w": draw((0, 3))}):
            optimizer = AdamW(parameters)
            optimizer.step(dict(parameters))
            assert optimizer.steps == 1
            assert clip_gradients(dict(parameters), 1.0) == 0


def test_averages_of_float64_are_not_coded() -> None:
    with pytest.raises(DTypeError, match="w is float64; 8-bit moments need"):
        AdamW({"w": draw(5000, np.float64)}, state_bits=8)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_sixteen_bit_parameters_are_rounded_once(dtype: np.dtype) -> None:
    narrow, gradient = draw((5, 3), dtype), draw((5, 3), dtype, seed=1)
    wide = narrow.astype(np.float32)
    AdamW({"w": narrow}, lr=0.1).step({"w": gradient})
    AdamW({"w": wide}, lr=0.1).step({"w": gradient.astype(np.float32)})
    assert narrow.tobytes() == wide.astype(dtype).tobytes()


def test_a_float32_gradient_of_a_sixteen_bit_parameter() -> None:
    parameter, gradient = draw(4, np.float16), draw(4, np.float32, seed=1)
    optimizer = AdamW({"w": parameter})
    optimizer.step({"w": gradient})
    expected = gradient * np.float32(1 - 0.9)
    np.testing.assert_allclose(optimizer.state()["mean.w"], expected, rtol=1e-6)


@pytest.mark.parametrize("layout", ["blocks", "strided", "empty", "scalar"])
def test_any_size_and_layout_gives_the_same_numbers(layout: str) -> None:
    """More elements than a block, Fortran order, none, and one."""
    shape = {"blocks": (3, 40_000), "strided": (6, 5), "empty": (0, 3), "scalar": ()}[layout]
    exact, gradient = draw(shape, np.float64), draw(shape, np.float64, seed=1)
    parameter = exact.astype(np.float32, order="F" if layout == "strided" else "C")
    optimizer = AdamW({"w": parameter}, lr=0.1, weight_decay=0.5)
    optimizer.step({"w": gradient.astype(np.float32)})
    expected = exact * (1 - 0.1 * 0.5) - 0.1 * gradient / (np.abs(gradient) + 1e-8)
    np.testing.assert_allclose(parameter, expected, rtol=1e-5, atol=1e-6)


def test_the_rate_of_a_step_comes_before_the_rate_of_the_optimizer() -> None:
    parameter = draw(3)
    before = parameter.copy()
    optimizer = AdamW({"w": parameter}, lr=0.1)
    optimizer.step({"w": draw(3, seed=1)}, lr=0.0)
    assert (parameter == before).all()
    optimizer.step({"w": draw(3, seed=1)})
    assert (parameter != before).all()


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_resumed_run_has_equal_bits(dtype: np.dtype, bits: int) -> None:
    """Through a safetensors file, as a checkpoint goes."""
    if bits == 8 and dtype == np.float64:
        pytest.skip("averages of float64 are not coded")
    straight = {"a": draw((65, 64), dtype), "b": draw((7,), dtype)}
    gradients = [{n: draw(a.shape, dtype, seed) for n, a in straight.items()} for seed in range(6)]
    first = {name: array.copy() for name, array in straight.items()}
    whole, half = AdamW(straight, state_bits=bits), AdamW(first, state_bits=bits)
    for gradient in gradients[:3]:
        half.step(gradient)
    stored = load(save(half.state()))
    again = {name: array.copy() for name, array in first.items()}
    resumed = AdamW(again, state_bits=bits)
    resumed.load_state(stored)
    for gradient in gradients:
        whole.step(gradient)
    for gradient in gradients[3:]:
        resumed.step(gradient)
    assert resumed.steps == 6
    for name, array in straight.items():
        assert again[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"state_bits": 16}, "choose 32 or 8"),
        ({"lr": -1.0}, "lr=-1.0; pass a finite number"),
        ({"lr": np.nan}, "lr must be a finite number"),
        ({"eps": np.inf}, "eps must be a finite number"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1; pass a finite number"),
        ({"betas": (0.9, 1.0)}, "each from 0 to below 1"),
        ({"betas": (0.9,)}, "pass two numbers"),
        ({"betas": 0.9}, "pass two numbers"),
        ({"betas": ("high", 0.9)}, "pass two numbers"),
        ({"lr": None}, "lr=None.*must be a finite number"),
    ],
    ids=str,
)
def test_bad_options_raise(options: dict, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        AdamW({"w": draw(3)}, **options)


def test_bad_parameters_raise() -> None:
    with pytest.raises(DTypeError, match="w is int64; pass float arrays"):
        AdamW({"w": np.arange(3)})
    with pytest.raises(DTypeError, match="w is not an array but list"):
        AdamW({"w": [1.0]})
    with pytest.raises(DTypeError, match=r"pass \{name: array\}, not list"):
        AdamW([draw(3)])
    with pytest.raises(DTypeError, match=r"AdamW.step: pass \{name: array\}, not NoneType"):
        AdamW({"w": draw(3)}).step(None)
    optimizer = AdamW({"w": np.ones(2)})
    for option, value in (("factor", "2"), ("factor", np.ones(2)), ("finite", np.ones(2, bool))):
        with pytest.raises(ConfigError, match=f"{option}=.*; pass"):
            optimizer.step({"w": np.ones(2)}, **{option: value})
    assert optimizer.steps == 0
    with pytest.raises(ConfigError, match="lr=high; pass a finite number"):
        AdamW({"w": draw(3)}).step({"w": draw(3)}, lr="high")
    with pytest.raises(DTypeError, match=r"AdamW.load_state: pass \{name: array\}"):
        AdamW({"w": draw(3)}).load_state([])
    frozen = draw(3)
    frozen.flags.writeable = False
    with pytest.raises(ConfigError, match="w is read-only; pass a copy"):
        AdamW({"w": frozen})


def test_parameters_of_torch_raise() -> None:
    torch = pytest.importorskip("torch", reason="torch is the peer")
    with pytest.raises(FrameworkError, match="comes from torch; pass NumPy or CuPy"):
        AdamW({"w": torch.ones(3)})


@pytest.mark.parametrize(
    ("gradients", "error", "cure"),
    [
        ({"a": draw(3)}, ConfigError, r"missing \['b'\], unknown \[\]; pass one gradient"),
        ({"a": draw(3), "b": draw(2), "c": draw(2)}, ConfigError, r"unknown \['c'\]"),
        ({"a": draw(3), "b": draw(3)}, ShapeError, r"gradient of b has shape \(3,\); it must be"),
        ({"a": draw(3), "b": draw(2, np.float64)}, DTypeError, "it must be float32"),
        ({"a": draw(3), "b": None}, DTypeError, "gradient of b"),
        ({"a": draw(3), "b": [1.0, 2.0]}, DTypeError, "gradient of b"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "none", "list"],
)
def test_bad_gradients_raise_before_anything_changes(gradients, error, cure) -> None:
    parameters = {"a": draw(3), "b": draw(2)}
    optimizer = AdamW(parameters)
    before = {name: array.copy() for name, array in parameters.items()}
    with pytest.raises(error, match=cure):
        optimizer.step(gradients)
    assert all((before[name] == parameters[name]).all() for name in before)
    assert optimizer.steps == 0
    assert not optimizer.state()["mean.a"].any()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"steps": None}, ConfigError),
        ({"steps": np.array(1.5)}, ConfigError),
        ({"steps": np.array(-1)}, ConfigError),
        ({"mean.w": None}, ConfigError),
        ({"mean.other": draw(3)}, ConfigError),
        ({"square.w": draw(4)}, ShapeError),
        ({"square.w": draw(3, np.float16)}, DTypeError),
    ],
    ids=str,
)
def test_a_bad_state_raises_before_anything_changes(change: dict, error: type) -> None:
    optimizer = AdamW({"w": draw(3)})
    optimizer.step({"w": draw(3)})
    other = AdamW({"w": draw(3)})
    state = {
        name: array for name, array in (optimizer.state() | change).items() if array is not None
    }
    with pytest.raises(error, match="load_state"):
        other.load_state(state)
    assert other.steps == 0
    assert not other.state()["mean.w"].any()


NAMES = {"a.weight": (70, 64), "b.weight": (64, 65), "norm.weight": (64,), "a.bias": (70,)}
GROUPS = [
    {"names": ["*norm*", "*.bias"], "weight_decay": 0.0},
    {"names": "b.weight", "lr": 0.02},
]


def grouped(bits=32, copies=False, groups=GROUPS, **options):
    parameters = {name: draw(shape, seed=n) for n, (name, shape) in enumerate(NAMES.items())}
    optimizer = AdamW(
        parameters, lr=0.1, weight_decay=0.5, state_bits=bits, groups=groups, **options
    )
    if copies:
        optimizer.keep_copies({n: np.zeros(NAMES[n], np.float16) for n in ("a.weight", "a.bias")})
    return optimizer


def gradients_of(step):
    return {name: draw(shape, seed=step + 9) for name, shape in NAMES.items()}


def bytes_of(optimizer):
    return {n: a.tobytes() for n, a in (optimizer.parameters | optimizer.state()).items()}


@pytest.mark.parametrize("where", [contextlib.nullcontext, emulator], ids=["host", "emulated"])
@pytest.mark.parametrize(("bits", "copies"), [(32, False), (8, True)])
def test_groups_step_as_optimizers_of_their_own(where, bits, copies) -> None:
    """With the same bits, also where a schedule halves all rates."""
    rates = {"a.weight": (0.1, 0.5), "b.weight": (0.02, 0.5)}
    with where():
        together = grouped(bits, copies)
        alone = {}
        for n, (name, shape) in enumerate(NAMES.items()):
            lr, decay = rates.get(name, (0.1, 0.0))
            options = {"lr": lr, "weight_decay": decay, "state_bits": bits}
            alone[name] = AdamW({name: draw(shape, seed=n)}, **options)
            if copies and name.startswith("a"):
                alone[name].keep_copies({name: np.zeros(shape, np.float16)})
        for step, share in enumerate((1, 0.5, 1)):
            gradients = gradients_of(step)
            together.step(gradients, lr=0.1 * share, factor=0.5)
            for name, each in alone.items():
                each.step({name: gradients[name]}, lr=each.lr * share, factor=0.5)
        assert together.steps == 3
        for name, each in alone.items():
            np.testing.assert_array_equal(together.parameters[name], each.parameters[name])


def test_groups_equal_those_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the peer")
    ours, tensors = grouped(), {}
    for name, array in ours.parameters.items():
        tensors[name] = torch.tensor(array, requires_grad=True)
    theirs = torch.optim.AdamW(
        [
            {"params": [tensors["norm.weight"], tensors["a.bias"]], "weight_decay": 0.0},
            {"params": [tensors["b.weight"]], "lr": 0.02},
            {"params": [tensors["a.weight"]]},
        ],
        lr=0.1,
        weight_decay=0.5,
    )
    for step in range(3):
        gradients = gradients_of(step)
        for name, gradient in gradients.items():
            tensors[name].grad = torch.tensor(gradient)
        theirs.step()
        ours.step(gradients)
        ours.groups[1]["lr"] = theirs.param_groups[1]["lr"] = 0.02 / (step + 2)
    for name, tensor in tensors.items():
        expected = tensor.detach().numpy()
        np.testing.assert_allclose(ours.parameters[name], expected, rtol=1e-5, atol=1e-5)


def test_a_state_keeps_the_rates_of_groups() -> None:
    first, second = grouped(), grouped()
    first.groups[1] |= {"lr": 0.03, "weight_decay": 0.1}
    first.step(gradients_of(0))
    state = load(save({n: np.array(a) for n, a in first.state().items()}))
    for name, array in first.parameters.items():
        second.parameters[name][...] = array
    second.load_state(state)
    for optimizer in (first, second):
        optimizer.step(gradients_of(1))
    assert bytes_of(first) == bytes_of(second)
    first.groups[-1]["lr"] = 0.02  # of the parameters that no group names
    del first.groups[1]["lr"]
    second.groups[1]["lr"] = 5.0
    second.load_state(first.state())
    assert second.groups == first.groups
    del state["groups"]  # of an optimizer without them
    third = grouped()
    third.load_state(state)
    assert third.groups == grouped().groups
    assert "groups" not in grouped(groups=()).state()


def test_groups_that_make_no_sense() -> None:
    for groups, words in (
        ([{"names": "c"}], "no parameter is named 'c'; names look like a.weight"),
        ([{"names": "a*"}, {"names": "*.bias"}], "a.bias is in another group too"),
        ([{"names": ["a.bias"], "lr": -1}], "lr=-1; pass a finite number"),
        ([{"names": ["a.bias"], "weight_decay": np.nan}], "weight_decay=nan"),
        ([{"names": ["a.bias"], "eps": 1}], "pass a group as"),
        ([{"params": ["a.bias"]}], "pass a group as"),
        (["a.bias"], "pass a group as"),
        ({"names": "a.bias"}, "pass a list of"),
        (None, "pass a list of"),
    ):
        with pytest.raises(ConfigError, match=words):
            grouped(groups=groups)
    optimizer = grouped()
    optimizer.groups[0]["weight_decay"] = -1
    with pytest.raises(ConfigError, match="weight_decay=-1"):
        optimizer.step(gradients_of(0))
    state = grouped().state()
    with pytest.raises(ShapeError, match="1 groups, with that of all other parameters"):
        grouped(groups=()).load_state(state)
    for bad in (np.full((3, 2), -1.0), np.full((3, 2), np.inf), np.full((3, 2), "a")):
        with pytest.raises(ConfigError, match="pass finite rates of 0 or more"):
            grouped().load_state(state | {"groups": bad})
    with pytest.raises(ShapeError, match="2 groups"):
        grouped(groups=GROUPS[:1]).load_state(state)
