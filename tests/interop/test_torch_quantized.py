"""Quantized weights in calls on tensors of torch."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.errors import (  # noqa: E402
    ConfigError,
    DTypeError,
    FrameworkError,
    GradientError,
)
from unsloth_cupy.interop import _torch_memory as memory  # noqa: E402

from . import quantized  # noqa: E402


def tensors(*names: str, grad: bool = True) -> list[Any]:
    return [torch.from_numpy(a.copy()).requires_grad_(grad) for a in quantized.drawn(*names)]


@pytest.mark.parametrize(("kind", "names", "call"), quantized.EVERY, ids=quantized.NAMES)
def test_calls_and_gradients_are_those_on_numpys_arrays(kind, names, call):
    w, names = quantized.weight(kind), names.split()
    expected, slopes = quantized.gradients(
        lambda *inputs: call(w, *inputs), quantized.drawn(*names)
    )
    inputs = tensors(*names)
    assert np.array_equal(call(w, *tensors(*names, grad=False)).numpy(), expected)
    y = call(w, *inputs)
    assert np.array_equal(y.detach().numpy(), expected)
    for actual, slope in zip(torch.autograd.grad(y.sum(), inputs), slopes, strict=True):
        assert np.array_equal(actual.numpy(), slope)


def test_a_merged_weight_is_a_tensor():
    w, (a, b) = quantized.weight("nf4"), quantized.drawn("a", "b")
    actual = uc.lora_merge(w, torch.from_numpy(a), torch.from_numpy(b), scale=0.5)
    assert np.array_equal(actual.numpy(), uc.lora_merge(w, a, b, scale=0.5))


def test_a_dense_weight_beside_a_quantized_one_learns():
    w, dense = quantized.weight("nf4"), torch.from_numpy(quantized.weight("int8").dequantize())
    x, dense = *tensors("x"), dense.requires_grad_()
    judge = [torch.from_numpy(w.dequantize()), dense, torch.from_numpy(w.dequantize())]
    weights: Any
    results = []
    for weights in ((w, dense, w), judge):
        results.append(torch.autograd.grad(uc.swiglu_mlp(x, *weights).sum(), (x, dense)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_only_what_asks_for_a_gradient_has_one():
    w, (x, a, b) = quantized.weight("nf4"), tensors("x", "a", "b")
    x.requires_grad_(False)
    uc.lora_linear(x, w, a, b).sum().backward()
    assert (x.grad, a.grad.shape, b.grad.shape) == (None, a.shape, b.shape)
    with torch.no_grad():
        assert not uc.linear(a, w).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_meets_the_weight(dtype):
    w, (x, a, b, magnitude) = quantized.weight("nf4"), tensors("x", "a", "b", "magnitude")
    base = torch.from_numpy(w.dequantize())
    actual = []
    with torch.autocast("cpu", dtype):
        for weight in (w, base):
            y = uc.lora_linear(x, weight, a, b, magnitude=magnitude)
            actual.append([y, *torch.autograd.grad(y.float().sum(), (x, a, b, magnitude))])
    for one, other in zip(*actual, strict=True):
        assert one.dtype is other.dtype
        difference = (one - other).float().norm() / other.float().norm()
        assert difference < 4 * torch.finfo(dtype).eps  # the dense one is rounded first
    assert actual[0][0].dtype is dtype


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_equal_bits(reentrant):
    w, inputs = quantized.weight("nf4"), tensors("x", "a", "b")

    def run(x, a, b):
        return uc.lora_linear(uc.linear(x, w), w, a, b, dropout=0.5, seed=3)

    slopes = []
    for checkpointed in (False, True):
        y = run(*inputs)
        if checkpointed:
            y = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=reentrant)
        y.sum().backward()
        slopes.append([each.grad.clone() for each in inputs])
        for each in inputs:
            each.grad = None
    assert all(map(torch.equal, *slopes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch, behind a break of a graph
@pytest.mark.parametrize("name", ["linear", "lora_linear with magnitudes", "swiglu_mlp"])
def test_compiled_functions_break_their_graph_there(name):
    names, call = quantized.CALLS[name]
    w, inputs = quantized.weight("nf4"), tensors(*names.split())

    def step(x, *others):
        return call(w, x * 2, *others) + 1

    expected = step(*inputs)
    actual = torch.compile(step, backend="aot_eager")(*inputs)
    torch.testing.assert_close(actual, expected)
    pairs = [torch.autograd.grad(y.sum(), inputs) for y in (actual, expected)]
    for slopes in zip(*pairs, strict=True):
        torch.testing.assert_close(*slopes)
    torch.compiler.reset()
    whole = torch.compile(step, backend="aot_eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="quantized weight cannot be in a graph"
    ):
        whole(*inputs)


def test_dispatch_modes_see_the_calls_around():
    from torch.utils.flop_counter import FlopCounterMode

    w, (x,) = quantized.weight("nf4"), tensors("x")
    with FlopCounterMode(display=False):
        uc.linear(x, w).sum().backward()
    (expected,) = torch.autograd.grad(uc.linear(x, w).sum(), x)
    assert torch.equal(x.grad, expected)


class Layer(torch.nn.Module):
    def forward(self, x):
        return uc.linear(x, quantized.weight("nf4"))


def tangent(x):
    with torch.autograd.forward_ad.dual_level():
        return Layer()(torch.autograd.forward_ad.make_dual(x, x))


class FromCupy:
    """Stands for an array on a GPU."""

    __module__ = "cupy"
    device = type("Device", (), {"id": 0})()


def on_gpu(w):
    w.home = FromCupy()
    return w


REFUSED = {
    "a gradient of torch.func": (
        lambda x, w: torch.func.grad(lambda x: uc.linear(x, w).sum())(x),
        FrameworkError,
        "linear: a quantized weight cannot be in a graph of .* pass the tensor of weight.deq",
    ),
    "vmap": (
        lambda x, w: torch.func.vmap(lambda x: uc.linear(x, w))(x),
        FrameworkError,
        "linear: a quantized weight cannot be in a graph",
    ),
    "an export": (
        lambda x, w: torch.export.export(Layer(), (x,)),
        FrameworkError,
        "linear: a quantized weight cannot be in a graph",
    ),
    "a tangent": (lambda x, w: tangent(x), GradientError, "no forward-mode derivative"),
    "no second derivative": (
        lambda x, w: torch.autograd.grad(
            *[torch.autograd.grad(uc.swiglu_mlp(x, w, w, w).sum(), x, create_graph=True)[0].sum()],
            x,
        ),
        GradientError,
        "swiglu_mlp has no second derivatives",
    ),
    "another operand": (
        lambda x, w: uc.linear(w, x),
        DTypeError,
        r"x is quantized; pass an array of x.dequantize\(\)",
    ),
    "an op without weights": (uc.swiglu, DTypeError, "up is quantized; pass"),
    "another place": (
        lambda x, w: uc.linear(x, on_gpu(w)),
        FrameworkError,
        r"weight is stored in CuPy arrays on cuda:0, and the other arrays are on cpu;"
        r" .* weight.moved\(cupy.asnumpy\)",
    ),
    "no device": (lambda x, w: uc.linear(x.to("meta"), w), FrameworkError, "x is on meta"),
    "another library": (
        lambda x, w: uc.lora_linear(x, w, np.ones((4, 64)), np.ones((64, 4))),
        FrameworkError,
        "x from torch cpu, a from numpy cpu",
    ),
    "sizes": (lambda x, w: uc.linear(x[..., :3], w), ValueError, "inputs=64; it must be 3"),
    "a threshold": (
        lambda x, w: uc.int8_linear(x, quantized.weight("int8"), threshold="6"),
        ConfigError,
        r"int8_linear\(threshold='6'\): threshold must be a finite number",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # tangents load it
@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call, error, words):
    x, w = *tensors("x"), quantized.weight("nf4")
    with pytest.raises(error, match=words):
        call(x, w)


def test_results_on_a_gpu_are_sought_among_tensors_alone():
    cupy = pytest.importorskip("cupy", reason="whose arrays they are on a GPU")
    held = torch.zeros(6)
    own = cupy.cuda.UnownedMemory(held.data_ptr(), 24, held, 0)
    array = cupy.ndarray((2, 3), np.float32, cupy.cuda.MemoryPointer(own, 0))
    actual = memory.tensor_of(array, (quantized.weight("nf4"),), (quantized.weight("nf4"),))
    assert actual.data_ptr() == held.data_ptr()


def close(actual, expected):
    most = 1e-5 * float(expected.detach().abs().max())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=most)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "names", "call"), quantized.EVERY, ids=quantized.NAMES)
def test_calls_on_a_gpu(kind, names, call):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    cupy = pytest.importorskip("cupy", reason="in which the weight is kept there")
    w, inputs = quantized.weight(kind), tensors(*names.split())
    there = [each.detach().cuda().requires_grad_() for each in inputs]
    actual, expected = call(w.moved(cupy.asarray), *there), call(w, *inputs)
    close(actual, expected)
    pairs = torch.autograd.grad(actual.sum(), there), torch.autograd.grad(expected.sum(), inputs)
    for one, other in zip(*pairs, strict=True):
        close(one, other)
    with pytest.raises(FrameworkError, match=r"kept in arrays of NumPy on cpu.*cuda:0"):
        uc.linear(there[0], quantized.weight("nf4"))
