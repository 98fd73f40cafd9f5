import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import DTypeError, ShapeError
from unsloth_cupy.ops.linear.matmul import matmul_backward

from ..harness.parity import Case, Parity

# The public names, as other people's programs call them.
PUBLIC = ("matmul(a, b)",)


class TestMatmul(Parity):
    op = "matmul"
    cases = (
        Case("one", matrices=[], height=3, inner=5, width=2),
        Case("batch", matrices=[2], height=3, inner=5, width=2),
        Case("two axes", matrices=[2, 3], height=2, inner=4, width=3),
        Case("no batch", matrices=[0], height=2, inner=4, width=3),
        Case("no rows", matrices=[2], height=0, inner=4, width=3),
        Case("nothing to add", matrices=[2], height=2, inner=0, width=3),
    )


def test_bad_input() -> None:
    a = np.ones((2, 3, 4), np.float32)
    with pytest.raises(ShapeError, match="inner"):
        uc.matmul(a, a)
    with pytest.raises(ShapeError, match="matrices"):
        uc.matmul(a, np.ones((3, 4, 2), np.float32))
    with pytest.raises(DTypeError, match="b is float64"):
        uc.matmul(a, np.ones((2, 4, 2)))


def test_what_nobody_asks_for_is_not_computed() -> None:
    a = np.ones((2, 3), np.float32)
    actual = matmul_backward(np.ones((2, 2), np.float32), a, a.T, wanted={"b"})
    assert actual[0] is None
    assert actual[1].shape == (3, 2)
