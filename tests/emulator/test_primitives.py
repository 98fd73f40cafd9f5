"""Every primitive against plain arithmetic, checked and fast."""

import pytest

from ..hardware.primitives import PRIMITIVES
from . import primitive

SEEDED = ["named barriers", "multicast TMA", "st.async and arrivals of other blocks"]


@pytest.mark.parametrize("check", [True, False], ids=["checked", "fast"])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive(check: bool, name: str) -> None:
    """Bit by bit: the values are integers that every sum holds."""
    assert primitive(name, check=check, seed=len(name) % 3) == 0


@pytest.mark.parametrize("seed", range(3, 8))
@pytest.mark.parametrize("name", SEEDED)
def test_any_schedule(name: str, seed: int) -> None:
    assert primitive(name, seed=seed) == 0
