import pytest

from ...machines.cuda_on_cpu import missing


@pytest.fixture(autouse=True)
def _emulator() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
