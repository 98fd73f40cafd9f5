"""The rule of ``parity`` for losses, measures and gradients of whole models.

    error(actual) <= 2 * error(plain) + 4 * eps(dtype) * size

where exact is the same model in float64 and plain the model in its dtype, computed in the way that
a test compares with.  The errors of all gradients count together, and so do those of all numbers: a
single one may be right by chance in one order of sums, and the order depends on the CPU.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from .parity import EPS

Gradients = Mapping[str, np.ndarray]


def widened(model: Any) -> Any:
    """Make a model compute in float64, with equal weights."""
    model.parameters = {n: array.astype(float) for n, array in model.parameters.items()}
    if model.adapter is not None:
        adapter = model.adapter
        adapter.parameters = {n: array.astype(float) for n, array in adapter.parameters.items()}
    return model


@contextmanager
def in_float64(*models: Any) -> Iterator[None]:
    """Let models compute in float64 in a ``with`` block."""
    holders = [each for model in models for each in (model, model.adapter) if each is not None]
    parameters = [each.parameters for each in holders]
    for model in models:
        widened(model)
    yield
    for each, own in zip(holders, parameters, strict=True):
        each.parameters = own


def largest_error(actual: Gradients, expected: Gradients) -> float:
    """Return the Frobenius norm of all errors, relative to that of all gradients."""
    assert actual.keys() == expected.keys()
    off = sum(np.square(actual[n].astype(np.float64) - expected[n]).sum() for n in expected)
    return float(np.sqrt(off / sum(np.square(gradient).sum() for gradient in expected.values())))


def judge_gradients(
    actual: Gradients, plain: Gradients, exact: Gradients, dtype: str = "float32"
) -> None:
    """Raise if gradients break the rule of this module."""
    allowed = 2 * largest_error(plain, exact) + 4 * EPS[dtype]
    assert largest_error(actual, exact) <= allowed


def allowed_error(plain: Any, exact: Any, terms: float = 0.0, dtype: str = "float32") -> float:
    """Return the error that the rule allows for each of some numbers.

    ``terms`` is the size of what the numbers are sums and differences of, where the numbers may be
    smaller, such as that of a log-probability.
    """
    plain, exact = np.atleast_1d(plain, exact)
    size = max(np.abs(exact).max(initial=0), terms)
    return float(2 * np.abs(plain - exact).max(initial=0) + 4 * EPS[dtype] * size)
