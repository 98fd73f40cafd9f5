from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import DTypeError

from ..golden.golden import OpCase
from ..parity import Case, KernelParity
from .golden_cases import agree, both_dtypes, cast, golden


class TestRelu2(KernelParity):
    op = "relu2"
    cases = (Case("odd", axes=[2, 3, 13]), Case("scalar", axes=[]), Case("empty", axes=[0, 4]))


@both_dtypes
@golden("layers", "relu2_glu")
def test_golden(golden: OpCase, dtype: Any) -> None:
    given = cast(golden, dtype)
    tape = uc.Tape()
    gate, up = tape.watch(given["gate"]), tape.watch(given["up"])
    y = uc.multiply(uc.relu2(gate), up)
    agree(y.value, golden.outputs["y"])
    dgate, dup = tape.gradients(y, [gate, up], given["cotangent"])
    agree(dgate, golden.grads["gate"])
    agree(dup, golden.grads["up"])


def test_integers_are_refused() -> None:
    with pytest.raises(DTypeError, match="x is int64; it must be float16"):
        uc.relu2(np.arange(3))
