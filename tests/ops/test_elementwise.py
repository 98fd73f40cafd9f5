import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError

from ..harness.parity import Case, KernelParity, Parity

# The public names, as other people's programs call them.
PUBLIC = ("clip(x, *, bound)",)


def positive(*shape):
    return lambda rng: rng.uniform(0.5, 2, shape)


def apart(*shape):
    """Return what draws numbers of either sign, none of them near 0."""
    return lambda rng: rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape)


class TestSubtract(Parity):
    op = "subtract"
    cases = (Case("two axes", axes=[3, 5]), Case("scalar", axes=[]), Case("empty", axes=[0, 3]))


class TestDivide(Parity):
    op = "divide"
    cases = (
        Case("two axes", axes=[3, 5], arrays={"b": apart(3, 5)}),
        Case("empty", axes=[0, 3]),
    )


class TestPower(Parity):
    op = "power"
    cases = (
        Case("square", axes=[3, 5], exponent=2.0),
        Case("cube", axes=[7], exponent=3.0),
        Case("one", axes=[7], exponent=1.0),
        Case("none", axes=[7], exponent=0.0),
        Case("reciprocal", axes=[3, 5], exponent=-1.0, arrays={"x": apart(3, 5)}),
        Case("root", axes=[3, 5], exponent=0.5, arrays={"x": positive(3, 5)}),
        Case("empty", axes=[0, 3], exponent=-0.5),
    )


class TestExp(Parity):
    op = "exp"
    cases = (Case("two axes", axes=[3, 5]), Case("scalar", axes=[]), Case("empty", axes=[0, 3]))


class TestLog(Parity):
    op = "log"
    cases = (
        Case("two axes", axes=[3, 5], arrays={"x": positive(3, 5)}),
        Case("empty", axes=[0, 3]),
    )


class TestClip(KernelParity):
    op = "clip"
    cases = (
        Case("odd", axes=[2, 3, 13], bound=1.2, arrays={"x": apart(2, 3, 13)}),
        Case("inside", axes=[7], bound=3.0, arrays={"x": apart(7)}),
        Case("slices", axes=[2, 3, 40], gaps=True, bound=9.0),
        Case("scalar", axes=[], bound=8.0),
        Case("empty", axes=[0, 3], bound=1.0),
    )


def test_a_nan_stays_one_and_bounds_are_positive():
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(uc.clip(x, bound=2.0), [np.nan, 2, -2])
    np.testing.assert_array_equal(uc.clip_backward(x, x, bound=2.0), 0)
    for bound in (0.0, -1.0):
        with pytest.raises(ConfigError, match="pass a positive number, such as 8"):
            uc.clip(x, bound=bound)
