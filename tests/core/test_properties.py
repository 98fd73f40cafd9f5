"""Properties of every op, tested on random calls of ``strategies.py``.

Results have the shape and the dtype of the signature, are finite, and are as close to a float64 run
as arithmetic allows; gradients equal finite differences; a wrong call raises an error of the
library; kernels agree with the definition.  The number of the sample seeds the calls;
``--sample all`` makes many.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from unsloth_cupy.bench.cases import Call, Scale, draw, forward_ops
from unsloth_cupy.core.dtypes import FLOATS, KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.signature import check, parts, shape_of
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError, UnslothCupyError

from ..harness.parity import (
    EPS,
    Arrays,
    _copied,
    _error,
    _seeds,
    _size,
    emulator,
    judge_gradient,
    outputs_of,
    proofs,
)
from ..harness.sampling import Sample
from ..harness.strategies import broken, calls

# Hypothesis draws ten calls afresh and most later ones from parts of those before them.
A_RUN, MANY = 12, 570  # calls of an op and a property; many are 10^5 in all
EMULATED = 2  # ops whose kernels a run judges: each call is one or two more to compile
NAMES = forward_ops()
# A number that lies on a step is rounded to another integer in float64, and a result moves with it;
# so do those of an op that is asked for int8.
STEPS = {"bit_linear_forward", "bit_linear_backward", "int8_linear_forward"}
STEPS |= {"rounded_sum_", "nf4_rounded_sum_"}
LEAST = 1e-2  # slope: see judge_gradient


def many(strategy: Any, judge: Callable[[Any], None], few: int = A_RUN, most: int = MANY) -> None:
    """Test as many calls of a strategy as the run has; the sample's number determines them."""
    rules = settings(
        max_examples=most if Sample.all else few,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    rules(seed(Sample.day)(given(strategy)(judge)))()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let numbers overflow without a warning, as they do on a GPU."""
    with np.errstate(all="ignore"):
        yield


# ---- results ------------------------------------------------------------------------------------
def near(call: Call, roundings: int = 1) -> Arrays:
    """Raise if a result is farther from a float64 run than arithmetic allows; return all results.

    A result is rounded once, after arithmetic in float32, or after a product in 16 bits, whose
    every step is rounded too; calls in float32 have a tighter bound.  Integers may be off by one if
    a value is between two steps.
    """
    op, plain, exact = call.op, outputs_of(call), outputs_of(call.cast(np.float64))
    dtypes = {array.dtype.name for array in call.arrays.values() if array is not None}
    narrow = [] if op.widen else [EPS[name] for name in dtypes & {"float16", "bfloat16"}]
    work = 16 * max(narrow) if narrow else 64 * EPS["float32"]
    for name, array in plain.items():
        error, size = _error(array, exact[name]), _size(exact[name])
        lost = 1.0 if array.dtype == np.int8 else max(size, 1.0) * work
        if op.__name__ not in STEPS and not call.options.get("int8"):
            assert error <= roundings * EPS[array.dtype.name] * size + lost, (name, error, size)
    return plain


def both_near(call: Call, roundings: int = 1) -> None:
    """Test a call and its backward op."""
    as_signed(call)
    plain = near(call, roundings)
    if call.op.backward is not None:
        back = call.backward(plain, _seeds(call.op, plain, np.random.default_rng(1)))
        as_signed(back)
        near(back, roundings)


def as_signed(call: Call) -> None:
    """Raise unless results have the shapes and dtypes that the signature names."""
    op, results = call.op, call.mapped(_copied).run()
    bound = check(op.called, op.contract, [call.arrays[name] for name in op.names])
    for operand, dtype in zip(op.contract.outputs, bound.outputs, strict=True):
        if (array := results.get(operand.name)) is None:
            continue
        assert array.dtype == dtype, operand.name
        like = call.arrays.get(operand.name[1:])  # of which it is the gradient
        if like is not None:
            assert array.shape == like.shape, operand.name
        elif all(parts(axis)[0] in bound.sizes for axis in operand.axes):
            assert array.shape == shape_of(operand, bound.sizes), operand.name


@pytest.mark.parametrize("name", NAMES)
def test_results(name: str) -> None:
    """Forward and backward: signed, finite, near a float64 run; arguments are left alone."""

    def judge(call: Call) -> None:
        with quiet():
            both_near(call)

    many(calls(OPS[name], KERNEL_DTYPES), judge)


SLOPES = sorted(
    {
        each.op
        for each in proofs()
        if getattr(each, "test_gradient_matches_finite_differences", None) is not None
    }
)


@pytest.mark.parametrize("name", SLOPES)
def test_gradients(name: str) -> None:
    def judge(call: Call) -> None:
        options = {k: v for k, v in call.options.items() if k != "int8"}  # rounds: no slope
        if name == "route_forward" and options.get("scores") != "softmax_of_k":
            call = call._replace(arrays=call.arrays | {"bias": None})
        with quiet():
            judge_gradient(call._replace(options=options), LEAST)

    many(calls(OPS[name], FLOATS[3:]), judge)


SMALL = Scale(tokens=64, hidden=64, inner=96, vocab=80, heads=4, kv_heads=2, dim=32)


# ---- errors -------------------------------------------------------------------------------------
def attempted(call: Call) -> None:
    """Run a call that may be wrong; errors that are not the library's propagate."""
    in_place = call.op.__name__.endswith("_")
    copied = lambda a: _copied(a) if in_place and isinstance(a, np.ndarray) else a  # noqa: E731
    with quiet(), contextlib.suppress(UnslothCupyError), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        call.mapped(copied).run()


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_the_librarys(name: str) -> None:
    many(broken(OPS[name]), attempted)


@pytest.mark.parametrize(
    "name", [n for n in NAMES for op in (OPS[n], OPS[n].backward) if op and "wanted" in op.options]
)
def test_wanted_names_inputs_alone(name: str) -> None:
    """Anything else would be a gradient that nobody gets, in silence."""
    op, call = OPS[name], draw(OPS[name], SMALL)
    if "wanted" not in op.options:
        outputs = call.mapped(_copied).run()
        call = call.backward(outputs, call.seeds(outputs, every=True))
    known = call._replace(options=call.options | {"wanted": {op.names[0]}})
    assert known() is not None
    for wanted in ({"no_operand"}, {op.names[0], "dy"}, op.names[0], [op.names[0]], -1, {1}):
        with pytest.raises(ConfigError, match=r"wanted=.*; pass "):
            known._replace(options=known.options | {"wanted": wanted})()


# ---- kernels ------------------------------------------------------------------------------------
def kernels() -> list[str]:
    """Return the ops whose kernels this run tests; they take turns."""
    named = [name for name in NAMES if OPS[name].launch is not None]
    first = Sample.day * EMULATED % len(named)
    return named if Sample.all else [*named, *named][first : first + EMULATED]


def full(call: Call) -> bool:
    return all(array is None or array.size for array in call.arrays.values())


@pytest.mark.parametrize("name", kernels())
def test_kernels(name: str) -> None:
    """A kernel has at most five times the rounding errors of its definition: see parity.py."""

    def judge(call: Call) -> None:
        with quiet(), emulator():
            both_near(call, roundings=5)

    many(calls(OPS[name], KERNEL_DTYPES).filter(full), judge, few=2, most=10)


# ---- what such calls have found -----------------------------------------------------------------
def tables(dtype: str, other: str) -> dict[str, Any]:
    return {"cos": np.ones((1, 1), dtype), "sin": np.ones((1, 1), other)}


HEADS = np.ones((1, 1, 1, 2), np.float16)
PLANES = np.array([[[3, 0, 0, 0], [4, 0, 0, 0]]], np.uint8)
ONE = np.ones(1, np.float32)
BYTES = np.zeros(4, np.uint8)


@pytest.mark.parametrize(
    ("op", "arrays", "options", "error"),
    [
        # a kernel would read both tables in the dtype of the first
        ("rope", {"x": HEADS, **tables("float16", "float32")}, {}, DTypeError),
        ("rope_qk", {"q": HEADS, "k": HEADS, **tables("float32", "float16")}, {}, DTypeError),
        ("rope_qk_over_", {"q": HEADS, "k": HEADS, **tables("f2", "f4")}, {}, DTypeError),
        *(
            (name, {"logits": np.ones(3, np.float32), "labels": 1}, {}, DTypeError)
            for name in ("cross_entropy_forward", "cross_entropy_over_")
        ),
        *(
            (name, {"x": ONE, "weight": np.ones((3, 1), "f4"), "labels": 1}, {}, DTypeError)
            for name in ("linear_cross_entropy_forward", "linear_cross_entropy_gradients")
        ),
        # too few bytes, or others than whole rows
        (
            "nf4_product_",
            {
                "out": np.ones((1, 3), "f4"),
                "x": np.ones((1, 8), "f4"),
                "packed": BYTES,
                "absmax": ONE,
            },
            {},
            ShapeError,
        ),
        (
            "nf4_dequantize_",
            {"w": np.ones((1, 16), "f4"), "packed": BYTES, "absmax": ONE},
            {"columns": 16},
            ShapeError,
        ),
        (
            "nf4_dequantize_",
            {"w": np.ones((1, 8), "f4"), "packed": BYTES, "absmax": ONE[:0]},
            {"columns": 8},
            ShapeError,
        ),
        (
            "ternary_dense_",
            {"w": np.ones((2, 8), "f4"), "planes": PLANES, "scale": ONE[None]},
            {},
            ShapeError,
        ),
        (  # fewer groups than there are columns
            "ternary_dense_",
            {
                "w": np.ones((1, 33), "f4"),
                "planes": np.zeros((1, 2, 12), np.uint8),
                "scale": np.ones((1, 2), "f4"),
            },
            {"group": 16},
            ShapeError,
        ),
        (
            "linear_cross_entropy_gradients",
            {"x": np.ones((1, 2), "f4"), "weight": np.ones((3, 2), "f4"), "labels": np.array([0])},
            {"wanted": -1},
            ConfigError,
        ),
    ],
)
def test_calls_that_are_refused(op: str, arrays: Any, options: Any, error: Any) -> None:
    call = Call(OPS[op], dict.fromkeys(OPS[op].names) | arrays, options)
    with pytest.raises(error):
        call.mapped(lambda a: a.copy() if isinstance(a, np.ndarray) else a).run()


@pytest.mark.parametrize("emulated", [False, True], ids=["definition", "kernel"])
def test_a_scale_of_one_axis_stands_for_every_row(emulated: bool) -> None:
    """As the signatures say: an axis that may be 1 may be absent."""
    x = np.eye(3, 32, dtype=np.float32)
    with emulator() if emulated else contextlib.nullcontext():
        actual = [
            OPS["ternary_linear_forward"](x, PLANES, scale) for scale in (2 * ONE, 2 * ONE[None])
        ]
        w = np.empty((1, 8), np.float32)
        dense = OPS["ternary_dense_"](w, PLANES, 2 * ONE)
        scores = OPS["ternary_scores_forward"](PLANES, PLANES, 2 * ONE[0:1].reshape(()), ONE)
    assert (actual[0] == actual[1]).all()
    assert (actual[0][:, 0] == [2, 2, -2]).all()
    assert dense.tolist() == [[2, 2, -2, 0, 0, 0, 0, 0]]
    assert scores.tolist() == [[6]]


def test_scales_of_groups_may_be_those_of_all_rows() -> None:
    """A kernel read them as if each row had its own, and so beyond their end."""
    x, planes = np.ones((1, 130), np.float16), np.zeros((3, 2, 20), np.uint8)
    planes[:, 0] = 255
    scale = np.array([[1, 3]], np.float16)
    with emulator():
        actual = OPS["ternary_linear_forward"](x, planes, scale, group=128)
    assert actual.tolist() == [[134.0] * 3]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("emulated", [False, True], ids=["definition", "kernel"])
def test_what_is_written_over_is_what_comes_back(emulated: bool, dtype: Any) -> None:
    """The array itself, in float32 beside narrow rows too."""
    x, y, out = np.ones((1, 32), dtype), np.empty((1, 1), "f4"), np.empty((1, 1), "f4")
    with emulator() if emulated else contextlib.nullcontext():
        ours = OPS["int8_few_rows_"](x, np.ones((1, 32), np.int8), 127 * ONE, y)
        theirs = OPS["nf4_product_"](out, x, np.full(16, 255, np.uint8), ONE)
    assert ours is y
    assert theirs is out
    assert y[0, 0] == out[0, 0] == 32
