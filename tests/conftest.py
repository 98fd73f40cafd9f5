"""Fixtures and markers that every test may use.

A run of the whole suite takes one dtype of each case of an emulated kernel, another the next day;
a run of some files, or UNSLOTH_CUPY_ALL_VARIANTS=1, takes all.
"""

import datetime
import itertools
import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before NumPy: as many processes as cores share them
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

FOLDER = Path(__file__).parent / "golden"
WHOLE = 3000  # tests: more are the suite


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test of a Parity class that names ``case`` the cases of its class."""
    if "case" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("case", metafunc.cls.cases, ids=lambda case: case.label)


def emulates_a_case(item: pytest.Item) -> bool:
    """Say whether a test is that of a Parity class: it runs a case in each dtype."""
    named = getattr(item, "originalname", "") == "test_emulated_kernels"
    return named and getattr(item, "cls", None) is not None


def sampled(items: list[pytest.Item], day: int) -> list[pytest.Item]:
    """Return one emulated test of each case: its dtypes take turns, day by day and case by case."""
    cases = itertools.groupby(
        filter(emulates_a_case, items), lambda i: (i.cls, i.callspec.params["case"].label)
    )
    chosen = []
    for number, (_, group) in enumerate(cases):
        dtypes = list(group)
        chosen.append(dtypes[(day + number) % len(dtypes)])
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a sample of the emulated kernels; skip what needs a GPU where there is none."""
    import importlib.util

    if adrift := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"an address names a test, another in each process: {adrift}")
    if len(items) > WHOLE and not os.environ.get("UNSLOTH_CUPY_ALL_VARIANTS"):
        today = {*sampled(items, datetime.date.today().toordinal())}
        left = [item for item in items if emulates_a_case(item) and item not in today]
        config.hook.pytest_deselected(items=left)
        gone = {*left}
        items[:] = [item for item in items if item not in gone]

    has_gpu = False
    if importlib.util.find_spec("cupy"):
        import cupy

        has_gpu = cupy.cuda.is_available()
    if not has_gpu:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
