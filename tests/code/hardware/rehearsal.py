"""Tests marked ``gpu`` without a GPU: ``pytest -p tests.code.hardware.rehearsal -m gpu``.

They run on the stand-in for CuPy, whose launches do nothing: of each kind the first test, the last,
and the first in bfloat16, which CuPy widens in some functions.  Numbers are wrong, so a test may
end where it compares them: with an AssertionError of its own, or where an error is not raised.  Any
other error, in the library, in the harness or in the test, is one that a GPU would meet too.
"""

import ctypes
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
OTHERS = tuple(str(ROOT / name) for name in ("unsloth_cupy", "tests/harness", "tests/machines"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep up to three tests of each kind, without the mark that skips them."""
    kinds: dict[str, list[pytest.Item]] = {}
    for item in items:
        kinds.setdefault(item.nodeid.partition("[")[0], []).append(item)
        item.own_markers = [m for m in item.own_markers if m.kwargs != {"reason": "needs a GPU"}]
    items[:] = []
    for kind in kinds.values():
        narrow = [item for item in kind if "bfloat16" in item.name][:1]
        items += dict.fromkeys((kind[0], *narrow, kind[-1]))


def is_about_numbers(error: BaseException) -> bool:
    """Return whether a test compared values, and found other ones or no error."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return type(error) in (AssertionError, pytest.fail.Exception) and not last.startswith(OTHERS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Run a test until it compares numbers."""
    try:
        yield
    except BaseException as error:
        if not is_about_numbers(error):
            raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """Play GPU 0 of one to a test and its fixtures; comparisons see dtypes and shapes alone."""
    import numpy as np

    from ...harness import parity
    from ...machines import stand_in

    def shapes(actual: Any, expected: Any, *_: Any, **__: Any) -> float:
        if np.shape(actual) != np.shape(expected):
            raise TypeError(f"the shape is {np.shape(actual)}, not {np.shape(expected)}")
        return 0.0

    with stand_in.gpu("90", devices=1) as machine, pytest.MonkeyPatch.context() as patch:
        machine.strict = False
        driver, load = types.SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 0), ctypes.CDLL
        with_driver = lambda name, *a, **b: driver if "libcuda." in name else load(name, *a, **b)  # noqa: E731
        patch.setattr(ctypes, "CDLL", with_driver)
        patch.setattr(parity, "_error", shapes)
        for name in ("assert_allclose", "assert_array_equal"):
            patch.setattr(np.testing, name, shapes)
        return (yield)
