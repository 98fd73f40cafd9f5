from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    attention_backward,
    attention_forward,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_forward,
)
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError

from ..harness.parity import Case, KernelAlone, KernelParity, Parity, emulator, launched
from .attention_cases import EVERY, hides, tiles
from .test_attention import Device, agree

# The public names, as other people's programs call them.
PUBLIC = (
    "attention_varlen(q, k, v, q_offsets, k_offsets, *, max_queries, max_keys, causal=False, "
    "window=None, scale=None, softcap=None, alibi=None, sinks=None, dropout=0.0, seed=None, "
    "mask=None, bias=None, block_mask=None)",
)

SIZES = {"tokens": 9, "key_tokens": 11, "heads": 4, "kv_heads": 2, "dim": 3, "value_dim": 2}
OFFSETS = {"q_offsets": [0, 3, 3, 5, 9], "k_offsets": [0, 4, 6, 6, 11]}
SEQUENCES = {"sequences": 4}
PADDED = SIZES | SEQUENCES | {"max_queries": 4, "max_keys": 5}


class TestAttentionVarlen(Parity):
    op = "attention_varlen_forward"
    cases = (
        Case("plain", **SIZES, arrays=OFFSETS),
        Case("causal", **SIZES, arrays=OFFSETS, causal=True, max_queries=4, max_keys=5),
        Case("window", **SIZES, arrays=OFFSETS, window=(1, 1), scale=0.4, softcap=2.0),
        Case("alibi by sequence", **SIZES, **SEQUENCES, arrays=OFFSETS, given=["alibi"]),
        Case("alibi", **SIZES, arrays=OFFSETS | {"alibi": [0.5, 0.25, 0.1, 1.0]}, causal=True),
        Case("sinks", **SIZES, arrays=OFFSETS, given=["sinks"], causal=True),
        Case("dropout", **SIZES, arrays=OFFSETS, dropout=0.4, seed=1),
        Case("mask", **PADDED, arrays=OFFSETS, given=["mask"], causal=True),
        Case("bias", **PADDED, arrays=OFFSETS, given=["bias"], softcap=2.0),
        Case("bias of keys", **SIZES, arrays=OFFSETS | {"bias": hides(6)}),
        Case("tiles left out", **PADDED, arrays=OFFSETS | {"block_mask": tiles(4, 4, 1, 1)}),
        Case(
            "no tokens",
            **SIZES | {"tokens": 0, "key_tokens": 0},
            arrays={name: [0, 0] for name in OFFSETS},
        ),
        Case(
            "no sequence",
            **SIZES | {"tokens": 0, "key_tokens": 0},
            arrays={name: [0] for name in OFFSETS},
        ),
    )


def alone(count: int) -> dict[str, Any]:
    """Return offsets of many sequences of 150 queries: a long one, then one token each, then 0."""
    lengths = np.ones(count, np.int64)
    lengths[0], lengths[-1] = 150 - count + 2, 0
    k_offsets = np.array([0, 75, *[75] * (count - 1)])
    return {"q_offsets": np.concatenate([[0], lengths.cumsum()]), "k_offsets": k_offsets}


LONG = {"tokens": 150, "key_tokens": 75, "heads": 4, "kv_heads": 2, "dim": 8, "value_dim": 16}
APART = {
    "q_offsets": np.array([0, 3, 3, 133, 150], np.int32),
    "k_offsets": [0, 40, 53, 53, 75],
}

WIDE = LONG | {"sequences": 4, "max_queries": 137, "max_keys": 41}
FAR_SIZES = LONG | {"key_tokens": 200}
FAR = {"q_offsets": [0, 11, 150], "k_offsets": [0, 189, 200]}


def shared(*shape: int) -> Any:
    return lambda rng: rng.standard_normal(shape)


class TestKernels(KernelParity):
    op = "attention_varlen_forward"
    sizes = (
        {"tokens": 64, "dim": 64, "value_dim": 64},
        {"max_keys": 1},  # a bias has sums of queries, or of keys, or pairs
        {},
        {"max_queries": 1},
        {"dim": 256, "value_dim": 256},
    )
    options = ({}, EVERY)
    test_gradient_matches_finite_differences = None  # the class above proves the definition
    test_rounds_once = test_any_strides = None
    cases = (
        Case("sequences without queries or keys", **LONG, arrays=APART, causal=True),
        Case("many sequences", **LONG, arrays=alone(70)),
        Case(
            "what hides and drops",
            **LONG,
            arrays=APART | {"alibi": [0.5, 0.25, 0.1, 0.3]},
            given=["sinks"],
            window=(40, 3),
            dropout=0.3,
            seed=5,
        ),
        Case("mask", **WIDE, arrays=APART, given=["mask"], causal=True),
        Case("bias of pairs", **WIDE, arrays=APART, given=["bias", "sinks"]),
        Case("bias of pairs, shared", **LONG, arrays=APART | {"bias": shared(130, 70)}),
        Case("bias of keys", **LONG, arrays=APART | {"bias": hides(40)}, causal=True),
        Case("bias of keys of a sequence", **LONG, arrays=APART | {"bias": shared(4, 1, 1, 70)}),
        Case("bias of queries", **LONG, arrays=APART | {"bias": shared(4, 4, 130, 1)}),
        Case("bias of heads", **LONG, arrays=APART | {"bias": shared(4, 1, 1)}),
        Case("tiles left out", **FAR_SIZES, arrays=FAR | {"block_mask": tiles(2, 4, 2, 2)}),
        Case(
            "all",
            **LONG,
            sequences=4,
            arrays=APART,
            given=["alibi", "sinks"],
            window=(9, 3),
            softcap=2.0,
            scale=0.4,
            dropout=0.3,
            seed=5,
        ),
        Case(
            "everything",
            **FAR_SIZES,
            sequences=2,
            max_queries=140,
            max_keys=190,
            arrays=FAR | {"block_mask": tiles(2, 4, 2, 2)},
            given=["mask", "bias", "alibi", "sinks"],
            window=(90, 3),
            softcap=2.0,
            scale=0.4,
            dropout=0.3,
            seed=5,
        ),
    )


class TestSequencesLongerThanTheirMasks(KernelAlone):
    """On a GPU nobody reads offsets first: what is past the arrays is seen, and not read."""

    op, dim = "attention_varlen_forward", 8
    cases = tuple(
        Case(f"{name} {shape}", arrays={name: shape})
        for name, *shapes in (
            ("mask", (2, 2, 9, 70)),
            ("bias", (2, 2, 9, 70), (1, 2, 1, 70), (2, 1, 9, 1)),
            ("block_mask", (2, 2, 1, 1)),
        )
        for shape in shapes
    )

    def prove(self, case: Case, dtype: Any) -> None:
        ((name, shape),) = case.arrays.items()
        rng = np.random.default_rng(0)
        q, k, dout = rng.standard_normal((3, 150, 2, self.dim)).astype(dtype)
        short = rng.standard_normal(shape).astype(dtype) if name == "bias" else tiles(*shape)(rng)
        longer = (0, 0, 131, 70) if name != "block_mask" else (0, 0, 1, 1)
        room = [(0, n * (size > 1 or n == 1)) for n, size in zip(longer, shape, strict=True)]
        long = np.pad(short, room, constant_values=name != "bias")
        arrays = (q, k, k, *2 * (np.array([0, 10, 150]),))
        results = []
        with emulator():
            for array in (short, long):
                more = {name: array}
                out, lse = launched("attention_varlen_forward", *arrays, **more)
                inputs = dout, *arrays, out, lse
                results.append([out, lse, *launched("attention_varlen_backward", *inputs, **more)])
        for one, other in zip(*results, strict=True):
            if one is not None:
                inside = other[tuple(map(slice, one.shape))]
                np.testing.assert_array_equal(one, inside)


class TestNothingIsReadPastASequence(KernelAlone):
    """NaN in a bias there reaches neither results nor gradients."""

    op, dim = "attention_varlen_forward", 8
    cases = (Case("a short sequence before a long one"),)

    def prove(self, case: Case, dtype: Any) -> None:
        rng = np.random.default_rng(0)
        q, k, dout = rng.standard_normal((3, 150, 2, self.dim)).astype(dtype)
        bias = rng.standard_normal((2, 2, 140, 140)).astype(dtype)
        arrays, results = (q, k, k, *2 * (np.array([0, 10, 150]),)), []
        for past in (0, np.nan):
            bias[0, :, 10:] = bias[0, :, :, 10:] = past
            with emulator():
                made = attention_varlen_forward(*arrays, bias=bias)
                back = attention_varlen_backward(dout, *arrays, *made, bias=bias)
            results.append([array for array in (*made, *back) if array is not None])
        for clean, same in zip(*results, strict=True):
            assert clean.tobytes() == same.tobytes()
            assert np.isfinite(clean.astype(np.float32)).all()


NO_OFFSETS = [0, 150, 9], [-5, 80, 900], [7, 7, 7]


@pytest.mark.parametrize("offsets", NO_OFFSETS)
def test_offsets_that_are_none_are_not_followed(offsets: list[int]) -> None:
    """On a GPU nobody reads them first: no access leaves the arrays."""
    q, k = np.random.default_rng(0).standard_normal((2, 150, 2, 8)).astype(np.float16)
    both = np.array(offsets), np.array(offsets[::-1])
    with emulator():
        launched("attention_varlen_forward", q, k, k, *both, causal=True)


DRAWN = np.random.default_rng(3)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (2, 0), "softcap": 1.5},
    {"alibi": np.linspace(0.1, 1, 12).reshape(3, 4), "causal": True},
    {"alibi": np.linspace(0.1, 1, 4), "sinks": np.linspace(-1, 1, 4)},
    {"dropout": 0.3, "seed": 11},
    {"mask": DRAWN.random((3, 4, 6, 6)) < 0.6, "causal": True},
    {"mask": DRAWN.random(6) < 0.6},
    {"mask": DRAWN.random((3, 1, 6, 1)) < 0.6, "block_mask": np.array([[[[True]]]])},
    {"bias": DRAWN.standard_normal((3, 4, 6, 6)), "window": (3, 1), "softcap": 2.0},
    {"bias": DRAWN.standard_normal((3, 1, 1, 6)), "dropout": 0.3, "seed": 11},
    {"bias": DRAWN.standard_normal((4, 6, 1))},
    {"bias": DRAWN.standard_normal((6, 6)), "alibi": np.linspace(0.1, 1, 4)},
    {"bias": DRAWN.standard_normal((1, 4, 1, 1)), "mask": DRAWN.random((4, 6, 6)) < 0.6},
    {"bias": np.array(0.7), "sinks": np.linspace(-1, 1, 4)},
    {"block_mask": np.array([1, 0, 1, 1, 0, 1], bool).reshape(3, 2, 1, 1).repeat(2, axis=1)},
]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_equals_padded(options: dict[str, Any], on_host: bool) -> None:
    """Results and gradients are those of one padded batch, dropout included."""
    rng = np.random.default_rng(0)
    lengths = np.array([6, 2, 4])  # sequences; each has as many queries as keys
    offsets = np.concatenate([[0], lengths.cumsum()])
    real = np.arange(6) < lengths[:, None]
    wide = [rng.standard_normal((3, 6, heads, n)) for heads, n in ((4, 3), (2, 3), (2, 2))]
    dout = rng.standard_normal((3, 6, 4, 2)) * real[..., None, None]
    dlse = rng.standard_normal((3, 4, 6)) * real[:, None]
    places = {"key_lengths": lengths, "query_start": np.zeros(3, np.int64)}
    expected = attention_forward(*wide, **places, **options)
    gradients = attention_backward(dout, *wide, *expected, **places, dlse=dlse, **options)

    packed = [a[real] for a in wide]
    packed = packed if on_host else [a.view(Device) for a in packed]
    arrays = (*packed, offsets, offsets)
    limits = {"max_queries": 6, "max_keys": 6}
    actual = attention_varlen_forward(*arrays, **limits, **options)
    np.testing.assert_allclose(actual[0], expected[0][real], rtol=1e-12)
    np.testing.assert_allclose(actual[1].T, expected[1].transpose(0, 2, 1)[real], rtol=1e-12)
    dlse = dlse.transpose(0, 2, 1)[real].T
    back = attention_varlen_backward(dout[real], *arrays, *actual, dlse=dlse, **limits, **options)
    for one, other in zip(back[:3], gradients[:3], strict=True):
        np.testing.assert_allclose(one, other[real], rtol=1e-11, atol=1e-13)
    for one, other in zip(back[5:], (*gradients[4:], gradients[3]), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


def test_torch() -> None:
    """torch's own attention of one sequence after the other, and its gradients."""
    torch = pytest.importorskip("torch", reason="an optional peer")
    rng = np.random.default_rng(0)
    q_offsets, k_offsets = np.array([0, 7, 7, 20]), np.array([0, 9, 12, 30])
    arrays = [
        rng.standard_normal((n, h, 8)).astype(np.float32) for n, h in ((20, 4), (30, 2), (30, 2))
    ]
    bias = rng.standard_normal((3, 4, 13, 18)).astype(np.float32)
    mask = rng.random((3, 1, 13, 18)) < 0.7
    mask[2, :, 4] = False  # a row that sees no key; torch gives NaN
    dout = rng.standard_normal((20, 4, 8)).astype(np.float32)
    there = [torch.tensor(a, requires_grad=True) for a in (*arrays, bias)]
    expected = []
    for number in range(3):
        rows, keys = (slice(*o[number : number + 2]) for o in (q_offsets, k_offsets))
        size = rows.stop - rows.start, keys.stop - keys.start
        q, k, v = (
            a[part].transpose(0, 1) for a, part in zip(there, (rows, keys, keys), strict=False)
        )
        hidden = torch.tensor(~mask[number, :, : size[0], : size[1]])
        added = there[3][number, :, : size[0], : size[1]].masked_fill(hidden, -torch.inf)
        seen = (~hidden).any(-1, keepdim=True)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.where(seen, added, 0.0), enable_gqa=True
        )
        expected.append((out * seen).transpose(0, 1))
    whole = torch.cat(expected)
    (whole * torch.tensor(dout)).sum().backward()
    offsets = q_offsets, k_offsets
    actual = attention_varlen_forward(*arrays, *offsets, bias=bias, mask=mask)
    agree(actual[0], whole.detach().numpy())
    back = attention_varlen_backward(dout, *arrays, *offsets, *actual, bias=bias, mask=mask)
    for one, tensor in zip((*back[:3], back[7]), there, strict=True):
        agree(one, tensor.grad.numpy())
    assert not back[0][7 + 4].any()


@pytest.mark.parametrize("on_host", [True, False])
def test_nothing_is_read_past_a_sequence(on_host: bool) -> None:
    """NaN in a bias there reaches nothing, and its gradient there is 0."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((9, 2, 4)) for _ in range(4))
    q_offsets, k_offsets = np.array([0, 3, 3, 9]), np.array([0, 1, 5, 9])
    inside = [np.arange(8) < np.diff(offsets)[:, None] for offsets in (q_offsets, k_offsets)]
    pairs = (inside[0][..., None] & inside[1][:, None])[:, None]
    bias = np.where(pairs, rng.standard_normal((3, 2, 8, 8)), np.nan)
    arrays = [a if on_host else a.view(Device) for a in (q, k, v)]
    arrays += [q_offsets, k_offsets]
    actual = attention_varlen_forward(*arrays, bias=bias)
    dbias = attention_varlen_backward(dout, *arrays, *actual, bias=bias)[7]
    assert np.isfinite(actual[0]).all()
    assert np.isfinite(dbias).all()
    assert ((dbias != 0) <= pairs).all()
    assert dbias.any()


@pytest.mark.parametrize("on_host", [True, False])
def test_sequences_do_not_see_each_other(on_host: bool) -> None:
    """NaN in one sequence stays there."""
    q, k, v = (np.random.default_rng(0).standard_normal((9, 2, 4)) for _ in range(3))
    offsets = np.array([0, 3, 7, 9])
    for array in (q, k, v):
        array[3:7] = np.nan
    arrays = [a if on_host else a.view(Device) for a in (q, k, v)]
    out = attention_varlen(*arrays, offsets, offsets, max_queries=4, max_keys=4)
    assert np.isnan(out).all(axis=(1, 2)).tolist() == [3 <= token < 7 for token in range(9)]
    assert np.isnan(out).any(axis=(1, 2)).sum() == 4


def test_wrong_arrays() -> None:
    q, k = np.ones((9, 4, 3)), np.ones((9, 2, 3))
    good = np.array([0, 4, 9])

    def call(q_offsets: Any, k_offsets: Any, **options: Any) -> Any:
        return attention_varlen(q, k, k, np.array(q_offsets), np.array(k_offsets), **options)

    with pytest.raises(RangeError, match="q_offsets goes from 1 to 9; it must rise from 0 to 9"):
        call([1, 4, 9], good)
    with pytest.raises(RangeError, match="k_offsets goes from 0 to 8"):
        call(good, [0, 4, 8])
    with pytest.raises(RangeError, match="falls in between"):
        call([0, 5, 4, 9], [0, 4, 5, 9])
    with pytest.raises(RangeError, match="5 tokens; max_queries=4"):
        call(good, good, max_queries=4)
    with pytest.raises(RangeError, match="5 tokens; max_keys=4"):
        call(good, good, max_keys=4)
    with pytest.raises(ShapeError, match="k_offsets"):
        call(good, [0, 9])
    with pytest.raises(ShapeError, match="q_offsets has sequences"):
        call(np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(DTypeError, match="q_offsets is float64"):
        call([0.0, 4.0, 9.0], good)
    with pytest.raises(ConfigError, match="seed"):
        call(good, good, dropout=0.5)
    with pytest.raises(RangeError, match="5 tokens; max_queries=4"):
        call(good, good, mask=np.ones((4, 9), bool))
    with pytest.raises(RangeError, match="5 tokens; max_keys=4"):
        call(good, good, bias=np.ones((2, 1, 1, 4)))
    with pytest.raises(ShapeError, match=r"mask of shape .* has 5 for max_keys=7; it must be 7"):
        call(good, good, mask=np.ones(5, bool), max_keys=7)
    with pytest.raises(ShapeError, match=r"has 2 for max_queries=128; it must be 1"):
        call(good, good, block_mask=np.ones((1, 1, 2, 1), bool), max_queries=128)
    with pytest.raises(ShapeError, match=r"mask has sequences\|1=3; it must be 2"):
        call(good, good, mask=np.ones((3, 1, 5, 5), bool))
    with pytest.raises(ShapeError, match=r"bias has max_keys\|1=6; it must be 5"):
        call(good, good, mask=np.ones((5, 5), bool), bias=np.ones((5, 6)))
    with pytest.raises(ShapeError, match=r"block_mask has max_keys/128=2; it must be 1"):
        call(good, good, mask=np.ones(5, bool), block_mask=np.ones((1, 1, 1, 2), bool))
