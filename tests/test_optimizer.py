import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

from unsloth_cupy import AdamW
from unsloth_cupy.errors import ConfigError, DTypeError, FrameworkError, ShapeError

from .conftest import FOLDER
from .golden.golden import OpCase, op_cases

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
    np.testing.assert_allclose(optimizer.mean["w"], expected, rtol=1e-6)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_resumed_run_has_equal_bits(dtype: np.dtype) -> None:
    """Through a safetensors file, as a checkpoint goes."""
    straight = {"a": draw((4, 3), dtype), "b": draw((7,), dtype)}
    gradients = [{n: draw(a.shape, dtype, seed) for n, a in straight.items()} for seed in range(6)]
    first = {name: array.copy() for name, array in straight.items()}
    whole, half = AdamW(straight), AdamW(first)
    for gradient in gradients[:3]:
        half.step(gradient)
    stored = load(save(half.state()))
    again = {name: array.copy() for name, array in first.items()}
    resumed = AdamW(again)
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
        ({"state_bits": 8}, "choose 32"),
        ({"lr": -1.0}, "lr=-1.0; pass a finite number"),
        ({"lr": np.nan}, "pass a finite number"),
        ({"eps": np.inf}, "pass a finite number"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1; pass a finite number"),
        ({"betas": (0.9, 1.0)}, "each from 0 to below 1"),
        ({"betas": (0.9,)}, "pass two numbers"),
        ({"betas": 0.9}, "pass two numbers"),
        ({"betas": ("high", 0.9)}, "pass two numbers"),
        ({"lr": None}, "lr=None; pass a finite number"),
    ],
    ids=str,
)
def test_bad_options_raise(options: dict, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        AdamW({"w": draw(3)}, **options)


def test_bad_parameters_raise() -> None:
    with pytest.raises(DTypeError, match="w is int64; pass float arrays"):
        AdamW({"w": np.arange(3)})
    with pytest.raises(DTypeError, match="w is no array but list"):
        AdamW({"w": [1.0]})
    with pytest.raises(DTypeError, match=r"pass \{name: array\}, not list"):
        AdamW([draw(3)])
    with pytest.raises(DTypeError, match=r"AdamW.step: pass \{name: array\}, not NoneType"):
        AdamW({"w": draw(3)}).step(None)
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
    assert not optimizer.mean["a"].any()


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
    assert not other.mean["w"].any()
