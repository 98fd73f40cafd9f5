"""bitsandbytes itself judges the bytes of weights in 4 and 8 bits."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="needs the extra `peers` (bitsandbytes)", exc_type=ImportError
)

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.interop._torch_memory import array_of  # noqa: E402

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SHAPES = ((64, 64), (7, 33), (1, 1), (130, 257), (3, 4100))


def drawn(shape, dtype):
    rng = np.random.default_rng(sum(shape))
    values = torch.from_numpy(rng.standard_normal(shape, np.float32))
    values *= torch.from_numpy(10.0 ** rng.integers(-3, 3, (shape[0], 1))).float()
    return zeroed(values).to(DTYPES[dtype])


def zeroed(values):
    """Return values of which some blocks are zeros."""
    if values.shape[1] > 32:
        values[0, : values.shape[1] // 2] = 0
    return values


@pytest.mark.parametrize("block", [64, 128, 256, 1024, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(kind, dtype, block):
    for shape in SHAPES:
        w = drawn(shape, dtype)
        packed, state = bitsandbytes.functional.quantize_4bit(w, blocksize=block, quant_type=kind)
        made = uc.nf4_quantize(array_of(w), block=block, kind=kind)
        assert np.array_equal(made.packed, packed.numpy().reshape(-1)), shape
        assert np.array_equal(made.absmax, state.absmax.numpy()), shape


@pytest.mark.parametrize("block", [64, 128, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_with_absmax_in_eight(kind, dtype, block):
    """Of multiples of 1 / 16, whose mean all sums in float32 agree on."""
    for shape in (*SHAPES, (300, 257)):
        rng = np.random.default_rng(sum(shape))
        w = zeroed(torch.from_numpy(rng.integers(-100, 100, shape).astype(np.float32) / 16))
        w = w.to(DTYPES[dtype])
        options = {"blocksize": block, "quant_type": kind, "compress_statistics": True}
        packed, state = bitsandbytes.functional.quantize_4bit(w, **options)
        made = uc.nf4_quantize(array_of(w), block=block, kind=kind, double=True)
        assert np.array_equal(made.packed, packed.numpy().reshape(-1)), shape
        assert made.absmax_offset == float(state.offset), shape
        assert np.array_equal(made.absmax_scale, state.state2.absmax.numpy()), shape
        matters = np.repeat(made.absmax_scale > 0, 256)[: made.absmax_codes.size]
        codes = state.absmax.numpy()
        assert np.array_equal(made.absmax_codes[matters], codes[matters]), shape


@pytest.mark.parametrize("threshold", [0.0, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_eight_bits(dtype, threshold):
    """bitsandbytes rounds x to float16 first; on a CPU its 1 / 127**2 is too large by 1.8e-5."""
    w, x = (np.random.default_rng(seed).standard_normal((n, 96)) for seed, n in ((0, 64), (1, 5)))
    options = {"has_fp16_weights": False}
    layer = bitsandbytes.nn.Linear8bitLt(96, 64, bias=False, threshold=threshold, **options)
    weight = torch.from_numpy(w).half()
    layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, **options)
    layer = layer.to("cpu").eval()
    rounded = torch.from_numpy(x).to(DTYPES[dtype]).half()
    size = rounded.abs().double()
    size[size >= (threshold or np.inf)] = 0
    steps = size * 127 / size.amax(1, keepdim=True)
    rounded[(steps % 1 - 0.5).abs() < 1e-4] = 0  # ties may fall elsewhere
    x = rounded.to(DTYPES[dtype])
    with torch.no_grad():
        expected, unrounded = layer(x), layer(x.float() * (1 + 2**-14))
    made = uc.Int8(layer.state.CB.numpy(), layer.state.SCB.numpy())
    actual = uc.int8_linear(rounded.float().numpy(), made, threshold=threshold or None)
    most = (2e-5 + torch.finfo(x.dtype).eps) * float(expected.abs().max())
    assert abs(actual - expected.double().numpy()).max() <= most
    if not threshold:  # columns of outliers are not rounded
        assert torch.equal(unrounded, layer(x.float()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits(dtype):
    """On a CPU bitsandbytes multiplies by 1 / absmax first, and ties may fall elsewhere."""
    for shape in SHAPES:
        w = drawn(shape, dtype).half()  # as bitsandbytes takes it
        codes, absmax, _ = bitsandbytes.functional.int8_vectorwise_quant(w.clone())
        made = uc.int8_weight(array_of(w))
        assert np.array_equal(made.absmax, absmax.numpy()), shape
        other = made.codes != codes.numpy()
        exact = (w.numpy().astype(np.float64) * 127 / made.absmax[:, None].astype(float))[other]
        assert np.all(abs(exact - np.floor(exact) - 0.5) < 1e-5), shape
        assert np.all(abs(made.codes[other] - exact) < 0.51), shape
