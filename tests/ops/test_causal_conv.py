"""Causal convolutions: stored numbers, texts packed and alone, the parity of kernels."""

import itertools
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.errors import ConfigError, RangeError, ShapeError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, KernelParity, emulator
from .golden_cases import agree, both_dtypes, cast

# The public names, as other people's programs call them.
PUBLIC = (
    'causal_conv(x, weight, bias=None, *, initial=None, offsets=None, activation="silu")',
    "causal_conv_backward(dy, dfinal, x, weight, bias, initial, offsets)",
)


def case(label: str, channels: int, width: int, *lengths: int, batch: int = 0, **how: Any) -> Case:
    """Return a convolution of texts of these lengths; with ``batch``, of rows of one length."""
    sizes: dict[str, Any] = {"batch": batch or 1, "tokens": sum(lengths), "states": batch}
    arrays = {}
    if not batch:
        arrays = {"offsets": np.cumsum([0, *lengths], dtype=how.pop("kind", np.int64))}
        sizes["states"] = len(lengths)
    sizes |= {"channels": channels, "previous": width - 1}
    return Case(label, arrays=arrays, **sizes, **how)


class TestCausalConv(KernelParity):
    op = "causal_conv"
    sizes = tuple(
        {"batch": 1, "tokens": 64, "channels": n, "previous": w - 1, "states": 1, "texts": 1}
        for n, w in ((256, 4), (256, 2), (256, 8), (7, 3))
    )
    options = ({"activation": "silu"}, {"activation": None})
    cases = (
        case("a batch", 16, 4, 13, batch=2),
        case("all", 24, 4, 5, batch=3, given=["bias", "initial"]),
        case("odd channels", 7, 3, 9, batch=2, given=["bias"], activation=None),
        case("no activation", 8, 2, 6, batch=1, given=["initial"], activation=None),
        case("one tap", 8, 1, 6, batch=2, given=["bias", "initial"]),
        case("five taps", 16, 5, 12, batch=1, given=["bias"]),
        case("six taps", 16, 6, 15, batch=1, given=["initial"]),
        case("eight taps", 16, 8, 20, batch=1, given=["initial"]),
        case("texts", 16, 4, 3, 0, 70, 1, 0, 2, given=["bias", "initial"], kind=np.int32),
        case("texts without states", 8, 4, 1, 2, 64, 65),
        case("wide texts", 12, 8, 3, 9, 1, given=["initial"]),
        case("one token", 16, 4, 1, batch=3, given=["bias", "initial"]),
        case("more channels than a block", 1032, 4, 3, batch=1, given=["bias"]),
        case("no tokens", 8, 4, 0, batch=2, given=["initial"]),
        case("empty texts", 8, 4, 0, 0, given=["initial"]),
        case("no channels", 0, 4, 3, batch=2, given=["bias", "initial"]),
        case("no rows", 8, 4, 3, batch=0, given=["bias"]),
    )


@both_dtypes
@pytest.mark.parametrize("golden", [*op_cases(FOLDER / "ops_next", "conv")], ids=lambda c: c.name)
def test_golden(golden: OpCase, dtype: Any) -> None:
    """Channels are last here, and first in torch."""
    known = cast(golden, dtype)
    arrays = {"x": known["x"].swapaxes(1, 2), "weight": known["weight"]}
    arrays |= {ours: known[n] for ours, n in (("bias", "bias"), ("initial", "state")) if n in known}
    tape = uc.Tape()
    watched = {name: tape.watch(array) for name, array in arrays.items()}
    y, final = uc.causal_conv(**watched, **golden.params)
    agree(y.value.swapaxes(1, 2), golden.outputs["y"])
    dy = np.ascontiguousarray(known.get("cotangent", known.get("cotangent_y")).swapaxes(1, 2))  # type: ignore[union-attr]
    loss: Any = uc.sum(uc.multiply(y, dy))
    if "final_state" in golden.outputs:
        agree(final.value, golden.outputs["final_state"])
        loss += uc.sum(uc.multiply(final, known["cotangent_final_state"]))
    gradients = tape.gradients(loss, [*watched.values()])
    for name, gradient in zip(watched, gradients, strict=True):
        expected = golden.grads[{"initial": "state"}.get(name, name)]
        agree(gradient, expected.swapaxes(1, 2) if name == "x" else expected)


LENGTHS = (5, 0, 1, 130, 2, 64, 3)


def _packed_and_alone(dtype: Any) -> None:
    """Raise unless y, final, dx and dinitial of packed texts are those of each text, in bits."""
    rng = np.random.default_rng(0)
    offsets = np.cumsum([0, *LENGTHS])
    x, dy = rng.standard_normal((2, 1, offsets[-1], 24)).astype(dtype)
    initial, dfinal = rng.standard_normal((2, len(LENGTHS), 24, 3)).astype(dtype)
    weight, bias = rng.standard_normal((24, 4)).astype(dtype), rng.standard_normal(24).astype(dtype)

    def run(at: slice, state: slice, offsets: Any) -> list[Any]:
        inputs = x[:, at], weight, bias
        y, final = uc.causal_conv(*inputs, initial=initial[state], offsets=offsets)
        backward = uc.causal_conv_backward(
            dy[:, at], dfinal[state], *inputs, initial=initial[state], offsets=offsets
        )
        return [y, final, backward[0], backward[3]]

    packed = run(slice(None), slice(None), offsets)
    for text, (start, stop) in enumerate(itertools.pairwise(offsets)):
        alone = run(slice(start, stop), slice(text, text + 1), None)
        for each, parts in zip(alone, packed, strict=True):
            part = parts[:, start:stop] if len(parts) == 1 else parts[text : text + 1]
            assert each.tobytes() == part.tobytes()


@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, np.dtype("float64")], ids=str)
def test_packed_texts_have_the_bits_of_each_alone(dtype: Any) -> None:
    _packed_and_alone(dtype)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_kernels_of_packed_texts_have_the_bits_of_each_alone(dtype: Any) -> None:
    with emulator(processors=4):
        _packed_and_alone(dtype)


def test_a_state_goes_on_with_a_text() -> None:
    """In pieces of any length, down to one token."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 19, 8)), rng.standard_normal((8, 4))
    whole, last = uc.causal_conv(x, weight)
    state, at, parts = None, 0, []
    for length in (1, 1, 2, 7, 1, 1, 6):
        y, state = uc.causal_conv(x[:, at : at + length], weight, initial=state)
        parts.append(y)
        at += length
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-12)
    np.testing.assert_array_equal(state, last)  # type: ignore[arg-type]


def test_taps_without_a_kernel() -> None:
    """More taps than a kernel has: the definition, on any target."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((1, 12, 4), np.float32), rng.standard_normal((4, 9), np.float32)
    expected, _ = uc.causal_conv(x, weight)
    with emulator():
        y, final = uc.causal_conv(x, weight)
        dx, *_ = uc.causal_conv_backward(y, final, x, weight, None)
    np.testing.assert_array_equal(y, expected)
    assert dx.shape == x.shape


def test_wrong_calls() -> None:
    x, weight = np.ones((2, 6, 4), np.float32), np.ones((4, 3), np.float32)
    with pytest.raises(ShapeError, match=r"batch=2; with offsets it must be 1: pass reshape\(1,"):
        uc.causal_conv(x, weight, offsets=np.array([0, 6]))
    with pytest.raises(RangeError, match="must rise from 0 to 6, the number of tokens"):
        uc.causal_conv(x[:1], weight, offsets=np.array([0, 7]))
    with pytest.raises(ShapeError, match="initial has 3 states"):
        uc.causal_conv(x, weight, initial=np.ones((3, 4, 2), np.float32))
    with pytest.raises(ShapeError, match="initial has previous=3; it must be 2"):
        uc.causal_conv(x, weight, initial=np.ones((2, 4, 3), np.float32))
    with pytest.raises(ConfigError, match="choose from 'silu', None"):
        uc.causal_conv(x, weight, activation="gelu")


@pytest.mark.parametrize(
    "offsets", [[0, 3, 5], [4, 6, 9], [0, 7, 2], [0, 9, 4, 20], [-3, 5, 9], [9, 9, 9]], ids=str
)
def test_kernels_end_whatever_offsets_a_device_holds(offsets: list[int]) -> None:
    """The host does not read them: a kernel stays in its arrays, and processes each token once."""
    x, weight = np.ones((1, 9, 4), np.float32), np.ones((4, 3), np.float32)
    initial = np.ones((len(offsets) - 1, 4, 2), np.float32)
    with emulator():
        y, final = uc.causal_conv(x, weight, initial=initial, offsets=np.array(offsets))
        dx, *_ = uc.causal_conv_backward(
            y, final, x, weight, None, initial=initial, offsets=np.array(offsets)
        )
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()
