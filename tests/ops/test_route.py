"""Routers: transformers' numbers, ties, groups, the parity of kernels."""

import importlib
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.ops.experts.route import weights_of

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, KernelParity, emulator
from .golden_cases import agree, both_dtypes

# The public names, as other people's programs call them.
PUBLIC = (
    'route(logits, *, k, scores="softmax", bias=None, normalize=True, groups=None, '
    "top_groups=None, scale=1.0)",
)

ROUTERS = [c for c in op_cases(FOLDER / "ops_next", "router") if c.name != "sparsemixer"]
LOW = np.array([[-300.0, -301, -302, -304], [-200, -202, -203, -201]])
GROUPED = {"groups": 4, "top_groups": 2}


class TestRoute(KernelParity):
    op = "route_forward"
    sizes = ({"experts": 8, "k": 2}, {"experts": 128, "k": 8}, {"experts": 257, "k": 4})
    options = (
        {},
        {"normalize": False},
        {"scores": "softmax_of_k"},
        {"scores": "sigmoid"},
        {"scores": "sqrt_softplus", "normalize": False},
    )
    cases = (
        Case("softmax", rows=[2, 3], experts=8, k=2),
        Case("softmax of all", rows=[7], experts=60, k=4, normalize=False),
        Case("softmax with bias", rows=[5], experts=33, k=3, given=["bias"]),
        Case("softmax of k", rows=[90], experts=40, k=8, scores="softmax_of_k", given=["bias"]),
        Case("groups of softmax", rows=[5], experts=16, k=3, normalize=False, **GROUPED),
        Case("sigmoid", rows=[9], experts=12, k=3, scores="sigmoid", given=["bias"], scale=2.5,
             **GROUPED),
        Case("sigmoid as it is", rows=[3], experts=300, k=2, scores="sigmoid", normalize=False),
        Case("sqrt softplus", rows=[4], experts=24, k=5, scores="sqrt_softplus"),
        Case("groups of one", rows=[3], experts=4, k=2, scores="sigmoid", groups=4, top_groups=3),
        Case("far below 0", arrays={"logits": LOW}, k=2, normalize=False),
        Case("no expert is allowed", arrays={"logits": [[-np.inf] * 4, [0.0, 2, 1, -1]]}, k=2),
        Case("one expert", rows=[3], experts=1, k=1),
        Case("no rows", rows=[0], experts=4, k=2),
    )  # fmt: skip


def options_of(case: OpCase) -> dict[str, Any]:
    """Return the options of ``route`` for a case."""
    given, name = case.params, case.name
    softmax = "softmax_of_k" if name == "topk_softmax" else "softmax"
    options: dict[str, Any] = {
        "k": case.outputs["indices"].shape[1],
        "scores": "sigmoid" if name.startswith("sigmoid") else softmax,
        "normalize": given.get("norm_topk_prob", True),
        "scale": given.get("routed_scaling_factor", 1.0),
    }
    if "n_group" in given:
        options |= {"groups": given["n_group"], "top_groups": given["topk_group"]}
    return options


@both_dtypes
@pytest.mark.parametrize("case", ROUTERS, ids=lambda case: case.name)
def test_golden(case: OpCase, dtype: Any) -> None:
    inputs = {name: array.astype(dtype) for name, array in case.inputs.items()}
    logits, bias, options = inputs["logits"], inputs.get("bias"), options_of(case)
    routes = uc.route(logits, bias=bias, **options)
    assert routes.experts.dtype == np.int32
    np.testing.assert_array_equal(np.sort(routes.experts, axis=1), case.outputs["indices"])
    y = np.zeros_like(logits)
    np.put_along_axis(y, routes.experts, routes.weights, axis=1)
    agree(y, case.outputs["y"])
    tape = uc.Tape()
    watched = [tape.watch(array) for array in (logits, bias) if array is not None]
    weights = uc.route(watched[0], bias=(*watched, None)[1], **options).weights
    seed = np.take_along_axis(inputs["cotangent"], routes.experts, axis=1)
    gradients = tape.gradients(weights, watched, seed)
    agree(gradients[0], case.grads["logits"])
    if "bias" in case.grads:
        agree(gradients[1], case.grads["bias"])


def test_ties_take_the_lowest_index() -> None:
    """Also of zeros with a sign, of -inf, and of logits whose softmax rounds to the same."""
    close = np.nextafter(np.float32(1), np.float32(2))
    logits = np.array(
        [[1, 2, 2, 2], [0, -0.0, 0, -1], [-np.inf, -np.inf, 3, -np.inf], [1, close, 0, 0]],
        np.float32,
    )
    for context in (None, emulator()):
        with context or np.errstate():
            routes = uc.route(logits, k=2)
            assert routes.experts.tolist() == [[1, 2], [0, 1], [2, 0], [1, 0]]
            np.testing.assert_allclose(routes.weights[:3], [[0.5] * 2, [0.5] * 2, [1, 0]])
            grouped = uc.route(np.ones((1, 8), np.float32), k=2, scores="sigmoid",
                               groups=4, top_groups=1)  # fmt: skip
            assert grouped.experts.tolist() == [[0, 1]]


@pytest.mark.parametrize("scores", ["softmax", "softmax_of_k", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": False}, {"bias": True}, {"groups": 2, "top_groups": 1}],
    ids=str,
)
def test_a_nan_is_the_last_choice_and_makes_all_weights_of_its_row_nan(
    scores: str, options: dict[str, Any]
) -> None:
    """Also one that is not chosen; experts exist and differ, other rows are as without it."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 8)).astype(np.float32)
    bias = rng.standard_normal(8).astype(np.float32) if "bias" in options else None
    options = {name: value for name, value in options.items() if name != "bias"}
    plain = uc.route(logits, k=2, scores=scores, bias=bias, **options)
    logits[1, logits[1].argmin()] = np.nan
    logits[2] = np.nan
    logits[3, :4] = np.nan
    broken = np.array([False, True, True, True, False])
    rows = []
    for context in (None, emulator()):
        with context or np.errstate():
            experts, weights = uc.route(logits, k=2, scores=scores, bias=bias, **options)
        np.testing.assert_array_equal(np.isnan(weights).all(axis=1), broken)
        np.testing.assert_array_equal(np.isnan(weights).any(axis=1), broken)
        np.testing.assert_array_equal(experts[~broken], plain.experts[~broken])
        assert ((experts >= 0) & (experts < 8)).all()
        assert (experts[:, 0] != experts[:, 1]).all()
        rows.append(experts)
    np.testing.assert_array_equal(*rows)
    again = weights_of(logits, bias, rows[0], scores=scores, normalize=True, scale=1.0)
    np.testing.assert_array_equal(np.isnan(again).all(axis=1), broken)
    without_bias = uc.route(logits[:1], k=2, scores=scores, bias=np.full(8, np.nan, np.float32))
    assert np.isnan(without_bias.weights).all()


def test_bias_and_groups_choose_but_do_not_weigh() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]])
    bias = np.array([0.0, 0.0, 0.0, 9.0])
    experts, weights = uc.route(logits, k=2, scores="sigmoid", bias=bias)
    assert experts.tolist() == [[3, 0]]
    sigma = 1 / (1 + np.exp(-logits[0, [3, 0]]))
    np.testing.assert_allclose(weights[0], sigma / sigma.sum())
    experts, _ = uc.route(logits, k=2, scores="sigmoid", bias=bias, groups=2, top_groups=1)
    assert experts.tolist() == [[3, 2]]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_float32_inside(scores: str) -> None:
    """Weights of 16-bit logits are those of the same logits in float32, rounded once."""
    logits = (np.random.default_rng(0).standard_normal((50, 64)) * 4).astype(np.float16)
    wide = uc.route(logits.astype(np.float32), k=6, scores=scores)
    narrow = uc.route(logits, k=6, scores=scores)
    np.testing.assert_array_equal(narrow.experts, wide.experts)
    np.testing.assert_array_equal(narrow.weights, wide.weights.astype(np.float16))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 9}, r"k must be in 1 \.\. 8, the number of experts"),
        ({"k": 0}, r"k must be in 1"),
        ({"k": 3, "groups": 4, "top_groups": 1}, r"1 \.\. 2, the number of experts of 1 groups"),
        ({"k": 1, "groups": 3, "top_groups": 1}, "groups must divide the 8 experts"),
        ({"k": 1, "groups": 4, "top_groups": 5}, r"top_groups must be in 1 \.\. 4"),
        ({"k": 1, "groups": 4}, "pass both, or none"),
        ({"k": 1, "scores": "tanh"}, "choose from softmax, softmax_of_k, sigmoid, sqrt_softplus"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        uc.route(np.ones((2, 8), np.float32), **options)


def test_too_many_experts_for_the_kernel() -> None:
    """The definition chooses instead."""
    logits = np.random.default_rng(0).standard_normal((2, 1025)).astype(np.float32)
    expected = uc.route(logits, k=2)
    with emulator():
        actual = uc.route(logits, k=2)
    np.testing.assert_array_equal(actual.experts, expected.experts)
    module = importlib.import_module("unsloth_cupy.ops.experts.route")
    assert module.MOST_EXPERTS == 1024
