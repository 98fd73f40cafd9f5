"""How a call is checked, planned, run and rounded; what the author of an op is told."""

import contextlib
import inspect
import warnings

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import add, multiply, rms_norm, rms_norm_forward
from unsloth_cupy.core import op as core_op
from unsloth_cupy.core import target
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.op import OPS, op
from unsloth_cupy.core.signature import parse
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError


def ones(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


class Here:
    """A target that runs launches on NumPy arrays, for as long as it is used."""

    def owns(self, array: object) -> bool:
        return isinstance(array, np.ndarray)


@op("x(*axes), y?(*axes), k?(n): int -> z(*axes)")
def shifted(x, y=None, *, k=None, by: float = 0.0):
    """An op with every kind of parameter."""
    z = x + by if y is None else x + y + by
    return z if k is None else z + k.sum()


def test_parameters_go_in_by_position_and_by_name() -> None:
    x, k = ones(2), np.arange(3)
    assert shifted(x).tolist() == [1, 1]
    assert shifted(x, x, by=2.0).tolist() == [4, 4]
    assert shifted(x, y=x).tolist() == [2, 2]
    assert shifted(y=x, x=x, k=k).tolist() == [5, 5]
    assert shifted.call([x, None, k], {"by": 1.0}).tolist() == [5, 5]


def test_wrong_parameters_raise() -> None:
    x = ones(2)
    with pytest.raises(DTypeError, match=r"shifted takes \(x, y\); pass other arrays by keyword"):
        shifted(x, x, x)
    with pytest.raises(TypeError, match=r"shifted\(with_=.*no such option"):
        shifted(x, with_=1)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        shifted(x, x=x)


def test_an_error_shows_the_whole_call() -> None:
    with pytest.raises(ShapeError) as error:
        rms_norm(ones(2, 3), ones(4), residual=ones(2, 3))
    assert str(error.value).splitlines() == [
        "rms_norm: weight has hidden=4; it must be 3",
        "  x(*rows, hidden)         = (2, 3) float32",
        "  weight(hidden): param    = (4,) float32",
        "  residual?(*rows, hidden) = (2, 3) float32",
    ]


def test_help_shows_signature_and_docstring() -> None:
    assert repr(add) == "<op add: a(*axes), b(*axes) -> c(*axes)>"
    assert add.__doc__ == add.definition.__doc__
    assert OPS["add"] is add


def test_help_shows_short_types() -> None:
    shown = str(inspect.signature(rms_norm))
    assert shown.startswith("(x: numpy.ndarray, weight: numpy.ndarray, *, eps: float = 1e-06, ")


def test_sixteen_bits_are_widened_and_rounded_once() -> None:
    received = []

    @op("x(n), w(n): param, r(n): stat -> y(n), s(n): stat, dw(n)")
    def spy(x, w, r):
        received.extend((x, w, r))
        return x + w * np.float32(2**-10), r, w

    x = ones(2, dtype=BFLOAT16)
    results = spy(x, x, ones(2))
    assert [a.dtype for a in received] == [np.float32] * 3
    assert [a.dtype for a in results] == [BFLOAT16, np.float32, BFLOAT16]
    assert results[0].tolist() == [1, 1]
    assert x.dtype == BFLOAT16


def test_ops_that_move_values_are_not_widened() -> None:
    received = []

    @op("x(n) -> y(n)", widen=False)
    def moved(x):
        received.append(x)
        return x[::-1]

    x = ones(2, dtype=np.float16)
    assert np.shares_memory(moved(x), x)
    assert received[0] is x


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
def test_results_are_arrays_of_the_dtype_that_is_promised(dtype) -> None:
    """NumPy makes scalars of 0-d results, and float64 of an option that is a NumPy float64."""

    @op("x(n) -> total(), y(n), none: none")
    def summed(x, *, factor):
        return x.sum(), x * factor, None

    total, y, none = summed(ones(3, dtype=dtype), factor=np.float64(0.5))
    assert (type(total), total.dtype, total.shape) == (np.ndarray, dtype, ())
    assert (type(y), y.dtype) == (np.ndarray, dtype)
    assert none is None


def test_plans_are_made_once_per_form(monkeypatch: pytest.MonkeyPatch) -> None:
    @op("x(n), i?: int -> y(n)")
    def same(x, i=None):
        return x if i is None else x + i

    checked = []
    monkeypatch.setattr(core_op, "check", lambda *call: checked.append(call) or _check(*call))
    for x in (ones(2), ones(2), np.ones(2)[::-1].astype(np.float32)):
        same(x)
    assert len(checked) == 1
    for i in (1, 2, 3):
        assert same(ones(2), i).tolist() == [1 + i] * 2
    assert len(checked) == 2
    same(ones(3))
    same(np.ones(2))
    assert len(checked) == 4
    monkeypatch.setattr(core_op, "KEPT_ROUTES", 4)
    same(ones(4))
    assert len(same.routes) == 1


_check = core_op.check


def test_a_call_that_raised_raises_again() -> None:
    for _ in range(2):
        with pytest.raises(ShapeError, match="b has axes"):
            add(ones(2), ones(3))


@op("i(*rows): int < vocab, w(vocab, n) -> y(*rows, n)")
def taken(i, w):
    return w[i]


@pytest.mark.parametrize(("bad", "shown"), [(3, "3"), (-1, "-1")])
def test_integers_outside_their_axis_raise(bad: int, shown: str) -> None:
    w = np.arange(6.0).reshape(3, 2)
    assert taken(np.array([[0, 2]]), w).tolist() == [[[0, 1], [4, 5]]]
    assert taken(np.zeros((0,), np.int32), w).shape == (0, 2)
    for _ in range(2):
        with pytest.raises(
            RangeError, match=rf"i holds {shown}; it must be in 0 \.\. 2, the vocab"
        ):
            taken(np.array([[0, bad]]), w)
    assert issubclass(RangeError, IndexError)


class TestLaunch:
    """A launch of the test's own, on a target of the test's own."""

    @pytest.fixture
    def launched(self):
        @op("x(*rows, n), k?(n): int -> y(*rows, n)")
        def twice(x, *, k=None):
            return 2 * x

        calls = []

        @twice.kernel
        def launch(x, *, k=None):
            calls.append((x, k))
            return x

        return twice, calls

    def test_runs_where_a_target_owns_the_arrays(self, launched) -> None:
        twice, calls = launched
        x, k = ones(2, 3), np.arange(3)
        assert twice(x, k=k)[0, 0] == 2
        with target.using(Here()):
            assert twice(x, k=k) is x
            assert twice(np.float16(1) * ones(2, 3, dtype=np.float16)).dtype == np.float16
        assert twice(x)[0, 0] == 2
        assert len(calls) == 2
        assert calls[0][1] is k

    def test_strided_arrays_are_packed(self, launched) -> None:
        twice, calls = launched
        with target.using(Here()):
            twice(np.arange(6, dtype=np.float32).reshape(3, 2).T[:, ::-1])
        assert calls[0][0].flags.c_contiguous
        assert calls[0][0].tolist() == [[4, 2, 0], [5, 3, 1]]

    def test_gets_what_it_names(self) -> None:
        @op("x(n), y?(n), z?(n) -> w(n)")
        def summed(x, y=None, *, z=None, factor=1.0, shift=0.0):
            return factor * x + shift

        received = []

        @summed.kernel(strided=("x",))
        def launch(shift, x, **rest):
            received.append((shift, x, rest))
            return x

        x, z = ones(2, 2)[:, 0], ones(2)
        with target.using(Here()):
            summed(x, z=z, shift=2.0)
        ((shift, same, rest),) = received
        assert (shift, same is x, rest["z"] is z) == (2.0, True, True)
        assert rest == {"y": None, "z": z, "factor": 1.0}

    @pytest.mark.parametrize(
        ("launch", "strided", "message"),
        [
            (lambda x, weight: x, (), "twice has no weight among call, x, k"),
            (lambda x: x, ("x", "y"), "twice has no y among call, x, k"),
        ],
    )
    def test_a_name_that_the_op_has_not_fails_where_it_is_written(
        self, launched, launch, strided, message
    ) -> None:
        twice, _ = launched
        before = twice.launch
        with pytest.raises(TypeError, match=message):
            twice.kernel(launch, strided=strided)
        with pytest.raises(TypeError, match="twice has no weight"):
            twice.require(lambda call, weight: None)
        assert twice.launch is before

    @pytest.mark.parametrize("kernel", [False, True])
    def test_a_check_comes_before_what_runs(self, kernel: bool) -> None:
        """Whichever options a call of a known form has."""
        ran = []

        @op("x(n) -> y(n)")
        def scaled_forward(x, *, parts=1):
            y = x / parts  # the stand-ins of a recording have no elements
            ran.append(parts)
            return y

        scaled_forward.kernel(scaled_forward.definition)

        @scaled_forward.require
        def check(call, x, parts):
            if parts > len(x):
                raise ShapeError(f"{call}: {parts}", expected=len(x), actual=parts)

        x = ones(2)
        with target.using(Here()) if kernel else contextlib.nullcontext():
            for _ in range(4):
                scaled_forward(x)
                scaled_forward(x, parts=2)
                with pytest.raises(ShapeError, match="scaled: 3"):
                    scaled_forward(x, parts=3)
        assert ran == [1, 2] * 4

    def test_float64_and_empty_axes_run_the_definition(self, launched) -> None:
        twice, calls = launched
        with target.using(Here()):
            assert twice(np.ones((1, 1))).tolist() == [[2]]
            assert twice(ones(0, 3)).shape == (0, 3)
        assert calls == []


def test_a_definition_must_have_the_parameters_of_its_signature() -> None:
    with pytest.raises(TypeError, match=r"parameters \['x', 'z'\] are not"):
        op("x(n), y(n) -> z(n)")(lambda x, z: x)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("dz, w", "misspelt_backward: forward has no w among x, y, z, dz"),
        ("dw", "no dw"),
        ("dz, *, slope", "no slope"),
        ("dx", "no dx"),
    ],
)
def test_a_misspelt_backward_op_fails_where_it_is_written(parameters: str, message: str) -> None:
    @op("x(n), y(n) -> z(n)")
    def forward(x, y, *, factor=1.0):
        return x

    name = "misspelt_backward"
    scope: dict = {}
    exec(f"def {name}({parameters}): ...", scope)
    with pytest.raises(TypeError, match=message):
        forward.gradient(scope[name])
    assert forward.backward is None


def test_a_backward_op_is_wired_by_the_names_of_its_parameters() -> None:
    @op("x(*rows, n), w(n): param, i(*rows): int < n, t(n): table -> y(*rows, n), s(*rows): stat")
    def forward(x, w, i, *, t, factor=1.0):
        return x, x[..., 0]

    @forward.gradient
    def forward_backward(dy, ds: np.ndarray | None, w, i, y, *, factor=1.0, wanted=None):
        return dy, w, None

    assert forward_backward.signature == (
        "dy(*rows, n), ds?(*rows): stat, w(n): param, i(*rows): int < n, y(*rows, n)"
        " -> dx(*rows, n), dw(n), di(): none"
    )
    assert str(parse(forward.signature)) == forward.signature
    assert forward_backward.options == {"factor", "wanted"}


def test_a_backward_op_that_takes_all_options_has_those_of_its_forward_op() -> None:
    @op("x(n), m?(n): bool -> z(n)")
    def masked(x, *, m=None, factor: float = 1.0, by=2):
        return x

    seen = []

    @masked.gradient
    def masked_backward(dz, *, wanted=None, by=2, **rest):
        seen.append((wanted, by, rest))
        return dz

    assert masked_backward.names == ("dz", "m")
    assert masked_backward.options == {"wanted", "by", "factor"}
    m = np.array([True])
    masked_backward(ones(1), m=m, factor=2)
    with pytest.raises(ConfigError, match="factor must be a finite number"):
        masked_backward(ones(1), factor="2")
    with pytest.raises(TypeError, match="shift"):
        masked_backward(ones(1), shift=1)
    assert seen == [(None, 2, {"m": m, "factor": 2})]


def test_keyword_inputs_have_gradients_only_where_they_are_differentiable() -> None:
    @op("x(n), b(n), m?(n): bool -> z(n)")
    def masked(x, *, b, m=None):
        return x

    @masked.gradient
    def masked_backward(dz):
        return dz, dz

    assert masked.backward is masked_backward


def test_arguments_are_not_changed() -> None:
    x, w = np.random.default_rng(0).standard_normal((2, 3, 3)).astype(np.float16)
    before = x.tobytes(), w.tobytes()
    rms_norm_forward(x, w[0])
    assert (x.tobytes(), w.tobytes()) == before


@pytest.fixture(autouse=True)
def _forget_ops_of_a_test():
    """Keep the list of ops as the package made it."""
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def test_what_float16_cannot_hold_is_infinite_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = multiply(ones(2, dtype=np.float16) * 300, ones(2, dtype=np.float16) * -300)
    assert y.tolist() == [-np.inf, -np.inf]
