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
from unsloth_cupy._op import OPS
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError

from ..parity import Case, KernelParity, Parity, emulator
from .test_attention import Device

SIZES = {"tokens": 9, "key_tokens": 11, "heads": 4, "kv_heads": 2, "dim": 3, "value_dim": 2}
OFFSETS = {"q_offsets": [0, 3, 3, 5, 9], "k_offsets": [0, 4, 6, 6, 11]}
SEQUENCES = {"sequences": 4}


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


class TestKernels(KernelParity):
    op = "attention_varlen_forward"
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
    )


@pytest.mark.parametrize("offsets", [[0, 150, 9], [-5, 80, 900], [7, 7, 7]])
def test_offsets_that_are_none_are_not_followed(offsets: list[int]) -> None:
    """On a GPU nobody reads them first: no access leaves the arrays."""
    q, k = np.random.default_rng(0).standard_normal((2, 150, 2, 8)).astype(np.float16)
    launch = OPS["attention_varlen_forward"].launch
    both = np.array(offsets), np.array(offsets[::-1])
    with emulator():
        launch(q, k, k, *both, causal=True)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (2, 0), "softcap": 1.5},
    {"alibi": np.linspace(0.1, 1, 12).reshape(3, 4), "causal": True},
    {"alibi": np.linspace(0.1, 1, 4), "sinks": np.linspace(-1, 1, 4)},
    {"dropout": 0.3, "seed": 11},
]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
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
    found = attention_varlen_forward(*arrays, **limits, **options)
    np.testing.assert_allclose(found[0], expected[0][real], rtol=1e-12)
    np.testing.assert_allclose(found[1].T, expected[1].transpose(0, 2, 1)[real], rtol=1e-12)
    dlse = dlse.transpose(0, 2, 1)[real].T
    back = attention_varlen_backward(dout[real], *arrays, *found, dlse=dlse, **limits, **options)
    for one, other in zip(back[:3], gradients[:3], strict=True):
        np.testing.assert_allclose(one, other[real], rtol=1e-11, atol=1e-13)
    for one, other in zip(back[5:], gradients[4:], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


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
