"""Linear layers whose weight is ternary: by the definition, by kernels, in place of a dense one."""

import copy
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.bench.cases import Call
from unsloth_cupy.core.dtypes import FLOATS, KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, DTypeError, GradientError, ShapeError
from unsloth_cupy.ops.quantized import ternary
from unsloth_cupy.ops.quantized import weight as quantized_weight
from unsloth_cupy.ops.quantized._planes import marks_of, planes_of, row_bytes
from unsloth_cupy.ops.quantized.ternary_linear import ternary_linear_forward

from ..harness.parity import Case, KernelParity, emulator, outputs_of, within_rule
from ..machines.cuda_on_cpu.traffic import counted
from ..machines.stand_in import gpu

# The public names, as other people's programs call them.
PUBLIC = ("ternary_linear(x, weight)",)


def codes(rng: np.random.Generator, outputs: int, inputs: int, zeros: float = 0.4) -> np.ndarray:
    """Return random codes, of which this share is 0."""
    signs = rng.choice(np.array([-1, 1], np.int8), (outputs, inputs))
    return np.where(rng.random((outputs, inputs)) < zeros, np.int8(0), signs)


def case(
    label: str,
    rows: Any,
    outputs: int,
    inputs: int,
    *,
    group: int = 0,
    per_row: bool = True,
    marked: bool = False,
    int8: bool = False,
) -> Case:
    """Return a case of random codes; where marked, a third of the columns is pruned."""

    def made(rng: np.random.Generator) -> np.ndarray:
        drawn_codes = codes(rng, outputs, inputs)
        if marked:
            drawn_codes[:, inputs // 3 : 2 * inputs // 3] = 0
            drawn_codes[::2, :] = 0
        return planes_of(drawn_codes)

    given: dict[str, Any] = {"planes": made}
    if marked:
        given["marks"] = lambda rng: marks_of(made(np.random.default_rng(0)))
        given["planes"] = lambda rng: made(np.random.default_rng(0))
    groups = -(-inputs // group) if group else 1
    shape = (outputs if per_row else 1, groups)
    given["scale"] = lambda rng: rng.random(shape) + 0.5
    extra = {"group": group} if group else {}
    return Case(label, rows=rows, inputs=inputs, arrays=given, int8=int8, **extra)


FORMS = {"signs": 2, "outputs": 4096, "groups": 1}


class TestTernaryLinear(KernelParity):
    op = "ternary_linear_forward"
    sizes = tuple(
        {**FORMS, "rows": (rows,), "inputs": n, "bytes": row_bytes(n), "mark_bytes": n // 2048 + 1}
        | ({"groups": n // 128} if grouped else {})
        for rows, n, grouped in (
            (4, 77, False),
            (1, 4096, False),
            (4, 4096, False),
            (13, 4096, False),
            (4, 4096, True),
            (256, 4096, False),
            (4096, 4096, False),
        )
    )
    options = ({"int8": False}, {"int8": True})
    cases = (
        case("odd", [2, 3], 5, 77),
        case("one row", [], 33, 640),
        case("a scale in all", [4], 17, 64, per_row=False),
        case("nine rows", [9], 20, 520),
        case("all warps", [2], 16, 4096),
        case("more than all warps", [3], 18, 5000),
        case("groups", [3], 19, 700, group=128),
        case("long groups", [11], 16, 1024, group=256),
        case("groups that no kernel takes", [3], 7, 200, group=32),
        case("several tiles of a block", [2], 130, 600),
        case("pruned, several tiles of a block", [1], 130, 5000, marked=True),
        case("pruned", [5], 21, 3000, marked=True),
        case("pruned, in groups", [5], 21, 2944, marked=True, group=128),
        case("many rows", [17], 9, 70),
        Case(
            "no rows",
            rows=[0],
            inputs=40,
            arrays={"planes": np.zeros((3, 2, 8), np.uint8), "scale": np.ones((1, 1))},
        ),
        Case(
            "no columns",
            rows=[2],
            inputs=0,
            arrays={"planes": np.zeros((3, 2, 0), np.uint8), "scale": np.ones((3, 1))},
        ),
    )


class TestTernaryLinearOfIntegers(KernelParity):
    op = "ternary_linear_forward"
    cases = (
        case("odd", [2, 3], 5, 77, int8=True),
        case("one row", [], 33, 640, int8=True),
        case("nine rows", [9], 20, 520, int8=True),
        case("more than all warps", [3], 18, 5000, int8=True),
        case("groups", [3], 19, 700, group=128, int8=True),
        case("pruned", [5], 21, 3000, marked=True, int8=True),
        case("many rows", [70], 133, 600, int8=True),
        case("many rows, odd", [17], 9, 77, int8=True, per_row=False),
        case("many rows, in groups", [65], 130, 400, group=256, int8=True),
        case("rows of an int8 product", [257], 70, 112, int8=True),
        case("rows of an int8 product, one scale", [2, 150], 5, 48, int8=True, per_row=False),
    )
    test_gradient_matches_finite_differences = None  # it passes straight through: below
    test_rounds_once = None  # at a tie, float32 and float64 fall to different sides
    test_any_strides = None  # as above


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("inputs", [16, 272])
def test_a_row_of_integers_has_the_bits_of_other_kernels(
    dtype: Any, per_row: bool, inputs: int
) -> None:
    """One, nine and 65 rows read the planes; more are a product of codes of one byte."""
    rng = np.random.default_rng(inputs)
    planes = planes_of(codes(rng, 34, inputs))
    scale = rng.random((34, 1) if per_row else (1, 1), np.float32)
    x = drawn(300, inputs, dtype=dtype)
    with emulator():
        whole = ternary_linear_forward(x, planes, scale, int8=True)
        for rows in (1, 9, 65):
            part = ternary_linear_forward(x[:rows], planes, scale, int8=True)
            np.testing.assert_array_equal(part, whole[:rows])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 12])
def test_sums_of_many_columns_keep_their_digits(rows: int) -> None:
    """Of values with all bits of float32, which a sum loses where it is long; cases have 11."""
    rng, op = np.random.default_rng(0), OPS["ternary_linear_forward"]
    x = np.abs(rng.standard_normal((rows, 12288))).astype(np.float32)
    weight = {"planes": planes_of(codes(rng, 16, 12288)), "scale": np.ones((1, 1), np.float32)}
    call = Call(op, {"x": x, **weight, "marks": None}, {})
    exact, plain = outputs_of(call.cast(np.float64)), outputs_of(call)
    with emulator():
        within_rule(plain, exact, outputs_of(call))


def quantized(outputs: int = 37, inputs: int = 50, seed: int = 1, **options: Any) -> uc.Ternary:
    """Return a random weight."""
    w = np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)
    return uc.ternary_quantize(w, **options)


def drawn(*shape: int, dtype: Any = np.float32, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("per", ["tensor", "row", "group"])
@pytest.mark.parametrize("rows", [3, 20])
def test_stands_where_a_dense_weight_stands(monkeypatch, dtype, per, rows) -> None:
    monkeypatch.setattr(quantized_weight, "CHUNK_BYTES", {False: 7 * 64, True: 7 * 64})
    weight = quantized(per=per, group=32)
    dense, x, dy = (
        weight.dequantize(dtype),
        drawn(rows, 50, dtype=dtype),
        drawn(rows, 37, dtype=dtype),
    )
    a, b, bias = drawn(4, 50, dtype=dtype), drawn(37, 4, dtype=dtype), drawn(37, dtype=dtype)

    def results(w: Any, kind: Any) -> dict[str, Any]:
        tape, named = uc.Tape(), {}
        xs, as_, bs = (tape.watch(array.astype(kind)) for array in (x, a, b))
        for name, y in {
            "linear": uc.linear(xs, w, bias.astype(kind)),
            "lora": uc.lora_linear(xs, w, as_, bs, scale=0.5),
            "linears": uc.lora_linears(xs, [uc.LoraLayer(w, as_, bs, 0.5)])[0],
        }.items():
            named[name] = y.value
            gradients = tape.gradients(y, [xs, as_, bs], dy.astype(kind))
            named |= {f"{name} {i}": gradient for i, gradient in enumerate(gradients)}
        return named

    exact = results(weight.dequantize(np.float64), np.float64)
    plain = results(dense, dtype)
    within_rule(plain, exact, results(weight, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_linear_asks_the_kernel_for_few_rows(dtype: Any, rows: int) -> None:
    weight, x, bias = quantized(50, 96), drawn(rows, 96, dtype=dtype), drawn(50, dtype=dtype)
    exact = {"y": uc.linear(*(a.astype(np.float64) for a in (x, weight.dequantize(), bias)))}
    plain = {"y": uc.linear(x, weight, bias)}
    with emulator():
        if rows <= ternary.FEW:
            actual = {"y": uc.linear(x, weight, bias)}
            within_rule(plain, exact, actual)
    with gpu() as machine:
        machine.strict = False
        there = copy.copy(weight)
        there.planes = there.home = machine.array(weight.planes.shape, "uint8")
        there.scale = machine.array((), "float32")
        uc.linear(machine.array(x.shape, dtype), there)
        kernels = [launch.kernel for launch in machine.launches]
        assert ("ternary_linear" in kernels) == (rows <= ternary.FEW)


@pytest.mark.slow
def test_float_activations_are_those_of_the_dense_product() -> None:
    for sparsity in (0.0, 0.5, 0.95, 1.0):
        rng = np.random.default_rng(3)
        weight = uc.Ternary.from_codes(codes(rng, 96, 1024, sparsity), 0.3)
        x = drawn(7, 1024)
        exact = x.astype(np.float64) @ weight.dequantize(np.float64).T
        bound = 1e-5 * max(np.abs(exact).max(), 1e-30)
        assert np.abs(uc.ternary_linear(x, weight) - exact).max() <= bound
        with emulator():
            assert np.abs(uc.ternary_linear(x, weight) - exact).max() <= bound


def test_integer_activations() -> None:
    weight, x, bias = quantized(9, 64), drawn(2, 3, 64), drawn(9)
    rounded, scales = uc.int8_quantize(x)
    y = uc.ternary_linear(x, weight, bias=bias, activations="int8")
    exact = (rounded.astype(np.int64) @ weight.codes.T.astype(np.int64)) * scales[..., None]
    np.testing.assert_allclose(y, exact * weight.scale + bias, rtol=1e-5, atol=1e-5)
    tape = uc.Tape()
    watched = tape.watch(x)
    dy = drawn(2, 3, 9)
    out = uc.ternary_linear(watched, weight, bias=bias, activations="int8")
    (dx,) = tape.gradients(out, [watched], dy)
    np.testing.assert_allclose(dx, dy @ weight.dequantize(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("int8", [False, True])
def test_marks_change_no_bit(dtype: Any, int8: bool) -> None:
    rng = np.random.default_rng(4)
    held = codes(rng, 40, 2500, 0.9)
    held[:, 300:1400] = held[7:30, 1500:] = 0
    planes, scale = planes_of(held), np.full((40, 1), 0.25, np.float32)
    x, marks = drawn(6, 2500, dtype=dtype), marks_of(planes)
    for row, column in np.ndindex(40, 10):
        part = held[row, column * 256 : (column + 1) * 256]
        assert part.any() == bool(marks[row, column // 8] >> column % 8 & 1)
    with emulator():
        plain = ternary_linear_forward(x, planes, scale, int8=int8)
        skipping = ternary_linear_forward(x, planes, scale, marks, int8=int8)
        blind = ternary_linear_forward(x, planes, scale, np.zeros_like(marks), int8=int8)
    assert plain.tobytes() == skipping.tobytes()
    assert not blind.any(), "marks are not asked"


def test_marks_are_there_where_they_pay() -> None:
    held = codes(np.random.default_rng(4), 8, 1024, 0.0)
    with emulator():
        assert uc.Ternary.from_codes(held, 1.0).marks is None
        held[:, :256] = 0
        made = uc.Ternary.from_codes(held, 1.0)
        assert made.marks.tobytes() == marks_of(made.planes).tobytes()
        made.set(3, 5, 1)
        assert made.marks.tobytes() == marks_of(made.planes).tobytes()
        assert made.prune(2.0).marks.any() == 0


def sparse(share: float, columns: int, per: str = "tensor", dtype: Any = np.float32) -> uc.Ternary:
    """Return a weight with 40 outputs and this share of zeros."""
    rng = np.random.default_rng(5)
    held = np.zeros((40, columns), np.int8)
    ones = rng.permutation(held.size)[: round(held.size * (1 - share))]
    held.ravel()[ones] = rng.choice([-1, 1], len(ones))
    group = 128 if per == "group" else None
    shape = {"tensor": (), "row": (40, 1), "group": (40, -(-columns // 128))}[per]
    return uc.Ternary.from_codes(held, rng.random(shape, np.float32), group=group, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("per", ["tensor", "row", "group"])
@pytest.mark.parametrize("rows", [1, 4, 5, 16])
def test_few_rows_of_a_sparse_weight(dtype: Any, per: str, rows: int) -> None:
    """Two parts of columns and a last one; gradients are those of the dense weight."""
    weight, bias = sparse(0.9, 2500, per), drawn(40, dtype=dtype)
    x, dy = drawn(rows, 2500, dtype=dtype), drawn(rows, 40, dtype=dtype)
    dense = weight.dequantize(np.float64)
    tape = uc.Tape()
    watched = tape.watch(x)
    out = uc.ternary_linear(watched, weight, bias=bias)
    plain = uc.linear(x, dense.astype(dtype), bias)
    exact = x.astype(np.float64) @ dense.T + bias.astype(np.float64)
    within_rule({"y": plain}, {"y": exact}, {"y": out.value})
    (dx,) = tape.gradients(out, [watched], dy)
    exact, plain = dy.astype(np.float64) @ dense, (dy @ dense.astype(dtype)).astype(dtype)
    within_rule({"x": plain}, {"x": exact}, {"x": dx})
    assert (weight.sparse_parts is not None) == (dtype != np.float64)


def test_the_dense_values_of_a_sparse_weight_are_made_once(monkeypatch) -> None:
    weight, x = sparse(0.95, 1500), drawn(2, 1500)
    bytes_before, first = weight.nbytes, uc.ternary_linear(x, weight)
    assert weight.nbytes == bytes_before == sum(a.nbytes for a in weight.held().values())
    with monkeypatch.context() as patch:
        patch.setattr(uc.Ternary, "_dense", None)
        assert uc.ternary_linear(x, weight).tobytes() == first.tobytes()
        assert uc.linear(x[:1], weight).tobytes() == first[:1].tobytes()
    weight.set(3, 7, 1 - abs(int(weight.codes[3, 7])))
    expected = x @ weight.dequantize().T
    np.testing.assert_allclose(uc.ternary_linear(x, weight), expected, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(first[:, 3], expected[:, 3])


@pytest.mark.parametrize(
    ("share", "rows", "is_sparse"), [(0.89, 16, True), (0.87, 1, False), (0.95, 17, False)]
)
def test_a_sparse_form_is_there_where_it_pays(share: float, rows: int, is_sparse: bool) -> None:
    weight = sparse(share, 256)
    uc.ternary_linear(drawn(rows, 256), weight)
    assert (weight.sparse_parts is not None) == is_sparse


def test_zeros_of_a_sparse_weight_do_not_hide_infinities() -> None:
    weight, x = sparse(0.95, 256), drawn(2, 256)
    uc.ternary_linear(x, weight)
    x[0, 5] = np.inf
    with np.errstate(invalid="ignore"):
        actual = uc.ternary_linear(x, weight)
        expected = uc.linear(x, weight.dequantize())
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    assert np.isnan(actual[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_planes_are_read_once(int8: bool) -> None:
    """Of 16 outputs and 8 rows of x all that is read moves once, without a conflict of banks."""
    weight, x = quantized(16, 8192), drawn(8, 8192, dtype=np.float16)
    with emulator():
        rounded, _ = uc.int8_quantize(x)
        with counted() as traffic:
            ternary_linear_forward(x, weight.planes, weight.scales, int8=int8)
    lines = [line for line in traffic if "ternary_linear.cu" in line.where]
    read = sum(line.moved * 32 for line in lines if line.space == "global" and not line.write)
    rows = rounded.nbytes if int8 else x.nbytes
    assert weight.planes.nbytes + rows <= read <= weight.planes.nbytes + rows + 1024  # and scales
    for write in (False, True):
        shared = [r for r in lines if r.space == "shared" and r.write == write]
        least, moved = (sum(getattr(r, name) for r in shared) for name in ("least", "moved"))
        assert least
        assert moved <= least + 32  # sums at the end, of two rows in one access


@pytest.mark.slow
@pytest.mark.parametrize("shifted", ["x", "planes", "scale"])
@pytest.mark.parametrize("int8", [False, True])
def test_one_array_off_alignment(shifted: str, int8: bool) -> None:
    def off(array: np.ndarray) -> np.ndarray:
        room = np.empty(array.size + 1, array.dtype)
        room[1:] = array.ravel()
        return room[1:].reshape(array.shape)

    weight = quantized(20, 1024)
    inputs = {
        "x": drawn(3, 1024, dtype=np.float16),
        "planes": weight.planes,
        "scale": weight.scales,
    }
    with emulator():
        plain = ternary_linear_forward(**inputs, int8=int8)
        actual = ternary_linear_forward(**inputs | {shifted: off(inputs[shifted])}, int8=int8)
    eps = 0 if shifted != "planes" else 2.0**-9 * np.abs(plain).max()
    np.testing.assert_allclose(actual, plain, rtol=0, atol=eps)


def test_what_is_not_finite_is_not_hidden() -> None:
    weight = uc.Ternary.from_codes(np.ones((3, 64), np.int8), 0.5)
    x = np.zeros((3, 64), np.float32)
    x[0, 3], x[1, 5], x[2, 63] = np.inf, np.nan, 3.39e38
    with emulator():
        y = uc.ternary_linear(x, weight)
        rounded = uc.ternary_linear(x, weight, activations="int8")
    assert (y[0] == np.inf).all()
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[2], 3.39e38 / 2, rtol=1e-2)  # a bfloat16 of the largest numbers
    assert np.isnan(rounded[:2]).all()
    np.testing.assert_allclose(rounded[2], 3.39e38 / 2, rtol=1e-6)


def test_it_is_frozen() -> None:
    weight, x = quantized(8, 64), drawn(2, 64)
    with pytest.raises(GradientError, match="frozen"):
        uc.Tape().watch(weight)
    assert uc.linear_backward(drawn(2, 8), x, weight, None)[1] is None


def test_wrong_calls() -> None:
    weight, x = quantized(8, 64), drawn(2, 64)
    with pytest.raises(DTypeError, match=r"weight is ndarray, not a Ternary; pass ternary_quant"):
        uc.ternary_linear(x, drawn(8, 64))
    with pytest.raises(ConfigError, match="activations='int4'; choose None or 'int8'"):
        uc.ternary_linear(x, weight, activations="int4")
    with pytest.raises(ShapeError, match="inputs=64; it must be 63"):
        uc.ternary_linear(x[:, :63], weight)
    with pytest.raises(ShapeError, match=r"planes are \(8, 2, 8\); 65 columns take \(2, 12\)"):
        uc.ternary_linear(drawn(2, 65), weight, activations="int8")
    with pytest.raises(ShapeError, match="scale has 3 groups; they do not have 128 columns"):
        ternary_linear_forward(x, weight.planes, np.ones((8, 3), np.float32))
