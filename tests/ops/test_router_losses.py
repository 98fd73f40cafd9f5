"""Losses of routers: transformers' numbers, masks, the parity of kernels."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import RangeError, ShapeError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, KernelParity, emulator
from .golden_cases import agree, both_dtypes

# The public names, as other people's programs call them.
PUBLIC = (
    "balance_loss(logits, experts, *, mask=None)",
    "router_z_loss(logits, *, mask=None)",
)

CASES = [*op_cases(FOLDER / "ops_next", "router_loss")]


class TestBalanceLoss(KernelParity):
    op = "balance_loss_forward"
    sizes = ({"experts": 8, "k": 2, "masked": (4,)}, {"experts": 128, "k": 8, "masked": (4,)})
    cases = (
        Case("few experts", rows=[5], experts=6, k=2),
        Case("layers", rows=[3, 2, 9], experts=40, k=4, masked=[2, 9], given=["mask"]),
        Case("rows one after another", rows=[42], experts=9, k=3, masked=[7, 2], given=["mask"]),
        Case("several blocks", rows=[300], experts=33, k=1),
        Case("one expert", rows=[3], experts=1, k=1),
        Case("no row counts", rows=[4], experts=5, k=2, arrays={"mask": np.zeros(4, bool)}),
        Case("no rows", rows=[0], experts=5, k=2),
    )


class TestRouterZLoss(KernelParity):
    op = "router_z_loss_forward"
    sizes = ({"experts": 8, "masked": (4,)}, {"experts": 128, "masked": (4,)})
    cases = (
        Case("few experts", rows=[5], experts=6),
        Case("layers", rows=[3, 2, 9], experts=40, masked=[2, 9], given=["mask"]),
        Case("several blocks", rows=[300], experts=33),
        Case("no row counts", rows=[4], experts=5, arrays={"mask": np.zeros(4, bool)}),
        Case("no rows", rows=[0], experts=5),
    )


@both_dtypes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden(case: OpCase, dtype: Any) -> None:
    names = [name for name in case.inputs if name.startswith(("layer", "logits"))]
    layers = [case.inputs[name].astype(dtype) for name in names]
    tape, logits = uc.Tape(), np.stack(layers)
    watched = tape.watch(logits)
    if case.name == "z_loss":
        loss = uc.router_z_loss(watched)
    else:
        experts = uc.route(logits, k=case.params["top_k"]).experts
        loss = uc.balance_loss(watched, experts, mask=case.inputs.get("mask"))
    agree(loss.value, case.outputs["y"])
    (gradient,) = tape.gradients(loss, [watched], case.inputs["cotangent"].astype(dtype))
    agree(gradient, np.stack([case.grads[name] for name in names]))


def test_hidden_rows_may_hold_anything() -> None:
    rng = np.random.default_rng(0)
    logits, experts = rng.standard_normal((6, 5)).astype(np.float32), rng.integers(0, 5, (6, 2))
    mask = np.array([1, 0, 1, 1, 0, 1])
    dirty = np.where(mask[:, None], logits, np.nan)
    kept = mask > 0
    for context in (None, emulator()):
        with context or np.errstate():
            for rows in (logits, dirty):
                loss = uc.balance_loss(rows, experts, mask=mask)
                np.testing.assert_allclose(
                    loss, uc.balance_loss(logits[kept], experts[kept]), rtol=1e-6
                )
                z = uc.router_z_loss(rows, mask=mask)
                np.testing.assert_allclose(z, uc.router_z_loss(logits[kept]), rtol=1e-6)
                _, slopes = uc.balance_loss_forward(rows, experts, kept)
                dlogits, *_ = uc.balance_loss_backward(loss, rows, kept, slopes)
                assert not dlogits[~kept].any()
                _, count = uc.router_z_loss_forward(rows, kept)
                dlogits, _ = uc.router_z_loss_backward(loss, rows, kept, count)
                assert not dlogits[~kept].any()


def test_bad_calls() -> None:
    logits, experts = np.ones((6, 3), np.float32), np.zeros((6, 1), int)
    with pytest.raises(RangeError, match=r"experts holds 3; it must be in 0 \.\. 2"):
        uc.balance_loss(logits, experts + 3)
    with pytest.raises(ShapeError, match="mask has 4 rows; logits has 6"):
        uc.balance_loss(logits, experts, mask=np.ones(4, bool))
    with pytest.raises(ShapeError, match="mask has 12 rows; logits has 6"):
        uc.router_z_loss(logits, mask=np.ones(12, bool))
