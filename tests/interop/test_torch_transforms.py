"""The library's functions under torch's transforms: func, autocast, checkpoint, data parallel."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.errors import GradientError  # noqa: E402

from . import groups  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_gradients_of_functions():
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    uc.rms_norm(x, weight).sum().backward()

    def loss(w, x):
        return uc.rms_norm(x, w).sum()

    slope = torch.func.grad(loss)(weight.detach(), x)
    torch.testing.assert_close(slope, weight.grad)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight.detach(), x)
    torch.testing.assert_close(each.sum(0), weight.grad)
    matrix = torch.func.jacrev(uc.relu2)(x[0])
    torch.testing.assert_close(matrix, torch.diag(2 * torch.relu(x[0])))


def test_slices_of_a_batch():
    x, weights = torch.randn(5, 3, 8), torch.randn(5, 8, requires_grad=True)
    actual = torch.func.vmap(uc.rms_norm)(x, weights)
    expected = torch.stack([uc.rms_norm(a, w) for a, w in zip(x, weights, strict=True)])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.sum(), weights), torch.autograd.grad(expected.sum(), weights)
    )
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(uc.relu2))(x), uc.relu2(x))


def twice(x):
    return torch.func.grad(lambda y: torch.func.grad(lambda z: uc.relu2(z).sum())(y).sum())(x)


def by_autograd(x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(uc.swiglu(x, x).sum(), x, create_graph=True)
    slope.sum().backward()


def dual(x):
    with torch.autograd.forward_ad.dual_level():
        assert uc.relu2(x).shape == x.shape  # which has no tangent
        return uc.relu2(torch.autograd.forward_ad.make_dual(x, x))


REFUSED = {
    "autograd": (by_autograd, "^swiglu has no second derivatives; take its gradient once"),
    "grad of grad": (twice, "^relu2 has no second derivatives; take its gradient once"),
    "jacrev of jacrev": (
        torch.func.jacrev(torch.func.jacrev(lambda x: uc.relu2(x).sum())),
        "^relu2 has no second derivatives; take its gradient once",
    ),
    "hessian": (torch.func.hessian(lambda x: uc.relu2(x).sum()), "no forward-mode derivative"),
    "jacfwd": (torch.func.jacfwd(uc.relu2), "no forward-mode derivative"),
    "jvp": (lambda x: torch.func.jvp(uc.relu2, (x,), (x,)), "no forward-mode derivative"),
    "dual numbers": (dual, "relu2 has no forward-mode derivative; take the gradient in backward"),
    "dual operator": (
        lambda x: torch.func.jvp(torch.ops.unsloth_cupy.relu2, (x,), (x,)),
        "no forward-mode derivative",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own calls
@pytest.mark.parametrize("case", REFUSED)
def test_other_derivatives_raise_and_are_never_zero(case):
    function, words = REFUSED[case]
    uc.relu2(torch.ones(1))
    with pytest.raises(GradientError, match=words):
        function(torch.randn(3))


def test_autocast_goes_by_the_kind_of_operands():
    x, weight = torch.randn(3, 8), torch.randn(4, 8, requires_grad=True)
    norm = torch.ones(4)
    with torch.autocast("cpu", torch.bfloat16):
        y = uc.linear(x, weight)
        operator = torch.ops.unsloth_cupy.linear(x, weight, None)
        normed, gated, shares = uc.rms_norm(y, norm), uc.swiglu(y, y.float()), uc.softmax(y)
        shares[0, 0].backward()
    assert y.dtype is operator.dtype is torch.bfloat16  # a product
    assert torch.equal(y, operator)
    assert normed.dtype is torch.bfloat16  # its weight stays float32
    assert gated.dtype is torch.float32  # the widest of both
    assert shares.dtype is torch.float32  # read as a number
    assert weight.grad.dtype is torch.float32
    double = x.double()
    with torch.autocast("cpu", torch.bfloat16):
        assert uc.linear(double, double).dtype is torch.float64
        assert uc.lora_linear(x, weight, x[:2], weight[:, :2], magnitude=norm).dtype is y.dtype


def test_autocast_casts_a_weight_once_in_its_region():
    from unsloth_cupy.interop._torch_autocast import casts

    x, half = torch.arange(24.0).reshape(3, 8), torch.bfloat16  # sums are exact
    weight = torch.randn(4, 8, requires_grad=True)

    def weight_of(y):  # what the graph of a product holds of the weight
        return y.grad_fn.next_functions[1][0]

    with torch.autocast("cpu", half):
        first, second = uc.linear(x, weight), uc.linear(x, weight)
        assert weight_of(first) is weight_of(second)
        with torch.no_grad():
            uc.linear(x, weight)
        uc.linear(x, weight.detach())
        assert len(casts) == 2  # one of them without a gradient
        with torch.autocast("cpu", torch.float16):
            assert uc.linear(x, weight).dtype is torch.float16
        assert len(casts) == 3
        assert weight_of(uc.linear(x, weight)) is weight_of(first)
        with torch.no_grad():
            weight.mul_(2)
        third = uc.linear(x, weight)
        torch.testing.assert_close(third, uc.linear(x.to(half), weight.to(half)))
    assert not casts
    (first + second + third).sum().backward()
    torch.testing.assert_close(weight.grad, 3 * x.sum(0).expand(4, 8))
    with torch.inference_mode(), torch.autocast("cpu", half):
        uc.linear(x, weight)
        assert len(casts) == 1
    with torch.autocast("cpu", half, cache_enabled=False):
        assert weight_of(uc.linear(x, weight)) is not weight_of(uc.linear(x, weight))
    assert not casts


def test_autocast_of_another_device_casts_nothing():
    x = torch.randn(3, 8)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert uc.linear(x, x).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_the_same_bits_again(reentrant):
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    a, b = torch.randn(2, 8), torch.randn(5, 2)

    def layer(x):
        y = uc.rms_norm(x, weight)
        return uc.lora_linear(y, torch.eye(8)[:5], a, b, dropout=0.5, seed=3)

    expected = torch.autograd.grad(layer(x).sum(), (x, weight))
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


@pytest.mark.parametrize("kind", groups.KINDS)
def test_a_process_alone_has_its_gradients(tmp_path: Path, kind):
    with groups.group(str(tmp_path / "store")):
        groups.average(kind)


@pytest.mark.slow
def test_processes_average_their_gradients(tmp_path: Path):
    """Of copies and of shards, in this process and another one, which starts once for all kinds."""
    store = str(tmp_path / "store")
    command = [sys.executable, "-m", "tests.interop.groups", "1", "2", store]
    with subprocess.Popen(command, cwd=ROOT) as other:
        try:
            with groups.group(store, 0, 2):
                for kind in groups.KINDS:
                    groups.average(kind)
            assert other.wait(timeout=120) == 0
        finally:
            other.kill()
