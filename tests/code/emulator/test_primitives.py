"""Every primitive against plain arithmetic, checked and fast."""

import numpy as np
import pytest

from unsloth_cupy.ops.common.philox import words

from ..hardware.primitives import PRIMITIVES
from . import RNG, kernel, primitive

SEEDED = ["named barriers", "multicast TMA", "st.async and arrivals of other blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive(name: str, check: bool) -> None:
    """Bit by bit: the values are integers that every sum holds."""
    assert primitive(name, check=check, seed=len(name) % 3) == 0


@pytest.mark.parametrize("seed", range(3, 8))
@pytest.mark.parametrize("name", SEEDED)
def test_any_schedule(name: str, seed: int) -> None:
    assert primitive(name, seed=seed) == 0


def test_philox_draws_what_the_definition_draws() -> None:
    counters, keys = RNG.integers(0, 1 << 32, (32, 4), np.uint32), np.zeros((32, 2), np.uint32)
    seed = 0x0123456789ABCDEF
    keys[:] = seed & 0xFFFFFFFF, seed >> 32
    out = np.zeros_like(counters)
    kernel("primitives.cu", "random_words")((1,), (32,), (counters, keys, out), 0)
    np.testing.assert_array_equal(out.T, words(seed, tuple(counters.T.astype(np.uint64))))
