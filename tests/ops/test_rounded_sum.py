"""Weights plus the changes of adapters, rounded as files have them, part by part."""

import contextlib
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.models import quantizer
from unsloth_cupy.ops.experts.grouped_linear import grouped_linear
from unsloth_cupy.ops.linear.lora_merge import lora_sum
from unsloth_cupy.ops.quantized._file_values import KINDS, file_values
from unsloth_cupy.ops.quantized.blocks import Q40, Q80
from unsloth_cupy.ops.quantized.nf4_dequantize import double_absmax, powers_of_two
from unsloth_cupy.ops.quantized.rounded_sum import nf4_rounded_sum_, rounded_sum_
from unsloth_cupy.ops.quantized.summed_weight import DOUBLE, SUMMED, SummedWeight, can_sum
from unsloth_cupy.ops.quantized.weight import CHUNK_BYTES, Quantized

from ..harness.parity import Case, KernelInPlace, emulator
from ..machines.cuda_on_cpu.traffic import counted

WHOLE = {"outputs": 64, "inputs": 64, "whole": 64, "columns": 64, "rank": 4, "lows": 4}
WITH_SIZES = {"given": 64, "groups+1": 2}
FOLDERS = {name: kind.make for name, kind in quantizer.KINDS.items() if kind.in_folders}
PLAIN = tuple({"kind": kind} for kind in sorted(KINDS, key="int8".__eq__))  # sizes are of int8


def part(label: str, rows: int, columns: int, **how: Any) -> Case:
    """Return a part of a weight of 9 rows of 320 values, with an adapter of rank 3."""
    experts, height, pitch = how.get("members", 1), how.pop("height", 9), how.pop("pitch", 320)
    sizes = {"outputs": rows, "inputs": columns, "whole": height, "columns": pitch}
    return Case(label, **sizes, rank=3, lows=3 * experts, scale=0.5, **how)


def rows_of(rng: Any) -> Any:
    return rng.random(9) + 20  # no value is larger


def blocks_of(rng: Any) -> Any:
    return rng.random(9 * 5) + 1


class TestRoundedSum(KernelInPlace):
    op = "rounded_sum_"
    sizes = ({**WHOLE, **WITH_SIZES, "shift": 1}, {**WHOLE, **WITH_SIZES})
    options = PLAIN
    cases = (
        *(part(kind, 9, 320, kind=kind) for kind in KINDS if kind != "int8"),
        part("int8", 9, 320, kind="int8", arrays={"sizes": rows_of}),
        part("ternary", 9, 320, kind="ternary", arrays={"sizes": lambda rng: rng.random(1) + 0.5}),
        part("rows", 5, 320, start=2 * 320),
        part("columns", 9, 128, start=64, kind="q4_0"),
        part("a corner", 3, 64, start=6 * 320 + 256),
        part("given sizes", 4, 64, start=2 * 320 + 64, arrays={"sizes": blocks_of}),
        part("experts", 24, 64, height=24, pitch=64, members=3, kind="q8_0"),
        part("rows of two experts", 5, 64, height=24, pitch=64, members=3, start=6 * 64),
        part("a matrix", 8, 64, height=24, pitch=64, members=3, start=8 * 64),
        part("odd experts", 9, 320, members=3),
        part("groups", 16, 64, height=16, pitch=64, members=2, arrays={"offsets": [0, 1, 2]}),
        Case("rank 0", outputs=4, inputs=64, whole=4, columns=64, rank=0, lows=0),
        part("no rows", 0, 320),
    )


def packed_case(label: str, stored: str, double: bool = False, **how: Any) -> Case:
    block, columns = how.pop("block", 64), how.pop("inputs", 320)
    blocks = 9 * 320 // block
    arrays: dict[str, Any] = {
        "packed": lambda rng: rng.integers(0, 256, 9 * 160, np.uint8),
        "absmax": lambda rng: rng.random(blocks) + 0.5,
    }
    if double:
        arrays["absmax_codes"] = lambda rng: rng.integers(0, 256, blocks, np.uint8)
        arrays["absmax"] = lambda rng: double_absmax(rng.random(1).astype(np.float32) + 0.5, 3.0)
    if stored == "mxfp4":
        arrays["absmax_codes"] = lambda rng: rng.integers(120, 130, blocks, np.uint8)
        arrays["absmax"] = np.clip(powers_of_two(), 2.0**-14, 2.0**14)  # in float16
    if stored == "q4_0":
        arrays["absmax"] = lambda rng: rng.standard_normal(blocks).astype(np.float16)
    return part(
        label, how.pop("rows", 9), columns, stored=stored, block=block, arrays=arrays, **how
    )


class TestNf4RoundedSum(KernelInPlace):
    op = "nf4_rounded_sum_"
    sizes = (
        {**WHOLE, **WITH_SIZES, "bytes": 2048, "scales": 258, "blocks": 64, "shift": 1},
        {**WHOLE, **WITH_SIZES, "bytes": 2048, "scales": 258, "blocks": 64},
    )
    options = PLAIN
    cases = (
        packed_case("nf4", "nf4"),
        packed_case("fp4 in 8 bits", "fp4", True, kind="q4_0"),
        packed_case("mxfp4", "mxfp4", block=32, kind="q8_0"),
        packed_case("q4_0", "q4_0", block=32, kind="q4_0"),
        packed_case("small blocks", "nf4", block=32, kind="fp4"),
        packed_case("columns", "nf4", inputs=64, start=128, kind="mxfp4"),
        packed_case("rows", "nf4", True, rows=4, start=5 * 320, kind="q5_1"),
    )


# ---- bits ---------------------------------------------------------------------------------------
def as_a_file(values: Any, kind: str) -> Any:
    """Return what the writers of files make of values: this library's, or the package gguf."""
    if kind in FOLDERS:
        return FOLDERS[kind](values).dequantize("float32")
    gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
    form, rows = gguf.GGMLQuantizationType[kind.upper()], values.reshape(-1, values.shape[-1])
    made = gguf.quants.dequantize(gguf.quants.quantize(rows, form), form)
    return made.reshape(values.shape)


def hard_values() -> Any:
    """Return blocks with ties, zeros, equal magnitudes of both signs, and the ends of float32."""
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((12, 320)).astype(np.float32)
    rows[0] = 0
    rows[1] = np.round(rows[1] * 4) / 4  # half-way between codes
    rows[2, ::2], rows[2, 1::2] = 1, -1
    rows[3, ::2], rows[3, 1::2] = -2, 2
    rows[4] *= 1e-30
    rows[5] *= 1e4
    rows[6] = np.abs(rows[6])
    rows[7] = -np.abs(rows[7])
    rows[8] = 0.3
    rows[9, 3], rows[10, 5] = 100, -100
    rows[11] = np.linspace(-1, 1, 320)
    return rows


@pytest.mark.parametrize("kind", SUMMED)
def test_values_are_those_of_the_writers(kind: str) -> None:
    values = hard_values()
    zero = np.zeros((1, 320), np.float32), np.zeros((12, 1), np.float32)
    expected = as_a_file(values, kind)
    np.testing.assert_array_equal(SummedWeight(values, *zero, 1.0, kind).dequantize(), expected)
    with emulator(), counted() as traffic:
        actual = SummedWeight(values, *zero, 1.0, kind).dequantize()
    assert traffic.of("global").efficiency > 0
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_visible(kind: str, broken: float) -> None:
    values = np.ones((4, 64), np.float32)
    values[1, 7] = broken
    a, b = np.zeros((1, 64), np.float32), np.zeros((4, 1), np.float32)
    for place in (False, True):
        if place:
            with emulator():
                made = SummedWeight(values, a, b, 1.0, kind).dequantize()
        else:
            made = SummedWeight(values, a, b, 1.0, kind).dequantize()
        assert not np.isfinite(made[1, :32]).any()
        whole = kind == "ternary"  # it has one scale
        assert np.isfinite(made[[0, 2, 3]]).all() != whole


def bases() -> dict[str, Any]:
    w = np.random.default_rng(0).standard_normal((40, 320)).astype(np.float32)
    made = {name: FOLDERS[name](w) for name in ("nf4", "nf4-double", "int8", "ternary")}
    made |= {"mxfp4": uc.mxfp4_quantize(w), "q4_0": Q40.quantized(w), "q8_0": Q80.quantized(w)}
    return {"float32": w, "bfloat16": w.astype(BFLOAT16)} | made


def pair(height: int, columns: int, rank: int = 5) -> tuple[Any, Any]:
    draw = np.random.default_rng(1)
    shapes = (rank, columns), (height, rank)
    a, b = (0.1 * draw.standard_normal(shape).astype(np.float32) for shape in shapes)
    return a, b


@pytest.mark.parametrize("base", bases())
@pytest.mark.parametrize("kind", ["nf4", DOUBLE, "int8", "ternary", "q4_0"])
def test_every_part_is_that_of_the_whole_sum(kind: str, base: str) -> None:
    """To the bit, of every base, by NumPy and by the kernels."""
    weight, (a, b) = bases()[base], pair(40, 320)
    expected = as_a_file(lora_sum(weight, a, b, 0.5), kind)
    for emulated in (False, True):
        if emulated:
            with emulator():
                made = SummedWeight(weight, a, b, 0.5, kind)
                whole, corner = made.dequantize("float32"), made._dense(*CORNER)
        else:
            made = SummedWeight(weight, a, b, 0.5, kind)
            whole, corner = made.dequantize("float32"), made._dense(*CORNER)
        np.testing.assert_array_equal(whole, expected)
        np.testing.assert_array_equal(corner, expected[3:21, 64:192])


CORNER = slice(3, 21), slice(64, 192), np.dtype("float32")


@pytest.mark.parametrize("base", ["float32", "nf4", "int8", "mxfp4", "q4_0"])
@pytest.mark.parametrize("kind", ["int8", "mxfp4", "q4_0"])
def test_stacks(kind: str, base: str) -> None:
    draw = np.random.default_rng(0)
    w = draw.standard_normal((3, 8, 64)).astype(np.float32)
    weight: Any = {**FOLDERS, "q4_0": Q40.quantized}.get(base, np.array)(w)
    a, b = 0.3 * draw.standard_normal((3, 2, 64)), 0.3 * draw.standard_normal((3, 8, 2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    total = np.stack([lora_sum(weight[e], a[e], b[e], 2.0) for e in range(3)])
    expected, offsets = as_a_file(total, kind), np.array([0, 2, 2, 5])
    x = draw.standard_normal((5, 64)).astype(np.float32)
    plain: Any = grouped_linear(x, expected, offsets)
    for emulated in (False, True):
        with emulator() if emulated else contextlib.nullcontext():
            both = SummedWeight(weight, a, b, 2.0, kind)
            dense, y = both.dense_where(offsets, x.dtype), grouped_linear(x, both, offsets)
        np.testing.assert_array_equal(dense[[0, 2]], expected[[0, 2]])
        np.testing.assert_allclose(y, plain, rtol=1e-5, atol=1e-5)


def test_products_read_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are whole blocks, however small a chunk may be, and no dense weight exists."""
    weight, (a, b) = bases()["nf4"], pair(40, 320)
    monkeypatch.setitem(CHUNK_BYTES, False, 40 * 4 * 50)  # 50 columns of it
    made, parts = SummedWeight(weight, a, b, 0.5, "nf4"), []
    expected = as_a_file(lora_sum(weight, a, b, 0.5), "nf4")
    write = made._write
    monkeypatch.setattr(made, "_write", lambda w, *more: parts.append(w.shape) or write(w, *more))
    draw = np.random.default_rng(2)
    x, dy = (draw.standard_normal((7, n)).astype(np.float32) for n in (320, 40))
    np.testing.assert_allclose(uc.linear(x, made), x @ expected.T, rtol=1e-5, atol=1e-5)
    assert parts == [(40, 320)]  # 64 rows at least
    dx, *_ = uc.linear_backward(dy, x, made, wanted={"x"})
    np.testing.assert_allclose(dx, dy @ expected, rtol=1e-5, atol=1e-5)
    assert parts[1:] == [(40, 64)] * 5


def test_a_row_that_ends_within_a_block_is_summed_whole() -> None:
    w = np.ones((4, 96), np.float32)
    assert can_sum("q4_0", w)
    assert not can_sum("nf4", w)
    assert not can_sum("q4_k", w)
    assert not can_sum("q4_0", w.astype("f8"))
    assert can_sum("ternary", w)
    assert can_sum("q4_k", np.ones((4, 512), np.float32), 256)
    assert not can_sum("q4_k", w, 256)


def test_kinds_without_a_kernel_have_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets parts of whole blocks, of experts with rows alone, and never a whole sum."""
    weight, (a, b) = (
        np.random.default_rng(0).standard_normal((1024, 512), np.float32),
        pair(1024, 512),
    )
    monkeypatch.setitem(CHUNK_BYTES, False, 5 * 2**18)  # of 640 rows, or of 320 columns
    parts: list[Any] = []

    def reader(part: Any) -> Any:
        assert part.dtype == np.float32
        parts.append(part.shape)
        return np.round(part)

    made = SummedWeight(weight, a, b, 0.5, "q4_k", reader, 256)
    expected = np.round(lora_sum(weight, a, b, 0.5))
    x, dy = np.eye(512, dtype=np.float32), np.eye(1024, dtype=np.float32)
    np.testing.assert_array_equal(uc.linear(x, made), expected.T)
    assert parts == [(512, 512)] * 2
    rows = np.zeros((1024, 512), np.float32)
    np.testing.assert_array_equal(uc.linear_backward(dy, rows, made, wanted={"x"})[0], expected)
    assert parts[2:] == [(1024, 256)] * 2
    stack, low, up = weight.reshape(4, 256, 512), np.stack([a] * 4), b.reshape(4, 256, -1)
    made = SummedWeight(stack, low, up, 0.5, "q4_k", reader, 256)
    offsets = np.array([0, 2, 2, 3, 3])
    dense = made.dense_where(offsets, x.dtype).reshape(1024, 512)
    assert parts[4:] == [(256, 512)] * 2
    np.testing.assert_array_equal(dense[:256], expected[:256])
    np.testing.assert_array_equal(dense[512:768], expected[512:768])


def test_what_moves() -> None:
    """A weight of 4 bits is read once, its part written once; a is read again from caches."""
    weight = uc.nf4_quantize(np.ones((64, 1024), np.float32))
    a, b = pair(64, 1024, 4)
    assert isinstance(weight, Quantized)
    with emulator(), counted() as traffic:
        SummedWeight(weight, a, b, 1.0, "q4_0").dequantize("bfloat16")
    assert traffic.of("global").efficiency > 0.95


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "q4_k"}, "choose from nf4"),
        ({"start": 32}, "not whole blocks of 64"),
        ({"members": 2}, "of 2 members of rank 3"),
        ({"kind": "q4_0", "sizes": np.ones(1, np.float32)}, "1 sizes; q4_0 takes 0"),
        ({"kind": "ternary", "sizes": np.ones(4, np.float32)}, "4 sizes; ternary takes 1"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], problem: str) -> None:
    w, (a, b) = np.ones((4, 128), np.float32), pair(4, 128, 3)
    with pytest.raises(ValueError, match=problem):
        rounded_sum_(np.empty_like(w), w, a, b, **options)
    packed, absmax = np.zeros(100, np.uint8), np.ones(8, np.float32)
    with pytest.raises(ValueError, match="100 bytes of packed"):
        nf4_rounded_sum_(w, packed, absmax, a, b)


@pytest.mark.parametrize(("kind", "read"), [("int8", (0, 0, -4, 2)), ("ternary", (0, 0, -1, 1))])
def test_without_sizes_values_are_whole_numbers(kind: str, read: tuple[int, ...]) -> None:
    """A half is 0, to either side."""
    values, expected = (np.array([row * 8], np.float32) for row in ((0.5, -0.5, -3.6, 2), read))
    np.testing.assert_array_equal(file_values(values, kind, None), expected)
    a, b, w = np.zeros((1, 32), np.float32), np.zeros((1, 1), np.float32), np.empty_like(values)
    with emulator():
        np.testing.assert_array_equal(rounded_sum_(w, values, a, b, kind=kind), expected)
