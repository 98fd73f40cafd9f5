import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import DTypeError, ShapeError

from ..parity import Case, Parity


class TestLinear(Parity):
    op = "linear"
    cases = (
        Case("odd", rows=[2, 3], inputs=13, outputs=7, given=["bias"]),
        Case("no bias", rows=[5], inputs=4, outputs=3),
        Case("one row", rows=[], inputs=5, outputs=2, given=["bias"]),
        Case("no rows", rows=[2, 0], inputs=5, outputs=2, given=["bias"]),
        Case("no inputs", rows=[3], inputs=0, outputs=2, given=["bias"]),
        Case("no outputs", rows=[3], inputs=2, outputs=0),
    )


def test_equals_torch() -> None:
    torch = pytest.importorskip("torch", reason="the peer of linear")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in [(2, 3, 5), (7, 5), (7,), (2, 3, 7)]]
    x, weight, bias, dy = (torch.tensor(array, requires_grad=True) for array in arrays)
    y = torch.nn.functional.linear(x, weight, bias)
    grads = torch.autograd.grad(y, (x, weight, bias), dy)
    np.testing.assert_allclose(uc.linear(*arrays[:3]), y.detach(), rtol=1e-12, atol=1e-14)
    found = uc.linear_backward(arrays[3], *arrays[:3])
    for mine, theirs in zip(found, grads, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)


def test_wrong_calls_show_the_call() -> None:
    x, weight = np.ones((2, 5), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(ShapeError, match=r"weight has inputs=4; it must be 5"):
        uc.linear(x, weight)
    with pytest.raises(DTypeError, match="weight is float16; it must be float32"):
        uc.linear(x, weight.astype(np.float16))
