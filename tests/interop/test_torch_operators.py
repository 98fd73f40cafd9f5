"""Ops as operators of torch: what its own checks, compilers and transforms say."""

import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.core.op import op  # noqa: E402
from unsloth_cupy.interop import torch as door  # noqa: E402
from unsloth_cupy.interop._torch_memory import give_back  # noqa: E402

from .calls import OPS, drawn, every_call  # noqa: E402


@pytest.fixture
def graphs():
    """Return how many graphs dynamo has made."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@every_call
def test_torch_finds_no_fault(op, optional):
    call, names = drawn(op, optional)
    tensors = {n: a if a is None else torch.from_numpy(a) for n, a in call.arrays.items()}
    for name in names:
        tensors[name].requires_grad_()
    operator = door.registered[op]
    arguments = [tensors.get(name) for name in operator.tensors]
    for name, codec in operator.codecs.items():
        value = call.options[name]
        arguments.append(value if codec.encode is None else codec.encode(value))
    torch.library.opcheck(operator.door, tuple(arguments))
    assert np.isfinite(call.run()[operator.results[0]]).all()


@pytest.mark.slow
def test_every_op_is_traced_by_one_compiler():
    """As torch's checks begin behind it: what leads from the library's names to operators."""
    calls = [drawn(op, optional=True)[0].mapped(lambda a: give_back(a, None)) for op in OPS]

    def everything(*tensors):
        made, inputs = [], iter(tensors)
        for call in calls:
            arrays = {name: None if a is None else next(inputs) for name, a in call.arrays.items()}
            made.append(call.op(**arrays, **call.options))
        return made

    tensors = [a for call in calls for a in call.arrays.values() if a is not None]
    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(*tensors), everything(*tensors))


def block(x, residual, weight, qkv, head, labels):
    y, h, _ = uc.rms_norm_forward(x, weight, residual)
    q, k, v = (uc.linear(y, w).reshape(*y.shape[:2], -1, 8) for w in qkv)
    y = uc.attention(q, k, v, causal=True, window=(4, None)).reshape(y.shape)
    return uc.linear_cross_entropy(uc.swiglu(y, uc.rms_norm(h, weight)), head, labels).mean()


@pytest.mark.slow
def test_a_block_is_compiled_once_for_all_lengths(graphs):
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    weights = torch.randn(16), [torch.randn(n, 16) for n in (16, 8, 8)], torch.randn(20, 16)
    for tokens in (9, 12, 7):
        x, r = (torch.randn(2, tokens, 16, requires_grad=True) for _ in "xr")
        inputs = x, r, *weights, torch.randint(20, (2, tokens))
        for rows in (x, r, inputs[-1]):
            torch._dynamo.mark_dynamic(rows, 1)  # a graph for one length alone is an error
        grads = [torch.autograd.grad(function(*inputs), (x, r)) for function in (block, compiled)]
        torch.testing.assert_close(*grads)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own calls
def test_inductor_fuses_around_ops(graphs, monkeypatch, tmp_path):
    """Between ops stands a product, in place, as in their gradients: g++ compiles one kernel."""
    # a kept graph has the strides that an operator said when it was compiled
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # processes of its own would import torch first
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    # for a small kernel, headers and trials of vector instructions cost more than they save
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", lambda: [])

    def function(x, weight, residual):
        y, h, _ = uc.rms_norm_forward(x, weight, residual)
        return uc.swiglu(y * 2, h)

    compiled, weight = torch.compile(function, fullgraph=True, dynamic=True), torch.randn(8)
    for rows in (4, 9):
        inputs = [torch.randn(rows, 8), weight, torch.randn(rows, 8)]
        inputs, seed = [tensor.requires_grad_() for tensor in inputs], torch.randn(rows, 8)
        actual, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(y, inputs, seed) for y in (actual, expected)]
        torch.testing.assert_close(*grads)
        weight = weight.detach()
    assert graphs() == 1


def adapted(x, seed):
    weight, a, b = (torch.ones(shape) for shape in ((8, 16), (2, 16), (8, 2)))
    return uc.lora_linear(x, weight, a, b, dropout=0.5, seed=seed)


@pytest.mark.slow
def test_seeds_are_operands_of_a_graph(graphs):
    compiled = torch.compile(adapted, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(3, 16, requires_grad=True)
    for seed in (0, 1, 5, 2**40, 2**63 - 1):
        actual, expected = compiled(x, seed), adapted(x, seed)
        assert torch.equal(actual, expected)
        slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected)]
        assert torch.equal(*slopes)
    assert graphs() <= 2  # of 0, which torch takes for a constant, and of all others
    assert torch.equal(compiled(x, 2**64 - 1), adapted(x, 2**64 - 1))


@pytest.mark.slow
def test_a_seed_that_is_not_an_integer_is_refused_while_compiling():
    for seed in (1.5, True, "a"):
        with pytest.raises(Exception, match=r"is not an integer; pass one, or a tensor of shape"):
            torch.compile(adapted, backend="eager", fullgraph=True)(torch.randn(3, 16), seed)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_output_that_nobody_used_has_a_gradient_of_zeros(backend):
    q, k = (torch.randn(1, 3, heads, 4, requires_grad=True) for heads in (4, 2))
    cos, sin = torch.ones(3, 2), torch.zeros(3, 2)

    def second(q, k):
        return uc.rope_qk(q, k, cos, sin)[1].sum()

    expected = torch.zeros_like(q), torch.ones_like(k)
    for function in (second, torch.compile(second, fullgraph=True, backend=backend)):
        torch.testing.assert_close(torch.autograd.grad(function(q, k), (q, k)), expected)
    x, residual, weight = (torch.randn(2, 4, requires_grad=True) for _ in range(3))

    def stream(x, residual, weight):
        return uc.rms_norm_forward(x, weight[0], residual)[1].sum()

    inputs = x, residual, weight
    expected = torch.ones_like(x), torch.ones_like(x), torch.zeros_like(x)
    for function in (stream, torch.compile(stream, fullgraph=True, backend=backend)):
        torch.testing.assert_close(torch.autograd.grad(function(*inputs), inputs), expected)


def test_a_graph_draws_anew_at_each_step(graphs):
    def step(x):
        seed = torch.randint(2**62, ())
        return adapted(x, seed), seed

    compiled, x = torch.compile(step, fullgraph=True, backend="aot_eager"), torch.randn(3, 16)
    (one, seed), (other, _) = compiled(x), compiled(x)
    assert not torch.equal(one, other)
    assert torch.equal(one, adapted(x, int(seed)))
    assert torch.equal(one, adapted(x, seed))
    assert graphs() == 1


def test_what_happens_elsewhere_recompiles_nothing(graphs):
    compiled, x = torch.compile(uc.relu2, fullgraph=True, backend="eager"), torch.ones(3)
    compiled(x)
    watched = uc.Tape().watch(np.ones(3, np.float32))
    uc.relu2(watched)  # arrays of a class that the op did not meet before

    @op("x(*axes) -> y(*axes)")
    def own(x):
        return x

    assert own(x) is x
    compiled(x)
    assert graphs() == 1


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return uc.swiglu(uc.rms_norm(x, self.weight), uc.scale(x, factor=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_ops(strict):
    model, rows = Gated(), torch.export.Dim("rows", min=2, max=64)
    inputs = (torch.randn(4, 8),)
    made = torch.export.export(model, inputs, dynamic_shapes=({0: rows},), strict=strict)
    assert "unsloth_cupy.rms_norm_forward" in made.graph_module.code
    x = torch.randn(7, 8)
    torch.testing.assert_close(made.module()(x), model(x))


@pytest.mark.slow
def test_what_is_composed_is_compiled():
    x, weight, m = torch.randn(2, 3, 16), torch.randn(16, 16), torch.rand(16) + 1
    a, b, cos, sin = torch.randn(4, 16), torch.randn(16, 4), torch.ones(3, 4), torch.zeros(3, 4)

    def composed(x):
        dora = uc.lora_linear(x, weight, a, b, magnitude=m)
        layers = [uc.LoraLayer(weight, a, b), uc.LoraLayer(weight, a, b, 0.5, m, m)]
        attended = uc.attention_layer(x, *[weight] * 4, cos, sin, heads=2)
        wide = uc.cast(uc.cast(x, "bfloat16"), "float32")
        return [dora, *uc.lora_linears(x, layers), attended, wide]

    compiled = torch.compile(composed, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(x), composed(x))


@pytest.mark.slow
def test_gradients_inside_of_graphs_and_casts():
    def slope(x):
        return torch.func.grad(lambda y: uc.relu2(y).sum())(x)

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return uc.linear(x, x)

    x = torch.randn(4, 4)
    for function in (slope, cast):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.slow
def test_what_changes_its_arguments_breaks_a_graph_and_runs():
    def add_up(x):
        return uc.accumulate_(torch.zeros(3), x) + 1

    assert torch.compile(add_up, backend="eager")(torch.ones(3)).tolist() == [2, 2, 2]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(add_up, backend="eager", fullgraph=True)(torch.ones(3))


UNFIT = {
    "sizes": (lambda x: uc.rms_norm(x, torch.ones(3)), "hidden=3; it must be 4"),
    "missing": (lambda x: uc.rms_norm(x, None), "weight is missing"),
    "an option": (lambda x: uc.rms_norm(x, x[0], eps=-1.0), "eps must be 0 or more"),
    "no seed": (lambda x: uc.lora_linear(x, x, x, x[:, :2], dropout=0.5), "dropout=0.5 needs an"),
    "odd heads": (
        lambda x: uc.apply_rotary_embedding(*[x[None, None, :, :3]] * 2, torch.ones(1, dtype=int)),
        "has an odd dim",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_call_that_does_not_fit_is_told_while_compiling(case):
    function, words = UNFIT[case]
    with pytest.raises(Exception, match=words):
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2, 4))
