from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ShapeError

from ..golden.golden import OpCase
from ..parity import Case, KernelParity
from .golden_cases import agree, both_dtypes, cast, golden


class TestSwiglu(KernelParity):
    op = "swiglu"
    cases = (
        Case("odd", axes=[2, 3, 13]),
        Case("one element", axes=[1]),
        Case("two blocks", axes=[5, 431]),
        Case("scalar", axes=[]),
        Case("empty", axes=[0, 4]),
    )


@both_dtypes
@golden("layers", "swiglu", without=("swiglu_mlp",))
def test_golden(golden: OpCase, dtype: Any) -> None:
    given = cast(golden, dtype)
    gate, up = given["gate"], given["up"]
    agree(uc.swiglu(gate, up), golden.outputs["y"])
    dgate, dup = uc.swiglu_backward(given["cotangent"], gate, up)
    agree(dgate, golden.grads["gate"])
    agree(dup, golden.grads["up"])


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ShapeError, match="up has axes="):
        uc.swiglu(np.ones((2, 3), np.float32), np.ones((2, 4), np.float32))
