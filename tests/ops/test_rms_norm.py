from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.bench.cases import Scale, draw
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError

from ..code.programs.variants import ROWS
from ..golden.golden import OpCase
from ..harness.parity import Case, KernelParity, emulator, on_schedules, outputs_of
from .golden_cases import agree, both_dtypes, cast, golden

# The public names, as other people's programs call them.
PUBLIC = (
    "rms_norm(x, weight, *, eps=1e-06, residual=None, bias=None, offset=0.0)",
    "rms_norm_forward(x, weight, residual=None, bias=None, *, eps=1e-06, offset=0.0)",
)


class TestRMSNorm(KernelParity):
    op = "rms_norm_forward"
    sizes = tuple({"hidden": n} for n in ROWS)
    cases = (
        Case("one row", rows=[], hidden=32),
        Case("no rows", rows=[0], hidden=8),
        Case("no columns", rows=[2], hidden=0),
        Case("odd width", rows=[2, 3], hidden=201),
        Case("one column", rows=[3], hidden=1),
        Case("8 threads a row", rows=[3], hidden=68, given=["bias"]),
        Case("32 threads a row", rows=[9], hidden=264, given=["residual"]),
        Case("seven columns", rows=[900], hidden=7, given=["bias"]),
        Case("large eps", rows=[5], hidden=64, eps=1.0),
        Case("residual", rows=[4], hidden=130, given=["residual"]),
        Case("all", rows=[2, 5], hidden=64, given=["residual", "bias"], offset=1.0),
        Case("blocks walk ragged rows", rows=[2, 70], hidden=136, given=["residual", "bias"]),
    )


class TestRMSNormBetweenGaps(KernelParity):
    """Slices of wider arrays: the kernel steps over what is not theirs."""

    op = "rms_norm_forward"
    cases = (
        Case("one row length", rows=[5], hidden=64, given=["residual"], gaps=True),
        Case("heads of tokens", rows=[3, 4], hidden=16, given=["residual", "bias"], gaps=True),
        Case("too many axes", rows=[2, 3, 4], hidden=16, gaps=True),
    )


class TestRMSNormLongRows(KernelParity):
    op = "rms_norm_forward"
    cases = (
        Case("a ragged block a row", rows=[20], hidden=1032, given=["residual", "bias"]),
        Case("four blocks an SM", rows=[7], hidden=4096),
        Case("two blocks share a row", rows=[3], hidden=8200, given=["residual", "bias"]),
        Case("four blocks share a row", rows=[1], hidden=16392),
        Case("eight blocks share a row", rows=[1], hidden=32776),
    )
    test_any_strides = None  # NumPy adds pairwise along contiguous axes only: 4 eps do not hold


class TestRMSNormWithoutClusters(KernelParity):
    op = "rms_norm_forward"
    machine = {"clusters": False, "shared_memory": 48 << 10}  # noqa: RUF012
    cases = (
        Case("all threads of a block", rows=[1], hidden=8200),
        Case("backward reads twice", rows=[6], hidden=8184, given=["residual", "bias"]),
        Case("both read twice", rows=[1], hidden=16392, given=["residual"]),
    )
    test_any_strides = None


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "hidden"), [(9, 136), (400, 136), (85, 2048), (40, 8200)])
def test_sums_of_weights_are_equal_in_every_order_of_blocks(rows: int, hidden: int) -> None:
    """Whatever block of `norm_backward` ends first."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, rows, hidden)).astype(np.float16)
    weight, bias = np.ones((2, hidden), np.float32)
    inputs = dy, None, x, weight, None, bias, np.ones(rows, np.float32)
    first, *others = (
        on_schedules(seed, processors=20, together=together)(
            lambda: uc.rms_norm_backward(*inputs)  # type: ignore[arg-type]
        )
        for seed, together in ((0, 1), (1, 1), (2, 8), (3, 2))
    )
    for other in others:
        np.testing.assert_array_equal(other[1], first[1])
        np.testing.assert_array_equal(other[3], first[3])
    exact = uc.rms_norm_backward(*inputs)  # type: ignore[arg-type]
    np.testing.assert_allclose(first[1], exact[1], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(first[3], exact[3], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("machine", [nullcontext, emulator])
@pytest.mark.parametrize("hidden", [24, 136, 8200, 16400])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "gated_rms_norm"])
def test_gradients_of_frozen_weights_are_left_out(name: str, hidden: int, machine: Any) -> None:
    """Whatever the form of the kernel; the others have the same bits."""
    scale = Scale(tokens=21, hidden=hidden, inner=hidden, vocab=8)
    forward = draw(OPS[f"{name}_forward"], scale, optional=True).cast(np.float16)
    with machine():
        outputs = forward.run()
        back = forward.backward(outputs, forward.seeds(outputs, every=True))
        every = outputs_of(back)
        for names in ({"x", "residual"}, {"gate"}, {"weight"}, {"x", "bias"}, {"residual"}):
            operands = names & {*OPS[f"{name}_forward"].names}
            some = outputs_of(back._replace(options=back.options | {"wanted": operands}))
            kept = operands | {"x"} if "residual" in operands else operands
            assert some.keys() == {f"d{each}" for each in kept} & every.keys()
            for key, actual in some.items():
                assert actual.tobytes() == every[key].tobytes(), key


@both_dtypes
@golden("layers", "rms_norm")
def test_golden(golden: OpCase, dtype: Any) -> None:
    """Rows near 1, and of 1e-13 or 1e17, whose squares float32 can just hold."""
    inputs, options = cast(golden, dtype), dict(golden.params)
    x, weight, dy = inputs["x"], inputs["weight"], inputs["cotangent"]
    y, h, rstd = uc.rms_norm_forward(x, weight, **options)
    agree(y, golden.outputs["y"])
    np.testing.assert_array_equal(y, uc.rms_norm(x, weight, **options))
    options.pop("eps")
    dx, dweight, *nothing = uc.rms_norm_backward(dy, None, h, weight, None, None, rstd, **options)
    agree(dx, golden.grads["x"])
    agree(dweight, golden.grads["weight"])
    assert nothing == [None, None]


def test_wrong_calls() -> None:
    x = np.ones((2, 8), np.float32)
    with pytest.raises(ShapeError, match="weight has hidden=7; it must be 8"):
        uc.rms_norm(x, np.ones(7, np.float32))
    with pytest.raises(DTypeError, match="weight is float64; it must be float32"):
        uc.rms_norm(x, np.ones(8))
    with pytest.raises(DTypeError, match="x is int64"):
        uc.rms_norm(np.ones((2, 8), int), np.ones(8))
    with pytest.raises(ConfigError, match="eps must be 0 or more"):
        uc.rms_norm(x, np.ones(8, np.float32), eps=-1e-6)
