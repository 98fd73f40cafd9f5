"""The notation of signatures: what it binds, what it refuses, and how it says so."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsloth_cupy.core.dtypes import BFLOAT16, KINDS, allowed
from unsloth_cupy.core.signature import Operand, check, parse, shape_of
from unsloth_cupy.errors import DTypeError, ShapeError

F16, F32, F64, I32, I64 = map(np.dtype, ("float16", "float32", "float64", "int32", "int64"))


def form(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


def bind(signature: str, *shapes: tuple[int, ...] | None, dtype: np.dtype = F32):
    """Check float arrays of these shapes; a shape of None is an absent array."""
    return check("f", parse(signature), [s if s is None else form(s, dtype) for s in shapes])


def misfit(signature: str, *shapes: tuple[int, ...] | None) -> str:
    with pytest.raises(ShapeError) as error:
        bind(signature, *shapes)
    return str(error.value)


def test_parse() -> None:
    contract = parse("x(*rows, hidden), labels?(*rows): int < vocab -> y(8), dl: none where a % b")
    assert contract.inputs == (
        Operand("x", ("*rows", "hidden")),
        Operand("labels", ("*rows",), "int", "vocab", optional=True),
    )
    assert contract.outputs == (Operand("y", ("8",)), Operand("dl", (), "none"))
    assert contract.multiples == (("a", "b"),)
    assert [str(o) for o in contract.inputs] == ["x(*rows, hidden)", "labels?(*rows): int < vocab"]


def test_an_unknown_kind_is_a_mistake_in_the_signature() -> None:
    with pytest.raises(ValueError, match="x: 'flaot' is not a kind; choose from float, weight"):
        parse("x(n): flaot -> y(n)")


def test_a_name_has_one_size() -> None:
    assert bind("x(n, m), y(m) -> z(n)", (2, 3), (3,)).sizes == {"n": 2, "m": 3}
    text = misfit("x(n, m), y(m) -> z(n)", (2, 3), (4,))
    assert text.startswith("f: y has m=4; it must be 3\n")
    assert "  x(n, m) = (2, 3) float32\n  y(m)    = (4,) float32" in text


def test_a_number_is_that_size() -> None:
    assert bind("x(8) -> y(8)", (8,)).sizes == {}
    assert "x has 8=7; it must be 8" in misfit("x(8) -> y(8)", (7,))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2, 3)])
def test_leading_axes(shape: tuple[int, ...]) -> None:
    bound = bind("x(*rows, n), y(*rows) -> z(*rows)", (*shape, 5), shape)
    assert bound.sizes == {"rows": shape, "n": 5}


def test_leading_axes_are_equal() -> None:
    text = misfit("x(*rows, n), y(*rows) -> z(n)", (2, 3, 5), (3, 2))
    assert "y has rows=(3, 2); it must be (2, 3)" in text
    assert "x has 0 axes, not (*rows, n)" in misfit("x(*rows, n) -> y(n)", ())


def test_one_more() -> None:
    assert bind("x(n), o(n+1) -> y(n)", (3,), (4,)).sizes == {"n": 3}
    assert bind("o(n+1), x(n) -> y(n)", (4,), (3,)).sizes == {"n": 3}
    assert "o has n+1=3; it must be 4" in misfit("x(n), o(n+1) -> y(n)", (3,), (3,))
    assert "x has n=4; it must be 3" in misfit("o(n+1), x(n) -> y(n)", (4,), (4,))
    assert "o has n+1=0; it must be 1" in misfit("o(n+1) -> y(n)", (0,))


def test_a_quotient_binds_no_name() -> None:
    """Nor is it checked where no other array has the axis: an option may say how long it is."""
    signature = "m?(keys/128), k?(keys|1), n?(keys/128) -> y(keys)"
    assert "keys" not in bind(signature, (3,), (1,), (2,)).sizes
    assert bind(signature, None, (256,), (2,)).sizes["keys"] == 256
    assert "n has keys/128=3; it must be 2" in misfit(signature, None, (256,), (3,))


@pytest.mark.parametrize(("keys", "blocks"), [(0, 0), (1, 1), (128, 1), (129, 2), (256, 2)])
def test_quotients_are_rounded_up(keys: int, blocks: int) -> None:
    signature = "k(keys), mask(keys/128) -> y(keys)"
    assert bind(signature, (keys,), (blocks,)).sizes == {"keys": keys}
    text = misfit(signature, (keys,), (blocks + 1,))
    assert f"mask has keys/128={blocks + 1}; it must be {blocks}" in text


def test_an_axis_may_be_absent() -> None:
    signature = "x(batch, n), p(batch?, n) -> y(n)"
    assert bind(signature, (2, 3), (3,)).sizes == bind(signature, (2, 3), (2, 3)).sizes
    assert "p has batch=1; it must be 2" in misfit(signature, (2, 3), (1, 3))
    assert "p has 0 axes, not (batch?, n)" in misfit(signature, (2, 3), ())


@pytest.mark.parametrize("shape", [(), (4,), (1,), (3, 4), (1, 4), (3, 1), (2, 3, 4), (2, 1, 1)])
def test_broadcast_axes(shape: tuple[int, ...]) -> None:
    signature = "x(b, q, k), mask(b|1, q|1, k|1) -> y(b)"
    assert bind(signature, (2, 3, 4), shape).sizes == {"b": 2, "q": 3, "k": 4}
    np.broadcast_shapes(shape, (2, 3, 4))


def test_broadcast_axes_are_1_or_all() -> None:
    signature = "x(b, q, k), mask(b|1, q|1, k|1) -> y(b)"
    assert "mask has k|1=3; it must be 4" in misfit(signature, (2, 3, 4), (3, 3))
    assert "mask has 4 axes" in misfit(signature, (2, 3, 4), (1, 2, 3, 4))


def test_multiples() -> None:
    signature = "q(heads), k(kv_heads) -> y(heads) where heads % kv_heads"
    bind(signature, (8,), (2,))
    assert "heads=8 must be a multiple of kv_heads=3" in misfit(signature, (8,), (3,))
    assert "heads=8 must be a multiple of kv_heads=0" in misfit(signature, (8,), (0,))


def test_optional_and_missing() -> None:
    assert bind("x(n), y?(n) -> z(n)", (3,), None).sizes == {"n": 3}
    with pytest.raises(DTypeError, match=r"f: y is missing; pass y\(n\): int"):
        bind("x(n), y(n): int -> z(n)", (3,), None)


@pytest.mark.parametrize("dtype", KINDS["float"], ids=str)
def test_dtypes_follow_the_first_float(dtype: np.dtype) -> None:
    signature = "i(n): int, x(n), w(n): param, t(n): table, s(n): stat -> y(n), r(n): stat, n: none"
    stat = F64 if dtype == F64 else F32
    forms = [form((1,), d) for d in (I32, dtype, F32, F32, stat)]
    bound = check("f", parse(signature), forms)
    assert bound.dtype == dtype
    assert bound.outputs == (dtype, stat, None)


def test_a_gradient_has_the_dtype_of_its_input() -> None:
    signature = "dy(n), weight(n): param -> dx(n), dweight(n)"
    bound = check("f", parse(signature), [form((1,), BFLOAT16), form((1,), F32)])
    assert bound.outputs == (BFLOAT16, F32)


@pytest.mark.parametrize(
    ("kind", "dtype", "cure"),
    [
        ("float", F64, "it must be float16"),
        ("param", F64, "it must be float16 or float32"),
        ("table", BFLOAT16, "it must be float16 or float32"),
        ("stat", F16, "it must be float32"),
        ("int", F32, "it must be int32 or int64"),
        ("bool", I64, "it must be bool"),
        ("byte", np.dtype("int8"), "it must be uint8"),
        ("code", np.dtype("uint8"), "it must be int8"),
    ],
)
def test_wrong_dtypes_name_the_right_ones(kind: str, dtype: np.dtype, cure: str) -> None:
    forms = [form((2,), F16), form((2,), dtype)]
    with pytest.raises(DTypeError, match=f"f: y is {dtype.name}; {cure}\n") as error:
        check("f", parse(f"x(n), y(n): {kind} -> z(n)"), forms)
    assert f"= (2,) {dtype.name}" in str(error.value)


def test_float64_takes_parameters_of_float32() -> None:
    assert allowed("param", F64) == (F64, F32)
    assert allowed("stat", F64) == (F64,)


def test_swapped_arrays_are_told_from_wrong_dtypes() -> None:
    x, labels = form((2,), F32), form((2,), np.dtype("int64"))
    contract = parse("x(n), y(n): int -> z(n)")
    with pytest.raises(DTypeError, match="f: x is int64 and y is float32: swap them\n"):
        check("f", contract, [labels, x])
    with pytest.raises(DTypeError, match="f: y is float32; it must be int32 or int64\n"):
        check("f", contract, [x, x])
    with pytest.raises(DTypeError, match="f: x is int64; it must be float16 or"):
        check("f", contract, [labels, labels])


def test_swapped_bytes_name_their_cure() -> None:
    with pytest.raises(DTypeError, match=r"x is float32 with swapped bytes; pass x\.astype"):
        bind("x(n) -> y(n)", (3,), dtype=F32.newbyteorder())


sizes = st.integers(0, 300)


@given(st.lists(sizes, max_size=3).map(tuple), sizes, sizes)
def test_the_shape_of_what_was_bound_is_what_was_given(rows, n, keys) -> None:
    signature = "x(*rows, n), o(n+1), k(8, keys), m(keys/128), p(batch?, n) -> y(*rows, n)"
    shapes = [(*rows, n), (n + 1,), (8, keys), (-(-keys // 128),), (n,)]
    bound = bind(signature, *shapes)
    for operand, shape in zip(parse(signature).inputs, shapes, strict=True):
        assert shape_of(operand, bound.sizes) == shape
    assert shape_of(Operand("y", ("unknown",)), bound.sizes) is None


@given(st.lists(st.integers(0, 3), max_size=4).map(tuple), st.lists(st.integers(0, 3), max_size=4))
def test_any_two_shapes_fit_or_raise_our_error(first, second) -> None:
    """A call obeys ``x(*rows, n), y(*rows, n)`` exactly where the shapes are equal."""
    if first == tuple(second) and first:
        bind("x(*rows, n), y(*rows, n) -> z(n)", first, tuple(second))
    else:
        misfit("x(*rows, n), y(*rows, n) -> z(n)", first, tuple(second))
