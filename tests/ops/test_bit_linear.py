"""The linear layer of BitNet, as it is trained."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import DTypeError, ShapeError
from unsloth_cupy.ops.quantized import bit_linear as module

from ..golden.golden import OpCase
from ..parity import Case, Parity
from .golden_cases import agree, golden

# The public names, as other people's programs call them.
PUBLIC = ("bit_linear(x, weight)",)


class TestBitLinear(Parity):
    op = "bit_linear_forward"
    cases = (
        Case("odd", rows=[2, 3], inputs=13, outputs=7, given=["bias"]),
        Case("no bias", rows=[5], inputs=40, outputs=3),
        Case("one row", rows=[], inputs=5, outputs=2, given=["bias"]),
        Case("no rows", rows=[2, 0], inputs=5, outputs=2, given=["bias"]),
        Case("no inputs", rows=[3], inputs=0, outputs=2, given=["bias"]),
        Case("no outputs", rows=[3], inputs=2, outputs=0),
        Case("zeros", arrays={"x": np.zeros((2, 5)), "weight": np.zeros((3, 5))}),
    )
    test_gradient_matches_finite_differences = None  # straight through: below
    test_any_strides = None  # another order of a mean may round a weight to another code


@golden("ternary", "auto_bit_linear", without=("auto_bit_linear_norm",))
def test_equals_transformers(golden: OpCase) -> None:
    x, weight, bias = (golden.inputs[name] for name in ("x", "weight", "bias"))
    agree(uc.bit_linear(x, weight, bias=bias), golden.outputs["y"])
    tape = uc.Tape()
    watched = [tape.watch(array) for array in (x, weight, bias)]
    y = uc.bit_linear(*watched[:2], bias=watched[2])
    found = tape.gradients(y, watched, golden.inputs["cotangent"])
    for name, gradient in zip(("x", "weight", "bias"), found, strict=True):
        agree(gradient, golden.grads[name])


@golden("ternary", "auto_bit_linear_norm")
def test_equals_transformers_behind_a_norm(golden: OpCase) -> None:
    given = golden.inputs
    tape = uc.Tape()
    names = ("x", "weight", "bias", "norm_weight")
    x, weight, bias, norm = watched = [tape.watch(given[name]) for name in names]
    normed = uc.rms_norm(x, norm, eps=golden.params["rms_norm_eps"])
    y = uc.bit_linear(normed, weight, bias=bias)
    agree(y.value, golden.outputs["y"])
    found = tape.gradients(y, watched, given["cotangent"])
    for name, gradient in zip(names, found, strict=True):
        agree(gradient, golden.grads[name])


@golden("ternary", "act_quant")
def test_rows_are_rounded_as_in_transformers(golden: OpCase) -> None:
    """A weight of one output a column, each 1 and so of mean 1, hands x through."""
    x = golden.inputs["x"]
    codes, scales = module._rows(x.reshape(-1, x.shape[-1]))
    assert (codes == np.rint(codes)).all()
    assert np.abs(codes).max() <= 127
    agree((codes * scales).reshape(x.shape), golden.outputs["y"])


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
@pytest.mark.parametrize("chunk", [1, 2**22])
def test_equals_the_product_of_what_is_rounded(monkeypatch, dtype: Any, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(dtype) for s in ((6, 40), (9, 40), (6, 9)))
    exact = {n: a.astype(np.float64) for n, a in (("x", x), ("w", w), ("dy", dy))}
    w_scale = max(np.abs(exact["w"]).mean(), 1e-5)
    wq = np.clip(np.rint(exact["w"] / w_scale), -1, 1) * w_scale
    top = np.abs(exact["x"]).max(axis=1, keepdims=True)
    xq = np.rint(exact["x"] * 127 / top) * top / 127
    eps = {2: 2.0**-7 if dtype == BFLOAT16 else 2.0**-10, 4: 1e-6}[np.dtype(dtype).itemsize]
    y, scale = module.bit_linear_forward(x, w)
    dx, dw, _ = module.bit_linear_backward(dy, x, w, None, scale)
    assert scale.dtype == np.float32
    for found, wanted in ((y, xq @ wq.T), (dx, exact["dy"] @ wq), (dw, exact["dy"].T @ xq)):
        assert found.dtype == dtype
        np.testing.assert_allclose(
            found.astype(np.float64), wanted, rtol=0, atol=2 * eps * np.abs(wanted).max()
        )


def test_no_gradient_that_nobody_asks_for() -> None:
    x, weight, bias, dy = (np.ones(shape) for shape in [(2, 5), (3, 5), (3,), (2, 3)])
    _, scale = module.bit_linear_forward(x, weight, bias)
    everything = module.bit_linear_backward(dy, x, weight, bias, scale)
    for i, name in enumerate(("x", "weight", "bias")):
        found = module.bit_linear_backward(dy, x, weight, bias, scale, wanted={name})
        assert [grad is None for grad in found] == [j != i for j in range(3)]
        np.testing.assert_array_equal(found[i], everything[i])


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
