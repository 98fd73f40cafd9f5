from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError, ShapeError
from unsloth_cupy.ops.elements.reductions import mean_backward, sum_backward

from ..harness.parity import Case, Parity

# The public names, as other people's programs call them.
PUBLIC = (
    "sum(x, *, axis=None, keepdims=False)",
    "mean(x, *, axis=None, keepdims=False)",
    "broadcast_to(x, *, shape)",
)

CASES = (
    Case("all", axes=[3, 5]),
    Case("one", axes=[3, 5], axis=1),
    Case("kept", axes=[3, 5, 2], axis=-2, keepdims=True),
    Case("two", axes=[3, 5, 2], axis=(0, -1)),
    Case("none", axes=[3, 5], axis=()),
    Case("empty", axes=[0, 3], axis=0),
    Case("no results", axes=[0, 3], axis=1),
    Case("scalar", axes=[]),
)


class TestSum(Parity):
    op = "sum"
    cases = CASES


class TestMean(Parity):
    op = "mean"
    cases = CASES


class TestBroadcastTo(Parity):
    op = "broadcast_to"
    cases = (
        Case("rows", axes=[5], shape=(3, 5)),
        Case("columns", axes=[3, 1], shape=(2, 3, 4)),
        Case("scalar", axes=[], shape=(2, 3)),
        Case("as it is", axes=[2, 3], shape=(2, 3)),
        Case("to nothing", axes=[1, 3], shape=(0, 3)),
    )


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sums_of_16_bits_are_made_in_32(name: str) -> None:
    """Ones beyond which the dtype knows no next integer, and a sum beyond float16 itself."""
    ones = np.ones((3, 2**13), np.dtype(name) if name == "float16" else BFLOAT16)
    assert uc.sum(ones, axis=1).tolist() == [2.0**13] * 3
    assert uc.mean(np.full_like(ones, 100)).item() == 100
    tape = uc.Tape()
    one = tape.watch(ones[:1, :1])
    (gradient,) = tape.gradients(uc.broadcast_to(one, shape=ones.shape), [one], ones)
    assert gradient.tolist() == [[3.0 * 2**13]]


@pytest.mark.parametrize("backward", [sum_backward, mean_backward])
def test_gradients_of_sums_can_be_written_to(backward: Any) -> None:
    x = np.ones((2, 3), np.float32)
    dx = backward(np.ones((), np.float32), x)
    dx[0, 0] = 7
    assert (dx == dx[1, 1]).sum() == 5


@pytest.mark.parametrize("call", [uc.sum, uc.mean])
def test_axes_that_are_none(call: Any) -> None:
    x = np.ones((2, 3), np.float32)
    for axis in (2, -3, (0, 5), (1, 1), (1, -1)):
        with pytest.raises(ShapeError, match=r"axis="):
            call(x, axis=axis)
    for axis in ("x", 1.0, (0, None), True):
        with pytest.raises(ConfigError, match="pass an integer"):
            call(x, axis=axis)
    with pytest.raises(ConfigError, match="keepdims must be True or False"):
        call(x, keepdims=1)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 4), (3, 2), 6, (-1, 3), (2.0, 3), None])
def test_shapes_that_are_not_broadcast_to(shape: Any) -> None:
    with pytest.raises(ShapeError, match="broadcast_to"):
        uc.broadcast_to(np.ones((2, 3), np.float32), shape=shape)
