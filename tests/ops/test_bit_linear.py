"""The linear layer of BitNet, as it is trained."""

import contextlib
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.errors import DTypeError, ShapeError
from unsloth_cupy.ops.common.no_kernel import reason_of
from unsloth_cupy.ops.quantized import bit_linear as module
from unsloth_cupy.ops.quantized._int8_rows import launch_quantize

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelParity, emulator, launched
from ..machines.stand_in import gpu
from .golden_cases import agree, golden

# The public names, as other people's programs call them.
PUBLIC = ("bit_linear(x, weight)",)


class TestBitLinear(KernelParity):
    op = "bit_linear_forward"
    sizes = (
        {"rows": (4,), "inputs": 4096, "outputs": 512},
        {"rows": (48,), "inputs": 7, "outputs": 9},
        {"rows": (4096,), "inputs": 4096, "outputs": 4096},
    )
    cases = (
        Case("odd", rows=[2, 3], inputs=13, outputs=7, given=["bias"]),
        Case("no bias", rows=[5], inputs=40, outputs=3),
        Case("one row", rows=[], inputs=5, outputs=2, given=["bias"]),
        Case("slices", rows=[2, 3], inputs=24, outputs=10, gaps=True),
        Case("sixteen to a copy", rows=[5], inputs=48, outputs=33, given=["bias"]),
        Case("tiles of 64 rows, odd", rows=[37], inputs=53, outputs=13),
        Case("several blocks, two tiles of rows", rows=[70], inputs=144, outputs=66),
        Case("no rows", rows=[2, 0], inputs=5, outputs=2, given=["bias"]),
        Case("no inputs", rows=[3], inputs=0, outputs=2, given=["bias"]),
        Case("no outputs", rows=[3], inputs=2, outputs=0),
        Case("below the least", arrays={"x": np.eye(3, 5) * 6e-6}, inputs=5, outputs=7),
        Case("zeros", arrays={"x": np.zeros((2, 5)), "weight": np.zeros((3, 5))}),
    )
    test_gradient_matches_finite_differences = None  # straight through: below
    test_any_strides = None  # another order of a mean may round a weight to another code


class TestBitLinearLarge(TestBitLinear):
    """The tiles of many rows, where there are enough for the one processor of this machine."""

    cases = (Case("large tiles", rows=[130], inputs=80, outputs=129, given=["bias"]),)


@golden("ternary", "auto_bit_linear", without=("auto_bit_linear_norm",))
def test_equals_transformers(golden: OpCase) -> None:
    x, weight, bias = (golden.inputs[name] for name in ("x", "weight", "bias"))
    agree(uc.bit_linear(x, weight, bias=bias), golden.outputs["y"])
    tape = uc.Tape()
    watched = [tape.watch(array) for array in (x, weight, bias)]
    y = uc.bit_linear(*watched[:2], bias=watched[2])
    actual = tape.gradients(y, watched, golden.inputs["cotangent"])
    for name, gradient in zip(("x", "weight", "bias"), actual, strict=True):
        agree(gradient, golden.grads[name])


@golden("ternary", "auto_bit_linear_norm")
def test_equals_transformers_behind_a_norm(golden: OpCase) -> None:
    inputs = golden.inputs
    tape = uc.Tape()
    names = ("x", "weight", "bias", "norm_weight")
    x, weight, bias, norm = watched = [tape.watch(inputs[name]) for name in names]
    normed = uc.rms_norm(x, norm, eps=golden.params["rms_norm_eps"])
    y = uc.bit_linear(normed, weight, bias=bias)
    agree(y.value, golden.outputs["y"])
    actual = tape.gradients(y, watched, inputs["cotangent"])
    for name, gradient in zip(names, actual, strict=True):
        agree(gradient, golden.grads[name])


@golden("ternary", "act_quant")
def test_rows_are_rounded_as_in_transformers(golden: OpCase) -> None:
    """A weight of one output a column, each 1 and so of mean 1, hands x through."""
    x = golden.inputs["x"]
    codes, scales = module._rows(x.reshape(-1, x.shape[-1]))
    assert (codes == np.rint(codes)).all()
    assert np.abs(codes).max() <= 127
    agree((codes * scales).reshape(x.shape), golden.outputs["y"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 63, 2**22])
@pytest.mark.parametrize("place", [contextlib.nullcontext, emulator])
def test_equals_the_product_of_what_is_rounded(
    monkeypatch: Any, dtype: Any, chunk: int, place: Any
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(dtype) for s in ((6, 40), (9, 40), (6, 9)))
    exact = {n: a.astype(np.float64) for n, a in (("x", x), ("w", w), ("dy", dy))}
    w_scale = max(np.abs(exact["w"]).mean(), 1e-5)
    wq = np.clip(np.rint(exact["w"] / w_scale), -1, 1) * w_scale
    top = np.abs(exact["x"]).max(axis=1, keepdims=True)
    xq = np.rint(exact["x"] * 127 / top) * top / 127
    eps = {2: 2.0**-7 if dtype == BFLOAT16 else 2.0**-10, 4: 1e-6}[np.dtype(dtype).itemsize]
    with place():
        y, scale = module.bit_linear_forward(x, w)
        dx, dw, _ = module.bit_linear_backward(dy, x, w, None, scale)
    assert scale.dtype == np.float32
    for actual, expected in ((y, xq @ wq.T), (dx, exact["dy"] @ wq), (dw, exact["dy"].T @ xq)):
        assert actual.dtype == dtype
        np.testing.assert_allclose(
            actual.astype(np.float64), expected, rtol=0, atol=2 * eps * np.abs(expected).max()
        )


@pytest.mark.parametrize("place", [contextlib.nullcontext, emulator])
def test_no_gradient_that_nobody_asks_for(place: Any) -> None:
    x, weight, bias, dy = (np.ones(n, np.float32) for n in [(2, 5), (3, 5), (3,), (2, 3)])
    _, scale = module.bit_linear_forward(x, weight, bias)
    with place():
        everything = module.bit_linear_backward(dy, x, weight, bias, scale)
        for i, name in enumerate(("x", "weight", "bias")):
            actual = module.bit_linear_backward(dy, x, weight, bias, scale, wanted={name})
            assert [grad is None for grad in actual] == [j != i for j in range(3)]
            np.testing.assert_array_equal(actual[i], everything[i])


# ---- kernels ------------------------------------------------------------------------------------
def _drawn(dtype: Any, rows: int = 6, inputs: int = 48, outputs: int = 10) -> dict[str, Any]:
    """Return arrays of a call; no weight lies where a scale decides its code by its last bits."""
    rng = np.random.default_rng(0)
    shapes = {"x": (rows, inputs), "weight": (outputs, inputs), "bias": (outputs,)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def _all(arrays: dict[str, Any]) -> list[Any]:
    """Return the results of a call and of its gradient."""
    y, scale = module.bit_linear_forward(**arrays)
    return [y, scale, *module.bit_linear_backward(y, **arrays, w_scale=scale)]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_kernels_round_as_the_definition(dtype: Any) -> None:
    """Rows of every size, of nothing but zeros too, and weights on a tie, which goes to 0."""
    x = _drawn(dtype)["x"] * np.array([[1], [0], [1e-4], [100], [1e-6], [3]], dtype)
    x[0, :4] = 127, 0.5, 1.5, -2.5
    for scale in (2.0, 2.0 / 1.0625):
        weight = np.array([[0, 1, -1, 1.0625, -1.0625, 3, -9, 0.9]], dtype)
        w_scale = np.array([scale], np.float32)
        actual = np.empty(weight.shape, np.int8), np.empty(weight.shape, dtype)
        with emulator():
            for codes in actual:
                module._launch_codes(weight, codes, w_scale)
        for codes in actual:
            np.testing.assert_array_equal(codes, module.weight_codes(weight, w_scale))
    with emulator():
        codes, scales, _ = launch_quantize(x, least=module.LEAST)
        rounded = module._launch_rounded(x)
    expected, steps = module._rows(x)
    np.testing.assert_array_equal(codes, expected.astype(np.int8))
    np.testing.assert_array_equal(scales[:, None], steps)
    np.testing.assert_array_equal(rounded, (expected.astype(np.float32) * steps).astype(dtype))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_few_blocks_add_up_a_large_weight(monkeypatch: Any, dtype: Any) -> None:
    monkeypatch.setattr(module, "SUMS", 2)
    weight = np.random.default_rng(0).random((40, 130)).astype(dtype)
    with emulator():
        actual = [module._launch_scale(each) for each in (weight, weight[:, 3:-5])]
    for scale, each in zip(actual, (weight, weight[:, 3:-5]), strict=True):
        assert scale[0] == pytest.approx(each.astype(np.float64).mean(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("off", ["x", "weight", "bias", "dy"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_one_array_off_alignment(dtype: Any, off: str) -> None:
    """Sums of sizes take another order: the scale may differ in its last bits, and no code."""
    arrays = _drawn(dtype)
    y, scale = module.bit_linear_forward(**arrays)
    moved = arrays | {"dy": y}
    room = np.empty(moved[off].size + 1, dtype)
    room[1:] = moved[off].ravel()
    moved[off] = room[1:].reshape(moved[off].shape)
    dy = moved.pop("dy")
    with emulator():
        expected = _all(arrays)
        actual = [*module.bit_linear_forward(**moved)]
        actual += module.bit_linear_backward(dy, **moved, w_scale=scale)
        expected[2:] = module.bit_linear_backward(y, **arrays, w_scale=scale)
    for one, other in zip(actual, expected, strict=True):
        both = one.astype(np.float64), other.astype(np.float64)
        np.testing.assert_allclose(*both, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
def test_what_is_not_finite_is_never_hidden(where: str, bad: float) -> None:
    """It spoils its row of y, or of a weight all of y; as in the definition."""
    arrays = _drawn(np.dtype("float32"))
    arrays[where][2, 3] = bad
    with np.errstate(all="ignore"):
        defined = _all(arrays)
        with emulator():
            actual = _all(arrays)
    for one, other in zip(actual, defined, strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    spoilt = np.isnan(actual[0]).all(axis=1).tolist()
    assert spoilt == [where == "weight" or row == 2 for row in range(6)]


@pytest.mark.parametrize("bias", [None, np.dtype("float16"), np.dtype("float32")], ids=str)
def test_what_a_call_launches(bias: Any) -> None:
    """Four kernels; of dx two a chunk of the weight, and one product."""
    with gpu() as machine:
        x, weight = (machine.array(n, np.float16) for n in ((64, 128), (256, 128)))
        inputs = None if bias is None else machine.array((256,), bias)
        y, scale = module.bit_linear_forward(x, weight, inputs)
        names = ["bit_scale", "bit_codes", "int8_quantize", "int8_linear"]
        assert [launch.kernel for launch in machine.launches] == names
        machine.launches.clear()
        module.bit_linear_backward(y, x, weight, inputs, scale)
        names = ["bit_codes", "bit_gradient", "int8_quantize", "int8_dequantize_"]
        names += ["column_sum"] * (bias is not None)
        assert [launch.kernel for launch in machine.launches] == names
        assert len(machine.products) == 2
        assert machine.functions == []


def test_more_inputs_than_a_sum_of_32_bits_holds(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_INPUTS", 47)
    with emulator():
        assert launched("bit_linear_forward", **_drawn(np.dtype("float32"))) is NotImplemented
    assert reason_of() == "sums of 48 products may overflow 32 bits; at most 47"


def test_it_learns() -> None:
    """Steps down the gradient that passes straight through lessen the loss."""
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((64, 16)), rng.integers(-1, 2, (8, 16)) * 0.5
    weight = rng.standard_normal((8, 16)) * 0.5
    losses = []
    for _ in range(60):
        y, scale = module.bit_linear_forward(x, weight)
        difference = y - x @ target.T
        losses.append(float(np.square(difference).mean()))
        weight = weight - 0.003 * module.bit_linear_backward(difference, x, weight, None, scale)[1]
    assert losses[-1] < 0.25 * losses[0]


def test_wrong_calls() -> None:
    x, weight = np.ones((2, 5), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(ShapeError, match="weight has inputs=4; it must be 5"):
        uc.bit_linear(x, weight)
    with pytest.raises(DTypeError, match="weight is float16; it must be float32"):
        uc.bit_linear(x, weight.astype(np.float16))
