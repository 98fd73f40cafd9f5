import functools
import itertools
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Tape, attention, attention_backward, attention_forward
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError
from unsloth_cupy.ops.attention import _blocks
from unsloth_cupy.ops.common import threads as common_threads

from ..golden.golden import OpCase
from ..harness.parity import Case, Parity, emulator
from .dense_attention import dense
from .golden_cases import agree, both_dtypes, cast, golden

# The public names, as other people's programs call them.
PUBLIC = (
    "attention(q, k, v, *, causal=False, window=None, scale=None, softcap=None, mask=None, "
    "bias=None, alibi=None, sinks=None, key_lengths=None, query_start=None, block_mask=None, "
    "dropout=0.0, seed=None)",
)

SMALL = {"batch": 2, "queries": 5, "keys": 7, "heads": 4, "kv_heads": 2, "dim": 3, "value_dim": 2}
LARGE = SMALL | {"queries": 70, "keys": 90, "heads": 2, "dim": 64}  # several blocks, cut products
DROPPED = {"bias": lambda rng: np.where(rng.random((2, 1, 5, 7)) < 0.3, -np.inf, 0.5)}


def tiles(*shape: int) -> Any:
    return lambda rng: rng.random(shape) < 0.6


class TestAttention(Parity):
    op = "attention_forward"
    cases = (
        Case("plain", **SMALL),
        Case("one of each", **dict.fromkeys(SMALL, 1)),
        Case("causal", **SMALL, causal=True),
        Case("more queries than keys", **SMALL | {"queries": 9}, causal=True),
        Case("window", **SMALL, window=(2, 1)),
        Case("left window", **SMALL, window=(2, None), causal=True),
        Case("scale and softcap", **SMALL, scale=0.9, softcap=1.3),
        Case("mask", **SMALL, given=["mask"]),
        Case("mask by key", **SMALL, arrays={"mask": tiles(7)}),
        Case("bias", **SMALL, given=["bias"]),
        Case("bias by head", **SMALL, arrays={"bias": lambda rng: rng.normal(size=(4, 1, 7))}),
        Case("bias hides", **SMALL, arrays=DROPPED),
        Case("alibi", **SMALL, given=["alibi"]),
        Case("alibi of heads", **SMALL, arrays={"alibi": [0.5, 0.3, 0.1, 0.2]}, causal=True),
        Case("sinks", **SMALL, given=["sinks"], causal=True),
        Case("lengths", **SMALL, arrays={"key_lengths": [7, 4]}, causal=True),
        Case("no key", **SMALL, arrays={"key_lengths": [0, 2]}, causal=True),
        Case("no key but a sink", **SMALL, arrays={"key_lengths": [0, 2]}, given=["sinks"]),
        Case("start", **SMALL, arrays={"query_start": [1, -2]}, window=(3, 0)),
        Case("one start", **SMALL, arrays={"query_start": 1}, given=["alibi"], causal=True),
        Case("dropout", **SMALL, dropout=0.4, seed=3),
        Case("dropout and softcap", **SMALL, dropout=0.4, seed=3, softcap=2.0, given=["sinks"]),
        Case("large", **LARGE, arrays={"key_lengths": [90, 51]}, causal=True, given=["alibi"]),
        Case("large bias", **LARGE, given=["bias", "mask"], softcap=4.0, window=(40, None)),
        Case(
            "tiles",
            **SMALL | {"queries": 140, "keys": 300},
            arrays={"block_mask": [[[[True, False, True], [False, True, True]]]]},
            causal=True,
        ),
        Case(
            "tiles by head",
            **SMALL | {"queries": 140, "keys": 300},
            arrays={"block_mask": tiles(2, 4, 2, 3)},
            dropout=0.2,
            seed=1,
        ),
        *(Case(f"empty {axis}", **SMALL | {axis: 0}) for axis in SMALL if axis != "kv_heads"),
        Case("no heads at all", **SMALL | {"heads": 0, "kv_heads": 0}),
        Case("empty keys and a sink", **SMALL | {"keys": 0}, given=["sinks", "alibi", "bias"]),
        Case(
            "all",
            **SMALL,
            given=["mask", "bias", "alibi", "sinks"],
            arrays={"key_lengths": [7, 6], "block_mask": [[[[True]]]], "query_start": [3, 2]},
            causal=True,
            window=(4, None),
            scale=0.7,
            softcap=3.0,
            dropout=0.1,
            seed=7,
        ),
    )


def drawn(rng: np.random.Generator, dtype: Any = np.float64, **sizes: int) -> list[np.ndarray]:
    """Return q, k and v."""
    n = SMALL | sizes
    heads = {"queries": "heads", "keys": "kv_heads"}
    shapes = [("queries", "dim"), ("keys", "dim"), ("keys", "value_dim")]
    return [
        rng.standard_normal((n["batch"], n[tokens], n[heads[tokens]], n[width])).astype(dtype)
        for tokens, width in shapes
    ]


OPTIONS: dict[str, Any] = {
    "causal": True,
    "window": (60, 20),
    "scale": 0.3,
    "softcap": 2.0,
    "mask": lambda rng: rng.random((2, 1, 140, 150)) < 0.7,
    "bias": lambda rng: rng.standard_normal((4, 140, 150)),
    "alibi": lambda rng: rng.random((2, 4)),
    "sinks": lambda rng: rng.standard_normal(4),
    "key_lengths": lambda rng: np.array([150, 90]),
    "query_start": lambda rng: np.array([7, 30]),
    "block_mask": lambda rng: np.array([[[[True, False], [True, True]]], [[[False, True]] * 2]]),
    "dropout": 0.3,
}


PAIRS = [*itertools.combinations_with_replacement(OPTIONS, 2)]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_options_compose(names: tuple[str, str], monkeypatch: Any) -> None:
    """Every option and every pair equals attention with all scores at once, on 1 and 3 threads."""
    monkeypatch.setattr(_blocks, "SINGLE", 2**13)  # cuts products into runs of 42 keys
    rng = np.random.default_rng(0)
    q, k, v = drawn(rng, queries=140, keys=150)
    options = {n: OPTIONS[n](rng) if callable(OPTIONS[n]) else OPTIONS[n] for n in sorted({*names})}
    options |= {"seed": 5} if "dropout" in options else {}
    wanted = dense(q, k, v, **options)
    for threads in (1, 3):
        monkeypatch.setattr(common_threads, "count", functools.partial(int, threads))
        for actual, expected in zip(attention_forward(q, k, v, **options), wanted, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


def golden_call(case: OpCase, dtype: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return q, k, v and options; golden arrays are (batch, heads, tokens, dim)."""
    inputs = cast(case, dtype)
    options = {n: case.params[n] for n in ("causal", "scale", "softcap") if n in case.params}
    if "window" in case.params:  # counts the query's own key
        options["window"] = (case.params["window"] - 1, 0)
    if "mask" in inputs:
        options["mask" if inputs["mask"].dtype == bool else "bias"] = inputs["mask"]
    return [inputs[name].transpose(0, 2, 1, 3) for name in "qkv"], options


@both_dtypes
@golden("attention", "")
def test_golden(golden: OpCase, dtype: Any) -> None:
    """The results and gradients of torch and transformers."""
    (q, k, v), options = golden_call(golden, dtype)
    out, lse = attention_forward(q, k, v, **options)
    assert out.dtype == lse.dtype == dtype
    agree(out.transpose(0, 2, 1, 3), golden.outputs["y"])
    if "lse" in golden.outputs:
        agree(lse, golden.outputs["lse"])
    if golden.grads:
        dout = golden.inputs["cotangent"].transpose(0, 2, 1, 3).astype(dtype)
        for name, actual in zip(
            "qkv", attention_backward(dout, q, k, v, out, lse, **options), strict=False
        ):
            agree(actual.transpose(0, 2, 1, 3), golden.grads[name])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_torch(heads: tuple[int, int], causal: bool) -> None:
    """torch's own attention and its gradients, over several blocks."""
    torch = pytest.importorskip("torch", reason="an optional peer")
    rng = np.random.default_rng(0)
    shape = {"queries": 200, "keys": 200, "heads": heads[0], "kv_heads": heads[1], "dim": 16}
    arrays = drawn(rng, np.float32, **shape)
    there = [torch.tensor(a.transpose(0, 2, 1, 3), requires_grad=True) for a in arrays]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *there, is_causal=causal, enable_gqa=True
    )
    out, lse = attention_forward(*arrays, causal=causal)
    agree(out.transpose(0, 2, 1, 3), expected.detach().numpy())
    dout = rng.standard_normal(out.shape).astype(np.float32)
    expected.backward(torch.tensor(dout.transpose(0, 2, 1, 3)))
    gradients = attention_backward(dout, *arrays, out, lse, causal=causal)[:3]
    for actual, tensor in zip(gradients, there, strict=True):
        agree(actual.transpose(0, 2, 1, 3), tensor.grad.numpy())


@pytest.mark.parametrize("queries", [5, 9])
def test_peers_count_from_the_first_key(queries: int) -> None:
    """As the guide says in other libraries' words, with more or fewer queries than the 7 keys."""
    torch = pytest.importorskip("torch", reason="an optional peer")
    jax = pytest.importorskip("jax", reason="an optional peer")
    q, k, v = drawn(np.random.default_rng(0), np.float32, queries=queries, dim=8, value_dim=8)
    heads_first = [torch.tensor(a.transpose(0, 2, 1, 3)) for a in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, enable_gqa=True
    )
    agree(attention(q, k, v, causal=True, query_start=0), expected.numpy().transpose(0, 2, 1, 3))
    lengths, ways = np.array([7, 4], np.int32), ((True, None), (False, (2, 3)), (False, None))

    @jax.jit  # compiles all of them at once
    def by_jax(q: Any, k: Any, v: Any, lengths: Any) -> list[Any]:
        return [
            jax.nn.dot_product_attention(
                *(q, k, v),
                is_causal=causal,
                local_window_size=window,
                key_value_seq_lengths=lengths,
            )
            for causal, window in ways
        ]

    for (causal, window), expected in zip(ways, by_jax(q, k, v, lengths), strict=True):
        options: dict[str, Any] = {"causal": causal, "window": window, "key_lengths": lengths}
        out, lse = attention_forward(q, k, v, query_start=0, **options)
        seen = np.isfinite(lse).transpose(0, 2, 1)  # of other rows each library has its own idea
        assert seen.any(axis=(0, 2)).all()
        agree(out[seen], np.asarray(expected)[seen])


@pytest.fixture
def rng() -> Iterator[np.random.Generator]:
    return np.random.default_rng(0)


@pytest.mark.parametrize("first", [1, 64, 77, 149])
def test_future_does_not_reach_back(rng: np.random.Generator, first: int) -> None:
    """With causal, other keys from a position on leave the rows before it as they were."""
    q, k, v = drawn(rng, np.float32, queries=150, keys=150)
    before, lse_before = attention_forward(q, k, v, causal=True)
    k[:, first:], v[:, first:] = 100 * k[:, first:], -7
    after, lse_after = attention_forward(q, k, v, causal=True)
    assert before[:, :first].tobytes() == after[:, :first].tobytes()
    assert lse_before[:, :, :first].tobytes() == lse_after[:, :, :first].tobytes()
    assert (before[:, first:] != after[:, first:]).all()


@both_dtypes
def test_scores_of_any_size(rng: np.random.Generator, dtype: Any) -> None:
    """What is added to all scores of a row moves its lse and not its result."""
    q, k, v = drawn(rng, dtype)
    added = np.array([-5000, -50, 0, 70, 5000], dtype)[:, None]
    for sinks in (None, np.full(4, -9000, dtype)):
        out, lse = attention_forward(q, k, v, sinks=sinks)
        moved, moved_lse = attention_forward(q, k, v, sinks=sinks, bias=added)
        eps = np.finfo(dtype).eps
        np.testing.assert_allclose(moved, out, rtol=0, atol=5000 * eps * np.abs(v).max())
        np.testing.assert_allclose(moved_lse, lse + added[:, 0], rtol=4 * eps)


@pytest.mark.parametrize("on_host", [True, False])
def test_keys_beyond_lengths_do_not_leak(rng: np.random.Generator, on_host: bool) -> None:
    """NaN in keys that do not exist reaches neither results nor gradients."""
    q, k, v = drawn(rng)
    lengths = np.array([3, 6])
    clean = attention_forward(q, k, v, key_lengths=lengths, causal=True)
    dout = rng.standard_normal(clean[0].shape)
    expected = attention_backward(dout, q, k, v, *clean, key_lengths=lengths, causal=True)
    for row, length in enumerate(lengths):
        k[row, length:], v[row, length:] = np.nan, np.inf
    arrays = [q, k, v] if on_host else [a.view(Device) for a in (q, k, v)]
    actual = attention_forward(*arrays, key_lengths=lengths, causal=True)
    gradients = attention_backward(dout, *arrays, *actual, key_lengths=lengths, causal=True)
    for one, other in zip((*actual, *gradients[:3]), (*clean, *expected[:3]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    assert not gradients[1][0, 3:].any()
    assert not gradients[2][0, 3:].any()


class Device(np.ndarray):
    """An array whose numbers the host may not read, as on a GPU: no block is left out."""


@pytest.mark.parametrize("name", OPTIONS)
def test_without_reading_on_the_host(rng: np.random.Generator, name: str) -> None:
    """What runs where reading lengths and tiles would stall gives the same."""
    q, k, v = drawn(rng, queries=140, keys=150)
    options = {name: OPTIONS[name](rng) if callable(OPTIONS[name]) else OPTIONS[name], "seed": 5}
    expected = attention_forward(q, k, v, **options)
    dout = rng.standard_normal(expected[0].shape)
    gradients = attention_backward(dout, q, k, v, *expected, **options)
    there = [a.view(Device) for a in (q, k, v)]
    actual = attention_forward(*there, **options)
    actual += attention_backward(dout, *there, *actual, **options)
    for one, other in zip(actual, expected + gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_threads_do_not_change_bits(rng: np.random.Generator, monkeypatch: Any) -> None:
    """Blocks that run side by side write apart: ten runs give equal bits."""
    monkeypatch.setattr(common_threads, "count", lambda: 4)
    monkeypatch.setattr(_blocks, "HOST_SCORES", 1)  # every head is a task of its own
    q, k, v = drawn(rng, np.float32, queries=130, keys=130, heads=6, kv_heads=3)
    alibi = rng.random(6).astype(np.float32)
    runs = set()
    for _ in range(10):
        out, lse = attention_forward(q, k, v, alibi=alibi, causal=True)
        gradients = attention_backward(out, q, k, v, out, lse, alibi=alibi, causal=True)
        runs.add(b"".join(a.tobytes() for a in (out, lse, *gradients) if a is not None))
    assert len(runs) == 1


def test_dropout_is_the_same_in_any_block(rng: np.random.Generator, monkeypatch: Any) -> None:
    """A pair's fate depends on seed, batch, head, query and key, not on the tiles."""
    q, k, v = drawn(rng, queries=140, keys=130)
    whole = attention(q, k, v, dropout=0.5, seed=2)
    alone = attention(q[1:], k[1:], v[1:], dropout=0.5, seed=2)
    assert not np.allclose(whole[1:], alone)  # another batch, another mask
    np.testing.assert_allclose(attention(q[:1], k[:1], v[:1], dropout=0.5, seed=2), whole[:1])
    np.testing.assert_allclose(attention(q[:, :50], k, v, dropout=0.5, seed=2), whole[:, :50])
    monkeypatch.setattr(_blocks, "HOST_SCORES", 1)
    np.testing.assert_allclose(attention(q, k, v, dropout=0.5, seed=2), whole)
    assert not np.allclose(attention(q, k, v, dropout=0.5, seed=3), whole)


def test_dropout_keeps_the_mean(rng: np.random.Generator) -> None:
    """Over 400 seeds the mean is attention without dropout, within five standard errors."""
    q, k, v = drawn(rng)
    runs = np.stack([attention(q, k, v, dropout=0.3, seed=seed) for seed in range(400)])
    error = np.abs(runs.mean(axis=0) - attention(q, k, v))
    assert (error <= 5 * runs.std(axis=0) / np.sqrt(len(runs))).all()
    assert runs.std(axis=0).min() > 0


def test_gradient_through_lse_alone(rng: np.random.Generator) -> None:
    """A tape passes the gradient of lse back: it is p against q and k."""
    q, k, v = drawn(rng)
    tape = Tape()
    watched = [tape.watch(a) for a in (q, k, v)]
    lse = attention_forward(*watched)[1]
    dq, _, dv = tape.gradients(lse, watched, np.ones(lse.shape))
    assert not dv.any()
    move = rng.standard_normal(q.shape)
    ahead, behind = (attention_forward(q + s * 1e-5 * move, k, v)[1].sum() for s in (1, -1))
    assert (dq * move).sum() == pytest.approx((ahead - behind) / 2e-5, rel=1e-7)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear(rng: np.random.Generator, causal: bool, monkeypatch: Any) -> None:
    """Four times the tokens take no more than four times the memory, forward and backward."""
    monkeypatch.setattr(common_threads, "count", lambda: 1)  # how much threads overlap is chance

    def peak(tokens: int) -> tuple[int, int]:
        sizes = {"batch": 1, "queries": tokens, "keys": tokens, "heads": 2, "kv_heads": 2}
        q, k, v = drawn(rng, np.float32, **sizes)
        tracemalloc.start()
        out, lse = attention_forward(q, k, v, causal=causal)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        attention_backward(out, q, k, v, out, lse, causal=causal)
        backward = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return forward, backward

    for small, large in zip(peak(512), peak(2048), strict=True):
        assert large <= 4 * small
        assert large < 2048 * 2048 * 4  # one head's scores


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (ConfigError, "seed", {"dropout": 0.1}),
        (ConfigError, "dropout=1", {"dropout": 1.0, "seed": 0}),
        (ConfigError, "dropout=-0", {"dropout": -0.5, "seed": 0}),
        (ConfigError, "seed=-1", {"dropout": 0.5, "seed": -1}),
        (ConfigError, "softcap=0", {"softcap": 0.0}),
        (ConfigError, "window=4", {"window": 4}),
        (ConfigError, r"window=\(-1, 0\)", {"window": (-1, 0)}),
        (ConfigError, r"window=\(True, 0\)", {"window": (True, 0)}),
        (RangeError, "key_lengths holds 8 .. 9", {"key_lengths": np.array([8, 9])}),
        (RangeError, "key_lengths holds -1 .. 3", {"key_lengths": np.array([3, -1])}),
        (ShapeError, "key_lengths", {"key_lengths": np.array([1, 2, 3])}),
        (ShapeError, "mask", {"mask": np.ones((3, 7), bool)}),
        (ShapeError, "mask has 5 axes", {"mask": np.ones((1, 1, 1, 5, 7), bool)}),
        (DTypeError, "mask is float64", {"mask": np.ones((5, 7))}),
        (ShapeError, "bias", {"bias": np.ones((4, 2, 7))}),
        (DTypeError, "bias is float16", {"bias": np.ones((5, 7), np.float16)}),
        (ShapeError, "alibi", {"alibi": np.ones(3)}),
        (ShapeError, "sinks", {"sinks": np.ones((2, 4))}),
        (ShapeError, "block_mask", {"block_mask": np.ones((1, 1, 2, 1), bool)}),
    ],
)
def test_wrong_options(error: Any, words: str, options: Any, rng: np.random.Generator) -> None:
    with pytest.raises(error, match=words):
        attention(*drawn(rng), **options)


def test_wrong_arrays(rng: np.random.Generator) -> None:
    q, k, v = drawn(rng)
    with pytest.raises(ShapeError, match="heads=4 must be a multiple of kv_heads=3"):
        attention(q, np.ones((2, 7, 3, 3)), np.ones((2, 7, 3, 2)))
    with pytest.raises(ShapeError, match="v has keys=6; it must be 7"):
        attention(q, k, v[:, :6])
    with pytest.raises(ShapeError, match="heads=4 must be a multiple of kv_heads=0"):
        attention(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(DTypeError, match="k is float32"):
        attention(q, k.astype(np.float32), v)


@pytest.mark.parametrize(("keys", "words"), [(7, "must be a multiple"), (5, "mask has")])
def test_heads_before_tokens_are_named_where_no_other_reading_fits(
    keys: int, words: str, rng: np.random.Generator
) -> None:
    q, k, v = (a.swapaxes(1, 2) for a in drawn(rng, keys=keys))
    mask = np.ones((5, 5), bool) if keys == 5 else None
    with pytest.raises(ShapeError, match=rf"{words}(.|\n)* heads before tokens"):
        attention(q, k, v, mask=mask)
    with pytest.raises(ShapeError) as caught:
        attention(q, k, v[:, :, :-1], mask=mask)
    assert "before tokens" not in str(caught.value)


@pytest.mark.parametrize("context", [nullcontext, emulator], ids=["definition", "kernels"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 5.0, "dropout": 0.5, "seed": 3}, {"mask": np.array([[True], [False]])}],
)
def test_one_key_has_its_value_and_no_score_changes_it(
    context: Any, dtype: str, options: Any, rng: np.random.Generator
) -> None:
    q, k, v = (3 * a for a in drawn(rng, dtype, queries=2, keys=1, dim=24, value_dim=24))
    bias = rng.standard_normal((4, 2, 1)).astype(dtype)
    with context():
        out, lse = attention_forward(q, k, v, bias=bias, **options)
        gradients = attention_backward(np.ones_like(out), q, k, v, out, lse, bias=bias, **options)
    seen = options.get("mask", np.ones((2, 1), bool))[:, None]
    expected = np.where(seen, v.repeat(2, axis=2) / (1 - options.get("dropout", 0)), 0)
    kept = (out != 0) if "dropout" in options else True
    rounded = context is emulator and dtype == "float32"  # the kernel's p is exp2 of a rounded 0
    np.testing.assert_allclose(
        out, expected.astype(dtype) * kept, rtol=4e-7 if rounded else 0, atol=0
    )
    dq, dk, dv, dbias, *_ = gradients
    assert not dq.any()
    assert not dk.any()
    assert not dbias.any()
    assert dv.any()


@pytest.mark.parametrize("context", [nullcontext, emulator], ids=["definition", "kernels"])
def test_a_part_of_one_key_has_the_gradient_of_its_share(
    context: Any, rng: np.random.Generator
) -> None:
    """The lse of all keys says that its probability is not 1, as ring attention needs."""
    q, k, v = drawn(rng, np.float32, queries=3, keys=2, dim=16, value_dim=16)
    dout = rng.standard_normal((*q.shape[:3], 16)).astype(np.float32)
    with context():
        out, lse = attention_forward(q, k, v)
        dq, dk, dv, *_ = attention_backward(dout, q, k, v, out, lse)
        parts = [
            attention_backward(dout, q, k[:, [key]], v[:, [key]], out, lse) for key in range(2)
        ]
    np.testing.assert_allclose(parts[0][0] + parts[1][0], dq, atol=1e-5)
    for place, whole in ((1, dk), (2, dv)):
        actual = np.concatenate([part[place] for part in parts], axis=1)
        np.testing.assert_allclose(actual, whole, atol=1e-5)
    assert np.abs(dk).max() > 1e-2


@pytest.mark.parametrize("shared", ["q", "k", "kv"])
def test_an_array_without_a_batch_axis_is_the_same_for_all(
    shared: str, rng: np.random.Generator
) -> None:
    arrays = dict(zip("qkv", drawn(rng), strict=True))
    arrays |= {name: arrays[name][0] for name in shared}
    batch = next(a.shape[0] for a in arrays.values() if a.ndim == 4)
    whole = {n: np.broadcast_to(a, (batch, *a.shape[-3:])) for n, a in arrays.items()}
    tape, plain = Tape(), Tape()
    inputs = [tape.watch(a) for a in arrays.values()]
    out = attention(*inputs, causal=True)
    expected_inputs = [plain.watch(a) for a in whole.values()]
    expected = attention(*expected_inputs, causal=True)
    np.testing.assert_array_equal(out.value, expected.value)
    seed = rng.standard_normal(out.shape)
    gradients = plain.gradients(expected, expected_inputs, seed)
    for name, actual, each in zip("qkv", tape.gradients(out, inputs, seed), gradients, strict=True):
        np.testing.assert_allclose(actual, each.sum(axis=0) if name in shared else each)


def test_a_window_of_narrow_integers_reaches_as_far(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, 300, 1, 2)) for _ in range(3))
    narrow = attention(q, k, v, window=(np.int8(100), np.int8(100)))
    np.testing.assert_array_equal(narrow, attention(q, k, v, window=(100, 100)))


def of_ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_grouped_heads_before_tokens_warn_once(library: str) -> None:
    """Such arrays fit the signature, with heads as tokens: in silence the results are others."""
    q, k = of_ones(1, 8, 16, 8), of_ones(1, 2, 16, 8)
    if library == "torch":
        torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
        q, k = torch.from_numpy(q), torch.from_numpy(k)
    with pytest.warns(UserWarning, match="q has 8 tokens and k 2, .* heads before tokens, swap"):
        attention(q, k, k, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, k, causal=True)


def test_a_part_of_a_text_does_not_warn() -> None:
    """A rank of a ring may have more queries than keys of another rank."""
    q, k = of_ones(1, 2, 4, 8), of_ones(1, 1, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, k, causal=True, query_start=1)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"),
    [(1, 64, 8, 8), (1, 8, 8, 2), (8, 8, 4, 4), (9, 2, 4, 4), (8, 2, 4, 2), (1, 1, 4, 4)],
    ids=["decode", "grouped decode", "as many", "no multiple", "grouped", "first token"],
)
def test_tokens_before_heads_do_not_warn(
    queries: int, keys: int, heads: int, kv_heads: int
) -> None:
    q, k = of_ones(1, queries, heads, 8), of_ones(1, keys, kv_heads, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, k, causal=True)
