"""Golden cases of operators as parameters of a test."""

from typing import Any

import numpy as np
import pytest

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # the first is the README's of tests/golden


def golden(group: str, *prefixes: str, without: tuple[str, ...] = ()) -> Any:
    """Parametrize ``golden`` by the cases of a group whose names start with a prefix."""
    cases = [
        case
        for case in op_cases(FOLDER / "ops", group)
        if case.name.startswith(prefixes) and not (without and case.name.startswith(without))
    ]
    assert cases, f"no golden case in {group} starts with {prefixes}"
    return pytest.mark.parametrize("golden", cases, ids=lambda case: case.name)


def cast(case: OpCase, dtype: Any) -> dict[str, np.ndarray]:
    """Return the inputs of a case, with floats in this dtype."""
    return {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in case.inputs.items()}


def agree(actual: Any, expected: np.ndarray) -> None:
    """Assert that actual equals expected within its tolerance of the largest element."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    error = np.abs(actual.astype(np.float64) - expected).max(initial=0)
    size = max(1e-30, np.abs(expected).max(initial=0))
    assert error <= TOLERANCE[actual.dtype.name] * size, f"{error / size:.1e}"


both_dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])
