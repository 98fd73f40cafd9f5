import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ShapeError

from ..parity import Case, KernelParity, Parity


class TestAdd(KernelParity):
    op = "add"
    cases = (Case("two axes", axes=[3, 5]), Case("empty", axes=[0]))


class TestMultiply(KernelParity):
    op = "multiply"
    cases = (Case("two axes", axes=[3, 5]), Case("scalar", axes=[]))


class TestScale(KernelParity):
    op = "scale"
    cases = (Case("two axes", axes=[3, 5], factor=0.3),)


class TestReshape(Parity):
    op = "reshape"
    cases = (Case("split", axes=[3, 4], shape=(3, 2, -1)),)


class TestColumns(Parity):
    op = "columns"
    cases = (Case("middle", rows=[3], columns=7, start=2, stop=5),)


@pytest.mark.parametrize("shape", [(4,), (-2, -3), (-1, -1, 6), (0, -1), 6, "x", None, (2.0, 3)])
def test_reshape_refuses_what_is_no_shape_of_it(shape: object) -> None:
    with pytest.raises(ShapeError, match="reshape"):
        uc.reshape(np.ones(6, np.float32), shape=shape)
