"""The operators of a Var: values and gradients are torch's, and NumPy's where torch is missing."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unsloth_cupy import Tape, Var
from unsloth_cupy.errors import ConfigError, DTypeError, FrameworkError, GradientError, ShapeError

from ..harness.parity import emulator

SHAPES = [(2, 3), (3,), (1, 3), (2, 1), (), (4, 2, 3), (4, 1, 1)]
BINARY: list[Callable[[Any, Any], Any]] = [
    operator.add,
    operator.sub,
    operator.mul,
    lambda a, b: a / (b * b + 1),
    lambda a, b: (a - 0.5) / (2 + b**2) * 3,
    lambda a, b: 1 / (1.5 + a**2) - b / 4,
]
UNARY: list[Callable[[Any], Any]] = [
    operator.neg,
    lambda a: (-(a**2)).exp(),
    lambda a: (a * a + 1).log(),
    lambda a: (a**2 + 1) ** 0.5,
    lambda a: a - a.mean(),
    lambda a: a.sum() * 0.25,
    lambda a: a[..., None] if a.ndim == 0 else a.mean(axis=-1, keepdims=True),
    lambda a: a.T if a.ndim == 2 else a,
    lambda a: a.reshape(-1) if a.ndim == 0 else a[..., 1:] if a.shape[-1] > 1 else a[..., 0],
]
trees = st.recursive(
    st.integers(0, len(SHAPES) - 1),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(UNARY), inner),
        st.tuples(st.sampled_from(BINARY), inner, inner),
    ),
    max_leaves=5,
)


def draw(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def evaluated(tree: Any, leaves: list[Any]) -> Any:
    """Return the value of an expression; where shapes do not broadcast, of its sums."""
    if isinstance(tree, int):
        return leaves[tree]
    function, *parts = tree
    values = [evaluated(part, leaves) for part in parts]
    try:
        np.broadcast_shapes(*(tuple(value.shape) for value in values))
    except ValueError:
        values = [value.sum() for value in values]
    return function(*values)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=80, database=None)
@given(trees)
def test_expressions_have_the_gradients_of_torch(tree: Any) -> None:
    torch = pytest.importorskip("torch", reason="whose autograd is the reference")
    arrays = [draw(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    tape = Tape()
    watched = [tape.watch(array) for array in arrays]
    leaves = [torch.tensor(array, requires_grad=True) for array in arrays]
    actual, expected = evaluated(tree, watched), evaluated(tree, leaves)
    seed = draw(*actual.shape, seed=9)
    np.testing.assert_allclose(actual.value, expected.detach().numpy(), rtol=1e-10, atol=1e-11)
    expected.backward(torch.tensor(seed))
    for gradient, leaf in zip(tape.gradients(actual, watched, seed), leaves, strict=True):
        wanted = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        size = np.abs(wanted).max(initial=1)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-9, atol=1e-11 * size)


LEFT = [(4,), (3, 4), (2, 3, 4), (5, 1, 3, 4)]
RIGHT = [(4,), (4, 2), (2, 4, 2), (1, 4, 2)]


@pytest.mark.parametrize(("left", "right"), [*itertools.product(LEFT, RIGHT)])
def test_products_are_those_of_numpy_and_torch(left: Any, right: Any) -> None:
    a, b = draw(*left), draw(*right, seed=1)
    tape = Tape()
    x, y = tape.watch(a), tape.watch(b)
    product = x @ y
    np.testing.assert_allclose(product.value, a @ b, rtol=1e-12, atol=1e-13)
    for mixed in (a @ y, x @ b):
        assert type(mixed) is Var
        np.testing.assert_allclose(mixed.value, a @ b, rtol=1e-12, atol=1e-13)
    torch = pytest.importorskip("torch", reason="whose autograd is the reference")
    s, t = (torch.tensor(array, requires_grad=True) for array in (a, b))
    seed = draw(*product.shape, seed=2)
    torch.matmul(s, t).backward(torch.tensor(seed))
    for gradient, leaf in zip(tape.gradients(product, [x, y], seed), (s, t), strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-12, atol=1e-13)


SIGNS = [operator.add, operator.sub, operator.mul, operator.truediv]


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_and_numbers_stand_on_either_side(sign: Any, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tape, array = Tape(), (np.arange(6).reshape(2, 3) + 1).astype(kind)
    x, row = tape.watch(array), array[0]
    for other in (row, 2, 0.5, np.float32(3), np.int64(2), True + 1):
        plain = other if isinstance(other, np.ndarray) else kind.type(other)
        for actual, exact in (
            (sign(x, other), sign(array, plain)),
            (sign(other, x), sign(plain, array)),
        ):
            assert type(actual) is Var
            assert actual.dtype == kind
            np.testing.assert_array_equal(actual.value, exact.astype(kind))


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("sign", [*SIGNS, operator.matmul])
def test_arrays_of_other_libraries_stand_on_either_side(library: str, sign: Any) -> None:
    module = pytest.importorskip(library, reason="whose arrays go in and come back")
    new = module.ones if library == "torch" else module.numpy.ones
    tape = Tape()
    array, x = new((3, 3)), tape.watch(new((3, 3)))
    for actual in (sign(x, array), sign(array, x), sign(x, x)):
        assert type(actual) is Var
        assert type(actual.value) is type(array)
        assert np.allclose(np.asarray(actual.value), sign(np.ones((3, 3)), np.ones((3, 3))))
    if sign is not operator.matmul:
        for actual in (sign(x, 2), sign(2.0, x), sign(x, new(3)).mean()):
            assert type(actual.value) is type(array)
        (gradient,) = tape.gradients(sign(x, new((2, 1, 3))).sum(), [x])
        assert type(gradient) is type(array)


def test_a_loss_of_ones_own() -> None:
    """Mean squared error and cross entropy by hand, in the words of NumPy."""
    from unsloth_cupy import cross_entropy

    x, weight, target = draw(8, 4), draw(4, 3, seed=1), draw(8, 3, seed=2)
    tape = Tape()
    w = tape.watch(weight)
    error = x @ w - target
    (gradient,) = tape.gradients((error**2).mean(), [w])
    np.testing.assert_allclose(gradient, x.T @ (x @ weight - target) * 2 / 24, rtol=1e-12)
    labels = np.array([0, 2, 1, 1, 0, 2, 2, 0])
    logits = x @ w
    peak = logits.value.max(axis=1, keepdims=True)  # a constant
    lse = (logits - peak).exp().sum(axis=1).log() + peak[:, 0]
    by_hand = (lse - (logits * np.eye(3)[labels]).sum(axis=1)).mean()
    losses = cross_entropy(logits, labels)
    np.testing.assert_allclose(by_hand.value, losses.value.mean(), rtol=1e-12)
    (one,), (other,) = tape.gradients(by_hand, [w]), tape.gradients(losses.mean(), [w])
    np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-14)


def test_a_gradient_keeps_the_shape_and_the_dtype_of_its_array() -> None:
    tape = Tape()
    arrays = [draw(*shape, dtype=np.float16) for shape in SHAPES]
    watched = [tape.watch(array) for array in arrays]
    total = sum(watched) * 0.5
    assert total.shape == np.broadcast_shapes(*SHAPES)
    for gradient, array in zip(tape.gradients(total.sum(), watched), arrays, strict=True):
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(gradient, 12 / array.size)  # 24 elements, each by half
        gradient[...] = 1  # it is the caller's own


def test_parts_are_those_of_numpy() -> None:
    array = draw(3, 4, 2)
    tape = Tape()
    x = tape.watch(array)
    keys = (0, -1, np.s_[1:, ::2], np.s_[..., 1:], np.s_[..., None, 0], np.int64(2), (1, 2, 0))
    for key in keys:
        part = x[key]
        np.testing.assert_array_equal(part.value, array[key])
        (gradient,) = tape.gradients(part.sum(), [x])
        expected = np.zeros_like(array)
        expected[key] = 1
        np.testing.assert_array_equal(gradient, expected)
    assert [row.shape for row in x] == [(4, 2)] * 3
    for turned, plain in (
        (x.T, array.T),
        (x.transpose(1, 0, 2), array.transpose(1, 0, 2)),
        (x.transpose((2, 0, 1)), array.transpose(2, 0, 1)),
        (x.reshape((4, -1)), array.reshape(4, -1)),
        (x.sum(axis=(0, 2)), array.sum(axis=(0, 2))),
        (x.mean(1, keepdims=True), array.mean(1, keepdims=True)),
    ):
        np.testing.assert_allclose(turned.value, plain, rtol=1e-12)


@pytest.mark.parametrize("sign", [*SIGNS, operator.matmul], ids=lambda sign: sign.__name__)
@pytest.mark.parametrize("other", ["x", None, [1.0], {}, b"x", True, 1j], ids=repr)
def test_what_is_no_operand(sign: Any, other: Any) -> None:
    x = Tape().watch(draw(2, 2))
    for call in (lambda: sign(x, other), lambda: sign(other, x)):
        with pytest.raises(DTypeError, match=r"Var [-+*/@] other: other is no\w* a?\w*"):
            call()


def test_numbers_multiply_no_matrix() -> None:
    x = Tape().watch(draw(2, 2))
    with pytest.raises(DTypeError, match="Var @ other"):
        x @ 2
    with pytest.raises(ShapeError, match=r"Var @ other: \(2, 2\) @ \(3, 2\)"):
        x @ draw(3, 2)
    with pytest.raises(ShapeError, match=r"\(2, 2\) @ \(\)"):
        x @ np.ones(())
    with pytest.raises(ShapeError, match="do not broadcast"):
        Tape().watch(draw(3, 2, 2)) @ draw(2, 2, 2)


@pytest.mark.parametrize("sign", SIGNS)
def test_operands_that_do_not_fit(sign: Any) -> None:
    x = Tape().watch(draw(2, 3))
    with pytest.raises(ShapeError, match=r"\(2, 3\) . \(2,\) do not broadcast"):
        sign(x, draw(2))
    with pytest.raises(DTypeError, match="b is float32; it must be float64"):
        sign(x, draw(3, dtype=np.float32))
    with pytest.raises(DTypeError, match="int64"):
        sign(x, np.ones(3, int))
    with pytest.raises(GradientError, match="arguments are on two tapes"):
        sign(x, Tape().watch(draw(2, 3)))
    with pytest.raises(ConfigError, match="pass one in the range of float"):
        sign(x, 10**400)
    torch = pytest.importorskip("torch", reason="whose array meets one of NumPy")
    with pytest.raises(FrameworkError, match="bring these to one"):
        sign(x, torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("exponent", ["x", None, float("nan"), 1j, np.ones(2)], ids=repr)
def test_exponents_are_numbers(exponent: Any) -> None:
    x = Tape().watch(draw(2))
    with pytest.raises(ConfigError, match="exponent must be a finite number"):
        x**exponent


def test_infinite_numbers_are_as_in_numpy() -> None:
    x = Tape().watch(np.array([1.0, -2.0]))
    assert (x * float("inf")).value.tolist() == [np.inf, -np.inf]
    assert (x + float("-inf")).value.tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("other", SHAPES)
def test_kernels_take_what_is_repeated(other: tuple[int, ...]) -> None:
    """Elements computed in float32 and rounded once are the definition's, to the bit."""

    def run() -> list[np.ndarray]:
        tape = Tape()
        x = tape.watch(draw(4, 2, 3, dtype=np.float16))
        y = tape.watch(draw(*other, seed=1, dtype=np.float16))
        total = 2 * (x * y + x)
        return [total.value, *tape.gradients(total, [x, y], draw(4, 2, 3, dtype=np.float16))]

    plain = run()
    with emulator():
        for actual, expected in zip(run(), plain, strict=True):
            np.testing.assert_array_equal(actual, expected)
