"""Fixtures and markers that every test may use."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test of a Parity class that names ``case`` the cases of its class."""
    if "case" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("case", metafunc.cls.cases, ids=lambda case: case.label)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    import importlib.util

    has_gpu = False
    if importlib.util.find_spec("cupy"):
        import cupy

        has_gpu = cupy.cuda.is_available()
    if not has_gpu:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
