"""xIELU: the formula, its gradients, transformers' module, kernels."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ShapeError

from ..harness.parity import Case, KernelParity

# The public names, as other people's programs call them.
PUBLIC = ("xielu(x, alpha_p, alpha_n, beta, eps)",)

NUMBERS: dict[str, Any] = {"beta": np.array(0.5), "eps": np.array(-1e-6)}


def case(label: str, *axes: int, **how: Any) -> Case:
    """Return a call on an array of these axes."""
    return Case(label, arrays=NUMBERS, axes=[*axes], **how)


class TestXielu(KernelParity):
    op = "xielu"
    cases = (
        case("odd", 2, 3, 13),
        case("slices", 2, 3, 40, gaps=True),
        case("several tiles", 5, 1000),
        case("scalar"),
        case("empty", 0, 4),
    )


def test_the_module_of_transformers() -> None:
    torch = pytest.importorskip("torch", reason="torch computes the references")
    activations = pytest.importorskip(
        "transformers.activations", reason="transformers computes the references"
    )
    module = activations.XIELUActivation(dtype=torch.float64)
    x = torch.linspace(-30, 5, 91, dtype=torch.float64, requires_grad=True)
    expected = module._xielu_python(x)
    expected.sum().backward()
    names = ("alpha_p", "alpha_n", "beta", "eps")
    numbers = [getattr(module, name).detach().numpy() for name in names]
    own = x.detach().numpy()
    np.testing.assert_allclose(uc.xielu(own, *numbers), expected.detach().numpy(), rtol=1e-12)
    gradients = uc.xielu_backward(np.ones_like(own), own, *numbers)
    for actual, array in zip(gradients[:3], (x, module.alpha_p, module.alpha_n), strict=True):
        np.testing.assert_allclose(actual, array.grad.numpy(), rtol=1e-12)


def test_two_curvatures_are_refused() -> None:
    two, x = np.zeros(2, np.float32), np.zeros(3, np.float32)
    number = np.zeros((), np.float32)
    with pytest.raises(ShapeError, match="xielu: alpha_p has 1=2"):
        uc.xielu(x, two, two, number, number)


def test_numbers_in_float32_do_not_round_float64() -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 40))
    alphas = rng.standard_normal((2, 1)).astype(np.float32)
    numbers = np.asarray(0.5), np.asarray(-1e-6)
    actual, expected = (
        [uc.xielu(x, *each, *numbers), *uc.xielu_backward(dy, x, *each, *numbers)[:3]]
        for each in (alphas, alphas.astype(np.float64))
    )
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])
    for one, other in zip(actual[2:], expected[2:], strict=True):
        np.testing.assert_array_equal(one, other.astype(np.float32))
