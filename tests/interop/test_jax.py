"""The library's functions on arrays of JAX: gradients, compilers, transforms, refusals."""

import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs the extra `peers` (jax)")

import jax.numpy as jnp  # noqa: E402

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.errors import (  # noqa: E402
    ConfigError,
    DTypeError,
    FrameworkError,
    GradientError,
    RangeError,
    ShapeError,
)
from unsloth_cupy.interop import jax as door  # noqa: E402

from .calls import drawn, every_call  # noqa: E402

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:  # JAX 0.7
    from jax.experimental import enable_x64


@pytest.fixture(scope="module")
def draw():
    rng = np.random.default_rng(0)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))


def judged(op, optional):
    """Return the arrays of a call, its weighted sum as a function of some, and their gradients."""
    call, names = drawn(op, optional)
    outputs = call.run()
    seeds = call.seeds(outputs, every=True)
    judge = call.backward(outputs, seeds).run()

    def weighed(some):
        results = op.call([*({**call.arrays, **some}).values()], call.options)
        results = results if isinstance(results, tuple) else [results]
        made = dict(zip(outputs, [each for each in results if each is not None], strict=False))
        return sum((made[seed[1:]] * weights).sum() for seed, weights in seeds.items())

    arrays = {name: array for name, array in call.arrays.items() if array is not None}
    return arrays, weighed, {name: judge[f"d{name}"] for name in names}


@every_call
def test_gradients_are_those_of_the_backward_op(op, optional):
    arrays, weighed, judge = judged(op, optional)
    arrays = jax.tree.map(jnp.asarray, arrays)
    held = {name: array for name, array in arrays.items() if name not in judge}
    some = {name: arrays[name] for name in judge}
    grads = jax.jit(jax.grad(lambda some: weighed(held | some)))(some)
    for name, expected in judge.items():
        assert grads[name].dtype == expected.dtype
        np.testing.assert_allclose(grads[name], expected, rtol=1e-5, atol=1e-5)
    if "residual" in judge:  # which shares its gradient with x
        grad = jax.grad(lambda one: weighed(held | some | {"residual": one}))(some["residual"])
        np.testing.assert_allclose(grad, judge["residual"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_jax_is_imported_by_its_first_array_and_no_sooner():
    program = """
import sys, unsloth_cupy
assert not {"torch", "jax"} & sys.modules.keys()
import jax
assert "unsloth_cupy.interop.jax" not in sys.modules
assert jax.jit(unsloth_cupy.relu2)(jax.numpy.ones(2)).tolist() == [1, 1]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_names_are_the_librarys():
    assert door.rms_norm is uc.rms_norm
    assert "lora_linears" in dir(door)
    with pytest.raises(AttributeError, match="no attribute 'rms_norm_'"):
        _ = door.rms_norm_


def block(x, residual, weight, qkv, head, labels):
    y, h, _ = uc.rms_norm_forward(x, weight, residual)
    q, k, v = (uc.linear(y, w).reshape(*y.shape[:2], -1, 8) for w in qkv)
    y = uc.attention(q, k, v, causal=True, window=(4, None)).reshape(y.shape)
    return uc.linear_cross_entropy(uc.swiglu(y, uc.rms_norm(h, weight)), head, labels).mean()


def twice(loss):
    """Return half the sum of a loss over two steps of a loop."""
    return jax.lax.scan(lambda total, _: (total + loss() / 2, None), 0.0, length=2)[0]


@pytest.mark.slow
def test_a_block_is_the_same_in_every_transform(draw):
    weights = draw(16), [draw(n, 16) for n in (16, 8, 8)], draw(20, 16)
    labels = jnp.arange(18).reshape(2, 9)
    x, r = draw(2, 9, 16), draw(2, 9, 16)
    loss = lambda x, r: block(x, r, *weights, labels)  # noqa: E731
    value, expected = jax.value_and_grad(loss, (0, 1))(x, r)

    @jax.jit
    def others(x, r):
        again = jax.grad(jax.checkpoint(loss), (0, 1))(x, r)
        looped = jax.grad(lambda *args: twice(lambda: loss(*args)), (0, 1))(x, r)
        each = jax.vmap(jax.grad(loss, (0, 1)))(jnp.stack([x, 2 * x]), jnp.stack([r, 2 * r]))
        return loss(x, r), again, looped, jax.tree.map(lambda grad: grad[0], each)

    actual, *grads = others(x, r)
    np.testing.assert_allclose(actual, value, rtol=1e-6)
    for grad in grads:
        for one, other in zip(grad, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    of_numpy = block(*jax.tree.map(np.asarray, (x, r, *weights, labels)))
    np.testing.assert_allclose(of_numpy, value, rtol=1e-6)


def test_a_batch_is_one_call_where_rows_are_free_and_else_one_for_each_slice(draw, monkeypatch):
    calls = []
    for op in (uc.swiglu, uc.softmax, uc.linear):
        record = lambda arrays, options, op=op, run=op.compute: (  # noqa: E731
            calls.append(op.__name__) or run(arrays, options)
        )
        monkeypatch.setattr(op, "compute", record)
        op.routes.clear()
    x, w = draw(3, 2, 8), draw(8, 8)

    @jax.jit
    def mapped(x):
        linear = jax.vmap(uc.linear, in_axes=(0, None))(x, w)
        return jax.vmap(uc.swiglu)(x, x), jax.vmap(jax.vmap(uc.softmax))(x), linear

    actual = mapped(x)
    assert sorted(calls) == ["linear"] * 3 + ["softmax", "swiglu"]
    for op in (uc.swiglu, uc.softmax, uc.linear):
        op.routes.clear()
    for one, other in zip(actual, (uc.swiglu(x, x), uc.softmax(x), uc.linear(x, w)), strict=True):
        # BLAS sums a slice in another order
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_functions_that_reach_ops_through_others(draw):
    x, weight, a, b = draw(5, 16), draw(12, 16), draw(4, 16), draw(12, 4)
    magnitude, gate, down = 1 + abs(draw(12)), draw(24, 16), draw(16, 24)

    def loss(x, a, b, magnitude):
        y = door.lora_linear(x, weight, a, b, scale=0.5, magnitude=magnitude)
        layers = [uc.LoraLayer(weight, a, b, scale=2.0), uc.LoraLayer(3 * weight, a, b)]
        low = door.lora_linears(x, layers)
        z = door.swiglu_mlp(door.cast(x, "float32"), gate, gate, down, chunk=2)
        return (y**2).sum() + (low[0] * low[1]).sum() + (z**2).sum()

    def judged(x, a, b, magnitude):
        merged = weight + 0.5 * b @ a
        norm = jax.lax.stop_gradient(jnp.linalg.norm(merged, axis=1))
        y = x @ merged.T * magnitude / norm
        low = x @ (weight + 2 * b @ a).T, x @ (3 * weight + b @ a).T
        z = (jax.nn.silu(x @ gate.T) * (x @ gate.T)) @ down.T
        return (y**2).sum() + (low[0] * low[1]).sum() + (z**2).sum()

    inputs = x, a, b, magnitude
    actual, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(*inputs) for f in (loss, judged)
    )
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5 * abs(other).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(draw, dtype):
    with enable_x64(dtype == "float64"):
        x, wide = jnp.asarray(np.asarray(draw(3, 8)), dtype), jnp.promote_types(dtype, "float32")
        loss = lambda x: uc.rms_norm(uc.swiglu(x, x), x[0]).sum(dtype=x.dtype).astype(wide)  # noqa: E731
        value, slope = jax.jit(jax.value_and_grad(loss))(x)
        assert slope.dtype == x.dtype
        exact = np.asarray(x, "float64")
        actual = uc.rms_norm(uc.swiglu(exact, exact), exact[0]).sum()
        near = 100 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(value, actual, rtol=0, atol=near)
        moved = np.random.default_rng(1).standard_normal(x.shape)
        if dtype == "float64":
            ahead, behind = (loss(x + sign * 1e-6 * moved) for sign in (1, -1))
            np.testing.assert_allclose((slope * moved).sum(), (ahead - behind) / 2e-6, rtol=1e-4)


@pytest.mark.slow
def test_seeds_are_operands(draw):
    q = draw(1, 6, 2, 8)
    dropped = lambda q, seed: uc.attention(q, q, q, dropout=0.5, seed=seed)  # noqa: E731

    @jax.jit
    def step(q, seed):
        slope = jax.grad(lambda q: dropped(q, seed).sum())(q)
        return (
            dropped(q, seed),
            slope,
            jax.vmap(lambda seed: dropped(q, seed))(jnp.stack([seed] * 2)),
        )

    @jax.jit
    def fixed(q):
        return dropped(q, 7), jax.grad(lambda q: dropped(q, 7).sum())(q)

    actual, slope, mapped = step(q, jnp.uint32(7))
    assert (actual == dropped(q, 7)).all()
    assert (actual == dropped(q, jnp.int32(7))).all()
    assert (mapped == actual).all()
    np.testing.assert_array_equal((actual, slope), fixed(q))
    bits = jax.random.bits(jax.random.key(0))
    assert (step(q, bits)[0] == dropped(q, int(bits))).all()
    assert (step(q, bits)[0] != actual).any()
    assert (step(q, jnp.int32(-1))[0] == dropped(q, 2**64 - 1)).all()
    assert step._cache_size() == 2, "a seed that changes compiles nothing"
    x, weight, a, b = draw(5, 16), draw(12, 16), draw(4, 16), draw(12, 4)
    adapted = lambda seed: uc.lora_linear(x, weight, a, b, dropout=0.5, seed=seed)  # noqa: E731
    np.testing.assert_allclose(jax.jit(adapted)(jnp.uint32(3)), adapted(3), rtol=1e-6)


def test_a_number_stands_for_an_array_of_integers(draw):
    q, k = draw(2, 5, 2, 8), draw(2, 7, 2, 8)
    attended = lambda q, start: uc.attention(q, k, k, causal=True, query_start=start)  # noqa: E731
    expected = attended(q, 1)
    traced = jax.jit(lambda q, start: (attended(q, 1), attended(q, start)))(q, jnp.int32(1))
    for actual in (*traced, attended(q, jnp.int32(1)), attended(q, jnp.array([1, 1]))):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_is_no_seed_is_refused(wrap, draw):
    q = draw(1, 6, 2, 8)
    dropped = wrap(lambda q, seed: uc.attention(q, q, q, dropout=0.5, seed=seed))
    with pytest.raises(ConfigError, match=r"attention: seed is a key .* jax.random.bits\(key\)"):
        dropped(q, jax.random.key(0))
    for wrong in (jnp.ones(2, "uint32"), jnp.float32(1)):
        with pytest.raises(ConfigError, match=r"seed is an array .*; pass one integer"):
            dropped(q, wrong)
    with pytest.raises(ConfigError, match="needs an integer; seed=None"):
        wrap(lambda q: uc.attention(q, q, q, dropout=0.5))(q)
    with pytest.raises(ConfigError, match=r"lora_linear: dropout=0.5 needs an integer"):
        wrap(lambda x: uc.lora_linear(x, x, x, x, dropout=0.5))(draw(4, 4))


@pytest.mark.slow
def test_second_derivatives_and_forward_mode_are_refused(draw):
    x = draw(2, 4)
    loss = lambda x: uc.swiglu(x, x).sum()  # noqa: E731
    for twice in (jax.grad(lambda x: jax.grad(loss)(x).sum()), jax.jit(jax.jacrev(jax.grad(loss)))):
        with pytest.raises(GradientError, match=r"^swiglu has no second derivatives; take its"):
            twice(x)
    for forward in (jax.jacfwd(loss), jax.hessian(loss), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(TypeError, match="forward-mode"):
            forward(x)


@pytest.mark.slow
def test_what_has_no_gradient_is_refused_and_not_zero(draw):
    x, weight, a, b = draw(5, 8), draw(8), draw(8, 4), draw(5, 4)
    with pytest.raises(GradientError, match=r"lora_merge has no gradient: adapters are merged"):
        jax.grad(lambda a: uc.lora_merge(draw(5, 4), a, b[:, :4].T[:, :5].T).sum())(a[:4, :4])
    with pytest.raises(GradientError, match=r"its result rstd has no gradient; .*stop_gradient"):
        jax.grad(lambda x: uc.rms_norm_forward(x, weight)[2].sum())(x)
    q, cos = draw(1, 5, 2, 4), draw(5, 2)
    with pytest.raises(GradientError, match=r"cos is a table and has no gradient; .*stop_gradient"):
        jax.grad(lambda cos: uc.rope(q, cos, cos).sum())(cos)
    stopped = lambda cos: uc.rope(q, jax.lax.stop_gradient(cos), draw(5, 2)).sum()  # noqa: E731
    assert not jax.grad(stopped)(cos).any()


def test_a_call_that_does_not_fit_raises_before_anything_runs(draw):
    x, weight, labels = draw(2, 4), draw(4), jnp.array([0, 1])
    half, ours, mixed = weight.astype("float16"), np.ones((2, 4), "f"), "bring these to one: "
    cases = [
        (ShapeError, "hidden=3; it must be 4", lambda x: uc.rms_norm(x, weight[:3])),
        (DTypeError, "weight is float16; it must be float32", lambda x: uc.rms_norm(x, half)),
        (FrameworkError, mixed + "x from jax, weight from numpy", lambda x: uc.rms_norm(x, ours)),
        (FrameworkError, mixed + "x from numpy cpu, weight", lambda x: uc.rms_norm(ours, x[0])),
        (DTypeError, "up is not an array but float", lambda x: uc.swiglu(x, 2.0)),
        (ConfigError, "eps must be 0 or more", lambda x: uc.rms_norm(x, weight, eps=-1)),
        (ConfigError, "eps must be a finite number", lambda x: uc.rms_norm(x, weight, eps=x[0, 0])),
        (ConfigError, "read-only; call cross_entropy", lambda x: uc.cross_entropy_(x, labels)),
    ]
    for error, match, call in cases:
        with pytest.raises(error, match=match):
            jax.jit(call)(x)
    torch = pytest.importorskip("torch", reason="whose tensors do not mix")
    with pytest.raises(FrameworkError, match="gate from jax, up from torch cpu"):
        jax.jit(lambda x: uc.swiglu(x, torch.ones(2, 4)))(x)
    with pytest.raises(FrameworkError, match="gate from torch cpu, up from jax"):
        jax.jit(lambda x: uc.swiglu(torch.ones(2, 4), x))(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RangeError: .* tokens holds 9"):
        jax.block_until_ready(jax.jit(uc.embedding)(jnp.array([9]), draw(8, 4)))


def test_integers_of_numpy_stand_beside_arrays_of_jax(draw):
    """As in functions of jax.numpy: labels, tokens and masks of a loader need no conversion."""
    x, weight, table = draw(2, 3, 8), draw(9, 8), draw(7, 8)
    tokens = np.array([[3, 1, 6], [0, 0, 5]])
    mask = np.tril(np.ones((3, 3), bool))

    def loss(table, weight, tokens, mask):
        y = uc.embedding(tokens, table)[:, :, None] + x[:, :, None]
        y = uc.attention(y, y, y, mask=mask)[:, :, 0]
        return uc.linear_cross_entropy(y, weight, tokens).sum()

    own = jnp.asarray(tokens), jnp.asarray(mask)
    assert loss(table, weight, tokens, mask) == loss(table, weight, *own)
    expected = jax.grad(loss)(table, weight, *own)
    step = jax.grad(lambda table: loss(table, weight, tokens, mask))
    for actual in (step(table), jax.jit(step)(table)):
        np.testing.assert_array_equal(actual, expected)
    with pytest.raises(RangeError, match="labels holds numbers beyond int32"):
        uc.cross_entropy(weight, np.array([2**32 + 1] * 9))
    with pytest.raises(FrameworkError, match="bring these to one"):
        uc.rms_norm(x, np.ones(8, np.float32))
    with pytest.raises(DTypeError, match="weight is int32"):
        uc.rms_norm(x, np.ones(8, np.int32))


def test_arrays_without_numbers_are_refused(draw):
    deleted = draw(4, 4)
    deleted.delete()  # as jit does with what it is donated; JAX may crash when it is asked of one
    for call in (lambda: uc.softmax(deleted), lambda: uc.swiglu(draw(4, 4), deleted)):
        with pytest.raises(FrameworkError, match=r": (x|up) was deleted, .* use what that call"):
            call()
    keys = jax.random.split(jax.random.key(0), 4)
    for wrap in (lambda call: call, jax.jit):
        with pytest.raises(DTypeError, match=r"^softmax: x holds keys of jax.random; pass numbers"):
            wrap(uc.softmax)(keys)
        with pytest.raises(DTypeError, match=r"^rms_norm: weight holds keys of jax.random"):
            wrap(uc.rms_norm)(draw(4, 4), keys)
    with pytest.raises(DTypeError, match="softmax: x is not an array but ShapeDtypeStruct; pass"):
        uc.softmax(jax.ShapeDtypeStruct((2, 3), "float32"))


SEVERAL = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from unsloth_cupy import rms_norm, swiglu
from unsloth_cupy.errors import FrameworkError

jax.config.update("jax_num_cpu_devices", 2)
x, w = jnp.arange(32.0).reshape(4, 8) / 10, jnp.arange(8.0) / 8 + 1
loss = lambda x, w: (rms_norm(x, w) ** 2).sum()
expected = jax.grad(loss, (0, 1))(x, w)
same = lambda grads: [
    np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(grads, expected)
]
parts, whole = P("d"), P()
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    given = put(x, parts), put(w, whole)
    same(jax.jit(jax.grad(loss, (0, 1)))(*given))
    for check in (True, False):
        total = lambda x, w: jax.lax.psum(loss(x, w), "d")
        options = {"mesh": mesh, "in_specs": (parts, whole), "check_vma": check}
        same(jax.jit(jax.grad(jax.shard_map(total, out_specs=whole, **options), (0, 1)))(*given))
    gated = jax.jit(jax.shard_map(swiglu, mesh=mesh, in_specs=(parts, parts), out_specs=parts))
    np.testing.assert_allclose(gated(given[0], given[0]), swiglu(x, x))
each = jax.pmap(jax.grad(loss, 1), in_axes=(0, None))(x.reshape(2, 2, 8), w)
np.testing.assert_allclose(each.sum(axis=0), expected[1], rtol=1e-5, atol=1e-5)
for wrong, problem in (
    ((given[0], given[0]), "gate is on several devices; call it inside jax.jit"),
    ((x, jax.device_put(x, jax.devices()[1])), "gate from jax .*0, up from jax .*1"),
):
    try:
        swiglu(*wrong)
    except FrameworkError as error:
        assert __import__("re").search(problem, str(error)), error
    else:
        raise AssertionError("nothing was raised")
away = jax.device_put(x, jax.devices()[1])
assert swiglu(away, away).devices() == away.devices()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="JAX 0.6 has no jax.shard_map")
def test_several_devices():
    subprocess.run([sys.executable, "-c", SEVERAL], check=True)
