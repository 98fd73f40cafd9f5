"""Ternary weights: how they are quantized, and every form that they are kept in."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unsloth_cupy as uc
from unsloth_cupy import Ternary, ternary_quantize
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError

from ..golden.golden import OpCase
from .golden_cases import agree, golden

# The public names, as other people's programs call them.
PUBLIC = ('ternary_quantize(w, *, method="absmean", per="tensor")',)

METHODS = {
    "absmean": {},
    "twn": {},
    "absmax": {},
    "percentile": {"percentile": 30.0},
    "mean_std": {"deviations": 0.25},
    "manual": {"threshold": 0.4},
}
DENSITIES = (0.0, 0.01, 0.3, 0.9, 1.0)


def weight(rows: int = 7, columns: int = 77, dtype: Any = np.float32) -> np.ndarray:
    """Return normal numbers."""
    return np.random.default_rng(3).standard_normal((rows, columns)).astype(dtype)


def matrix(
    rows: int, columns: int, density: float, per: str = "tensor", group: int | None = None
) -> Ternary:
    """Return random codes, of which this share is not 0."""
    rng = np.random.default_rng(5)
    codes = np.where(rng.random((rows, columns)) < density, rng.choice([-1, 1], (rows, columns)), 0)
    groups = -(-columns // group) if group else 1
    scale = rng.random(() if per == "tensor" else (rows, groups)).astype(np.float32) + 0.5
    return Ternary.from_codes(codes.astype(np.int8), scale, group=group)


def same(a: Ternary, b: Ternary) -> None:
    """Assert that two matrices have equal bits."""
    assert a.shape == b.shape
    assert (a.dtype, a.group) == (b.dtype, b.group)
    assert a.planes.tobytes() == b.planes.tobytes()
    assert (a.scale.shape, a.scale.dtype) == (b.scale.shape, b.scale.dtype)
    assert a.scale.tobytes() == b.scale.tobytes()


def by_hand(size: np.ndarray, method: str, options: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Return what is kept of the |w| that share a scale, and the scale."""
    size = size.astype(np.float64)
    if method == "absmean":
        return size > size.mean() / 2, size.mean()
    if method == "absmax":
        return size >= size.max() / 2, size.max()
    threshold = {
        "twn": lambda: 0.7 * size.mean(),
        "percentile": lambda: np.percentile(size, options["percentile"]),
        "mean_std": lambda: size.mean() + options["deviations"] * size.std(),
        "manual": lambda: options["threshold"],
    }[method]()
    kept = size > threshold
    return kept, size[kept].mean()


@pytest.mark.parametrize("per", ["tensor", "row", "group"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("columns", [64, 77])
def test_methods(method: str, per: str, columns: int) -> None:
    w, options = weight(5, columns), METHODS[method]
    actual = ternary_quantize(w, method=method, per=per, group=32, **options)
    exact = np.zeros(w.shape)
    codes = np.zeros(w.shape, np.int8)
    step = {"tensor": columns, "row": columns, "group": 32}[per]
    for row in [slice(None)] if per == "tensor" else [slice(i, i + 1) for i in range(5)]:
        for start in range(0, columns, step):
            part = row, slice(start, start + step)
            kept, scale = by_hand(np.abs(w[part]), method, options)
            codes[part] = np.sign(w[part]) * kept
            exact[part] = codes[part] * scale
    np.testing.assert_array_equal(actual.codes, codes)
    assert actual.codes.dtype == np.int8
    np.testing.assert_allclose(actual.dequantize(), exact, rtol=1e-6)
    assert actual.per == per
    assert actual.scale.shape == {"tensor": (), "row": (5, 1), "group": (5, -(-columns // 32))}[per]
    error = np.abs(w - exact)
    statistics = actual.statistics
    assert statistics.sparsity == actual.sparsity == (codes == 0).mean()
    assert (statistics.plus, statistics.minus) == ((codes == 1).mean(), (codes == -1).mean())
    assert statistics.mean_error == pytest.approx(error.mean(), rel=1e-6)
    assert statistics.largest_error == pytest.approx(error.max(), rel=1e-6)


def test_many_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from unsloth_cupy.ops.quantized import _planes

    w = weight(9, 70)
    for method, options in METHODS.items():
        for per in ("tensor", "row", "group"):
            monkeypatch.undo()
            whole = ternary_quantize(w, method=method, per=per, group=32, **options)
            monkeypatch.setattr(_planes, "BLOCK", 140)
            parts = ternary_quantize(w, method=method, per=per, group=32, **options)
            same(whole, parts)
            np.testing.assert_array_equal(whole.dequantize(), parts.dequantize())
            assert whole.sparsity == parts.sparsity


@golden("ternary", "weight_quant")
def test_absmean_is_that_of_transformers(golden: OpCase) -> None:
    actual = ternary_quantize(golden.inputs["weight"])
    np.testing.assert_array_equal(actual.codes, golden.outputs["codes"])
    agree(actual.dequantize(), golden.outputs["y"])
    agree(actual.scale, golden.outputs["absmean"])


@golden("ternary", "pack")
def test_bitnet_bytes(golden: OpCase) -> None:
    codes = golden.inputs["weight"]
    packed = Ternary.from_codes(codes, 1.0).pack("bitnet")
    assert packed == golden.outputs["packed"].tobytes()
    back = Ternary.unpack(golden.outputs["packed"], "bitnet", codes.shape, scale=0.5)
    np.testing.assert_array_equal(back.codes, codes)
    assert back.scale == 0.5


@golden("ternary", "gguf")
def test_gguf_bytes(golden: OpCase) -> None:
    w, layout = golden.inputs["weight"], golden.name.lower()
    made = ternary_quantize(w, method="absmax", per="group", group=256)
    assert made.pack(layout) == golden.outputs["data"].tobytes()
    back = Ternary.unpack(golden.outputs["data"].tobytes(), layout, w.shape)
    np.testing.assert_array_equal(back.dequantize(), golden.outputs["dequantized"])
    assert back.pack(layout) == golden.outputs["data"].tobytes()


@pytest.mark.parametrize("layout", ["gguf_tq1_0", "gguf_tq2_0"])
@pytest.mark.parametrize("density", DENSITIES)
def test_gguf_of_any_codes_equals_gguf(layout: str, density: float) -> None:
    gguf = pytest.importorskip("gguf", reason="the peer of the layouts gguf_tq1_0 and gguf_tq2_0")
    kind = gguf.GGMLQuantizationType[layout.removeprefix("gguf_").upper()]
    for per in ("tensor", "row"):
        made = matrix(3, 768, density, per)
        theirs = gguf.quants.quantize(made.dequantize(), kind)
        assert made.pack(layout) == theirs.tobytes()
        mine = Ternary.unpack(theirs, layout, made.shape)
        np.testing.assert_array_equal(mine.dequantize(), gguf.quants.dequantize(theirs, kind))
        np.testing.assert_array_equal(mine.codes, made.codes)


def test_planes_are_bits_of_words() -> None:
    made = matrix(3, 77, 0.6)
    words = np.frombuffer(made.pack("planes"), "<u4").reshape(2, 3, 3)
    for row in range(3):
        for d in range(77):
            plus, minus = ((words[i, row, d // 32] >> np.uint32(d % 32)) & 1 for i in (0, 1))
            assert int(plus) - int(minus) == made.codes[row, d]
    assert made.nbytes == words.nbytes + 4


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(0, 70), st.sampled_from(DENSITIES), st.booleans())
def test_every_form_keeps_every_bit(rows: int, columns: int, density: float, grouped: bool) -> None:
    per = "row" if grouped else "tensor"
    made = matrix(rows, columns, density, per, 32 if grouped and columns else None)
    for layout in ("planes", "bitnet"):
        back = Ternary.unpack(made.pack(layout), layout, made.shape)
        np.testing.assert_array_equal(back.codes, made.codes)
    same(Ternary.from_state(made.state()), made)
    same(Ternary.from_ell(made.to_ell()), made)
    same(Ternary.from_runs(made.to_runs()), made)
    same(Ternary.from_csr(made.to_csr(), made.scale, group=made.group), made)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("per", "group"), [("tensor", None), ("row", None), ("row", 32)])
def test_products_without_zeros(per: str, group: int | None, density: float) -> None:
    made = matrix(6, 77, density, per, group)
    dense = made.dequantize()
    x = np.random.default_rng(0).standard_normal((2, 3, 77)).astype(np.float32)
    exact = x.astype(np.float64) @ dense.T.astype(np.float64)
    forms = (
        made.to_ell().product(x),
        made.to_runs().product(x),
        (made.to_csr() @ x.reshape(6, 77).T).T.reshape(2, 3, 6),
    )
    for y in forms:
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5 * max(1, np.abs(exact).max()))
    np.testing.assert_array_equal(made.to_csr().toarray(), dense)
    assert made.to_csr().nnz == (made.codes != 0).sum()


def test_csr_tells_its_scales() -> None:
    whole, by_row = matrix(5, 40, 0.5), matrix(5, 40, 0.5, "row")
    same(Ternary.from_csr(whole.to_csr()), whole)
    same(Ternary.from_csr(by_row.to_csr()), by_row)
    with pytest.raises(ConfigError, match="pass scale="):
        Ternary.from_csr(matrix(5, 40, 0.5, "row", 32).to_csr())


@pytest.mark.parametrize(("per", "group"), [("tensor", None), ("row", None), ("row", 32)])
def test_parts_of_the_dense_weight(per: str, group: int | None) -> None:
    made = matrix(6, 77, 0.5, per, group)
    groups = np.repeat(made.scale, 32, 1)[:, :77] if group else made.scale
    np.testing.assert_array_equal(made.dequantize(), made.codes * groups)
    for dtype in (np.float16, BFLOAT16, np.float64):
        dense = made.dequantize(dtype)
        np.testing.assert_array_equal(dense, made.dequantize().astype(dtype))
        assert dense.dtype == dtype
        for start, stop in ((0, 77), (3, 4), (31, 70), (33, 33), (64, 77)):
            part = made._dense(slice(1, 4), slice(start, stop), np.dtype(dtype))
            np.testing.assert_array_equal(part, dense[1:4, start:stop])


def test_set_and_prune_are_followed_by_statistics() -> None:
    made = ternary_quantize(weight(4, 70), per="row")
    codes = made.codes
    for row, column in ((0, 0), (3, 69), (2, 31), (2, 32)):
        for value in (1, 0, -1, 1, -1, 0):
            assert made.set(row, column, value) is made
            codes[row, column] = value
            np.testing.assert_array_equal(made.codes, codes)
            statistics = made.statistics
            assert statistics[:3] == tuple((codes == code).mean() for code in (0, 1, -1))
            assert statistics.mean_error is statistics.largest_error is None
    middle = float(np.sort(made.scale, axis=None)[2])
    made.prune(middle)
    codes[made.scale[:, 0] < middle] = 0
    np.testing.assert_array_equal(made.codes, codes)
    assert made.sparsity == (codes == 0).mean()


def test_prune_of_groups_and_of_nothing() -> None:
    made = matrix(5, 77, 1.0, "row", 32)
    codes, scale = made.codes, np.repeat(made.scale, 32, 1)[:, :77]
    assert made.prune(0).sparsity == 0
    np.testing.assert_array_equal(made.prune(1.0).codes, np.where(scale < 1, 0, codes))
    assert matrix(3, 9, 1.0).prune(9.0).sparsity == 1


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float64])
def test_dtypes(dtype: Any) -> None:
    w = weight(dtype=dtype)
    made = ternary_quantize(w, method="twn")
    assert made.dtype == made.dequantize().dtype == dtype
    assert made.scale.dtype == (np.float64 if dtype == np.float64 else np.float32)
    wide = ternary_quantize(w.astype(np.float64), method="twn")
    np.testing.assert_array_equal(made.codes, wide.codes)


def test_bytes_at_most_a_seventh_of_float16() -> None:
    for per in ("tensor", "row"):
        made = ternary_quantize(weight(64, 1024, np.float16), per=per)
        assert made.nbytes * 7.5 <= 64 * 1024 * 2


def test_a_scale_by_hand() -> None:
    w = weight(3, 40)
    for per in ("tensor", "row"):
        made = ternary_quantize(w, method="manual", per=per, threshold=0.5, scale=0.75)
        np.testing.assert_array_equal(made.dequantize(), np.sign(w) * (np.abs(w) > 0.5) * 0.75)


def test_bitnet_layers_are_written_as_they_were_read() -> None:
    packed = np.random.default_rng(0).integers(0, 81, (3, 8)).astype(np.uint8)
    packed = sum((packed // 3**i % 3) << np.uint8(2 * i) for i in range(4))
    layer = {"weight": packed, "weight_scale": np.array([1.5], BFLOAT16)}
    made = Ternary.from_state(layer)
    assert (made.shape, made.dtype, made.activations) == ((12, 8), BFLOAT16, "int8")
    written = made.state()
    assert written.keys() == layer.keys()
    for name, array in layer.items():
        assert written[name].dtype == array.dtype
        np.testing.assert_array_equal(written[name], array)
    made.largest = np.max  # as of columns of a larger weight
    again = made.requantized(made.dequantize("float32"))
    assert again.facts() == made.facts() | {"errors": again.facts()["errors"]}
    assert again.facts()["errors"] is not None


def test_zeros_and_nothing() -> None:
    for method, options in METHODS.items():
        for per in ("tensor", "row", "group"):
            zeros = ternary_quantize(np.zeros((3, 40)), method=method, per=per, group=32, **options)
            assert zeros.sparsity == 1
            assert not zeros.dequantize().any()
            for shape in ((0, 40), (3, 0)):
                none = ternary_quantize(np.zeros(shape), method=method, per=per, **options)
                assert none.dequantize().shape == shape


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(value: float) -> None:
    w = weight()
    w[5, 33] = value
    for method, options in METHODS.items():
        with pytest.raises(RangeError, match=rf"w\[5, 33\] is {value}"):
            ternary_quantize(w, method=method, **options)


def test_a_group_wider_than_the_rows_is_the_row() -> None:
    w = weight()
    row = ternary_quantize(w, per="row")
    for group in (-(-w.shape[1] // 32) * 32, 2**40):
        wide = ternary_quantize(w, per="group", group=group)
        np.testing.assert_array_equal(wide.dequantize(), row.dequantize())
        np.testing.assert_array_equal(wide.scales, row.scales)


def test_wrong_weights_and_options() -> None:
    w = weight()
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "method='tern'; choose from absmean", {"method": "tern"}),
        (ConfigError, "per='column'; choose from tensor, row", {"per": "column"}),
        (ConfigError, "group=48; it must be a multiple of 32", {"per": "group", "group": 48}),
        (ConfigError, "percentile=101", {"method": "percentile", "percentile": 101}),
        (ConfigError, "deviations=nan", {"method": "mean_std", "deviations": np.nan}),
        (ConfigError, "needs a threshold", {"method": "manual"}),
        (ConfigError, "threshold=-1", {"method": "manual", "threshold": -1}),
        (ConfigError, "option of method='manual'", {"threshold": 1.0}),
    ]
    for error, words, options in wrong:
        with pytest.raises(error, match=words):
            ternary_quantize(w, **options)
    with pytest.raises((ConfigError, DTypeError), match="quantized already"):
        ternary_quantize(ternary_quantize(w))
    with pytest.raises(DTypeError, match="w is int64"):
        ternary_quantize(np.ones((2, 2), np.int64))
    with pytest.raises(ShapeError, match=r"w has (3 axes|shape)"):
        ternary_quantize(np.ones((2, 2, 2)))


def test_wrong_codes_scales_and_states() -> None:
    codes = np.zeros((3, 5), np.int8)
    codes[2, 4] = 2
    with pytest.raises(RangeError, match=r"codes\[2, 4\] is 2; it must be -1, 0 or 1"):
        Ternary.from_codes(codes, 1.0)
    codes[2, 4] = 1
    for bad in (np.nan, np.inf, -1.0):
        with pytest.raises(RangeError, match=f"scale is {bad}"):
            Ternary.from_codes(codes, bad)
        with pytest.raises(RangeError, match=rf"scale\[1, 0\] is {bad}"):
            Ternary.from_codes(codes, np.array([[1], [bad], [1]]))
    with pytest.raises(ShapeError, match=r"scale is \(2, 1\); it must be \(\) or \(3, 1\)"):
        Ternary.from_codes(codes, np.ones((2, 1)))
    with pytest.raises(ShapeError, match="codes are float64"):
        Ternary.from_codes(np.ones((3, 5)), 1.0)
    state = Ternary.from_codes(codes, 1.0).state()
    form = json.loads(bytes(state["weight_form"]))
    header = lambda **facts: np.frombuffer(json.dumps(form | facts).encode(), np.uint8)  # noqa: E731
    for wrong, words in (
        ({"weight_form": header(shape=[4, 6])}, r"weight is \(1, 5\) uint8; it must be \(1, 6\)"),
        ({"weight_form": header(shape=[3])}, r"shape \[3\] is not a shape of a matrix"),
        ({"weight_form": header(dtype="int4")}, "dtype='int4'"),
        ({"weight_form": header(activations="int4")}, "activations='int4'"),
        ({"weight_form": state["weight"][0]}, "is not JSON in bytes"),
        ({"weight": state["weight"].astype(np.int8)}, "weight is .* int8; it must be"),
        ({"weight_scale": np.array([np.nan], np.float32)}, "holds a number that is not finite"),
    ):
        with pytest.raises(ConfigError, match=words):
            Ternary.from_state(state | wrong)
    with pytest.raises(ConfigError, match="weight_scale is missing among weight"):
        Ternary.from_state({"weight": state["weight"]})
    with pytest.raises(RangeError, match=r"field \[0, 0\] of bitnet is 3"):
        Ternary.from_state(state | {"weight": np.full((1, 5), 255, np.uint8)})
    with pytest.raises(ShapeError, match=r"scale is \(2, 1\)"):
        Ternary.from_state(state | {"weight_scale": np.ones((2, 1), np.float32)})
    for row, column, value in ((3, 0, 1), (0, 5, 1), (-1, 0, 1), (0, 0, 2)):
        with pytest.raises(RangeError, match=r"Ternary\.set"):
            Ternary.from_codes(codes, 1.0).set(row, column, value)
    with pytest.raises(RangeError, match="threshold=nan"):
        Ternary.from_codes(codes, 1.0).prune(np.nan)


@pytest.mark.parametrize("layout", ["planes", "bitnet", "gguf_tq1_0", "gguf_tq2_0"])
def test_bytes_cut_short(layout: str) -> None:
    data = matrix(5, 256, 0.5).pack(layout)
    Ternary.unpack(data, layout, (5, 256))
    for wrong in (data[:-1], data + b"0", b""):
        with pytest.raises(ShapeError, match=f"takes {len(data)} bytes"):
            Ternary.unpack(wrong, layout, (5, 256))


def test_bytes_that_hold_no_codes() -> None:
    with pytest.raises(RangeError, match=r"field \[3, 1\] of bitnet is 3"):
        Ternary.unpack(np.array([[0, 0], [0, 12]], np.uint8), "bitnet", (7, 2))
    with pytest.raises(RangeError, match="row 1 of the planes has a column that is both"):
        Ternary.unpack(np.array([[[0] * 4, [1, 0, 0, 0]]] * 2, np.uint8), "planes", (2, 5))
    block = matrix(1, 256, 0.5)
    for layout in ("gguf_tq1_0", "gguf_tq2_0"):
        data = bytearray(block.pack(layout))
        data[-2:] = np.float16(np.nan).tobytes()
        with pytest.raises(RangeError, match=r"scale\[0, 0\] is nan"):
            Ternary.unpack(data, layout, (1, 256))
    data = bytearray(block.pack("gguf_tq2_0"))
    data[0] = 255
    with pytest.raises(RangeError, match=r"field \[0, 0\] of gguf_tq2_0 is 3"):
        Ternary.unpack(data, "gguf_tq2_0", (1, 256))


def test_wrong_layouts() -> None:
    made = matrix(2, 77, 0.5)
    with pytest.raises(ConfigError, match="layout='csr'; choose from planes, bitnet"):
        made.pack("csr")
    with pytest.raises(ShapeError, match="77 columns do not fill"):
        made.pack("gguf_tq1_0")
    with pytest.raises(ConfigError, match="quantize with group=256"):
        matrix(2, 256, 0.5, "row", 64).pack("gguf_tq2_0")
    with pytest.raises(RangeError, match="float16"):
        Ternary.from_codes(np.ones((1, 256), np.int8), 1e6).pack("gguf_tq2_0")
    data, runs = matrix(2, 256, 0.5).pack("gguf_tq2_0"), made.to_runs()
    with pytest.raises(ConfigError, match="contains its scales"):
        Ternary.unpack(data, "gguf_tq2_0", (2, 256), scale=1.0)
    with pytest.raises(ShapeError, match="do not fill 2 rows"):
        Ternary.from_runs(runs._replace(lengths=runs.lengths[:-1], codes=runs.codes[:-1]))
    with pytest.raises(ShapeError, match="its last axis must be 77"):
        made.to_ell().product(np.ones((2, 76)))


def test_public_names() -> None:
    assert uc.Ternary is Ternary
    assert "Ternary" in repr(matrix(2, 3, 0.5))
