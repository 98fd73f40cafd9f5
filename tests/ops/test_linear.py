import importlib
import tracemalloc
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.errors import DTypeError, ShapeError

from ..harness.parity import Case, Parity, emulator, within_rule
from ..machines.stand_in import gpu

# The public names, as other people's programs call them.
PUBLIC = ("linear(x, weight, bias=None)",)


class TestLinear(Parity):
    op = "linear"
    cases = (
        Case("odd", rows=[2, 3], inputs=13, outputs=7, given=["bias"]),
        Case("no bias", rows=[5], inputs=4, outputs=3),
        Case("one row", rows=[], inputs=5, outputs=2, given=["bias"]),
        Case("no rows", rows=[2, 0], inputs=5, outputs=2, given=["bias"]),
        Case("no inputs", rows=[3], inputs=0, outputs=2, given=["bias"]),
        Case("no outputs", rows=[3], inputs=2, outputs=0),
    )


def test_equals_torch() -> None:
    torch = pytest.importorskip("torch", reason="the peer of linear")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in [(2, 3, 5), (7, 5), (7,), (2, 3, 7)]]
    x, weight, bias, dy = (torch.tensor(array, requires_grad=True) for array in arrays)
    y = torch.nn.functional.linear(x, weight, bias)
    grads = torch.autograd.grad(y, (x, weight, bias), dy)
    np.testing.assert_allclose(uc.linear(*arrays[:3]), y.detach(), rtol=1e-12, atol=1e-14)
    actual = uc.linear_backward(arrays[3], *arrays[:3])
    for mine, theirs in zip(actual, grads, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)


def test_no_gradient_that_nobody_asks_for() -> None:
    x, weight, bias, dy = (np.ones(shape) for shape in [(2, 5), (3, 5), (3,), (2, 3)])
    everything = uc.linear_backward(dy, x, weight, bias)
    for i, name in enumerate(("x", "weight", "bias")):
        actual = uc.linear_backward(dy, x, weight, bias, wanted={name})
        assert [grad is None for grad in actual] == [j != i for j in range(3)]
        np.testing.assert_array_equal(actual[i], everything[i])


def test_a_frozen_weight_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    module, shapes = importlib.import_module("unsloth_cupy.ops.linear.linear"), []
    gemm = module.gemm

    def counted(a: Any, b: Any, **options: Any) -> Any:
        shapes.append((a.shape, b.shape))
        return gemm(a, b, **options)

    monkeypatch.setattr(module, "gemm", counted)
    tape = uc.Tape()
    x = tape.watch(np.ones((2, 5)))
    y = uc.linear(x, np.ones((3, 5)))
    tape.gradients(y, [x], y.value)
    assert shapes == [((2, 5), (5, 3)), ((2, 3), (3, 5))]


def test_a_float32_bias_of_narrow_rows_is_rounded_with_them() -> None:
    x, weight = np.full((1, 1), 1, np.float16), np.full((1, 1), 2.0**-11, np.float16)
    bias = np.full(1, 1 + 2.0**-12, np.float32)  # rounded before, it would be 1
    assert uc.linear(x, weight, bias)[0, 0] == 1 + 2.0**-10
    assert uc.linear_backward(x, x, weight, bias)[2].dtype == np.float32


def test_a_float32_bias_of_float64_rows_takes_nothing_from_them() -> None:
    x, weight = np.full((1, 1), 1 + 2.0**-40), np.ones((1, 1))
    assert uc.linear(x, weight, np.zeros(1, np.float32))[0, 0] == 1 + 2.0**-40


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_gradient_of_a_bias_by_kernel(dtype: Any, rows: int) -> None:
    """Summed in float32, in a fixed order, with any gaps between rows."""
    rng = np.random.default_rng(0)
    dy = rng.standard_normal((rows, 2, 40)).astype(np.float16).astype(dtype)[..., :37]
    x, weight, bias = np.ones((rows, 2, 1), dtype), np.ones((37, 1), dtype), np.ones(37, dtype)

    def sums(kind: Any) -> dict[str, np.ndarray]:
        inputs = (array.astype(kind) for array in (dy, x, weight, bias))
        return {"dbias": uc.linear_backward(*inputs, wanted={"bias"})[2]}

    with emulator():
        first, second = sums(dtype), sums(dtype)
    within_rule(sums(dtype), sums(np.float64), first)
    assert first["dbias"].tobytes() == second["dbias"].tobytes()
    with gpu() as machine:
        there = [machine.array(array.shape, dtype) for array in (dy, x, weight, bias)]
        uc.linear_backward(*there, wanted={"bias"})
        assert [launch.kernel for launch in machine.launches] == ["column_sum"]
        assert machine.functions == []


def test_16_bit_matrices_are_not_widened_whole() -> None:
    x, weight = np.ones((8, 3000), np.float16), np.ones((3000, 3000), np.float16)
    tracemalloc.start()
    uc.linear(x, weight)
    uc.linear_backward(x, x, weight, None, wanted={"x"})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20 < weight.size * 4


def test_wrong_calls_show_the_call() -> None:
    x, weight = np.ones((2, 5), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(ShapeError, match=r"weight has inputs=4; it must be 5"):
        uc.linear(x, weight)
    with pytest.raises(DTypeError, match="weight is float16; it must be float32"):
        uc.linear(x, weight.astype(np.float16))
