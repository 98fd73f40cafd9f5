import pytest

from .. import budget
from ..cuda_on_cpu import missing


@pytest.fixture(autouse=True)
def _compilers() -> None:
    if (reason := missing() or budget.missing()) is not None:
        pytest.skip(reason)
