"""MXFP4: the numbers that released files hold, and quantization to them; stacks."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError, GradientError, ShapeError
from unsloth_cupy.memory.ledger import Ledger
from unsloth_cupy.memory.planned import Planned, recording_in
from unsloth_cupy.ops.quantized.blocks import Q40, Q80

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import emulator

# The public names, as other people's programs call them.
PUBLIC = ("mxfp4_quantize(w)",)
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
STACKS = pytest.mark.parametrize(
    "quantize",
    [
        uc.mxfp4_quantize,
        uc.nf4_quantize,
        lambda w: uc.nf4_quantize(w, double=True, kind="fp4"),
        uc.int8_weight,
        Q40.quantized,
        Q80.quantized,
    ],
    ids=["mxfp4", "nf4", "fp4-double", "int8", "q4_0", "q8_0"],
)
Make = Callable[[Any], Any]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("golden", [*op_cases(FOLDER / "ops_next", "mxfp4")], ids=lambda c: c.name)
def test_golden(golden: OpCase) -> None:
    """The values of transformers, in equal bits, on the host and by the kernel."""
    state = {f"w_{name}": golden.inputs[name] for name in ("blocks", "scales")}
    weight = uc.Mxfp4.from_state(state)
    expected = np.ascontiguousarray(golden.outputs["y"].swapaxes(1, 2))  # (experts, out, in)
    assert weight.dequantize().tobytes() == expected.tobytes()
    small = (np.abs(expected) < 2.0**-126) | np.repeat(weight.scales == 0, 32, axis=-1)
    with emulator():  # in kernels float32 denormals are zero
        assert weight.dequantize().tobytes() == np.where(small, 0 * expected, expected).tobytes()
    again = weight.state()
    for name, array in state.items():
        np.testing.assert_array_equal(again[name.replace("w_", "weight_")], array)
    made = uc.mxfp4_quantize(expected)  # other codes may stand for the same numbers
    np.testing.assert_array_equal(made.dequantize(), expected)


def test_quantization_is_what_the_specification_says() -> None:
    """Value by value: the exponent of the largest, the nearest level, of two the even code."""
    w = drawn(6, 64) * np.exp2(np.arange(-60, 60, 20, dtype=np.float32))[:, None]
    ties = (LEVELS[1:] + LEVELS[:-1]) / 2
    w[0, :16] = [6, *ties, *-ties, 0]
    w[0, 16:32] = w[1, :32] = 0
    w[2, :3] = 7.9, -7.9, 1  # beyond the largest level: limited
    rows = (a.reshape(-1, 32) for a in (w, uc.mxfp4_quantize(w).dequantize()))
    for row, line in zip(*rows, strict=True):
        most = float(np.abs(row).max())
        factor = 2.0 ** (np.floor(np.log2(most)) - 2) if most else 1.0
        for value, actual in zip(row, line, strict=True):
            distance = np.abs(LEVELS - min(abs(float(value)) / factor, 6))
            best = np.flatnonzero(distance == distance.min())
            code = next(c for c in best if len(best) == 1 or c % 2 == 0)
            assert actual == np.sign(value) * LEVELS[code] * factor


def test_the_smallest_and_the_largest_numbers() -> None:
    tiny = np.float32(2.0**-149)
    w = np.zeros((4, 32), np.float32)
    w[0, 0], w[1, 0], w[2, 0], w[3, 0] = tiny, 2.0**-126, np.finfo(np.float32).max, 6 * 2.0**-127
    made = uc.mxfp4_quantize(w).dequantize()
    assert made[0, 0] == 0  # half the smallest level is 2^-129
    assert made[1:, 0].tolist() == [2.0**-126, 6 * 2.0**125, 6 * 2.0**-127]


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
@STACKS
def test_stacks(quantize: Make, dtype: Any) -> None:
    """Each matrix of a stack is multiplied as a dense one, by definitions and by kernels."""
    w = drawn(3, 40, 64).astype(dtype)
    stack = quantize(w)
    assert (stack.shape, stack.ndim, len(stack), stack.dtype) == (w.shape, 3, 3, w.dtype)
    dense, offsets = stack.dequantize(), np.array([0, 4, 4, 9])
    for expert in range(3):
        np.testing.assert_array_equal(stack[expert], dense[expert])
    again = type(stack).from_state(stack.state())
    np.testing.assert_array_equal(again.dequantize(dtype), dense)
    x, dy = drawn(9, 64, seed=1).astype(dtype), drawn(9, 40, seed=2).astype(dtype)

    def results(weight: Any) -> list[np.ndarray]:
        y = uc.grouped_linear(x, weight, offsets)
        wanted = {"x"}
        return [y, uc.grouped_linear_backward(dy, x, weight, offsets, None, wanted=wanted)[0]]

    for actual, expected in zip(results(stack), results(dense), strict=True):
        np.testing.assert_array_equal(actual, expected)
    with emulator():
        for actual, expected in zip(results(stack), results(dense), strict=True):
            np.testing.assert_array_equal(actual, expected)
    with pytest.raises(GradientError, match="frozen"):
        uc.grouped_linear_backward(dy, x, stack, offsets, None, wanted={"weight"})


@STACKS
def test_experts_with_quantized_stacks(quantize: Make) -> None:
    """Every gradient but those of the stacks is that of dense ones; kernels launch the same."""
    stacks = quantize(drawn(4, 64, 32)), quantize(drawn(4, 32, 32, seed=1))
    dense = [stack.dequantize() for stack in stacks]
    biases = drawn(4, 64, seed=2), drawn(4, 32, seed=3)
    x, logits = drawn(7, 32, seed=4), drawn(7, 4, seed=5)
    logits[:, 2] = -50  # an expert without rows
    routes = uc.route(logits, k=2)

    def results(weights: Any) -> list[np.ndarray]:
        tape = uc.Tape()
        watched = [tape.watch(a) for a in (x, *biases)]
        y = uc.experts_mlp(watched[0], *weights, routes, *watched[1:], activation="swiglu_clamped")
        return [
            tape.value_of(y) if hasattr(tape, "value_of") else y.value,
            *tape.gradients(y, watched, np.ones_like(x)),
        ]

    for context in (None, emulator()):
        with context or uc.AttentionConfig().use():
            for actual, expected in zip(results(stacks), results(dense), strict=True):
                np.testing.assert_array_equal(actual, expected)


def test_only_experts_with_rows_are_made_dense() -> None:
    """Bytes of an expert without rows are never read: here they are scales that are not numbers."""
    stack = uc.mxfp4_quantize(drawn(3, 32, 32))
    expected = uc.grouped_linear(drawn(5, 32, seed=1), stack, np.array([0, 2, 2, 5]))
    stack.scales[1] = 255
    with emulator():
        actual = uc.grouped_linear(drawn(5, 32, seed=1), stack, np.array([0, 2, 2, 5]))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_stack_is_dense_for_one_product_at_a_time() -> None:
    """Planned bytes: gate and up are freed before down is made dense."""
    shapes, ledger = ((8, 512, 256), (8, 256, 256)), Ledger(1)
    made = (uc.mxfp4_quantize(np.zeros(shape, np.float32)) for shape in shapes)
    stacks = [each.moved(lambda a: Planned.of(a.shape, a.dtype)) for each in made]
    x, experts, weights = (
        Planned.of(*form) for form in (((4, 256), BFLOAT16), ((4, 2), np.int32), ((4, 2), BFLOAT16))
    )
    with recording_in(ledger):
        uc.experts_mlp(x, *stacks, uc.Routes(experts, weights))
    held = list(
        itertools.accumulate(
            ledger.sizes[number] if number >= 0 else -ledger.sizes[~number]
            for number in ledger.changes
        )
    )
    dense = 8 * 512 * 256 * 2
    assert dense <= max(held) < 1.2 * dense


def test_wrong_calls() -> None:
    weight = uc.mxfp4_quantize(drawn(2, 4, 64))
    with pytest.raises(ShapeError, match=r"rows of w have 40 values, not whole blocks of 32"):
        uc.mxfp4_quantize(drawn(4, 40))
    with pytest.raises(ShapeError, match="weight has 3 axes"):
        uc.linear(drawn(3, 64), weight)
    with pytest.raises(ShapeError, match="weight has 2 axes"):
        uc.grouped_linear(drawn(3, 64), uc.mxfp4_quantize(drawn(4, 64)), np.array([0, 3]))
    with pytest.raises(ConfigError, match="only the index of one matrix is supported"):
        weight[:1]
    with pytest.raises(ConfigError, match=r"columns \[0, 16\] split blocks of 32 values"):
        weight.cut(2, [slice(0, 16)])
    state = weight.state()
    state["weight_scales"] = state["weight_scales"].copy()
    state["weight_scales"][0, 0, 0] = 255
    with pytest.raises(ConfigError, match="weight_scales holds 255"):
        uc.Mxfp4.from_state(state)
    with pytest.raises(ConfigError, match=r"pass two arrays, \.\.\._blocks"):
        uc.Mxfp4.from_state({**weight.state(), "bias": state["weight_scales"]})
    with pytest.raises(ConfigError, match=r"weight_blocks is .* it must be \(2, 4, 2, 16\)"):
        uc.Mxfp4.from_state({**weight.state(), "weight_blocks": weight.packed})
