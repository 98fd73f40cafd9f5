"""Grouped products: stored numbers, skewed groups, the parity of kernels."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import RangeError, ShapeError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, KernelParity, emulator
from .golden_cases import agree, both_dtypes

# The public names, as other people's programs call them.
PUBLIC = ("grouped_linear(x, weight, offsets, bias=None)",)


def case(label: str, groups: list[int], inputs: int, outputs: int, **how: Any) -> Case:
    """Return a product of groups of these sizes."""
    offsets = np.cumsum([0, *groups], dtype=how.pop("kind", np.int64))
    arrays = {"offsets": offsets}
    sizes = {"assignments": sum(groups), "experts": len(groups)}
    return Case(label, inputs=inputs, outputs=outputs, arrays=arrays, **sizes, **how)


class TestGroupedLinear(KernelParity):
    op = "grouped_linear"
    machine = {"processors": 2}  # noqa: RUF012
    sizes = (
        {"assignments": 1024, "experts": 8, "inputs": 256, "outputs": 512},
        {"assignments": 256, "experts": 8, "inputs": 256, "outputs": 512},
        {"assignments": 16, "experts": 8, "inputs": 256, "outputs": 512},
        {"assignments": 16, "experts": 8, "inputs": 33, "outputs": 7},
    )
    cases = (
        case("uneven groups", [3, 0, 5, 1], 16, 24, given=["bias"], kind=np.int32),
        case("odd sizes", [2, 0, 7], 13, 11, given=["bias"]),
        case("all rows of one group", [0, 140, 0], 72, 40),
        case("tiles of 128 rows", [131, 70], 136, 24, given=["bias"]),
        case("tiles of 256 columns", [0, 300, 3], 72, 264, given=["bias"]),
        case("tiles of 64 rows", [30, 0, 66], 24, 264),
        case("one row each", [1] * 6, 40, 8),
        case("more groups than a warp has lanes", [1, 0, 2] * 15, 8, 8),
        case("one group", [5], 8, 8),
        case("odd tiles of 128 rows", [129], 9, 5, given=["bias"]),
        case("no rows", [0, 0], 8, 8, given=["bias"]),
        case("no inputs", [2, 1], 0, 4, given=["bias"]),
        case("no outputs", [2, 1], 4, 0),
    )


class TestBeforeHopper(TestGroupedLinear):
    """What a GPU without warpgroups runs."""

    machine = {"architecture": 80}  # noqa: RUF012
    cases = tuple(each for each in TestGroupedLinear.cases if each.label.startswith("tiles of"))


@both_dtypes
@pytest.mark.parametrize(
    "golden", [*op_cases(FOLDER / "ops_next", "grouped")], ids=lambda c: c.name
)
def test_golden(golden: OpCase, dtype: Any) -> None:
    x, weight, dy = (golden.inputs[n].astype(dtype) for n in ("x", "weight", "cotangent"))
    turned = golden.params["layout"] == "(experts, in_out)"
    if turned:
        weight = weight.transpose(0, 2, 1)
    offsets = golden.inputs["offsets"]
    agree(uc.grouped_linear(x, weight, offsets), golden.outputs["y"])
    dx, dweight, _, dbias = uc.grouped_linear_backward(dy, x, weight, offsets, None)
    agree(dx, golden.grads["x"])
    agree(dweight.transpose(0, 2, 1) if turned else dweight, golden.grads["weight"])
    assert dbias is None


def test_any_schedule() -> None:
    """Any order of threads gives equal bits, however many blocks share the tiles."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((200, n)).astype(np.float16) for n in (40, 24))
    weight = rng.standard_normal((3, 24, 40)).astype(np.float16)
    bias, offsets = rng.standard_normal((3, 24)).astype(np.float16), np.array([0, 1, 1, 200])

    def bits() -> list[bytes]:
        y = uc.grouped_linear(x, weight, offsets, bias)
        gradients = uc.grouped_linear_backward(dy, x, weight, offsets, bias)
        return [a.tobytes() for a in (y, *gradients) if a is not None]

    with emulator():
        expected = bits()
    for seed in (1, 2):
        with emulator(seed=seed, processors=seed + 1):
            assert bits() == expected


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_of_no_group_are_zero(dtype: Any) -> None:
    """On a GPU the host does not read offsets; whatever they hold, nothing else is read."""
    x, weight = np.ones((6, 8), dtype), np.ones((2, 8, 8), dtype)
    launch: Any = OPS["grouped_linear"].launch
    for offsets, rows in (([0, 1, 4], 4), ([0, 9, 9], 6), ([0, -5, 2], 2), ([0, 0, 0], 0)):
        with emulator():
            y = launch([x, weight, np.array(offsets), np.ones((2, 8), dtype)], {})
        np.testing.assert_array_equal(y, np.where(np.arange(6) < rows, 9, 0)[:, None] + 0 * y)


@pytest.mark.parametrize("wanted", [{"x"}, {"weight"}, {"bias"}])
def test_no_gradient_that_nobody_asks_for(wanted: set[str]) -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(s) for s in ((4, 3), (2, 5, 3), (2, 5)))
    offsets, dy = np.array([0, 3, 4]), rng.standard_normal((4, 5))
    every = uc.grouped_linear_backward(dy, x, weight, offsets, bias)
    kept = [array.copy() for array in (x, weight, bias)]
    some = uc.grouped_linear_backward(dy, x, weight, offsets, bias, wanted=wanted)
    for array, own in zip((x, weight, bias), kept, strict=True):
        np.testing.assert_array_equal(array, own)  # those without a gradient, too
    names = ("x", "weight", "offsets", "bias")
    for name, actual, full in zip(names, some, every, strict=True):
        assert (actual is None) == (name not in wanted)
        if actual is not None:
            np.testing.assert_array_equal(actual, full)


@pytest.mark.parametrize("offsets", [[0, 3, 2], [1, 2, 4], [0, 2, 3], [0, 5, 4], [-1, 2, 4]])
def test_offsets_that_are_no_groups(offsets: list[int]) -> None:
    x, weight = np.ones((4, 3), np.float32), np.ones((2, 5, 3), np.float32)
    with pytest.raises(RangeError, match=r"offsets are \[.*\]; they must rise from 0 to 4"):
        uc.grouped_linear(x, weight, np.array(offsets))
    with pytest.raises(ShapeError, match=r"offsets has experts\+1=2; it must be 3"):
        uc.grouped_linear(x, weight, np.array([0, 4]))
