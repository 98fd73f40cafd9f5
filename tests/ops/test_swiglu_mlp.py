import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, ShapeError

from ..golden.golden import OpCase
from ..parity import Case, Parity
from .golden_cases import agree, both_dtypes, cast, golden

SIZES: dict[str, Any] = {"rows": [2, 3], "hidden": 5, "inner": 7, "outputs": 5}


class TestSwigluMlp(Parity):
    op = "swiglu_mlp"
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
    given = cast(golden, dtype)
    arrays = [given[name] for name in ("x", "gate", "up", "down")]
    agree(uc.swiglu_mlp(*arrays, chunk=chunk), golden.outputs["y"])
    grads = uc.swiglu_mlp_backward(given["cotangent"], *arrays, chunk=chunk)
    for found, name in zip(grads, ("x", "gate", "up", "down"), strict=True):
        agree(found, golden.grads[name])


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


def test_wrong_calls() -> None:
    x, weight = np.ones((2, 3), np.float32), np.ones((5, 3), np.float32)
    with pytest.raises(ConfigError, match="chunk must be a positive number of rows"):
        uc.swiglu_mlp(x, weight, weight, weight.T, chunk=0)
    with pytest.raises(ShapeError, match="down_weight has inner=3; it must be 5"):
        uc.swiglu_mlp(x, weight, weight, weight)
