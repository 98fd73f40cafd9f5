"""The library's functions on tensors of torch: gradients, compilers, transforms, refusals."""

import functools
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.core.op import op  # noqa: E402
from unsloth_cupy.errors import (  # noqa: E402
    ConfigError,
    DTypeError,
    FrameworkError,
    GradientError,
    RangeError,
    ShapeError,
)
from unsloth_cupy.interop import torch as door  # noqa: E402
from unsloth_cupy.interop._torch_memory import give_back  # noqa: E402
from unsloth_cupy.interop._wiring import public  # noqa: E402

from .calls import drawn, every_call  # noqa: E402


def tensor(array):
    return give_back(array, None)


@every_call
def test_gradients_are_those_of_the_backward_op(op, optional):
    call, names = drawn(op, optional)
    actual = call.run()
    seeds = call.seeds(actual, every=True)
    judge = call.backward(actual, seeds).run()
    single = [[name] for name in names] if "wanted" in op.backward.options else []
    for some in (names, *single):  # one gradient may share its array with another
        tensors = {n: a if a is None else torch.from_numpy(a) for n, a in call.arrays.items()}
        leaves = [tensors[name].requires_grad_() for name in some]
        results = op.call([*tensors.values()], call.options)
        results = results if isinstance(results, tuple) else [results]
        made = dict(zip(actual, [each for each in results if each is not None], strict=False))
        loss = sum((made[seed[1:]] * tensor(w)).sum() for seed, w in seeds.items())
        for name, grad in zip(some, torch.autograd.grad(loss, leaves), strict=True):
            expected = tensor(judge[f"d{name}"])
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_torch_is_imported_by_its_first_tensor_and_no_sooner():
    program = """
import sys, unsloth_cupy
assert not {"torch", "jax"} & sys.modules.keys()
import torch
compiled = torch.compile(lambda a: unsloth_cupy.relu2(a), backend="eager", fullgraph=True)
assert "unsloth_cupy.interop.torch" not in sys.modules
assert compiled(torch.ones(2)).tolist() == [1, 1]  # met inside of a graph
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_names_are_the_librarys():
    names = public()
    assert all(getattr(door, name) is names[name] for name in names)
    assert {"rms_norm", "lora_linears", "cast"} <= {*dir(door)}
    with pytest.raises(AttributeError, match="no attribute 'rms_norm_'"):
        _ = door.rms_norm_


BAD = {
    "not a tensor": (lambda x: uc.add(x, [1.0]), DTypeError, "b is not an array but list"),
    "a number": (lambda x: uc.add(x, 3), DTypeError, "b is not a tensor but int"),
    "missing": (uc.add, DTypeError, r"b is missing; pass b\(\*axes\)"),
    "first missing": (lambda x: uc.add(None, x), DTypeError, "a is missing"),
    "too many": (lambda x: uc.add(x, x, x), DTypeError, r"add takes \(a, b\)"),
    "another library": (
        lambda x: uc.add(x, np.ones((2, 4), np.float32)),
        FrameworkError,
        "a from torch cpu, b from numpy cpu",
    ),
    "another library first": (
        lambda x: uc.add(np.ones((2, 4), np.float32), x),
        FrameworkError,
        "a from numpy cpu, b from torch cpu",
    ),
    "another device": (
        lambda x: uc.add(x, x.to("meta")),
        FrameworkError,
        "a from torch cpu, b from torch meta",
    ),
    "no device": (
        lambda x: uc.add(x.to("meta"), x.to("meta")),
        FrameworkError,
        "add: a is on meta, where no op runs; bring it to a CPU or a GPU",
    ),
    "sparse": (lambda x: uc.add(x.detach().to_sparse(), x), FrameworkError, "a can't.*Sparse"),
    "integers": (lambda x: uc.relu2(torch.ones(3, dtype=int)), DTypeError, "x is int64; it must"),
    "two dtypes": (lambda x: uc.add(x, x.double()), DTypeError, "b is float64; it must be float32"),
    "no dtype of NumPy's": (
        lambda x: uc.relu2(x.detach().to(torch.float8_e4m3fn)),
        DTypeError,
        r"relu2: x is torch.float8_e4m3fn, which no op reads; pass values: x.to\(torch.bfloat16\)",
    ),
    "sizes": (lambda x: uc.rms_norm(x, torch.ones(3)), ShapeError, "hidden=3; it must be 4"),
    "a token": (lambda x: uc.embedding(torch.tensor([1, 9]), x), RangeError, "tokens holds 9"),
    "an option": (lambda x: uc.rms_norm(x, x[0], eps="a"), ConfigError, "must be a finite number"),
    "a seed": (
        lambda x: uc.lora_linear(x, x, x, x[:, :2], dropout=0.5, seed=torch.ones(2)),
        ConfigError,
        r"seed is a tensor of \(2,\) torch.float32; pass integers of shape \(\)",
    ),
    "a change on the way": (
        lambda x: uc.accumulate_(torch.zeros(2, 4), x),
        FrameworkError,
        "requires a gradient, but torch's autograd does not see this call",
    ),
    "a table": (
        lambda x: uc.rope(torch.ones(1, 2, 1, 4), x[:, :2], x[:, :2]).sum().backward(),
        GradientError,
        "cos is a table and has no gradient; detach it",
    ),
    "an op without gradient": (
        lambda x: uc.linear_cross_entropy_gradients(x, x, torch.tensor([0, 1]))[0].sum().backward(),
        GradientError,
        "linear_cross_entropy_gradients has no gradient: it returns the gradients",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_meets_one_clear_error(case):
    call, error, words = BAD[case]
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(error, match=words):
        call(x)


def test_what_lies_in_an_argument_is_that_tensor_or_a_view_of_it():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.ones(4)
    assert uc.rms_norm_forward(x, weight)[1] is x
    assert uc.cast(x, "float32") is x
    inputs = x.detach()
    part = uc.index(inputs, key=(slice(1, None), slice(None, None, 2)))
    assert part.data_ptr() == inputs.data_ptr() + 16
    version = inputs._version
    part.zero_()
    assert inputs._version > version  # autograd sees that it was changed
    assert inputs[1:, ::2].eq(0).all()
    turned = uc.index(inputs, key=(slice(None, None, -1),))
    assert turned.data_ptr() != inputs.data_ptr()  # torch has no negative strides


def test_equal_gradients_are_one_tensor_until_they_are_kept():
    a, b = (torch.randn(3, 4, requires_grad=True) for _ in "ab")
    uc.add(a, b).sum().backward()
    assert a.grad.data_ptr() != b.grad.data_ptr()  # each may be scaled in place
    x, r = (torch.randn(3, 4, requires_grad=True) for _ in "xr")
    uc.rms_norm(x, torch.ones(4), residual=r).sum().backward()
    assert x.grad.data_ptr() != r.grad.data_ptr()
    assert torch.equal(x.grad, r.grad)


def test_only_what_was_asked_for_is_computed(monkeypatch):
    from unsloth_cupy.ops.linear import linear as module

    made = []
    gemm = module.gemm
    monkeypatch.setattr(module, "gemm", lambda *a, **o: made.append(1) or gemm(*a, **o))
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4)
    uc.linear(x, weight).sum().backward()
    assert len(made) == 2  # y and dx; a frozen weight costs no product


def test_16_bits_and_parameters_in_float32():
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(8))
    y = uc.rms_norm(x, weight)
    y.sum().backward()
    dtypes = y.dtype, x.grad.dtype, weight.grad.dtype
    assert dtypes == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_an_op_of_ones_own_has_a_gradient_too():
    @op("x(*axes) -> y(*axes)")
    def twice(x):
        return 2 * x

    @twice.gradient
    def twice_backward(dy):
        return 2 * dy

    x = torch.ones(3, requires_grad=True)
    twice(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    slope = torch.func.grad(lambda a: twice(a).sum())(x.detach())
    assert slope.tolist() == [2, 2, 2]


def test_gradients_agree_with_differences():
    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def two(*arrays):
        return uc.rms_norm_forward(*arrays)[:2]

    def attend(q, k, v, sinks):
        return uc.attention_forward(q, k, v, sinks=sinks, causal=True)

    assert torch.autograd.gradcheck(two, (draw(3, 4), draw(4)))
    assert torch.autograd.gradcheck(two, (draw(3, 4), draw(4), draw(3, 4)))
    heads = draw(1, 5, 4, 2), draw(1, 5, 2, 2), draw(1, 5, 2, 2), draw(4)
    assert torch.autograd.gradcheck(attend, heads)

    def adapted(x, weight, a, b):
        return uc.lora_linear(x, weight, a, b, dropout=0.3, seed=2**64 - 1)

    assert torch.autograd.gradcheck(adapted, (draw(3, 4), draw(5, 4), draw(2, 4), draw(5, 2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_losses_in_half_precision_are_nearer_to_float64_than_torchs(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(64, 1000, generator=generator)).to(dtype)
    labels = torch.randint(1000, (64,), generator=generator)
    plain = functools.partial(torch.nn.functional.cross_entropy, reduction="sum")
    own = lambda x, labels: uc.cross_entropy(x, labels).sum()  # noqa: E731
    exact, actual, peers = (
        _value_and_gradient(loss, x, labels)
        for loss, x in ((plain, logits.double()), (own, logits), (plain, logits))
    )
    for result, peer, right in zip(actual, peers, exact, strict=True):
        assert (result - right).norm() <= (peer - right).norm()
    assert abs(actual[0] - exact[0]) <= 2**-22 * exact[0]
    assert (actual[1] - exact[1]).abs().max() <= torch.finfo(dtype).eps / 2


def _value_and_gradient(loss, x, labels):
    x = x.clone().requires_grad_()
    value = loss(x, labels)
    return value.detach().double(), torch.autograd.grad(value, x)[0].double()
