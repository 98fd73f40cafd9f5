"""The table of a layer of experts in docs/performance.md equals the output of its command."""

from itertools import islice

import pytest

from ..machines import cuda_on_cpu
from .mixture import PAGE, lines

if (reason := cuda_on_cpu.missing()) is not None:
    pytest.skip(reason, allow_module_level=True)


def test_the_page_says_what_a_dense_product_costs() -> None:
    """Forward; the others with the whole table."""
    shown = PAGE.read_text(encoding="utf-8")
    for line in islice(lines("grouped_linear"), 2):
        assert line in shown, f"{line}: python -m tests.code.mixture --write"


@pytest.mark.slow
def test_the_page_says_what_a_layer_costs() -> None:
    shown = PAGE.read_text(encoding="utf-8")
    for line in lines():
        assert line in shown, f"{line}: python -m tests.code.mixture --write"
