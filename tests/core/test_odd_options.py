"""Options and arrays of odd types: a call works, or raises one of the library's errors.

Each argument of each public function of an op is replaced by values of all types, its arrays by
arrays of dtypes that no kernel knows.  NumPy gives no warning, even where results overflow.
"""

import contextlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy import losses
from unsloth_cupy.bench import cases
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, ShapeError, UnslothCupyError

from ..harness.sampling import Sample
from .test_names_in_errors import COMPOSED, FUNCTIONS, SCALE, call_of_op, op_of

CALLS = 40  # of a function in a run; all of them with --sample all
RECORD = np.zeros(3, [("a", "f4"), ("b", "i4")])
VALUES = [
    *(2**31, 2**40, 2**63 - 1, -(2**63), 2**70, -(2**70), 10**400, -(10**400), 0, -1, 3),
    *(0.5, 1e308, 5e-324, float("nan"), float("inf"), 1j, True, None, "", "x", b"x", int, object()),
    *((), (1, 2), (2**70, 0), (-(2**70),), (10**400,), ((1,),), ("a", "b"), [1], {}, {1}, ...),
    *(np.array(1), np.array([1]), np.ones((2, 2)), np.array(0.5), np.array([None]), RECORD),
    *(RECORD[0], np.bool_(True), np.int8(1), np.uint64(2**64 - 1), np.float16(1)),
    *(np.timedelta64(1), np.datetime64("2020"), np.longdouble(1), np.complex64(1)),
    *(slice(None), slice(0, 2**70), (np.array([1, 2]),), Fraction(1, 2)),
]
DTYPES = ([("a", "f4")], [], "O", "M8[s]", "m8[s]", "U3", "S3", "V4", "c8", "g", "u8", ">f4", "?")


LOSSES = [name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))]


def call_of_loss(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a loss of texts and valid arguments, drawn for its op."""
    function = getattr(losses, name)
    parameters = inspect.signature(function).parameters
    options = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    both = options | {"group": 4, "share": 0.5} | cases.draw(OPS[f"{name}_forward"], SCALE).arrays
    return function, {n: value for n, value in both.items() if n in parameters}


def targets() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return the public functions of ops with valid arguments, by name."""
    of_ops = {name: call_of_op(name) for name in FUNCTIONS if op_of(name)}
    composed = {name: COMPOSED[name] for name in COMPOSED if hasattr(uc, name)}
    return of_ops | composed | {name: call_of_loss(name) for name in LOSSES}


def odd(value: Any) -> Iterator[Any]:
    """Yield what an argument may not be in place of a value."""
    yield from VALUES
    if isinstance(value, np.ndarray):
        yield from (np.zeros(value.shape, dtype) for dtype in DTYPES)
        yield from (value.tolist(), np.ma.masked_array(value, np.ones(value.shape, bool)))
        yield np.zeros((), value.dtype)


def judge(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise for an error that is not the library's, and for a warning of NumPy."""
    copies = {n: a.copy() if type(a) is np.ndarray else a for n, a in arguments.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(UnslothCupyError):
            function(**copies)


TARGETS = targets()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_odd_arguments(name: str) -> None:
    function, arguments = TARGETS[name]
    calls = [(key, value) for key in arguments if key != "comm" for value in odd(arguments[key])]
    draw = random.Random(f"{name} {Sample.day}")
    for key, value in calls if Sample.all else draw.sample(calls, min(CALLS, len(calls))):
        try:
            judge(function, arguments | {key: value})
        except Exception as error:
            error.add_note(f"{name}({key}={value!r:.200})")
            raise


X, EXPERTS = np.ones((4, 4), np.float32), np.zeros((4, 1), int)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: uc.sort_by_expert(EXPERTS, count=2**40), ConfigError),
        (lambda: uc.broadcast_to(X[:0, 0], shape=(2**70, 0)), ShapeError),
        (lambda: uc.broadcast_to(X[0, 0], shape=(2**40, 2**40)), ShapeError),
        (lambda: uc.reshape(X[:0], shape=(2**40, 2**40, 0)), ShapeError),
        (lambda: uc.reshape(X[:0], shape=(0,) * 70), ShapeError),
        (lambda: uc.causal_conv(X[None], X, activation=X), ConfigError),  # type: ignore[arg-type]
        (lambda: uc.balance_loss(X, EXPERTS, mask=np.zeros(4, [("a", "?")])), UnslothCupyError),
        (lambda: uc.cross_entropy_(X.copy(), EXPERTS[:, 0], 10**400), ConfigError),
    ],
)
def test_what_is_odd_is_refused(call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
