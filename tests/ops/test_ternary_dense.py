"""A ternary weight made dense, part by part."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Ternary
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.ops.quantized._planes import dense, planes_of
from unsloth_cupy.ops.quantized.ternary_dense import ternary_dense_

from ..harness.parity import Case, KernelInPlace, emulator
from ..machines.cuda_on_cpu.traffic import counted


def case(label: str, rows: int, columns: int, *, group: int = 0, **options: Any) -> Case:
    """Return a part of a matrix of 40 x 300."""
    made = lambda rng: planes_of(rng.integers(-1, 2, (40, 300)).astype(np.int8))  # noqa: E731
    groups = -(-300 // group) if group else 1
    inputs = {"planes": made, "scale": lambda rng: rng.random((40 if group else 1, groups)) + 0.5}
    options |= {"group": group} if group else {}
    return Case(label, rows=rows, columns=columns, arrays=inputs, **options)


FORM = {"signs": 2, "outputs": 64, "rows": 64}


class TestTernaryDense(KernelInPlace):
    op = "ternary_dense_"
    sizes = (
        {**FORM, "columns": 4096, "bytes": 512, "groups": 1},
        {**FORM, "columns": 4096, "bytes": 512, "groups": 128},
        {**FORM, "columns": 77, "bytes": 12, "groups": 1},
    )
    cases = (
        case("all", 40, 300),
        case("rows", 7, 300, row=31),
        case("columns", 40, 64, column=72),
        case("odd", 3, 13, row=2, column=8),
        case("not from a byte on", 3, 13, column=5),
        case("groups", 40, 300, group=32),
        case("a part of groups", 9, 160, group=64, row=5, column=40),
        case("nothing", 0, 8),
    )


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_kernel_equals_the_definition(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    scale = rng.random((21, 3)).astype(np.float32)
    made = Ternary.from_codes(
        rng.integers(-1, 2, (21, 90)).astype(np.int8), scale, group=32, dtype=dtype
    )
    plain = made.dequantize()
    with emulator():
        np.testing.assert_array_equal(made.dequantize(), plain)
        np.testing.assert_array_equal(made[3:8], plain[3:8])


def test_all_that_moves_is_wanted() -> None:
    planes = planes_of(np.ones((16, 1024), np.int8))
    w, scale = np.empty((16, 1024), np.float16), np.ones((1, 1), np.float16)
    with emulator(), counted() as traffic:
        ternary_dense_(w, planes, scale)
    assert traffic.of("global").efficiency == 1
    whole = slice(0, 16), slice(0, 1024)
    np.testing.assert_array_equal(w, dense(planes, scale, 32, *whole, w.dtype))
