"""Selective scan: the recurrence, transformers' scan, texts packed and alone, kernels."""

import itertools
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.errors import RangeError, ShapeError

from ..harness.parity import Case, KernelParity, emulator
from .packed_texts import (
    assert_any_schedule,
    assert_bits_of_each_alone,
    assert_states_go_on,
    assert_texts_of_a_device_are_not_read,
)

# The public names, as other people's programs call them.
PUBLIC = (
    "selective_scan(x, dt, a_log, b, c, d=None, dt_bias=None, *, initial=None, offsets=None)",
)

NAMES = ("x", "dt", "a_log", "b", "c", "d", "dt_bias")


def case(
    label: str,
    inner: int,
    state: int,
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
    sizes = {"batch": rows, "tokens": tokens, "inner": inner, "d_state": state}
    return Case(label, arrays=arrays, given=[*given], **sizes, states=batch or len(lengths), **how)


class TestSelectiveScan(KernelParity):
    op = "selective_scan"
    sizes = tuple(
        {
            **{"batch": 1, "tokens": tokens, "inner": inner, "d_state": state},
            **{"states": 1, "texts": 1},
        }
        for tokens, inner, state in ((128, 256, 16), (16, 40, 24), (16, 256, 64), (1, 256, 16))
    )
    options = ({},)
    cases = (
        case("a batch", 3, 8, 5, batch=2),
        case("16 states", 40, 16, 18, batch=1, given=["initial", "d"]),
        case("odd sizes", 7, 9, 6, batch=1, given=["initial"]),
        case("two chunks", 4, 16, 33, batch=1, given=["initial", "d", "dt_bias"]),
        case("texts", 33, 16, 3, 0, 17, 1, 0, given=["initial", "d"], kind=np.int32),
        case("texts without states", 5, 4, 16, 2),
        case("24 states", 17, 24, 5, batch=2, given=["initial", "dt_bias"]),
        case("64 states", 9, 64, 17, batch=1, given=["initial", "d"]),
        case("one token", 40, 16, 1, batch=2, given=["initial", "d", "dt_bias"]),
        case("one token of new texts", 3, 12, 1, batch=4, given=[]),
        case("more states than kernels support", 2, 70, 3, batch=1),
        case("no tokens", 8, 4, 0, batch=2, given=["initial"]),
        case("empty texts", 8, 4, 0, 0, given=["initial"]),
        case("no channels", 0, 8, 3, batch=1),
        case("no state", 4, 0, 3, batch=1),
        case("slices", 8, 4, 3, batch=1, gaps=True),
    )


def drawn(lengths: tuple[int, ...], dtype: Any, inner: int = 6, state: int = 8) -> dict[str, Any]:
    """Return the arrays of packed texts, their states and the gradients of both results."""
    rng, tokens = np.random.default_rng(0), sum(lengths)
    x, dt, dy = rng.standard_normal((3, 1, tokens, inner))
    b, c = rng.standard_normal((2, 1, tokens, state)) * state**-0.5
    a_log, (d, dt_bias) = rng.standard_normal((inner, state)), rng.standard_normal((2, inner))
    arrays = {
        **{"x": x, "dt": dt, "a_log": a_log, "b": b, "c": c, "d": d, "dt_bias": dt_bias},
        "dy": dy,
    }
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    wide = np.promote_types(dtype, np.float32)
    initial, dfinal = rng.standard_normal((2, len(lengths), inner, state)).astype(wide)
    return arrays | {"initial": initial, "dfinal": dfinal}


def both_ways(arrays: dict[str, Any], offsets: Any) -> list[Any]:
    """Return results of tokens, of states and of parameters, of a call and its backward."""
    inputs, more = [arrays[name] for name in NAMES], (arrays["initial"], offsets)
    y, final = uc.selective_scan(*inputs, initial=more[0], offsets=offsets)
    dx, ddt, da_log, db, dc, dd, ddt_bias, dinitial = uc.selective_scan_backward(
        arrays["dy"], arrays["dfinal"], *inputs, *more
    )
    return [y, dx, ddt, db, dc, final, dinitial, da_log, dd, ddt_bias]


def test_the_scan_of_transformers() -> None:
    """Results of a text, and all gradients by torch, in float64."""
    torch = pytest.importorskip("torch", reason="torch computes the references")
    mamba = pytest.importorskip(
        "transformers.models.mamba.modeling_mamba", reason="transformers computes the references"
    )
    arrays = drawn((40,), np.float64)
    arrays["initial"] = np.zeros_like(arrays["initial"])  # their function has no states before
    tensors = {n: torch.from_numpy(arrays[n]).requires_grad_() for n in NAMES}
    own_float = torch.Tensor.float
    torch.Tensor.float = lambda self: self  # it computes in float32, wherever it is called
    try:
        y, final = mamba.mamba_selective_scan(
            *(tensors["x"].transpose(1, 2), tensors["dt"].transpose(1, 2), -tensors["a_log"].exp()),
            *(tensors["b"].transpose(1, 2), tensors["c"].transpose(1, 2)),
            D=tensors["d"],
            delta_bias=tensors["dt_bias"],
            delta_softplus=True,
            return_last_state=True,
        )
    finally:
        torch.Tensor.float = own_float
    y = y.transpose(1, 2)
    outputs, gradients = [y], [torch.from_numpy(arrays["dy"])]
    if final.requires_grad:
        outputs.append(final)
        gradients.append(torch.from_numpy(arrays["dfinal"]))
    torch.autograd.backward(outputs, gradients)
    expected = [y.detach(), *(tensors[n].grad for n in ("x", "dt", "b", "c")), final.detach()]
    expected += [tensors[n].grad for n in ("a_log", "d", "dt_bias")]
    results = both_ways(arrays, None)
    del results[6]  # the gradient of the states before
    for actual, exact in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, exact.numpy(), rtol=1e-9, atol=1e-10)


def by_tokens(x: Any, dt: Any, a_log: Any, b: Any, c: Any, d: Any, bias: Any, state: Any) -> Any:
    """Return y and the last states by the recurrence, in loops over tokens and channels."""
    y = np.zeros_like(x)
    state = state.copy()
    for t, channel in itertools.product(range(x.shape[1]), range(x.shape[2])):
        rate = np.log1p(np.exp(dt[0, t, channel] + bias[channel]))
        own = np.exp(-np.exp(a_log[channel]) * rate) * state[0, channel]
        state[0, channel] = own + rate * x[0, t, channel] * b[0, t]
        y[0, t, channel] = state[0, channel] @ c[0, t] + d[channel] * x[0, t, channel]
    return y, state


@pytest.mark.parametrize("strength", [-30.0, 0.0, 3.0, 9.0])
def test_the_recurrence(strength: float) -> None:
    """In float64 along a text of many chunks, with decays of every strength; and in float32."""
    arrays = drawn((100,), np.float64)
    arrays["a_log"] += strength
    inputs = [arrays[name] for name in NAMES]
    expected = by_tokens(*inputs, arrays["initial"])
    actual = uc.selective_scan(*inputs, initial=arrays["initial"])
    for one, exact in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-10, atol=1e-12)
    narrow = [a.astype(np.float32) for a in inputs]
    results = uc.selective_scan(*narrow, initial=arrays["initial"].astype(np.float32))
    for one, exact in zip(results, expected, strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-4, atol=2e-5 * np.abs(exact).max())


def packed_and_alone(lengths: tuple[int, ...], *rest: Any) -> None:
    assert_bits_of_each_alone(both_ways, drawn(lengths, *rest), lengths, of_tokens=5)


@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, np.dtype("float64")], ids=str)
def test_packed_texts_have_the_bits_of_each_alone(dtype: Any) -> None:
    packed_and_alone((5, 0, 35, 1, 16, 3), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(40, 16), (9, 40)], ids=str)
def test_kernels_of_packed_texts_have_the_bits_of_each_alone(sizes: tuple[int, int]) -> None:
    """None begins where a chunk of all tokens would."""
    with emulator():
        packed_and_alone((3, 0, 1, 34), KERNEL_DTYPES[1], *sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(40, 16), (9, 40)], ids=str)
def test_any_schedule(sizes: tuple[int, int]) -> None:
    assert_any_schedule(both_ways, drawn((3, 35), np.float32, *sizes), (3, 35))


@pytest.mark.parametrize("lengths", [(5, 0, 35, 1, 16, 3), (0, 0), (0, 7, 0)], ids=str)
def test_texts_of_a_device_are_not_read(lengths: tuple[int, ...]) -> None:
    assert_texts_of_a_device_are_not_read(both_ways, drawn(lengths, np.float64), lengths)


def test_states_go_on_with_a_text() -> None:
    """In pieces of any length, down to one token."""
    arrays = drawn((50,), np.float64)
    inputs = {name: arrays[name] for name in NAMES}
    assert_states_go_on(uc.selective_scan, inputs, (1, 1, 30, 10, 1, 7))


def test_wrong_calls() -> None:
    x, a_log = np.ones((2, 6, 4), np.float32), np.zeros((4, 3), np.float32)
    b = np.ones((2, 6, 3), np.float32)
    with pytest.raises(ShapeError, match=r"batch=2; with offsets it must be 1: pass reshape\(1,"):
        uc.selective_scan(x, x, a_log, b, b, offsets=np.array([0, 6]))
    one = x[:1], x[:1], a_log, b[:1], b[:1]
    with pytest.raises(RangeError, match="must rise from 0 to 6, the number of tokens"):
        uc.selective_scan(*one, offsets=np.array([0, 7]))
    with pytest.raises(ShapeError, match="initial has 3 states"):
        uc.selective_scan(*one, initial=np.zeros((3, 4, 3), np.float32))
    with pytest.raises(ShapeError, match=r"a_log\(inner, d_state\)"):
        uc.selective_scan(*one[:2], a_log.T.copy(), *one[3:])
