"""The library's functions on tensors of torch: gradients, compilers, transforms, refusals."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.errors import GradientError, ShapeError  # noqa: E402
from unsloth_cupy.interop import torch as door  # noqa: E402
from unsloth_cupy.interop._torch_memory import give_back  # noqa: E402

from .calls import drawn, every_call  # noqa: E402


def tensor(array):
    return give_back(array, None)


@every_call
def test_gradients_are_those_of_the_backward_op(op, optional):
    call, names = drawn(op, optional)
    found = call.run()
    seeds = call.seeds(found, every=True)
    judge = call.backward(found, seeds).run()
    tensors = {n: a if a is None else torch.from_numpy(a) for n, a in call.arrays.items()}
    leaves = [tensors[name].requires_grad_() for name in names]
    results = op.call([*tensors.values()], call.options)
    made = dict(zip(found, results if isinstance(results, tuple) else [results], strict=False))
    loss = sum((made[seed[1:]] * tensor(w)).sum() for seed, w in seeds.items())
    for name, grad in zip(names, torch.autograd.grad(loss, leaves), strict=True):
        expected = tensor(judge[f"d{name}"])
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


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
    assert door.rms_norm is uc.rms_norm
    assert door.swiglu is uc.swiglu
    assert "lora_linears" in dir(door)
    with pytest.raises(AttributeError, match="no attribute 'rms_norm_'"):
        _ = door.rms_norm_


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own call
def test_second_derivatives_and_forward_mode_are_refused():
    x = torch.randn(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(uc.swiglu(x, x).sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="no second derivatives"):
        slope.sum().backward()
    with pytest.raises(GradientError, match="no forward-mode derivative"):
        torch.func.jvp(uc.relu2, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
        with pytest.raises(GradientError, match="no forward-mode derivative"):
            uc.relu2(dual)
        assert uc.relu2(x.detach()).shape == x.shape


def test_a_call_that_does_not_fit_shows_itself():
    x = torch.randn(2, 4, requires_grad=True)
    for function in (uc.rms_norm, torch.compile(uc.rms_norm, backend="eager")):
        with pytest.raises(Exception, match=r"hidden=3; it must be 4") as caught:
            function(x, torch.ones(3))
        assert function is not uc.rms_norm or isinstance(caught.value, ShapeError)


def block(x, residual, weight, qkv, head, labels):
    y, h, _ = uc.rms_norm_forward(x, weight, residual)
    q, k, v = (uc.linear(y, w).reshape(*y.shape[:2], -1, 8) for w in qkv)
    y = uc.attention(q, k, v, causal=True, window=(4, None)).reshape(y.shape)
    return uc.linear_cross_entropy(uc.swiglu(y, uc.rms_norm(h, weight)), head, labels).mean()


def test_a_block_is_compiled_once_for_all_lengths():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    weights = torch.randn(16), [torch.randn(n, 16) for n in (16, 8, 8)], torch.randn(20, 16)
    for tokens in (9, 12, 7):
        x, r = (torch.randn(2, tokens, 16, requires_grad=True) for _ in "xr")
        given = x, r, *weights, torch.randint(20, (2, tokens))
        grads = [torch.autograd.grad(function(*given), (x, r)) for function in (block, compiled)]
        torch.testing.assert_close(*grads)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_transforms_and_autocast():
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    uc.rms_norm(x, weight).sum().backward()
    slope = torch.func.grad(lambda w: uc.rms_norm(x, w).sum())(weight.detach())
    torch.testing.assert_close(slope, weight.grad)
    mapped = torch.func.vmap(uc.rms_norm, in_dims=(0, None))(x[:, None], weight.detach())
    torch.testing.assert_close(mapped[:, 0], uc.rms_norm(x, weight.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        y = uc.linear(x, torch.randn(4, 8, requires_grad=True))
        assert y.dtype is torch.bfloat16
        assert uc.swiglu(y, y.float()).dtype is torch.float32
