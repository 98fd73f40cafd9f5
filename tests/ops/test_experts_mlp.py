"""The layer of a mixture of experts: transformers' numbers, the parity of kernels."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, RangeError, ShapeError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, KernelParity, emulator
from .golden_cases import agree, both_dtypes
from .test_cross_entropy import reported

# The public names, as other people's programs call them.
PUBLIC = (
    "experts_mlp(x, gate_up, down, routes, gate_up_bias=None, down_bias=None, *, "
    'activation="swiglu", limit=None, alpha=None)',
)

STACKS = ("gate_up", "down", "gate_up_bias", "down_bias")
STORED = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
BIASES = ["gate_up_bias", "down_bias"]


def distinct(rows: int, k: int, experts: int) -> Any:
    """Return a function that draws k different experts of each row."""
    return lambda rng: np.argsort(rng.random((rows, experts)), axis=1)[:, :k]


def case(label: str, rows: int, k: int, experts: int, hidden: int, inner: int, **how: Any) -> Case:
    """Return a layer; the experts of its rows are random unless they are passed."""
    arrays = {"experts": how.pop("chosen", distinct(rows, k, experts))}
    both = (1 if how.get("activation") == "relu2" else 2) * inner
    sizes = {"rows": [rows], "k": k, "hidden": hidden, "both": both, "inner": inner}
    return Case(label, arrays=arrays, **{"experts": experts}, **sizes, **how)


class TestExpertsMlp(KernelParity):
    op = "experts_mlp_forward"
    sizes = (
        {"rows": (256,), "k": 4, "experts": 8, "hidden": 256, "both": 1024, "inner": 512},
        {"rows": (4,), "k": 2, "experts": 8, "hidden": 9, "both": 14, "inner": 7},
        {"rows": (256,), "k": 4, "experts": 8, "hidden": 256, "both": 512, "inner": 512}
        | {"activation": "relu2"},
    )
    options = (
        {},
        {"activation": "swiglu_clamped"},
        {"activation": "geglu"},
        {"activation": "geglu_tanh"},
    )
    cases = (
        case("swiglu", 9, 2, 5, 16, 24),
        case("odd sizes", 7, 3, 4, 13, 11, given=BIASES),
        case("as gpt-oss", 12, 2, 4, 8, 16, given=BIASES, activation="swiglu_clamped", limit=0.7),
        case("geglu", 5, 1, 3, 24, 8, activation="geglu"),
        case("geglu by tanh", 5, 2, 3, 8, 8, activation="geglu_tanh", given=["down_bias"]),
        case("without a gate", 9, 2, 5, 16, 24, activation="relu2"),
        case("no gate, odd sizes", 7, 3, 4, 13, 11, given=BIASES, activation="relu2"),
        case("all rows to one expert", 70, 1, 3, 8, 8, chosen=np.full((70, 1), 1)),
        case("one row each", 4, 1, 4, 16, 8, chosen=np.array([[2], [0], [3], [1]])),
        case("tiles of 128 rows", 70, 2, 2, 24, 72, given=["gate_up_bias"]),
        case("threads of a block", 3, 2, 3, 8, 600),
        case("no rows", 0, 2, 3, 8, 8, given=BIASES),
    )


def turned(stack: np.ndarray) -> np.ndarray:
    """Return a stack of gpt-oss, (experts, in, out) with gate and up in turn, in our layout."""
    interleaved = stack.shape[-1] == 22
    if interleaved:
        stack = np.concatenate([stack[..., ::2], stack[..., 1::2]], axis=-1)
    return stack.swapaxes(1, 2) if stack.ndim == 3 else stack


@both_dtypes
@pytest.mark.parametrize(
    "golden",
    [c for c in op_cases(FOLDER / "ops_next", "experts") if not c.name.startswith("block")],
    ids=lambda c: c.name,
)
def test_golden(golden: OpCase, dtype: Any) -> None:
    """As Mixtral and gpt-oss compute it, with all gradients."""
    known = {n: a.astype(dtype) for n, a in golden.inputs.items() if n != "indices"}
    options: dict[str, Any] = {}
    layout: Any = lambda stack: stack  # noqa: E731
    if "swiglu_limit" in golden.params:
        options = {"activation": "swiglu_clamped", "limit": golden.params["swiglu_limit"]}
        layout = turned
    arrays = {"x": known["x"], "weights": known["weights"]}
    for ours, theirs in zip(STACKS, STORED, strict=True):
        if theirs in known:
            arrays[ours] = layout(known[theirs])
    tape = uc.Tape()
    watched = {name: tape.watch(array) for name, array in arrays.items()}
    routes = uc.Routes(golden.inputs["indices"], watched["weights"])
    operands = {n: watched[n] for n in ("x", *STACKS) if n in watched}
    y = uc.experts_mlp(**operands, routes=routes, **options)
    agree(y.value, golden.outputs["y"])
    gradients = tape.gradients(y, [*watched.values()], known["cotangent"])
    theirs = dict(zip(STACKS, STORED, strict=True))
    for name, gradient in zip(watched, gradients, strict=True):
        agree(gradient, layout(golden.grads[theirs.get(name, name)]))


@both_dtypes
@pytest.mark.parametrize(
    "golden",
    [c for c in op_cases(FOLDER / "ops_next", "experts") if c.name.startswith("block")],
    ids=lambda c: c.name,
)
def test_whole_blocks(golden: OpCase, dtype: Any) -> None:
    """Router, experts and shared experts of DeepSeek-V3 and Qwen3-Next, with all gradients."""
    given = golden.params
    bias = golden.inputs.get("gate.e_score_correction_bias")
    arrays = {n: a.astype(dtype) for n, a in golden.inputs.items() if n in golden.grads}
    tape = uc.Tape()
    names = {name: tape.watch(array) for name, array in arrays.items()}
    x = names["x"]
    options: dict[str, Any] = {"k": given["num_experts_per_tok"]}
    if bias is not None:
        options |= {"scores": "sigmoid", "bias": bias.astype(dtype)}
        options |= {"groups": given["n_group"], "top_groups": given["topk_group"]}
        options |= {"scale": given["routed_scaling_factor"]}
    routes = uc.route(uc.linear(x, names["gate.weight"]), **options)
    y = uc.experts_mlp(x, names["experts.gate_up_proj"], names["experts.down_proj"], routes)
    of = "shared_experts" if bias is not None else "shared_expert"
    shared = uc.swiglu_mlp(
        x, *(names[f"{of}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    )
    if bias is None:
        gate = uc.linear(x, names["shared_expert_gate.weight"])
        ones = np.ones(shared.shape, dtype)
        shared = uc.divide(shared, uc.exp(uc.broadcast_to(gate, shape=ones.shape) * -1.0) + ones)
    y = y + shared
    agree(y.value, golden.outputs["y"])
    gradients = tape.gradients(y, [*names.values()], golden.inputs["cotangent"].astype(dtype))
    for name, gradient in zip(names, gradients, strict=True):
        agree(gradient, golden.grads[name])


@pytest.mark.parametrize("wanted", [{"x"}, {"weights"}, {"gate_up", "down_bias"}, {"down"}])
def test_no_gradient_that_nobody_asks_for(wanted: set[str]) -> None:
    rng = np.random.default_rng(0)
    x, gate_up, down = (rng.standard_normal(s) for s in ((4, 3), (2, 10, 3), (2, 3, 5)))
    biases = rng.standard_normal((2, 10)), rng.standard_normal((2, 3))
    experts, weights = np.array([[0, 1]] * 4), rng.random((4, 2))
    arrays = x, gate_up, down, experts, weights, *biases
    y, *kept = uc.experts_mlp_forward(*arrays)
    every = uc.experts_mlp_backward(y, *arrays, *kept)
    kept = [array.astype(np.int64) for array in kept]
    some = uc.experts_mlp_backward(y, *arrays, *kept, wanted=wanted)
    names = ("x", "gate_up", "down", "experts", "weights", "gate_up_bias", "down_bias")
    for name, actual, full in zip(names, some, every, strict=True):
        assert (actual is None) == (name not in wanted)
        if actual is not None:
            np.testing.assert_array_equal(actual, full)


def test_any_schedule() -> None:
    """Any order of threads and blocks gives equal bits."""
    rng = np.random.default_rng(0)
    x, logits = (rng.standard_normal((80, n)).astype(np.float16) for n in (16, 3))
    gate_up, down = (rng.standard_normal((3, *s)).astype(np.float16) for s in ((16, 16), (16, 8)))
    routes = uc.route(logits, k=2)

    def bits() -> list[bytes]:
        y, *kept = uc.experts_mlp_forward(x, gate_up, down, *routes)
        gradients = uc.experts_mlp_backward(x, x, gate_up, down, *routes, None, None, *kept)
        return [a.tobytes() for a in (y, *gradients) if a is not None]

    with emulator():
        expected = bits()
    with emulator(seed=3):
        assert bits() == expected


def test_an_expert_that_does_not_exist() -> None:
    """Its row is NaN on a GPU, whose experts the host does not read, and has no gradient."""
    x = np.ones((3, 8), np.float32)
    gate_up, down = np.ones((2, 16, 8), np.float32), np.ones((2, 8, 8), np.float32)
    experts, weights = np.array([[0, 1], [1, 2], [1, 0]]), np.ones((3, 2), np.float32)
    with pytest.raises(RangeError, match=r"experts holds 2; it must be in 0 \.\. 1"):
        uc.experts_mlp(x, gate_up, down, (experts, weights))  # type: ignore[arg-type]
    forward: Any = OPS["experts_mlp_forward"]
    options = {"activation": "swiglu", "limit": None, "alpha": None}
    bias = np.ones((2, 8), np.float32)
    with emulator():
        arrays = [x, gate_up, down, experts, weights, None, bias]
        y, *kept = forward.launch(arrays, options)
        assert "routes.experts holds 2 in row 3" in reported()
        gradients = forward.backward.launch([x, *arrays, *kept], options | {"wanted": None})
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False]
    assert all(np.isfinite(a).all() for a in gradients if a is not None)
    assert gradients[4].tolist()[1][1] == 0
    np.testing.assert_array_equal(gradients[6][:, 0], [2, 3])


def test_bad_calls() -> None:
    x, gate_up, down = (np.ones(s, np.float32) for s in ((2, 4), (3, 10, 4), (3, 4, 5)))
    routes = uc.Routes(np.zeros((2, 1), int), np.ones((2, 1), np.float32))
    with pytest.raises(
        ConfigError, match="choose from swiglu, swiglu_clamped, geglu, geglu_tanh, relu2"
    ):
        uc.experts_mlp(x, gate_up, down, routes, activation="relu")
    with pytest.raises(ConfigError, match="activation 'swiglu' uses neither; leave them out"):
        uc.experts_mlp(x, gate_up, down, routes, limit=7.0)
    with pytest.raises(ConfigError, match="limit must be above 0"):
        uc.experts_mlp(x, gate_up, down, routes, activation="swiglu_clamped", limit=0.0)
    with pytest.raises(ShapeError, match=r"gate_up has 8 rows for each expert; .* need 10"):
        uc.experts_mlp(x, gate_up[:, :8], down, routes)
    with pytest.raises(ShapeError, match=r"gate_up has 10 rows .* 'relu2' need 5"):
        uc.experts_mlp(x, gate_up, down, routes, activation="relu2")
