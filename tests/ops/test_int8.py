"""Weights of eight bits: bitsandbytes' codes, products equal to those of the dequantized weight."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16, FLOATS, KERNEL_DTYPES
from unsloth_cupy.errors import ConfigError, DTypeError, GradientError, RangeError, ShapeError
from unsloth_cupy.ops.quantized import weight as base
from unsloth_cupy.ops.quantized.int8 import Int8

from ..harness.parity import emulator, within_rule
from ..machines.stand_in import gpu

# The public names, as other people's programs call them.
PUBLIC = ("int8_weight(w)",)


def drawn(*shape: int, seed: int = 0, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def results(x: np.ndarray, dy: np.ndarray, weight: Any, wide: Any) -> dict[str, np.ndarray]:
    """Return what linear and an adapter make of x, with their gradients."""
    outputs, inputs = weight.shape
    at = lambda array: array.astype(wide)  # noqa: E731
    a, b = drawn(4, inputs, seed=1, dtype=np.float16), drawn(outputs, 4, seed=2, dtype=np.float16)
    bias = drawn(outputs, seed=3, dtype=np.float16)
    tape, named = uc.Tape(), {}
    xs, as_, bs = (tape.watch(at(array)) for array in (x, a, b))
    for name, y in {
        "linear": uc.linear(xs, weight, at(bias)),
        "plain": uc.linear(xs, weight),
        "lora": uc.lora_linear(xs, weight, as_, bs, scale=0.5),
    }.items():
        named[name] = y.value
        for of, gradient in zip("xab", tape.gradients(y, [xs, as_, bs], at(dy)), strict=True):
            named[f"{name} {of}"] = gradient
    return named


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("chunk", [1, 7 * 64, 2**20])
def test_products_are_those_of_the_dense_weight(monkeypatch: Any, dtype: Any, chunk: int) -> None:
    monkeypatch.setattr(base, "CHUNK_BYTES", {False: chunk, True: chunk})
    weight = uc.int8_weight(drawn(37, 50))
    x, dy = drawn(3, 2, 50, dtype=np.float16), drawn(3, 2, 37, dtype=np.float16)
    x, dy = x.astype(dtype), dy.astype(dtype)
    exact = results(x, dy, weight.dequantize(np.float64), np.float64)
    plain = results(x, dy, weight.dequantize(dtype), dtype)
    within_rule(plain, exact, results(x, dy, weight, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_products_by_kernel(dtype: Any, rows: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(base, "CHUNK_BYTES", {False: 2**20, True: 64 * 16 * 2})
    weight = uc.int8_weight(drawn(70, 48))
    x = drawn(rows, 48, dtype=np.float16).astype(dtype)
    dy = drawn(rows, 70, dtype=np.float16).astype(dtype)
    exact = results(x, dy, weight.dequantize(np.float64), np.float64)
    plain = results(x, dy, weight.dequantize(dtype), dtype)
    with emulator():
        actual = results(x, dy, weight, dtype)
    within_rule(plain, exact, actual)


def test_which_kernels_run() -> None:
    """Up to 16 rows read the codes; more of them, and dx, multiply what is dequantized."""
    for rows, kernels, products in ((1, ["int8_few_rows_"], 0), (16, ["int8_few_rows_"], 0),
                                    (17, ["int8_dequantize_"], 1)):  # fmt: skip
        with gpu() as machine:
            weight = Int8(machine.array((128, 64), np.int8), machine.array((128,), np.float32))
            x, dy = (machine.array((rows, n), BFLOAT16) for n in (64, 128))
            uc.linear(x, weight)
            assert [launch.kernel for launch in machine.launches] == kernels
            assert len(machine.products) == products
            machine.launches.clear()
            uc.linear_backward(dy, x, weight, None)
            assert [launch.kernel for launch in machine.launches] == ["int8_dequantize_"]


@pytest.mark.slow
def test_no_dense_copy_exists() -> None:
    weight, x = uc.int8_weight(drawn(2048, 2048)), drawn(512, 2048)
    uc.linear(x[:1], weight)
    for run in (lambda: uc.linear(x, weight), lambda: uc.linear_backward(x, x, weight, None)):
        tracemalloc.start()
        result = run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - x.nbytes < 2048 * 2048 * 4 * 0.8
        del result


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_are_within_half_a_step(dtype: Any) -> None:
    w = drawn(9, 33, dtype=dtype)
    weight = uc.int8_weight(w)
    off = np.abs(weight.dequantize(np.float64) - w.astype(np.float64))
    assert (off.max(axis=1) <= np.abs(w.astype(np.float64)).max(axis=1) / 127 * 0.50001).all()
    assert weight.dtype == w.dtype == weight.dequantize().dtype


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1)], ids=str)
def test_empty_and_tiny(shape: tuple[int, int]) -> None:
    weight = uc.int8_weight(drawn(*shape))
    y = uc.linear(np.ones((2, shape[1]), np.float32), weight)
    assert np.array_equal(y, np.ones((2, shape[1]), np.float32) @ weight.dequantize().T)
    again = Int8.from_state(weight.state())
    assert again.dequantize().tobytes() == weight.dequantize().tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (4, 77), (6, 99)])
def test_not_finite_is_named(bad: float, place: tuple[int, int]) -> None:
    w = drawn(7, 100)
    w[place] = bad
    with pytest.raises(RangeError, match=rf"w\[{place[0]}, {place[1]}\] is {bad}"):
        uc.int8_weight(w)


def test_attributes() -> None:
    weight = uc.int8_weight(drawn(8, 64, dtype=BFLOAT16))
    assert (weight.shape, weight.ndim, weight.size, len(weight)) == ((8, 64), 2, 512, 8)
    assert weight.nbytes == 512 + 8 * 4
    assert weight.dequantize("float16").dtype == np.float16
    assert repr(weight) == "Int8(8 x 64, 544 bytes)"
    assert np.array_equal(weight[2:5], weight.dequantize()[2:5])
    assert weight.state().keys() == {"weight", "SCB", "weight_format"}


def test_it_is_frozen() -> None:
    weight, x = uc.int8_weight(drawn(8, 64)), drawn(2, 64)
    with pytest.raises(GradientError, match="frozen"):
        uc.Tape().watch(weight)
    with pytest.raises(GradientError, match="weight: a quantized weight is frozen"):
        uc.linear_backward(drawn(2, 8), x, weight, None, wanted={"weight"})


def test_wrong_calls() -> None:
    weight = uc.int8_weight(drawn(8, 64))
    with pytest.raises(DTypeError, match="quantized already"):
        uc.int8_weight(weight)
    with pytest.raises(DTypeError, match="int64"):
        uc.int8_weight(np.arange(64).reshape(1, 64))
    with pytest.raises(ShapeError, match="outputs, inputs"):
        uc.int8_weight(drawn(8))
    with pytest.raises(ShapeError, match="inputs=64; it must be 63"):
        uc.linear(drawn(2, 63), weight)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_format": np.array(1, np.uint8)}, "are not in row order"),
        ({"weight": None}, "weight is missing"),
        ({"SCB": None}, "SCB is missing"),
        ({"weight": np.zeros(8, np.int8)}, "it must have 2 or 3 axes"),
        ({"weight": np.zeros((8, 64), np.uint8)}, "uint8"),
        ({"weight": np.full((8, 64), -128, np.int8)}, "holds -128"),
        ({"SCB": np.zeros(7, np.float32)}, r"SCB is \(7,\)"),
        ({"SCB": np.zeros(8, np.float16)}, "float16"),
        ({"SCB": np.full(8, np.nan, np.float32)}, "SCB holds a number that is not finite"),
        ({"SCB": np.full(8, -1, np.float32)}, "SCB holds a negative number"),
    ],
)
def test_broken_states(changes: dict[str, Any], words: str) -> None:
    state = uc.int8_weight(drawn(8, 64)).state() | changes
    with pytest.raises(ConfigError, match=words):
        Int8.from_state({name: array for name, array in state.items() if array is not None})
