"""Weights of 4 bits: bitsandbytes' bytes, products equal to those of the dequantized weight."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16, FLOATS
from unsloth_cupy.errors import (
    ConfigError,
    DTypeError,
    GradientError,
    RangeError,
    ShapeError,
)
from unsloth_cupy.ops.quantized import weight as quantized_weight
from unsloth_cupy.ops.quantized.nf4 import BLOCKS, Nf4

from ..conftest import FOLDER
from ..harness.parity import EPS, within_rule
from .golden_cases import agree, golden

PUBLIC = [
    "nf4_quantize(w, *, block=64, double=False, kind='nf4')",
    "nf4_linear(x, weight, bias=None)",
]
KINDS = pytest.mark.parametrize("kind", ["nf4", "fp4"])
DOUBLE = pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])


def drawn(*shape: int, seed: int = 0, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@golden("four_bit", "nf4_", "fp4_", without=("nf4_linear",))
def test_equals_bitsandbytes(golden) -> None:
    expected, params = golden.outputs, golden.params
    options = {"block": params["blocksize"], "kind": params["quant_type"]}
    weight = uc.nf4_quantize(golden.inputs["weight"], double=params["double_quant"], **options)
    assert weight.packed.tobytes() == expected["packed"].tobytes()
    if not params["double_quant"]:
        assert weight.absmax.tobytes() == expected["absmax"].tobytes()
        assert weight.dequantize().tobytes() == expected["dequantized"].tobytes()
        return
    assert weight.absmax_codes.tobytes() == expected["absmax_uint8"].tobytes()
    # torch sums the offset in another order on each CPU: its rounding is in scales and values too
    close = {"rtol": 0, "atol": 4 * EPS["float32"] * float(np.abs(golden.inputs["weight"]).max())}
    np.testing.assert_allclose(weight.absmax_offset, expected["offset"], **close)
    np.testing.assert_allclose(weight.absmax_scale, expected["nested_absmax"], **close)
    np.testing.assert_allclose(weight.dequantize(), expected["dequantized"], **close)


@golden("four_bit", "nf4_linear")
def test_linear_equals_bitsandbytes(golden) -> None:
    """Of a weight read from what bitsandbytes wrote to a file."""
    file = load_file(FOLDER / "ops" / "bnb_nf4_linear.safetensors")
    state = {name.removeprefix("layer."): array for name, array in file.items()}
    weight = Nf4.from_state(state)
    assert weight.packed.tobytes() == golden.inputs["packed"].tobytes()
    tape = uc.Tape()
    x = tape.watch(golden.inputs["x"])
    y = uc.nf4_linear(x, weight)
    agree(y.value, golden.outputs["y"])
    agree(tape.gradients(y, [x], golden.inputs["cotangent"])[0], golden.grads["x"])
    again = weight.state()
    assert again.keys() == state.keys()
    for name, array in state.items():
        if "quant_state" in name:
            assert json.loads(bytes(again[name])) == json.loads(bytes(array))
        else:
            assert again[name].tobytes() == array.tobytes(), name
            assert again[name].shape == array.shape, name


@KINDS
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 43), (5, 64), (7, 96), (33, 130), (3, 4097)], ids=str
)
def test_nearest_level_of_each_block(kind: str, block: int, shape: tuple[int, int]) -> None:
    """Against one value after the other, in float64."""
    w = drawn(*shape)
    weight = uc.nf4_quantize(w, block=block, kind=kind)
    levels = np.unique(uc.nf4_quantize(np.linspace(-1, 1, 4001)[None], block=4096, kind=kind)[:])
    flat, actual = w.reshape(-1), weight.dequantize().reshape(-1)
    for start in range(0, flat.size, block):
        part, size = (
            flat[start : start + block].astype(np.float64),
            np.abs(flat[start : start + block]).max(),
        )
        best = np.abs(part[:, None] - levels.astype(np.float64) * size).min(axis=1)
        error = np.abs(actual[start : start + block] - part)
        assert (error <= best + 2 * EPS["float32"] * size).all()
        assert weight.absmax[start // block] == size


@DOUBLE
@pytest.mark.parametrize("shape", [(6, 128), (7, 50), (5, 33), (4, 192), (3, 64)], ids=str)
def test_every_part_is_that_of_the_whole(shape: tuple[int, int], double: bool) -> None:
    weight = uc.nf4_quantize(drawn(*shape), double=double)
    dense = weight.dequantize()
    outputs, inputs = shape
    for rows in ((0, outputs), (1, 3), (2, 2), (outputs - 1, outputs)):
        for columns in ((0, inputs), (0, 2), (1, 4), (inputs - 1, inputs), (3, 3), (0, 64)):
            top, left = slice(*rows), slice(columns[0], min(columns[1], inputs))
            part = weight._dense(top, left, np.dtype("float32"))
            assert np.array_equal(part, dense[top, left]), (rows, columns)
    assert np.array_equal(weight[1:3], dense[1:3])


@DOUBLE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("chunk", [1, 7 * 64, 2**20])
def test_products_are_those_of_the_dense_weight(monkeypatch, dtype, double, chunk) -> None:
    """Of each chunk size; the gradients of an adapter and of x, with and without DoRA."""
    monkeypatch.setattr(quantized_weight, "CHUNK_BYTES", {False: chunk, True: chunk})
    weight = uc.nf4_quantize(drawn(37, 50), double=double)
    dense, x, dy = (
        weight.dequantize(dtype),
        drawn(3, 2, 50, dtype=dtype),
        drawn(3, 2, 37, dtype=dtype),
    )
    a, b, bias = drawn(4, 50, dtype=dtype), drawn(37, 4, dtype=dtype), drawn(37, dtype=dtype)
    magnitude = np.abs(drawn(37, dtype=dtype))

    def results(w: object, wide: object) -> dict[str, np.ndarray]:
        tape, named = uc.Tape(), {}
        at = lambda array: array.astype(wide)  # noqa: E731
        xs, as_, bs, size = (tape.watch(at(array)) for array in (x, a, b, magnitude))
        for name, y in {
            "linear": uc.linear(xs, w, at(bias)),
            "lora": uc.lora_linear(xs, w, as_, bs, scale=0.5),
            "dora": uc.lora_linear(xs, w, as_, bs, scale=0.5, magnitude=size, bias=at(bias)),
            "linears": uc.lora_linears(xs, [uc.LoraLayer(w, as_, bs, 0.5)])[0],
        }.items():
            named[name] = y.value
            for of, gradient in zip(
                "xabm", tape.gradients(y, [xs, as_, bs, size], at(dy)), strict=True
            ):
                named[f"{name} {of}"] = gradient
        return named

    exact = results(dense.astype(np.float64), np.float64)
    within_rule(results(dense, dtype), exact, results(weight, dtype))


def test_swiglu_mlp_and_merge_take_it() -> None:
    gate, up, down = (
        uc.nf4_quantize(drawn(*s, seed=i)) for i, s in enumerate([(24, 16), (24, 16), (16, 24)])
    )
    x = drawn(70, 16)
    dense = [weight.dequantize() for weight in (gate, up, down)]
    agree(uc.swiglu_mlp(x, gate, up, down), uc.swiglu_mlp(x, *dense))
    actual = uc.swiglu_mlp_backward(x, x, gate, up, down)
    agree(actual[0], uc.swiglu_mlp_backward(x, x, *dense)[0])
    assert actual[1:] == (None, None, None)
    a, b = drawn(4, 16), drawn(24, 4)
    agree(uc.lora_merge(gate, a, b), uc.lora_merge(dense[0], a, b))


@pytest.mark.slow
def test_no_dense_copy_exists() -> None:
    """Both ways: 512 rows of 2048 x 2048 take less than a quarter of the dense weight."""
    weight, x = uc.nf4_quantize(drawn(2048, 2048)), drawn(512, 2048)
    uc.linear(x[:1], weight)
    for run in (lambda: uc.linear(x, weight), lambda: uc.linear_backward(x, x, weight, None)):
        tracemalloc.start()
        result = run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - x.nbytes < 2048 * 2048 * 4 * 0.8
        del result


@KINDS
@DOUBLE
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1)], ids=str)
def test_empty_and_tiny(kind: str, double: bool, shape: tuple[int, int]) -> None:
    weight = uc.nf4_quantize(drawn(*shape), kind=kind, double=double)
    y = uc.linear(np.ones((2, shape[1]), np.float32), weight)
    assert y.shape == (2, shape[0])
    assert np.array_equal(y, np.ones((2, shape[1]), np.float32) @ weight.dequantize().T)
    again = Nf4.from_state(weight.state())
    assert again.dequantize().tobytes() == weight.dequantize().tobytes()


@DOUBLE
def test_block_of_zeros(double: bool) -> None:
    weight = uc.nf4_quantize(np.zeros((3, 50), np.float32), double=double)
    assert not weight.dequantize().any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (4, 77), (6, 99)])
def test_not_finite_is_named(bad: float, place: tuple[int, int]) -> None:
    w = drawn(7, 100)
    w[place] = bad
    with pytest.raises(RangeError, match=rf"w\[{place[0]}, {place[1]}\] is {bad}"):
        uc.nf4_quantize(w)


def test_attributes() -> None:
    weight = uc.nf4_quantize(drawn(8, 64, dtype=BFLOAT16), double=True)
    assert (weight.shape, weight.ndim, weight.size, len(weight)) == ((8, 64), 2, 512, 8)
    assert weight.dtype == BFLOAT16 == weight.dequantize().dtype
    assert weight.nbytes == 256 + 8 + 4
    assert weight.dequantize("float32").dtype == np.float32
    assert repr(weight) == "Nf4(8 x 64, 268 bytes)"


def test_it_is_frozen() -> None:
    weight, x = uc.nf4_quantize(drawn(8, 64)), drawn(2, 64)
    with pytest.raises(GradientError, match="frozen"):
        uc.Tape().watch(weight)
    with pytest.raises(GradientError, match="weight: a quantized weight is frozen"):
        uc.linear_backward(drawn(2, 8), x, weight, None, wanted={"weight"})
    assert uc.linear_backward(drawn(2, 8), x, weight, None)[1] is None


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("double", [False, True])
def test_codes_stored_as_numbers_of_another_dtype(dtype: str, double: bool) -> None:
    weight = uc.nf4_quantize(drawn(6, 64), double=double)
    state = weight.state()
    stored = state["weight"].reshape(-1).view(dtype)[:, None]
    again = uc.Nf4.from_state({**state, "weight": stored})
    np.testing.assert_array_equal(again.packed, weight.packed)
    with pytest.raises(ConfigError, match=r"weight is \(\d+, 1\) uint8; it must be \(192, 1\)"):
        uc.Nf4.from_state({**state, "weight": stored[:-1]})


@pytest.mark.parametrize("offset", [np.nan, np.inf, -np.inf, 1e300, -1e39, None, "0", [0.0]])
def test_offsets_of_scales_are_finite_in_float32(offset: Any) -> None:
    state = uc.nf4_quantize(drawn(6, 64), double=True).state()
    name = "weight.quant_state.bitsandbytes__nf4"
    facts = json.loads(state[name].tobytes()) | {"nested_offset": offset}
    state[name] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    with pytest.raises(ConfigError, match=r"nested_offset of .* is wrong"):
        uc.Nf4.from_state(state)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_are_finite(double: bool, value: float) -> None:
    state = uc.nf4_quantize(drawn(6, 64), double=double).state()
    name = "weight.nested_absmax" if double else "weight.absmax"
    state[name] = np.full_like(state[name], value)
    with pytest.raises(ConfigError, match=f"{name} holds a number that is not finite"):
        uc.Nf4.from_state(state)


def test_wrong_calls() -> None:
    w, weight = drawn(8, 64), uc.nf4_quantize(drawn(8, 64))
    with pytest.raises(ConfigError, match=r"block=48\): choose from 32, 64"):
        uc.nf4_quantize(w, block=48)
    with pytest.raises(ConfigError, match="kind='int4'"):
        uc.nf4_quantize(w, kind="int4")
    with pytest.raises(DTypeError, match="quantized already"):
        uc.nf4_quantize(weight)
    with pytest.raises(DTypeError, match="int64"):
        uc.nf4_quantize(np.arange(64).reshape(1, 64))
    with pytest.raises(ShapeError, match="outputs, inputs"):
        uc.nf4_quantize(w[0])
    with pytest.raises(ShapeError, match="inputs=64; it must be 63"):
        uc.linear(drawn(2, 63), weight)
    with pytest.raises(DTypeError, match=r"weight is quantized; pass weight\.dequantize"):
        uc.embedding(np.array([1]), weight)
    with pytest.raises(DTypeError, match="not an Nf4"):
        uc.nf4_linear(drawn(2, 64), w)
    for index in (slice(None, None, 2), 0, (0, 1)):
        with pytest.raises(ConfigError, match="only a slice of rows in order is supported"):
            weight[index]
    with pytest.raises(DTypeError, match="is not an array; pass its dequantize"):
        np.asarray(weight)
    with pytest.raises(DTypeError, match="is frozen; pass the arrays of an adapter"):
        uc.AdamW({"w": weight})
    with pytest.raises(DTypeError, match="is frozen; pass the arrays of an adapter"):
        uc.clip_gradients({"w": weight}, 1.0)
    with pytest.raises(ConfigError, match="dtype='int8'"):
        weight.dequantize("int8")


def broken(**changes: object) -> dict[str, object]:
    state = uc.nf4_quantize(drawn(8, 64), double=True).state() | changes
    return {name: array for name, array in state.items() if array is not None}


FACTS = "weight.quant_state.bitsandbytes__nf4"


def facts(**changes: object) -> np.ndarray:
    known = json.loads(bytes(broken()[FACTS])) | changes
    return np.frombuffer(json.dumps(known).encode(), np.uint8)


TABLES = ["weight.quant_map", "weight.nested_quant_map"]


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_another_cpu_rounded(name: str) -> None:
    table = broken()[name]
    for places, fine in ((1, True), (-1, True), (4, False)):
        moved = np.where(table, table.view(np.int32) + places, 0).astype(np.int32)
        state = broken(**{name: moved.view(np.float32)})
        if fine:
            actual = Nf4.from_state(state).dequantize()
            np.testing.assert_array_equal(actual, Nf4.from_state(broken()).dequantize())
        else:
            with pytest.raises(ConfigError, match=f"{name} differs from the table"):
                Nf4.from_state(state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": None}, "weight is missing"),
        ({"weight": np.zeros((255, 1), np.uint8)}, r"weight is \(255, 1\)"),
        ({"weight": np.zeros((256, 1), np.int8)}, "int8"),
        ({"weight.absmax": np.zeros(7, np.uint8)}, r"absmax is \(7,\)"),
        ({"weight.nested_absmax": np.array([np.nan], np.float32)}, "nested_absmax holds"),
        ({"weight.quant_map": np.zeros(16, np.float32)}, "quant_map differs from the table"),
        (
            {"weight.nested_quant_map": np.zeros(256, np.float32)},
            "nested_quant_map differs from the table",
        ),
        ({FACTS: None}, "none of weight.quant_state"),
        ({FACTS: np.frombuffer(b'{"quant_type": "nf4"', np.uint8)}, "is not JSON"),
        ({FACTS: np.frombuffer(b"[1]", np.uint8)}, "must hold a JSON object"),
        ({FACTS: facts(blocksize=63)}, "block=63"),
        ({FACTS: facts(quant_type="nf5")}, "kind='nf5'"),
        ({FACTS: facts(shape=[8, 65])}, "weight is"),
        ({FACTS: facts(shape=[-8, -64])}, "is not a shape of a matrix"),
        ({FACTS: facts(dtype="int8")}, "'int8' is not a float dtype"),
        ({FACTS: facts(nested_blocksize=64)}, "nested_blocksize"),
    ],
)
def test_broken_states(state: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Nf4.from_state(broken(**state))
