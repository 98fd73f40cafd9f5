import re
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, DTypeError, GradientError, RangeError, ShapeError
from unsloth_cupy.ops.common.strides import head_strides, with_head_strides
from unsloth_cupy.ops.position.rope import launch_rope
from unsloth_cupy.ops.position.rope_qk import rope_qk_over_

from ..golden.golden import OpCase
from ..harness.parity import Case, KernelAlone, KernelInPlace, KernelParity, emulator
from .golden_cases import agree, both_dtypes, cast, golden
from .test_cross_entropy import reported

# The public names, as other people's programs call them.
PUBLIC = (
    "rope(x, cos, sin, positions=None, *, interleaved=False)",
    "rope_qk(q, k, cos, sin, positions=None, *, interleaved=False)",
    "rope_qk_(q, k, cos, sin, positions=None, *, interleaved=False)",
    "apply_rotary_embedding(q, k, positions, rope_theta=10000.0)",
)

SIZES: dict[str, Any] = {"batch": 2, "tokens": 3, "heads": 3, "dim": 10, "length": 5, "half": 5}
ROW = np.array([4, 0, 2])
CASES = (
    Case("tokens in order", **SIZES),
    Case("positions of each row", **SIZES, given=["positions"]),
    Case("positions for all rows", **SIZES, arrays={"positions": ROW}),
    Case("neighbours", **SIZES, given=["positions"], interleaved=True),
    Case("part of a head", **SIZES | {"half": 2, "dim": 7}),
    Case("neighbours, part of a head", **SIZES | {"half": 2, "dim": 7}, interleaved=True),
    Case("no tokens", **SIZES | {"tokens": 0}),
    Case("no pairs", **SIZES | {"half": 0, "dim": 1}),
)


WHOLE, PART, ODD = (
    {"heads": heads, "kv_heads": kv_heads, "dim": dim, "half": half}
    for heads, kv_heads, dim, half in ((32, 8, 128, 64), (32, 8, 96, 24), (3, 1, 7, 3))
)


class TestRope(KernelParity):
    op = "rope"
    sizes = (PART,)
    cases = (
        *(CASES[0], CASES[2], *CASES[5:]),  # rope_qk, which runs the same code, takes them all
        *(Case(f"heads of {n}", **SIZES | {"dim": n, "half": n // 2}) for n in (4, 8, 16)),
    )


class TestRopeQK(KernelParity):
    op = "rope_qk"
    sizes = (WHOLE, ODD)
    cases = (
        *(
            Case(case.label, given=case.given, arrays=case.arrays, kv_heads=2, **case.both)
            for case in CASES
        ),
        Case("heads of 8", **SIZES | {"dim": 8, "half": 4}, kv_heads=2),
        Case("slices", **SIZES | {"dim": 16, "half": 8}, kv_heads=2, gaps=True),
    )


class TestRopeQKInPlace(KernelInPlace):
    op = "rope_qk_over_"
    sizes = (WHOLE,)
    cases = (TestRopeQK.cases[2], TestRopeQK.cases[5])


class TestApplyRotaryEmbedding(KernelParity):
    op = "apply_rotary_embedding_forward"
    sizes = (WHOLE,)
    cases = (
        Case("any positions", **SIZES, kv_heads=1, arrays={"positions": [[9, 0, -3], [1, 1, 100]]}),
        Case(
            "far positions",  # float32 counts them in steps of 8 and of 256
            **SIZES | {"dim": 24},
            kv_heads=1,
            arrays={"positions": [[131072, 10**8 + 1, -(10**8)], [7, 2**31 - 1, 2**31]]},
        ),
        Case("slices", **SIZES | {"dim": 16}, kv_heads=2, arrays={"positions": ROW}, gaps=True),
        Case(
            "more tokens than a block takes",
            **SIZES | {"tokens": 70},
            kv_heads=1,
            arrays={"positions": np.arange(70)},
        ),
        Case(
            "positions for all rows",
            **SIZES,
            kv_heads=1,
            arrays={"positions": ROW},
            rope_theta=50.0,
        ),
        Case(
            "no tokens", **SIZES | {"tokens": 0}, kv_heads=1, arrays={"positions": np.zeros(0, int)}
        ),
    )


@both_dtypes
@golden("rotary", "half", "interleaved", "partial")
def test_golden(golden: OpCase, dtype: Any) -> None:
    """One row of the tables for each token of each row of the batch."""
    inputs, interleaved = cast(golden, dtype), golden.params.get("interleaved", False)
    half = golden.params.get("rotary_dim", 16) // 2
    cos, sin = (inputs[name][..., :half].reshape(-1, half) for name in ("cos", "sin"))
    x, dy = (inputs[name].transpose(0, 2, 1, 3) for name in ("x", "cotangent"))
    positions = np.arange(len(cos)).reshape(inputs["positions"].shape)
    y = uc.rope(x, cos, sin, positions, interleaved=interleaved)
    agree(y.transpose(0, 2, 1, 3), golden.outputs["y"])
    dx, *nothing = uc.rope_backward(dy, cos, sin, positions, interleaved=interleaved)
    agree(dx.transpose(0, 2, 1, 3), golden.grads["x"])
    assert nothing == [None, None, None]


@golden("rotary", "half")
def test_golden_from_positions(golden: OpCase) -> None:
    """Tables, and angles worked out on the spot, from base and positions."""
    inputs = cast(golden, np.float32)
    x, positions = inputs["x"].transpose(0, 2, 1, 3), inputs["positions"]
    tables = uc.rope_tables(int(positions.max()) + 1, 16, base=golden.params["theta"])
    y = uc.rope(x, *tables, positions)
    q, k = uc.apply_rotary_embedding(x, x, positions, golden.params["theta"])
    for actual in (y, q, k):
        agree(actual.transpose(0, 2, 1, 3), golden.outputs["y"])


def _qk() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(2, 3, heads, 8) for heads in (4, 2)]
    q, k = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q, k


def test_both_at_once_equals_one_by_one() -> None:
    (q, k), tables = _qk(), uc.rope_tables(9, 8)
    for actual, x in zip(uc.rope_qk(q, k, *tables, ROW), (q, k), strict=True):
        np.testing.assert_array_equal(actual, uc.rope(x, *tables, ROW))


def test_in_place() -> None:
    (q, k), tables = _qk(), uc.rope_tables(9, 8)
    expected = uc.rope_qk(q, k, *tables, ROW, interleaved=True)
    actual = uc.rope_qk_(q, k, *tables, ROW, interleaved=True)
    assert actual[0] is q
    assert actual[1] is k
    np.testing.assert_array_equal(q, expected[0])
    np.testing.assert_array_equal(k, expected[1])


def test_in_place_returns_what_it_was_given() -> None:
    (q, k), tables = _qk(), uc.rope_tables(9, 8)
    actual = rope_qk_over_(q, k, *tables, ROW)
    assert actual[0] is q
    assert actual[1] is k


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "strided"])
def test_kernel_in_place(packed: bool) -> None:
    (q, k), tables = _qk(), uc.rope_tables(9, 6)
    expected = uc.rope_qk(q, k, *tables, ROW)
    if not packed:
        q = np.asfortranarray(q)
    with emulator():
        actual = uc.rope_qk_(q, k, *tables, ROW)
    for array, mine, wanted in zip(actual, (q, k), expected, strict=True):
        assert array is mine
        np.testing.assert_allclose(array, wanted, rtol=0, atol=4 * 2.0**-23 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_kernel_turns_slices_of_one_projection(dtype: Any) -> None:
    """q and k lie in it side by side, and between them and the next token's lies v."""
    rng = np.random.default_rng(0)
    fused = rng.standard_normal((2, 3, 8, 16)).astype(dtype)
    tables, before = uc.rope_tables(9, 16), fused.copy()
    expected = uc.rope_qk(fused[:, :, :4], fused[:, :, 4:6], *tables, ROW)
    with emulator():
        uc.rope_qk_(fused[:, :, :4], fused[:, :, 4:6], *tables, ROW)
    for actual, wanted in zip((fused[:, :, :4], fused[:, :, 4:6]), expected, strict=True):
        scale = np.abs(wanted).max().astype(np.float64)
        error = np.abs(actual.astype(np.float64) - wanted).max()
        assert error <= 4 * float(np.finfo(dtype).eps) * scale
    np.testing.assert_array_equal(fused[:, :, 6:], before[:, :, 6:])


def test_head_strides_of_slices() -> None:
    fused = np.zeros((2, 3, 8, 16), np.float32)
    for even in (fused, fused[:, :, 4:6], fused[:1, 1:], fused[..., :5]):
        assert head_strides(even) == (128, 16)
    assert head_strides(fused[:, 1:2, :1]) == (3 * 128, 16)
    assert head_strides(fused[:, :, ::2]) == (128, 32)
    for uneven in (fused[:, 1:], fused[..., ::2], fused[:, ::-1], fused[:, :, ::-1], fused[::-1]):
        assert head_strides(uneven) is None
        flat, strides = with_head_strides(uneven)
        assert strides == (uneven.shape[2] * uneven.shape[3], uneven.shape[3])
        assert not np.shares_memory(flat, fused)
    flat, strides = with_head_strides(fused[:, :, 4:6, 1:])
    assert strides == (128, 16)
    assert flat.shape == (5 * 128 + 31,)
    assert np.shares_memory(flat, fused)


def test_kernel_of_many_heads_and_wide_tokens() -> None:
    """Heads that a thread walks, pairs that a head's threads walk."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, 9, 600)).astype(np.float32)
    tables = uc.rope_tables(2, 600)
    room = np.empty(x.size + 1, np.float32)[1:].reshape(x.shape)  # 4-byte accesses
    room[...] = x
    with emulator():
        y = uc.rope(room, *tables)
    expected = uc.rope(x, *tables)
    np.testing.assert_allclose(y, expected, rtol=0, atol=4 * 2.0**-23 * np.abs(expected).max())


class TestPositionOutsideTheTables(KernelAlone):
    """A GPU's positions are not read by the host: such a token is NaN, and is reported."""

    op = "rope"
    cases = (Case("before and behind"),)

    def prove(self, case: Case, dtype: Any) -> None:
        (q, _), tables = _qk(), uc.rope_tables(9, 8)
        q = q.astype(dtype)
        with emulator():
            y, _ = launch_rope(q, None, tables, np.array([9, 1, -1]))
            said = r"^rope: positions holds (9 in row 0|-1 in row 2); it must be in 0 .. 8, the len"
            assert re.search(said, reported())
            among_others, _ = launch_rope(q, None, tables, np.array([8, 1, 0]))
            assert reported() == ""
        actual = np.isnan(y.astype(np.float32)).all(axis=(2, 3))
        np.testing.assert_array_equal(actual, [[True, False, True]] * 2)
        np.testing.assert_array_equal(y[:, 1], among_others[:, 1])


def test_in_place_needs_arrays_that_may_change() -> None:
    (q, k), tables = _qk(), uc.rope_tables(9, 8)
    with pytest.raises(GradientError, match="q is on a tape; call rope_qk"):
        uc.rope_qk_(uc.Tape().watch(q), k, *tables)
    k.flags.writeable = False
    with pytest.raises(ConfigError, match="k is read-only; call rope_qk"):
        uc.rope_qk_(q, k, *tables)


def test_in_place_needs_arrays_apart() -> None:
    (q, k), tables = _qk(), uc.rope_tables(9, 8)
    packed = np.concatenate([q, k[:, :, : q.shape[2]]], axis=2)
    half, before = packed.shape[2] // 2, packed.copy()
    for two in ((q, q), (q, q[:]), (packed[:, :, 1:], packed[:, :, :-1])):
        with pytest.raises(ConfigError, match="rope_qk_: q and k share memory; copy one"):
            uc.rope_qk_(*two, *tables)
    np.testing.assert_array_equal(packed, before)
    beside = packed[:, :, :half], packed[:, :, half:]  # between each other's rows
    expected = uc.rope_qk(*beside, *tables)
    uc.rope_qk_(*beside, *tables)
    np.testing.assert_array_equal(packed, np.concatenate(expected, axis=2))


@pytest.mark.parametrize("position", [-1, 9])
def test_position_outside_the_tables(position: int) -> None:
    (q, k), tables = _qk(), uc.rope_tables(9, 8)
    with pytest.raises(RangeError, match=rf"positions holds {position}; it must be in 0 .. 8"):
        uc.rope_qk(q, k, *tables, np.array([0, position, 1]))


def test_more_tokens_than_positions() -> None:
    q, _ = _qk()
    with pytest.raises(RangeError, match=r"make tables with rope_tables\(3, 8\)"):
        uc.rope(q, *uc.rope_tables(2, 8))


def test_wrong_shapes_and_dtypes() -> None:
    q, k = _qk()
    with pytest.raises(ShapeError, match="rotates 10 columns"):
        uc.rope(q, *uc.rope_tables(9, 10))
    with pytest.raises(ShapeError, match="positions has tokens=2; it must be 3"):
        uc.rope(q, *uc.rope_tables(9, 8), np.array([0, 1]))
    with pytest.raises(DTypeError, match="positions is float32"):
        uc.rope(q, *uc.rope_tables(9, 8), np.ones(3, np.float32))
    with pytest.raises(ShapeError, match="odd dim"):
        uc.apply_rotary_embedding(q[..., :7], k[..., :7], ROW)
    with pytest.raises(ConfigError, match="it must be above 1"):
        uc.apply_rotary_embedding(q, k, ROW, -5.0)
