"""Quantized weights in calls on arrays of JAX."""

import gc
import weakref

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs the extra `peers` (jax)")

import jax.numpy as jnp  # noqa: E402

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.errors import DTypeError, FrameworkError, GradientError  # noqa: E402

from . import quantized  # noqa: E402


def arrays(*names):
    return [jnp.asarray(array) for array in quantized.drawn(*names)]


@pytest.mark.parametrize(("kind", "names", "call"), quantized.EVERY, ids=quantized.NAMES)
def test_calls_and_gradients_are_those_on_numpys_arrays(kind, names, call):
    w, names = quantized.weight(kind), names.split()
    expected, slopes = quantized.gradients(
        lambda *inputs: call(w, *inputs), quantized.drawn(*names)
    )
    inputs = arrays(*names)
    assert np.array_equal(call(w, *inputs), expected)

    def loss(*inputs):
        y = call(w, *inputs)
        return y.sum(), y

    every = tuple(range(len(names)))
    actual, y = jax.jit(jax.grad(loss, argnums=every, has_aux=True))(*inputs)
    assert np.array_equal(y, expected)
    for one, slope in zip(actual, slopes, strict=True):
        assert np.allclose(one, slope, rtol=1e-6, atol=1e-6 * abs(slope).max())


@pytest.mark.slow
def test_a_gradient_outside_of_a_jit():
    w, (x, a, b) = quantized.weight("nf4"), arrays("x", "a", "b")
    slope = jax.grad(lambda x: uc.linear(x, w).sum())(x)
    assert np.allclose(slope, w.dequantize().sum(0), atol=1e-5)
    value, actual = jax.value_and_grad(lambda a, b: uc.lora_linear(x, w, a, b).sum(), (0, 1))(a, b)
    dense = jnp.asarray(w.dequantize())
    judge = jax.value_and_grad(lambda a, b: (x @ dense.T + x @ a.T @ b.T).sum(), (0, 1))(a, b)
    assert np.isclose(value, judge[0], rtol=1e-4)
    for one, other in zip(actual, judge[1], strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5 * float(abs(other).max()))


@pytest.mark.slow
def test_mapped_calls():
    w, (x, bias) = quantized.weight("nf4"), arrays("x", "bias")
    assert np.array_equal(jax.vmap(lambda x: uc.linear(x, w))(x), uc.linear(x, w))
    with_bias = jax.vmap(lambda x: uc.linear(x, w, bias))(x)
    assert np.allclose(with_bias, uc.linear(x, w, bias), atol=1e-5)
    each = jax.jit(jax.vmap(jax.grad(lambda row: uc.linear(row, w).sum())))(x[0])
    assert np.allclose(each, jnp.broadcast_to(w.dequantize().sum(0), x[0].shape), atol=1e-5)


def test_checkpoints_and_merging():
    w, (x, a, b) = quantized.weight("nf4"), arrays("x", "a", "b")
    loss = lambda x: uc.swiglu_mlp(x, w, w, w).sum()  # noqa: E731
    kept, remembered = jax.grad(loss)(x), jax.grad(jax.checkpoint(loss))(x)
    assert np.allclose(kept, remembered, rtol=1e-5, atol=1e-4)
    merged = uc.lora_merge(w, *quantized.drawn("a", "b"))
    for actual in (uc.lora_merge(w, a, b), jax.jit(lambda a, b: uc.lora_merge(w, a, b))(a, b)):
        assert np.array_equal(actual, merged)


def test_two_weights_of_one_form_are_two_calls():
    x, (one, other) = arrays("x")[0], (quantized.weight("nf4", seed) for seed in (1, 2))
    both = jax.jit(lambda x: uc.linear(x, one) - uc.linear(x, other))
    assert np.array_equal(both(x), uc.linear(x, one) - uc.linear(x, other))
    for w in (one, other):
        slope = jax.grad(lambda x, w=w: uc.linear(x, w).sum())(x)
        assert np.allclose(slope, w.dequantize().sum(0), atol=1e-5)


def test_a_weight_that_changes_is_seen():
    w, x = quantized.weight("ternary"), arrays("x")[0]
    call = jax.jit(lambda x: uc.linear(x, w))
    before = call(x)
    w.set(0, 0, 1 if w.codes[0, 0] != 1 else -1)
    assert not np.array_equal(call(x), before)
    assert np.array_equal(call(x), uc.linear(x, w))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_a_weight_goes_when_nobody_has_it(compiled):
    x = arrays("x")[0]

    def use():
        w = quantized.weight("nf4")
        slope = jax.grad(lambda x: uc.linear(x, w).sum())
        (jax.jit(slope) if compiled else slope)(x)
        return weakref.ref(w.packed)

    packed = use()
    gc.collect()
    if not compiled:
        jax.clear_caches()
        gc.collect()
    gc.collect()
    assert packed() is None


class FromCupy:
    """Stands for an array on a GPU."""

    __module__ = "cupy"
    device = type("Device", (), {"id": 0})()


def elsewhere(x):
    w = quantized.weight("nf4")
    w.home = FromCupy()
    return uc.linear(x, w)


def twice(x):
    w = quantized.weight("nf4")
    slope = jax.grad(lambda x: uc.swiglu_mlp(x, w, w, w).sum())
    return jax.grad(lambda x: slope(x).sum())(x)


REFUSED = {
    "another place": (elsewhere, FrameworkError, "weight is stored in CuPy arrays on cuda:0, and"),
    "another operand": (
        jax.jit(lambda x: uc.swiglu(x, quantized.weight("nf4"))),
        DTypeError,
        r"up is quantized; pass an array of up.dequantize\(\)",
    ),
    "sizes": (
        jax.jit(lambda x: uc.linear(x[..., :3], quantized.weight("nf4"))),
        ValueError,
        "inputs=64; it must be 3",
    ),
    "a second derivative": (twice, GradientError, "swiglu_mlp has no second derivatives"),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call(arrays("x")[0])
