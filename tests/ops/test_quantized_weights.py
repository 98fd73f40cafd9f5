"""What every quantized weight takes and refuses alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import FLOATS
from unsloth_cupy.errors import (
    ConfigError,
    DTypeError,
    FrameworkError,
    RangeError,
    ShapeError,
    UnslothCupyError,
)
from unsloth_cupy.models.quantizer import KINDS
from unsloth_cupy.ops.quantized.weight import Quantized

from ..interop import quantized
from ..machines.stand_in import gpu

ALL = {name: kind.make for name, kind in KINDS.items()}
EVERY = pytest.mark.parametrize("quantize", ALL.values(), ids=ALL)
Make = Callable[[Any], Quantized]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@EVERY
def test_where_a_dense_weight_lies_changes_nothing(quantize: Make) -> None:
    w = drawn(12, 128)
    expected = quantize(w[::2].copy()).dequantize()
    shifted = np.zeros(6 * 128 + 1, np.float32)[1:].reshape(6, 128)
    shifted[...] = w[::2]
    shifted.flags.writeable = False
    for view in (w[::2], np.asfortranarray(w[::2]), shifted):
        assert np.array_equal(quantize(view).dequantize(), expected)


@EVERY
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_float_dtype(quantize: Make, dtype: Any) -> None:
    w = drawn(8, 64).astype(dtype)
    weight = quantize(w)
    assert weight.dtype == weight.dequantize().dtype == dtype
    plain = quantize(w.astype(np.float32)).dequantize()
    assert np.array_equal(weight.dequantize("float32"), plain.astype(dtype).astype(np.float32)) or (
        np.array_equal(weight.dequantize("float32"), plain)
    )
    for one in FLOATS:
        assert uc.linear(np.ones((3, 64), one), weight).dtype == one


@EVERY
def test_attention_layer(quantize: Make) -> None:
    q, k, v, o = (quantize(drawn(n, 64, seed=n)) for n in (64, 32, 32, 64))
    dense = [weight.dequantize() for weight in (q, k, v, o)]
    x, dy = drawn(2, 5, 64), drawn(2, 5, 64, seed=1)
    made, expected = (uc.attention_layer(x, *w, heads=4) for w in ((q, k, v, o), dense))
    assert np.abs(made - expected).max() <= 1e-5 * np.abs(expected).max()
    tape = uc.Tape()
    var = tape.watch(x)
    (dx,) = tape.gradients(uc.attention_layer(var, q, k, v, o, heads=4), [var], dy)
    expected = uc.attention_layer_backward(dy, x, *dense, heads=4)[0]
    assert np.abs(dx - expected).max() <= 1e-5 * np.abs(expected).max()


@EVERY
def test_states(quantize: Make) -> None:
    weight = quantize(drawn(8, 64))
    again = type(weight).from_state(weight.state())
    assert np.array_equal(again.dequantize(), weight.dequantize())
    assert again.nbytes == weight.nbytes == sum(a.nbytes for a in weight.held().values())
    for bad in (None, 3, [1], {}):
        with pytest.raises(ConfigError):
            type(weight).from_state(bad)
    for name in weight.state():
        less = {key: array for key, array in weight.state().items() if key != name}
        try:
            actual = type(weight).from_state(less)
        except UnslothCupyError:
            continue
        assert np.array_equal(actual.dequantize(), weight.dequantize()), f"{name} is not missed"


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_torch(quantize: Make, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="whose tensors these are")
    tensor = torch.from_numpy(drawn(64, 8)).T.to(getattr(torch, dtype)).requires_grad_()
    weight = quantize(tensor)
    expected = quantize(tensor.detach().float().numpy())
    assert weight.dtype.name == dtype
    for name, array in expected.held().items():
        np.testing.assert_array_equal(weight.held()[name], array)
    x = torch.ones(3, 64, dtype=tensor.dtype)
    np.testing.assert_array_equal(
        uc.linear(x, weight).float().numpy(), uc.linear(x, expected).float().numpy()
    )


@EVERY
def test_wrong_weights(quantize: Make) -> None:
    for bad in ([[1.0, 2.0]], None, 3):
        with pytest.raises(DTypeError, match=r"is not an array"):
            quantize(bad)
    with pytest.raises(DTypeError, match="int64"):
        quantize(np.ones((4, 64), np.int64))
    for shape in ((64,), (2, 1, 4, 64), ()):
        with pytest.raises(ShapeError, match=r"\(outputs, inputs\)"):
            quantize(np.ones(shape, np.float32))
    with pytest.raises((ConfigError, DTypeError), match="quantized already"):
        quantize(quantize(drawn(4, 64)))
    for value in (np.nan, np.inf, -np.inf):
        w = drawn(5, 96)
        w[2, 69] = w[4, 3] = value
        with pytest.raises(RangeError, match=rf"w\[2, 69\] is {value}"):
            quantize(w)


@EVERY
def test_beyond_float32(quantize: Make) -> None:
    """A float64 weight that is too large is refused, or kept: nothing turns infinite in silence."""
    w = np.full((2, 64), 1e300)
    try:
        message = "w[0, 0]" if np.isfinite(quantize(w).dequantize()).all() else "infinite"
    except RangeError as error:
        message = str(error)
    assert "w[0, 0]" in message


LINEARS: dict[str, Any] = {
    "nf4_linear": lambda x, w, bias=None: uc.nf4_linear(x, uc.nf4_quantize(w), bias),
    "ternary_linear": lambda x, w, bias=None: uc.ternary_linear(
        x, uc.ternary_quantize(w), bias=bias
    ),
    "ternary_linear of int8": lambda x, w, bias=None: uc.ternary_linear(
        x, uc.ternary_quantize(w), bias=bias, activations="int8"
    ),
}


@pytest.mark.parametrize("name", LINEARS)
def test_an_error_bears_the_name_of_the_call(name):
    w, call = np.ones((64, 64), np.float32), f"^{name.split()[0]}: "
    with pytest.raises(ShapeError, match=call):
        LINEARS[name](w[:3, :32], w)
    for bias in (w[0, :3], w[0, :1], w[:3], w[0, 0]):
        with pytest.raises((ShapeError, DTypeError), match=call):
            LINEARS[name](w[:3], w, bias)
    with pytest.raises(DTypeError, match=call):
        LINEARS[name](w[:3], w, np.arange(64))


@pytest.mark.parametrize("strange", [True, "3", None, [2], np.nan])
def test_a_change_of_codes_takes_numbers(strange):
    made = uc.ternary_quantize(np.ones((2, 8), np.float32))
    for change in (made.prune, lambda n: made.set(n, 0, 1), lambda n: made.set(0, 0, n)):
        with pytest.raises(UnslothCupyError, match=r"^Ternary\.(prune|set)"):
            change(strange)
    assert (made.codes == 1).all()


@pytest.mark.parametrize(("kind", "names", "call"), quantized.EVERY, ids=quantized.NAMES)
def test_calls_and_gradients_stay_on_the_gpu(kind: str, names: str, call: quantized.Call) -> None:
    with gpu() as machine:
        machine.strict = False  # while the weight is made
        weight = quantized.weight(kind).moved(machine.place)
        arrays = [machine.place(array) for array in quantized.drawn(*names.split())]
        tape = uc.Tape()
        watched = [tape.watch(array) for array in arrays]
        y = call(weight, *watched)
        seed = machine.array(y.shape, y.dtype)
        for gradient, array in zip(tape.gradients(y, watched, seed), arrays, strict=True):
            assert type(gradient) is type(array)
            assert gradient.shape == array.shape


@EVERY
def test_a_weight_of_another_library_is_refused_after_calls_that_were_right(quantize: Make) -> None:
    """Calls of one form share a route, which weights in arrays of NumPy and CuPy both fit."""
    on_host, x = quantize(drawn(64, 64)), drawn(3, 64)
    with gpu() as machine:
        machine.strict = False
        there = on_host.moved(machine.place)
        for arrays, other in (((machine.place(x), there), on_host), ((x, on_host), there)):
            for _ in range(3):  # the third one is a replay
                uc.linear(*arrays)
            with pytest.raises(FrameworkError, match=r"x from \w+ .*weight from \w+"):
                uc.linear(arrays[0], other)
