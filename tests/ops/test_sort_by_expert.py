"""The order of assignments by expert."""

import re
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError
from unsloth_cupy.ops.experts.sort_by_expert import REPORTER, launch_sort

from ..harness.parity import Case, KernelAlone, KernelParity, emulator
from .test_cross_entropy import reported

# The public names, as other people's programs call them.
PUBLIC = ("sort_by_expert(experts, count)",)


def drawn(rows: int, k: int, count: int) -> Any:
    """Return a function that draws assignments."""
    return lambda rng: rng.integers(0, count, (rows, k))


class TestSortByExpert(KernelParity):
    op = "sort_by_expert_forward"
    sizes = ({"assigned": (512, 4), "count": 8}, {"assigned": (4096, 8), "count": 128})
    test_gradient_matches_finite_differences = None
    cases = (
        Case("a part of a warp", arrays={"experts": drawn(3, 2, 5)}, count=5),
        Case("many experts", arrays={"experts": drawn(70, 6, 256)}, count=256),
        Case("one expert", arrays={"experts": drawn(50, 1, 1)}, count=1),
        Case("the last expert alone", arrays={"experts": np.full((40, 2), 3, np.int32)}, count=4),
        Case("two blocks", arrays={"experts": drawn(700, 6, 11)}, count=11),
        Case("no rows", arrays={"experts": drawn(0, 2, 3)}, count=3),
    )


@pytest.mark.parametrize(("assignments", "count"), [(1, 3), (33, 1), (513, 9), (9001, 60)])
def test_the_order_is_stable(assignments: int, count: int) -> None:
    experts = np.random.default_rng(0).integers(0, count, assignments)
    for context in (None, emulator()):
        with context or np.errstate():
            order, offsets = uc.sort_by_expert(experts, count)
        assert order.dtype == offsets.dtype == np.int32
        np.testing.assert_array_equal(order, sorted(range(assignments), key=experts.__getitem__))
        np.testing.assert_array_equal(offsets, np.searchsorted(np.sort(experts), range(count + 1)))


def test_any_schedule() -> None:
    """Any order of threads and blocks gives the same order of assignments."""
    experts = np.random.default_rng(0).integers(0, 5, (1100, 4))
    expected = uc.sort_by_expert(experts, 5)
    for seed in (1, 2):
        with emulator(seed=seed):
            for actual, wanted in zip(uc.sort_by_expert(experts, 5), expected, strict=True):
                np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("expert", [-1, 3])
def test_an_expert_that_does_not_exist(expert: int) -> None:
    with pytest.raises(RangeError, match=rf"experts holds {expert}; it must be in 0 \.\. 2"):
        uc.sort_by_expert(np.array([1, expert, 0, expert]), 3)


class TestExpertsThatDoNotExist(KernelAlone):
    """A GPU's experts are not read by the host: such assignments come last, and are reported."""

    op = "sort_by_expert_forward"
    cases = (Case("before and behind"),)

    def prove(self, case: Case, dtype: Any) -> None:
        for expert in (-1, 3):
            experts = np.array([1, expert, 0, expert])
            with emulator():
                order, offsets, places = launch_sort(experts, 3, places=True, who=REPORTER)
            assert re.search(rf"experts holds {expert} in row [13]; it must be", reported())
            assert order.tolist() == [2, 0, 1, 3]
            assert offsets.tolist() == [0, 1, 2, 2]
            assert places.tolist() == [1, -1, 0, -1]


def test_bad_calls() -> None:
    with pytest.raises(ConfigError, match="count must be in 1"):
        uc.sort_by_expert(np.array([0]), 0)
    with pytest.raises(DTypeError, match="experts is the number 3"):
        uc.sort_by_expert(3, 4)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="experts is float32; it must be int32 or int64"):
        uc.sort_by_expert(np.ones(2, np.float32), 4)
