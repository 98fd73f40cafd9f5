import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, ShapeError

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelParity
from ..machines.stand_in import gpu
from .golden_cases import agree, both_dtypes, cast, golden

# The public names, as other people's programs call them.
PUBLIC = ("swiglu_mlp(x, gate_weight, up_weight, down_weight, *, chunk=None)",)

SIZES: dict[str, Any] = {"rows": [2, 3], "hidden": 5, "inner": 7, "outputs": 5}


class TestSwigluMlp(KernelParity):
    op = "swiglu_mlp"
    sizes = ({"hidden": 64, "inner": 256},)
    cases = (
        Case("one chunk", **SIZES),
        Case("a short last chunk", **SIZES, chunk=4),
        Case("one row", **SIZES | {"rows": []}),
        Case("no rows", **SIZES | {"rows": [0]}),
        Case("no inner", **SIZES | {"inner": 0}),
    )


@both_dtypes
@pytest.mark.parametrize("chunk", [None, 2])
@golden("layers", "swiglu_mlp")
def test_golden(golden: OpCase, dtype: Any, chunk: int | None) -> None:
    inputs = cast(golden, dtype)
    arrays = [inputs[name] for name in ("x", "gate", "up", "down")]
    agree(uc.swiglu_mlp(*arrays, chunk=chunk), golden.outputs["y"])
    grads = uc.swiglu_mlp_backward(inputs["cotangent"], *arrays, chunk=chunk)
    for actual, name in zip(grads, ("x", "gate", "up", "down"), strict=True):
        agree(actual, golden.grads[name])


def _unfused(x: Any, gate_weight: Any, up_weight: Any, down_weight: Any) -> Any:
    return uc.linear(uc.swiglu(uc.linear(x, gate_weight), uc.linear(x, up_weight)), down_weight)


def _peak(function: Callable[..., Any], arrays: list[np.ndarray]) -> int:
    """Return the most bytes that forward and backward hold beside arguments and gradients."""
    tracemalloc.start()
    tape = uc.Tape()
    watched = [tape.watch(array) for array in arrays]
    y = function(*watched)
    grads = tape.gradients(y, watched, y.value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - sum(grad.nbytes for grad in grads)


@pytest.mark.parametrize("rows", [512, 2048])
def test_peak_is_forty_percent_below_the_unfused(rows: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [(rows, 64), (192, 64), (192, 64), (64, 192)]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    fused, unfused = (_peak(function, arrays) for function in (uc.swiglu_mlp, _unfused))
    assert fused <= 0.6 * unfused, f"{fused} of {unfused} bytes"


@pytest.mark.parametrize("wanted", [{"x"}, {"gate_weight"}, {"up_weight", "down_weight"}])
def test_no_gradient_that_nobody_asks_for(wanted: set[str]) -> None:
    shapes = [(5, 4), (7, 4), (7, 4), (3, 7), (5, 3)]
    *arrays, dy = (np.random.default_rng(0).standard_normal(shape) for shape in shapes)
    some = uc.swiglu_mlp_backward(dy, *arrays, chunk=2, wanted=wanted)
    everything = uc.swiglu_mlp_backward(dy, *arrays, chunk=2)
    names = ("x", "gate_weight", "up_weight", "down_weight")
    for name, actual, full in zip(names, some, everything, strict=True):
        assert (actual is None) == (name not in wanted)
        if actual is not None:
            np.testing.assert_array_equal(actual, full)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_gpu_holds_three_inner_activations_of_a_chunk(dtype: Any) -> None:
    """And dx of the chunk, and the sums of the gradients, in float32: a stand-in counts."""
    rows, hidden, inner, chunk = 512, 64, 256, 128
    shapes = [(rows, hidden), (inner, hidden), (inner, hidden), (hidden, inner), (rows, hidden)]
    with gpu() as machine:
        *arrays, dy = (machine.array(shape, dtype) for shape in shapes)
        before = machine.peak = machine.held
        y = uc.swiglu_mlp(*arrays, chunk=chunk)
        activation = chunk * inner * np.dtype(dtype).itemsize
        assert machine.peak - before == y.nbytes + 3 * activation
        before = machine.peak = machine.held
        dx = uc.swiglu_mlp_backward(dy, *arrays, chunk=chunk)[0]
        sums = 3 * inner * hidden * 4
        assert machine.peak - before <= dx.nbytes + sums + 3 * activation + chunk * hidden * 6


def test_wrong_calls() -> None:
    x, weight = np.ones((2, 3), np.float32), np.ones((5, 3), np.float32)
    with pytest.raises(ConfigError, match="chunk must be a positive number of rows"):
        uc.swiglu_mlp(x, weight, weight, weight.T, chunk=0)
    with pytest.raises(ShapeError, match="down_weight has inner=3; it must be 5"):
        uc.swiglu_mlp(x, weight, weight, weight)
