"""The tape: what it records, what it returns and what it refuses."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    Tape,
    Var,
    add,
    columns,
    multiply,
    reshape,
    rms_norm,
    scale,
    softmax_backward,
)
from unsloth_cupy.core.op import op
from unsloth_cupy.errors import (
    ArgumentError,
    ConfigError,
    DTypeError,
    FrameworkError,
    GradientError,
    ShapeError,
)
from unsloth_cupy.training.tape import Entry


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@op("x(*axes) -> y(*axes)")
def doubled(x):
    """An op without a gradient."""
    return 2 * x


@op("x(*axes), table(*axes): table -> y(*axes)")
def looked_up(x, table):
    return x * table


@looked_up.gradient
def looked_up_backward(dy, table):
    return dy * table, None


@op("x(n) -> low(n), high(n)")
def split(x):
    return x, 10 * x


@split.gradient
def split_backward(dlow, dhigh):
    return dlow + 10 * dhigh


@op("x(*axes), w(*axes) -> y(*axes)")
def weighed(x, w):
    return x * w


@weighed.gradient
def weighed_backward(dy, x, w, *, wanted=None):
    asked.append(wanted)
    return dy * w if "x" in wanted else None, dy * x if "w" in wanted else None


asked: list[frozenset[str]] = []


def test_only_what_leads_to_the_asked_gradients_is_computed() -> None:
    tape = Tape()
    x, w, frozen = tape.watch(draw(3)), tape.watch(draw(3)), draw(3)
    before = weighed(x, frozen)  # no gradient: x is watched, and nobody asks for its own
    y = weighed(weighed(before, w), frozen)
    asked.clear()
    (dw,) = tape.gradients(y, [w], np.ones(3))
    assert asked == [{"x"}, {"w"}]
    np.testing.assert_allclose(dw, frozen * before.value)
    asked.clear()
    tape.gradients(y, [x, w], np.ones(3))
    assert asked == [{"x"}, {"x", "w"}, {"x"}]


def test_a_value_used_twice_adds_up() -> None:
    tape = Tape()
    x = tape.watch(draw(4))
    y = multiply(add(x, x), x)
    (dx,) = tape.gradients(y, [x], np.ones(4))
    np.testing.assert_allclose(dx, 4 * x.value)


def test_the_same_array_watched_twice_is_two_variables() -> None:
    tape, array = Tape(), draw(4)
    x, y = tape.watch(array), tape.watch(array)
    dx, dy = tape.gradients(multiply(x, y), [x, y], np.ones(4))
    np.testing.assert_array_equal(dx, array)
    np.testing.assert_array_equal(dy, array)


def test_a_gradient_in_the_middle() -> None:
    tape = Tape()
    x = tape.watch(draw(4))
    y = scale(x, factor=3.0)
    dx, dy = tape.gradients(multiply(y, y), [x, y], np.ones(4))
    np.testing.assert_allclose(dy, 2 * y.value)
    np.testing.assert_allclose(dx, 3 * dy)


def test_of_itself_is_the_seed() -> None:
    tape, seed = Tape(), draw(4, seed=1)
    x = tape.watch(draw(4))
    (dx,) = tape.gradients(x, [x], seed)
    np.testing.assert_array_equal(dx, seed)
    assert not np.shares_memory(dx, seed)


def test_an_output_that_is_not_used_has_no_gradient_to_give() -> None:
    tape = Tape()
    x = tape.watch(draw(4))
    _, high = split(x)
    (dx,) = tape.gradients(high, [x], np.ones(4))
    np.testing.assert_array_equal(dx, 10)


def test_a_scalar_needs_no_seed() -> None:
    tape = Tape()
    x = tape.watch(np.array(3.0))
    assert tape.gradients(multiply(x, x), [x]) == [6.0]


def test_an_array_needs_a_seed_of_its_shape() -> None:
    tape = Tape()
    x = tape.watch(draw(2, 3))
    with pytest.raises(ShapeError, match=r"of has shape \(2, 3\); pass dy of that shape"):
        tape.gradients(x, [x])
    with pytest.raises(ShapeError, match=r"dy has shape \(3,\); it must be \(2, 3\)"):
        tape.gradients(x, [x], np.ones(3))
    for seed in ([1.0], 1, 1.0, "ones"):
        with pytest.raises(DTypeError, match=r"dy is not an array but \w+"):
            tape.gradients(x, [x], seed)
    with pytest.raises(DTypeError, match="dy is float32; it must be float64"):
        tape.gradients(scale(x, factor=2.0), [x], np.ones((2, 3), np.float32))


def test_what_of_does_not_depend_on_gets_zeros() -> None:
    tape = Tape()
    x, y = tape.watch(draw(3)), tape.watch(draw(2, 2).astype(np.float32))
    later = scale(x, factor=2.0)
    dx, dy, dlater = tape.gradients(scale(x, factor=3.0), [x, y, later], np.ones(3))
    np.testing.assert_array_equal(dx, 3)
    assert (dy.shape, dy.dtype, dy.any()) == ((2, 2), np.float32, False)
    assert not dlater.any()


def test_an_op_without_a_gradient_raises_only_on_the_way_back() -> None:
    tape = Tape()
    x = tape.watch(draw(3))
    y = doubled(x)
    (dx,) = tape.gradients(scale(x, factor=3.0), [x], np.ones(3))
    np.testing.assert_array_equal(dx, 3)
    with pytest.raises(GradientError, match="doubled has no gradient; compute the loss without"):
        tape.gradients(y, [x], np.ones(3))


def test_a_watched_table_raises() -> None:
    tape = Tape()
    x, table = tape.watch(draw(3)), tape.watch(draw(3))
    with pytest.raises(GradientError, match="looked_up: table is a constant; do not watch it"):
        tape.gradients(looked_up(x, table), [x], np.ones(3))
    (dx,) = tape.gradients(looked_up(x, table.value), [x], np.ones(3))
    np.testing.assert_array_equal(dx, table.value)


def test_two_tapes_raise() -> None:
    x, y = Tape().watch(draw(3)), Tape().watch(draw(3))
    with pytest.raises(GradientError, match="add: arguments are on two tapes; watch them on one"):
        add(x, y)
    with pytest.raises(GradientError, match="pass Vars of this tape"):
        Tape().gradients(x, [x], np.ones(3))
    with pytest.raises(GradientError, match="pass Vars of this tape"):
        x.tape.gradients(x, [x.value], np.ones(3))


@pytest.mark.parametrize("bad", [[1.0], 1.0, None], ids=repr)
def test_only_arrays_are_watched(bad) -> None:
    with pytest.raises(DTypeError, match=r"its argument is not an array but \w+"):
        Tape().watch(bad)


def test_a_variable_is_not_watched_again() -> None:
    tape = Tape()
    with pytest.raises(DTypeError, match="not an array but Var"):
        tape.watch(tape.watch(draw(3)))


def test_errors_of_an_op_come_through_the_tape() -> None:
    tape = Tape()
    with pytest.raises(ShapeError, match=r"(?s)b has axes=\(4,\).*a\(\*axes\) = \(3,\) float64"):
        add(tape.watch(draw(3)), tape.watch(draw(4)))


def chain(library=np):
    """Return a tape, its result and variables whose gradients are views of one array."""
    tape = Tape()
    x, y, z = (tape.watch(library.ones(6)) for _ in range(3))
    return tape, reshape(add(add(x, y), z), shape=(2, 3)), [x, y, z, x]


def test_gradients_own_their_memory() -> None:
    tape, result, variables = chain()
    seed = np.ones((2, 3))
    grads = tape.gradients(result, variables, seed)
    for i, grad in enumerate(grads):
        grad[...] = grad * (i + 2)
    assert [set(grad.tolist()) for grad in grads] == [{2.0}, {3.0}, {4.0}, {5.0}]
    assert (seed == 1).all()


def test_gradients_do_not_share_memory_with_the_tape() -> None:
    tape = Tape()
    x, ones = tape.watch(draw(3)), tape.watch(np.ones(()))

    @op("x(n), factor() -> y(n)")
    def times(x, factor):
        return x * factor

    @times.gradient
    def times_backward(dy, x):
        return x, dy.sum()  # not its gradient: an input handed back

    (dx,) = tape.gradients(times(x, ones), [x], np.ones(3))
    assert not np.shares_memory(dx, x.value)


def test_gradients_of_torch_are_of_torch_and_own_their_memory() -> None:
    torch = pytest.importorskip("torch", reason="whose arrays go in and come back")
    tape, result, variables = chain(torch)
    seed = torch.ones(2, 3)
    grads = tape.gradients(result, variables, seed)
    for i, grad in enumerate(grads):
        assert type(grad) is torch.Tensor
        grad[...] = grad * (i + 2)
    assert [set(grad.tolist()) for grad in grads] == [{2.0}, {3.0}, {4.0}, {5.0}]
    assert (seed == 1).all()
    with pytest.raises(FrameworkError, match="of from torch cpu, dy from numpy cpu"):
        tape.gradients(result, variables, np.ones((2, 3)))


def test_gradients_of_jax_are_of_jax() -> None:
    jax = pytest.importorskip("jax", reason="whose arrays go in and come back")
    tape = Tape()
    x, w = (tape.watch(jax.numpy.ones(shape, "bfloat16")) for shape in ((2, 3), 3))
    dx, dw = tape.gradients(rms_norm(x, w), [x, w], jax.numpy.ones((2, 3), "bfloat16"))
    assert isinstance(dx, jax.Array)
    assert (dw.shape, dw.dtype) == ((3,), "bfloat16")


def test_gradients_may_be_asked_for_twice() -> None:
    tape = Tape()
    x, w = tape.watch(draw(2, 5)), tape.watch(draw(5, seed=1))
    y = multiply(rms_norm(x, w), x)
    first = tape.gradients(y, [x, w], np.ones((2, 5)))
    kept = [grad.copy() for grad in first]
    for grad in first:
        grad[...] = np.inf
    for grad, again in zip(kept, tape.gradients(y, [x, w], np.ones((2, 5))), strict=True):
        assert grad.tobytes() == again.tobytes()


@pytest.mark.slow
def test_nothing_outlives_the_tape() -> None:
    """Reference counts alone free the arrays: no cycle waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        tape = Tape()
        x = tape.watch(draw(3, 4))
        y = rms_norm(scale(x, factor=2.0), np.ones(4))
        grads = tape.gradients(y, [x], np.ones((3, 4)))
        alive = [weakref.ref(a) for a in (x.value, y.value, tape.entries[1].values["h"], *grads)]
        del tape, x, y, grads
        assert [reference() for reference in alive] == [None] * 4
    finally:
        gc.enable()


def test_a_variable_looks_like_its_array() -> None:
    tape = Tape()
    x = tape.watch(draw(2, 6).astype(np.float32))
    assert (x.shape, x.dtype, x.ndim) == ((2, 6), np.float32, 2)
    assert repr(x) == "Var((2, 6), float32)"
    parts = [x[..., :2], x[..., 2:], x.reshape(3, -1), x + x.value]
    assert [type(part) for part in parts] == [Var] * 4
    assert [part.shape for part in parts] == [(2, 2), (2, 4), (3, 4), (2, 6)]
    np.testing.assert_array_equal(parts[1].value, x.value[:, 2:])


def test_columns_put_a_matrix_back_together() -> None:
    tape = Tape()
    x = tape.watch(draw(2, 5))
    y = multiply(columns(x, start=0, stop=2), columns(x, start=3, stop=5))
    (dx,) = tape.gradients(y, [x], np.ones((2, 2)))
    expected = np.zeros((2, 5))
    expected[:, :2], expected[:, 3:] = x.value[:, 3:], x.value[:, :2]
    np.testing.assert_array_equal(dx, expected)


def test_an_array_may_stand_before_a_variable() -> None:
    tape, array = Tape(), draw(2, 4)
    x = tape.watch(array)
    total = array + x
    assert (total.value == array + array).all()
    assert (tape.gradients(total, [x], array)[0] == array).all()
    assert ((1.0 + x).value == 1.0 + array).all()


def test_wrt_is_any_run_of_variables() -> None:
    tape = Tape()
    named = {"a": tape.watch(draw(2)), "b": tape.watch(draw(2, seed=1))}
    of, seed = multiply(*named.values()), np.ones(2)
    for wrt in (named.values(), iter(named.values()), tuple(named.values())):
        assert [g.tolist() for g in tape.gradients(of, wrt, seed)] == [
            named["b"].value.tolist(),
            named["a"].value.tolist(),
        ]
    for wrt in (named["a"], None):
        with pytest.raises(GradientError, match="pass a list of Vars"):
            tape.gradients(of, wrt, seed)


@pytest.mark.parametrize("release", [False, True])
def test_released_calls_are_gone_while_gradients_grow(
    release: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape()
    x = tape.watch(draw(3, 4))
    y = multiply(x, x)
    for _ in range(5):
        y = multiply(y, y)
    kept = [weakref.ref(entry.values["a"]) for entry in tape.entries]
    alive: list[int] = []
    walk = Entry.add_back

    def counted(entry: Entry, *rest: Any) -> None:
        walk(entry, *rest)
        alive.append(sum(array() is not None for array in kept))

    monkeypatch.setattr(Entry, "add_back", counted)
    (actual,) = tape.gradients(y, [x], np.ones((3, 4)), release=release)
    np.testing.assert_allclose(actual, 64 * x.value**63, rtol=1e-12)
    assert alive == ([6, 5, 4, 3, 2, 1] if release else [6] * 6)
    assert bool(tape.entries) != release


def test_the_upstream_gradient_is_taken_by_its_name_of_before() -> None:
    tape = Tape()
    x = tape.watch(np.arange(3, dtype=np.float32))
    y, dy = x * x, np.full(3, 2, np.float32)
    (expected,) = tape.gradients(y, [x], dy=dy)
    with pytest.warns(FutureWarning, match=r"Tape\.gradients: seed is named dy now") as caught:
        (actual,) = tape.gradients(y, [x], seed=dy)  # type: ignore[call-arg]
    np.testing.assert_array_equal(actual, expected)
    assert caught[0].filename == __file__
    for arguments, options in (((dy,), {}), ((), {"dy": dy})):
        with pytest.raises(ConfigError, match="seed is the old name of dy; pass dy alone"):
            tape.gradients(y, [x], *arguments, seed=dy, **options)
    with pytest.raises(ArgumentError, match=r"softmax_backward\(seed=\.\.\.\): there is no such"):
        softmax_backward(dy, dy, seed=dy)  # type: ignore[call-arg]
