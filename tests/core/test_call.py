"""What an option may be: every op refuses what is not such a number, before any work."""

import inspect
import math
import traceback
from collections.abc import Callable

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.op import op
from unsloth_cupy.errors import ConfigError, RangeError, ShapeError


@op("x(*axes) -> y(*axes)")
def mixed(
    x,
    *,
    eps: float = 0.0,
    cap: float | None = None,
    steps: int = 1,
    chunk: int | None = None,
    flag: bool = False,
    pair: tuple[int, int] = (0, 0),
):
    """An op with an option of every type, which notes what it is given."""
    mixed.seen = (eps, cap, steps, chunk, flag, pair)
    return x


def given(**options: object) -> object:
    mixed.seen = None
    mixed(np.ones(2, np.float32), **options)
    return mixed.seen


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("eps", "x", "a finite number"),
        ("eps", None, "a finite number"),
        ("eps", math.nan, "a finite number"),
        ("eps", -math.inf, "a finite number"),
        ("eps", np.float32("inf"), "a finite number"),
        ("eps", True, "a finite number"),
        ("eps", 1j, "a finite number"),
        ("eps", np.ones(()), "a finite number"),
        ("eps", 10**400, "a finite number"),
        ("cap", -(10**309), "a finite number or None"),
        ("cap", [1.0], "a finite number or None"),
        ("cap", math.nan, "a finite number or None"),
        ("steps", 1.0, "an integer"),
        ("steps", None, "an integer"),
        ("steps", True, "an integer"),
        ("chunk", np.bool_(True), "an integer or None"),
        ("chunk", np.arange(3), "an integer or None"),
        ("flag", 1, "True or False"),
        ("flag", "no", "True or False"),
        ("flag", None, "True or False"),
    ],
)
def test_what_does_not_fit_raises_before_any_work(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^mixed\({name}=.*\): {name} must be {words}$"):
        given(**{name: value})
    assert mixed.seen is None


def test_numbers_arrive_as_pythons() -> None:
    numbers = {"eps": np.float64(0.5), "cap": np.int32(2), "steps": np.int64(3)}
    seen = given(**numbers, chunk=4, flag=np.bool_(True), pair="its own to check")
    assert seen == (0.5, 2, 3, 4, True, "its own to check")
    assert [type(value) for value in seen[:5]] == [float, int, int, int, bool]
    assert given(eps=10**300, cap=None)[:2] == (1e300, None)


def test_a_float64_option_does_not_widen_float32() -> None:
    @op("x(*axes) -> y(*axes)")
    def raised(x, *, by: float):
        widths.append((x + by).dtype)
        return x

    widths: list[object] = []
    raised(np.ones(2, np.float32), by=np.float64(1))
    assert widths == [np.float32]


def test_unknown_options_stay_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"mixed\(other=\.\.\.\): there is no such option"):
        given(other=1)


def test_a_call_of_a_known_form_looks_its_plan_up_once() -> None:
    x, seen = np.ones(2, np.float32), []

    @op("x(n), k?: int, b?(n) -> y(n)")
    def shown(x, k=None, *, b=None, factor: float = 2.0):
        seen.append((k, b is None, factor))
        return x

    for _ in range(3):
        shown(x)
        shown(x, 3)
        shown(x, 4, b=x, factor=1)
    assert len(shown.routes) == 3
    assert seen == [(None, True, 2.0), (3, True, 2.0), (4, False, 1)] * 3


X, LABELS = np.ones((2, 3), np.float32), np.array([0, 1])
ROWS = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: uc.rms_norm_forward(X, X[0], eps=-1.0), "eps must be 0 or more"),
        (lambda: uc.rms_norm(X, X[0], eps="x"), "eps must be a finite number"),
        (lambda: uc.softmax_backward(X, X, scale=math.nan), "scale must be a finite number"),
        (
            lambda: uc.cross_entropy_backward(ROWS, None, X, LABELS, ROWS, softcap=0.0),
            "softcap must be positive",
        ),
        (
            lambda: uc.linear_cross_entropy_backward(ROWS, None, X, X, LABELS, ROWS, smoothing=2),
            "smoothing must be in",
        ),
    ],
)
def test_bounds_hold_whichever_op_is_called(call: Callable[[], object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: uc.cross_entropy_backward(ROWS, None, X, LABELS + 2, ROWS),
        lambda: uc.linear_cross_entropy_backward(ROWS, None, X, X, LABELS + 1, ROWS),
        lambda: uc.embedding_backward(X, LABELS + 2, X),
        lambda: uc.embedding_backward(X, LABELS - 1, X),
        lambda: uc.rope_backward(np.ones((1, 3, 1, 4), np.float32), *uc.rope_tables(2, 4), None),
    ],
)
def test_a_backward_op_refuses_indices_outside(call: Callable[[], object]) -> None:
    with pytest.raises(RangeError, match=r"labels holds|tokens holds|has 3 tokens"):
        call()


def test_a_backward_op_refuses_tables_too_wide() -> None:
    x, tables = np.ones((1, 3, 1, 4), np.float32), uc.rope_tables(3, 6)
    for call in (
        lambda: uc.rope_backward(x, *tables, None),
        lambda: uc.rope_qk_backward(x, x, *tables, None),
    ):
        with pytest.raises(ShapeError, match="rotates 6 columns"):
            call()


def test_generated_functions_have_a_source() -> None:
    """Tracebacks show it, also of two functions that have the same name."""
    arguments = "x=arrays[0]", "x=arrays[0], bits=options['bits']"
    for function, expected in zip((same, renamed()), arguments, strict=True):
        made = op("x(*axes) -> y(*axes)")(function)
        assert inspect.getsource(made.compute).endswith(f"return function({expected})\n")
        assert inspect.getsource(type(made).__call__).startswith("def same(self, x=None, *more")
    with pytest.raises(ShapeError) as raised:
        uc.rms_norm_forward(np.ones((2, 3)), np.ones(4))
    shown = "".join(traceback.format_exception(raised.value))
    assert "run = plan([x, weight, residual, bias])" in shown


def same(x):
    return x


def renamed():
    def same(x, *, bits: int = 0):
        return x

    return same
