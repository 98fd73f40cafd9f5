"""State space duality: the recurrence, transformers' scan, texts packed and alone, kernels."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.bench.cases import Call
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, RangeError, ShapeError

from ..harness.parity import (
    Case,
    KernelParity,
    emulator,
    outputs_of,
    within_rule,
    worst_nearby,
)
from .packed_texts import (
    assert_any_schedule,
    assert_bits_of_each_alone,
    assert_states_go_on,
    assert_texts_of_a_device_are_not_read,
)

# The public names, as other people's programs call them.
PUBLIC = (
    "ssd(x, dt, a_log, b, c, d=None, dt_bias=None, *, initial=None, offsets=None, dt_min=0.0,"
    " dt_max=None, chunk=64)",
)

NAMES = ("x", "dt", "a_log", "b", "c", "d", "dt_bias")


def case(
    label: str,
    groups: int,
    each: int,
    state: int,
    dim: int,
    *lengths: int,
    batch: int = 0,
    given: Any = ("d", "dt_bias"),
    **how: Any,
) -> Case:
    """Return a call on texts of these lengths; with ``batch``, on rows of one length."""
    rows, tokens = batch or 1, sum(lengths)
    arrays = {}
    if not batch:
        arrays["offsets"] = np.cumsum([0, *lengths], dtype=how.pop("kind", np.int64))
    sizes = {"batch": rows, "tokens": tokens, "groups": groups, "heads": groups * each}
    sizes |= {"state": state, "dim": dim, "states": batch or len(lengths)}
    return Case(label, arrays=arrays, given=[*given], **sizes, **how)


class TestSsd(KernelParity):
    op = "ssd"
    sizes = tuple(
        {
            **{"batch": 1, "tokens": tokens, "groups": 2, "heads": heads, "states": 1, "texts": 1},
            **{"state": state, "dim": dim},
        }
        for tokens, heads, state, dim in (
            *((128, 4, 64, 64), (128, 40, 128, 64), (64, 4, 256, 64), (1, 4, 128, 64)),
            (64, 2, 9, 7),
        )
    )
    options = ({"chunk": 64}, {"chunk": 64, "dt_min": 0.1, "dt_max": 0.9})
    cases = (
        case("a batch", 1, 1, 16, 8, 5, batch=2),
        case("a group for two", 1, 2, 16, 16, 3, batch=1, given=["initial", "d"]),
        case("two groups", 2, 2, 8, 4, 5, batch=1, given=["initial", "dt_bias"]),
        case("odd sizes", 1, 1, 9, 7, 6, batch=1, given=["initial"], dt_min=0.4, dt_max=0.9),
        case("two chunks", 1, 1, 8, 4, 70, batch=1, given=["initial", "d", "dt_bias"]),
        case("texts", 1, 1, 8, 8, 3, 0, 65, 1, 0, given=["initial", "d"], kind=np.int32),
        case("texts without states", 1, 1, 8, 8, 64, 2),
        case("more heads than a block adds", 1, 17, 8, 4, 3, batch=1),
        case("state 128", 1, 3, 128, 40, 5, batch=2, given=["initial"]),
        case("state 256", 1, 1, 256, 4, 2, batch=1, given=["initial", "d"]),
        case("one token", 2, 2, 16, 40, 1, batch=2, given=["initial", "d", "dt_bias"]),
        case("one token of a new text", 1, 3, 12, 4, 1, batch=4, dt_max=0.5),
        case("one token, state 200", 1, 1, 200, 4, 1, batch=1, given=["initial"]),
        case("no tokens", 1, 1, 8, 4, 0, batch=2, given=["initial"]),
        case("empty texts", 1, 1, 8, 4, 0, 0, given=["initial"]),
        case("no columns", 1, 2, 8, 0, 3, batch=1),
        case("no state", 1, 1, 0, 4, 3, batch=1),
        case("chunks of 16", 1, 1, 8, 4, 40, batch=1, chunk=16),
        case("slices", 2, 2, 8, 4, 3, batch=1, gaps=True),
    )


class TestSsdOnTensorCores(KernelParity):
    """States of 64 rows, in bfloat16 128, and 64s of columns have another kernel forward."""

    op = "ssd"
    sides = ("forward",)
    cases = (
        case("texts", 1, 2, 64, 64, 67, 0, 1, 2, given=["initial", "d"], kind=np.int32),
        case("texts without states", 2, 1, 64, 64, 64, 2),
        case("a batch", 1, 2, 128, 64, 5, batch=2, given=["initial", "dt_bias"], dt_max=0.9),
        case("two tiles", 1, 1, 64, 128, 130, batch=1, dt_min=0.4),
    )
    test_gradient_matches_finite_differences = None
    test_rounds_once = None
    test_any_strides = None


class TestSsdBackwardOnTensorCores(KernelParity):
    """States and their gradients are walked along on them."""

    op = "ssd"
    sides = ("backward",)
    cases = (
        case("texts", 1, 1, 64, 64, 65, 0, 1, given=["initial", "d"], kind=np.int32),
        case("two tiles", 2, 1, 64, 128, 3, batch=1, given=["dt_bias"], dt_min=0.4),
        case("state 128", 1, 2, 128, 64, 5, batch=1, given=["initial", "d"], dt_max=0.9),
    )
    test_gradient_matches_finite_differences = None
    test_rounds_once = None
    test_any_strides = None


@pytest.mark.parametrize("seed", [0, 1, 65, 93, 100, 106])
def test_any_order_of_sums_is_within_the_rule_of_kernels(seed: int) -> None:
    """The gradient of a_log is one sum for a head: right by luck in one order, in others not."""
    rng, tokens, dim, state = np.random.default_rng(seed), 70, 4, 8
    shapes = {"x": (1, tokens, 1, dim), "dt": (1, tokens, 1), "a_log": (1,)} | dict.fromkeys(
        "bc", (1, tokens, 1, state)
    )
    shapes |= {"dy": (1, tokens, 1, dim), "dfinal": (1, 1, state, dim)}
    arrays: dict[str, Any] = {
        n: rng.standard_normal(shape).astype(np.float16).astype(np.float32)
        for n, shape in shapes.items()
    }
    op: Any = OPS["ssd"].backward
    call = Call(op, dict.fromkeys(op.names) | arrays, {})
    rows, columns = rng.permutation(state), rng.permutation(dim)
    moved = {n: arrays[n][..., columns].copy() for n in ("x", "dy")}
    moved |= {n: arrays[n][..., rows].copy() for n in "bc"}
    moved["dfinal"] = arrays["dfinal"][:, :, rows][..., columns].copy()
    other = outputs_of(call._replace(arrays=call.arrays | moved))
    exact = outputs_of(call.cast(np.float64))
    only = {"da_log": other["da_log"]}
    within_rule(worst_nearby(call, exact), exact, only)


def drawn(
    lengths: tuple[int, ...],
    dtype: Any,
    heads: int = 4,
    groups: int = 2,
    state: int = 8,
    dim: int = 4,
) -> dict[str, Any]:
    """Return the arrays of packed texts, their states and the gradients of both results."""
    rng, tokens = np.random.default_rng(0), sum(lengths)
    x, dy = rng.standard_normal((2, 1, tokens, heads, dim))
    b, c = rng.standard_normal((2, 1, tokens, groups, state)) * state**-0.5
    dt = rng.standard_normal((1, tokens, heads))
    a_log, d, dt_bias = rng.standard_normal((3, heads))
    arrays = {
        "x": x,
        "dt": dt,
        "a_log": a_log,
        "b": b,
        "c": c,
        "d": d,
        "dt_bias": dt_bias,
        "dy": dy,
    }
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    wide = np.promote_types(dtype, np.float32)
    initial, dfinal = rng.standard_normal((2, len(lengths), heads, state, dim)).astype(wide)
    return arrays | {"initial": initial, "dfinal": dfinal}


def both_ways(arrays: dict[str, Any], offsets: Any, **options: Any) -> list[Any]:
    """Return results of tokens, of states and of parameters, of a call and its backward."""
    inputs, more = [arrays[name] for name in NAMES], (arrays["initial"], offsets)
    y, final = uc.ssd(*inputs, initial=more[0], offsets=offsets, **options)
    dx, ddt, da_log, db, dc, dd, ddt_bias, dinitial = uc.ssd_backward(
        arrays["dy"], arrays["dfinal"], *inputs, *more, **options
    )
    return [y, dx, ddt, db, dc, final, dinitial, da_log, dd, ddt_bias]


@pytest.mark.parametrize("bounds", [(0.0, np.inf), (0.5, 1.0)])
def test_the_scan_of_transformers(bounds: tuple[float, float]) -> None:
    """Both results, and all gradients by torch, in float64."""
    torch = pytest.importorskip("torch", reason="torch computes the references")
    bamba = pytest.importorskip(
        "transformers.models.bamba.modeling_bamba", reason="transformers computes the references"
    )
    arrays = drawn((70,), np.float64)
    tensors = {n: torch.from_numpy(arrays[n]).requires_grad_() for n in (*NAMES, "initial")}
    torch.set_default_dtype(torch.float64)
    bamba_float = torch.Tensor.float
    torch.Tensor.float = lambda self: self  # it computes in float32, wherever it is called
    try:
        y, final = bamba.mamba2_chunk_scan(
            *(tensors["x"], tensors["dt"], -tensors["a_log"].exp(), tensors["b"], tensors["c"], 16),
            D=tensors["d"],
            dt_bias=tensors["dt_bias"],
            initial_states=tensors["initial"].transpose(2, 3),
            dt_softplus=True,
            dt_limit=bounds,
            return_final_states=True,
        )
    finally:
        torch.Tensor.float = bamba_float
        torch.set_default_dtype(torch.float32)
    final = final.transpose(2, 3)
    dfinal = torch.from_numpy(arrays["dfinal"])
    torch.autograd.backward([y, final], [torch.from_numpy(arrays["dy"]), dfinal])
    gradients = [tensors[n].grad for n in ("x", "dt", "b", "c", "initial", "a_log", "d", "dt_bias")]
    expected = [y.detach(), *gradients[:4], final.detach(), *gradients[4:]]
    limits = {"dt_min": bounds[0], "dt_max": bounds[1] if np.isfinite(bounds[1]) else None}
    for actual, exact in zip(both_ways(arrays, None, **limits), expected, strict=True):
        np.testing.assert_allclose(actual, exact.numpy(), rtol=1e-9, atol=1e-10)


def by_tokens(x: Any, dt: Any, a_log: Any, b: Any, c: Any, d: Any, bias: Any, state: Any) -> Any:
    """Return y and the last state by the recurrence, a token at a time."""
    results, each = [], x.shape[2] // b.shape[2]
    for t in range(x.shape[1]):
        rate = np.log1p(np.exp(dt[:, t] + bias))
        write, read = (a[:, t].repeat(each, axis=1) for a in (b, c))
        state = np.exp(-np.exp(a_log) * rate)[..., None, None] * state
        state = state + np.einsum("bh,bhn,bhp->bhnp", rate, write, x[:, t])
        results.append(np.einsum("bhnp,bhn->bhp", state, read) + d[:, None] * x[:, t])
    return np.stack(results, axis=1), state


@pytest.mark.parametrize("strength", [-30.0, 0.0, 3.0, 9.0])
def test_chunks_are_the_recurrence(strength: float) -> None:
    """In float64 along a text of many chunks, with decays of every strength; and in float32."""
    arrays = drawn((300,), np.float64)
    arrays["a_log"] += strength
    inputs = [arrays[name] for name in NAMES]
    expected = by_tokens(*inputs, arrays["initial"])
    for actual, exact in zip(uc.ssd(*inputs, initial=arrays["initial"]), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-10, atol=1e-12)
    narrow = [a.astype(np.float32) for a in inputs]
    results = uc.ssd(*narrow, initial=arrays["initial"].astype(np.float32))
    for actual, exact in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=2e-5 * np.abs(exact).max())


def packed_and_alone(lengths: tuple[int, ...], dtype: Any, *sizes: int) -> None:
    arrays = drawn(lengths, dtype, *(sizes or (17, 1)))
    assert_bits_of_each_alone(both_ways, arrays, lengths, of_tokens=5)


@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, np.dtype("float64")], ids=str)
def test_packed_texts_have_the_bits_of_each_alone(dtype: Any) -> None:
    packed_and_alone((5, 0, 130, 1, 64, 3), dtype)


@pytest.mark.slow
def test_kernels_of_packed_texts_have_the_bits_of_each_alone() -> None:
    """None begins where a chunk of all tokens would; one token alone has a kernel of its own."""
    with emulator():
        packed_and_alone((3, 0, 1, 66), KERNEL_DTYPES[1])


@pytest.mark.slow
@pytest.mark.parametrize("state", [64, 128])
def test_tensor_cores_of_packed_texts_have_the_bits_of_each_alone(state: int) -> None:
    with emulator():
        packed_and_alone((3, 0, 1, 66), KERNEL_DTYPES[1], 2, 1, state, 64)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(np.float32,), (KERNEL_DTYPES[1], 2, 1, 64, 64)], ids=str)
def test_any_schedule(sizes: Any) -> None:
    assert_any_schedule(both_ways, drawn((3, 70), *sizes), (3, 70))


@pytest.mark.parametrize("lengths", [(5, 0, 130, 1, 64, 3), (0, 0), (0, 7, 0)], ids=str)
def test_texts_of_a_device_are_not_read(lengths: tuple[int, ...]) -> None:
    assert_texts_of_a_device_are_not_read(both_ways, drawn(lengths, np.float64), lengths)


def test_a_state_goes_on_with_a_text() -> None:
    """In pieces of any length, down to one token."""
    arrays = drawn((100,), np.float64)
    assert_states_go_on(uc.ssd, {name: arrays[name] for name in NAMES}, (1, 1, 70, 20, 1, 7))


def test_wrong_calls() -> None:
    x, dt, a_log = np.ones((2, 6, 2, 4), np.float32), np.zeros((2, 6, 2), np.float32), np.zeros(2)
    one = x, dt, a_log.astype(np.float32), x, x
    with pytest.raises(ConfigError, match=r"chunk=0; pass an integer of 1 or more, such as 64"):
        uc.ssd(*one, chunk=0)
    with pytest.raises(ConfigError, match=r"dt_min=2.0, dt_max=1.0; pass 0 <= dt_min <= dt_max"):
        uc.ssd(*one, dt_min=2.0, dt_max=1.0)
    with pytest.raises(ShapeError, match=r"batch=2; with offsets it must be 1: pass reshape\(1,"):
        uc.ssd(*one, offsets=np.array([0, 6]))
    one = x[:1], dt[:1], a_log.astype(np.float32), x[:1], x[:1]
    with pytest.raises(RangeError, match="must rise from 0 to 6, the number of tokens"):
        uc.ssd(*one, offsets=np.array([0, 7]))
    with pytest.raises(ShapeError, match="initial has 3 states"):
        uc.ssd(*one, initial=np.zeros((3, 2, 4, 4), np.float32))
    three = np.ones((1, 6, 3, 4), np.float32)
    with pytest.raises(ShapeError, match="heads=3 must be a multiple of groups=2"):
        uc.ssd(three, three[..., 0], a_log[[0, 0, 1]].astype(np.float32), x[:1], x[:1])
