import pytest

from ...machines.cuda_on_cpu import missing
from ..programs import budget


@pytest.fixture(autouse=True)
def _compilers() -> None:
    if (reason := missing() or budget.missing()) is not None:
        pytest.skip(reason)
