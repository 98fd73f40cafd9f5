"""The plain kernels in norm.cu and attention_forward.cu compute what the definitions do."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import attention_forward, rms_norm_forward

from ...harness.parity import emulator, within_rule
from ..programs.ladder import LADDERS, PLAIN

SHAPES = {
    rms_norm_forward: ((5, 40), (40,)),
    attention_forward: ((2, 70, 4, 24), (2, 9, 2, 24), (2, 9, 2, 16)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.name)
def test_a_plain_kernel_computes_what_the_definition_does(ladder: Any, dtype: Any) -> None:
    op, rng = ladder.op, np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in SHAPES[op]]
    exact, expected = op(*(array.astype(np.float64) for array in arrays)), op(*arrays)
    op.routes.clear()  # a call that was recorded would launch the kernel of the library
    with ladder.rungs[PLAIN] as load, emulator():
        actual = op(*arrays)
    load.assert_called_once()
    op.routes.clear()
    within_rule({"y": expected[0]}, {"y": exact[0]}, {"y": actual[0]})
