"""Random calls of attention over packed sequences and over pages, as test_attention_random.py.

The definitions are judged on all of them against attention with all scores at once.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS

from ..harness.parity import Case, _equal_bits, _seeds, emulator, outputs_of, within_rule
from ..harness.sampling import Sample
from .attention_cases import beyond_denormals, worst_gradients, worst_plain
from .dense_attention import dense
from .test_attention_random import broadcast

COUNT = 300  # of each
A_RUN = 2  # calls of each that the kernels are asked for
OPTIONS = (
    *("causal", "window", "scale", "softcap", "alibi", "sinks", "dropout"),
    *("mask", "bias", "block_mask"),
)
PAIRS = [*itertools.combinations(OPTIONS, 2)]
PACKED, PAGED = "attention_varlen_forward", "attention_paged_forward"


class Random(NamedTuple):
    """Arrays and options of a call, and its sequences beside each other for ``dense``."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    beside: dict[str, np.ndarray]


def length(rng: np.random.Generator, most: int) -> int:
    """Return how long a sequence is: often empty or short."""
    return int(rng.choice([0, 1, rng.integers(1, 40), rng.integers(1, most + 1)], p=SHARES))


SHARES = [0.15, 0.15, 0.5, 0.2]


def made(op: str, number: int) -> Random:
    """Return one call in float32; q, k and v are times 10 in some, pairs of options take turns."""
    rng = np.random.default_rng([number, op == PAGED])
    share = rng.choice([0.0, 0.15, 0.5])
    chosen = {*PAIRS[number % len(PAIRS)]} | {n for n in OPTIONS if rng.random() < share}
    batch = int(rng.integers(1, 5))
    kv_heads, group = (int(n) for n in rng.integers(1, 4, 2))
    heads, size = kv_heads * group, 10 if rng.random() < 0.3 else 1
    dim, value_dim = (int(n) for n in rng.choice([8, 16, 40, 72], 2))
    keys = np.array([length(rng, 257) for _ in range(batch)])
    if op == PAGED:
        rows = np.full(batch, int(rng.choice([1, 1, 2, 5, 16, 23])))
    else:
        rows = np.array([length(rng, 257) for _ in range(batch)])
    shapes = ((rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim))
    q, k, v = (
        size * rng.standard_normal((batch, max(1, tokens.max()), *shape)).astype(np.float32)
        for tokens, *shape in shapes
    )
    options: dict[str, Any] = {"causal": "causal" in chosen}
    if "window" in chosen:
        far = [None if rng.random() < 0.2 else int(n) for n in rng.integers(0, 80, 2)]
        options["window"] = tuple(far)
    if "scale" in chosen:
        options["scale"] = float(rng.choice([0.0, -0.3, 0.3]))
    if "softcap" in chosen:
        options["softcap"] = float(rng.choice([0.5, 30.0]))
    if "dropout" in chosen:
        options |= {"dropout": float(rng.choice([0.1, 0.9])), "seed": int(rng.integers(2**62))}
    inputs = {}
    if "alibi" in chosen:
        inputs["alibi"] = rng.random((batch, heads) if rng.random() < 0.3 else heads, np.float32)
    if "sinks" in chosen:
        inputs["sinks"] = rng.standard_normal(heads, np.float32)
    scores = (batch, heads, q.shape[1], k.shape[1])
    if "mask" in chosen:
        inputs["mask"] = rng.random(broadcast(rng, scores)) < rng.choice([0.1, 0.7])
    if "bias" in chosen:
        bias = rng.standard_normal(broadcast(rng, scores), np.float32)
        inputs["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.float32("inf"), bias)
    if "block_mask" in chosen:
        some = [1 if rng.random() < 0.5 else n for n in (batch, heads)]
        inputs["block_mask"] = rng.random((*some, *(-(-n // 128) for n in scores[2:]))) < 0.6
    beside = {"q": q, "k": k, "v": v, "key_lengths": keys, "query_start": keys - rows, **inputs}
    offsets = rng.choice([np.int32, np.int64])
    store = in_pages if op == PAGED else end_to_end
    arrays = store(rng, q, k, v, rows, keys, offsets)
    if op == PAGED and rng.random() < 0.3:
        beside["query_start"] = inputs["query_start"] = keys - rows + rng.integers(-40, 40, batch)
    room = arrays["page_table"].shape[1] * arrays["k_pages"].shape[1] if op == PAGED else None
    inputs |= {n: grown(n, inputs[n], rows, keys, room) for n in MASKS if n in inputs}
    return Random(arrays | inputs, options, beside)


MASKS = ("mask", "bias", "block_mask")


def grown(
    name: str, array: np.ndarray, rows: np.ndarray, keys: np.ndarray, room: int | None
) -> np.ndarray:
    """Return what is past the tokens of sequences too: NaN where it is a bias, else True."""
    tile = 128 if name == "block_mask" else 1
    if name == "bias" and array.ndim == 4 and len(array) == len(rows):
        past = np.zeros(array.shape, bool)
        for axis, lengths in ((2, rows), (3, keys)):
            if array.shape[axis] > 1:
                numbers = np.arange(array.shape[axis]).reshape(-1, *[1] * (3 - axis))
                past |= numbers >= lengths.reshape(-1, *[1] * 3)
        array = np.where(past, np.float32("nan"), array)
    if room is not None and (array.shape[-1:] > (1,) or tile > 1):
        more = -(-room // tile) - array.shape[-1]
        fill = np.nan if name == "bias" else True
        array = np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, more)], constant_values=fill)
    return array


def end_to_end(
    rng: np.random.Generator, q: Any, k: Any, v: Any, rows: Any, keys: Any, integers: Any
) -> dict[str, np.ndarray]:
    """Return the operands of a call of packed sequences."""
    of_rows, of_keys = (np.arange(a.shape[1]) < n[:, None] for a, n in ((q, rows), (k, keys)))
    ends = {name: np.cumsum([0, *n]) for name, n in (("q_offsets", rows), ("k_offsets", keys))}
    arrays = {"q": q[of_rows], "k": k[of_keys], "v": v[of_keys]}
    return arrays | {name: offsets.astype(integers) for name, offsets in ends.items()}


def in_pages(
    rng: np.random.Generator, q: Any, k: Any, v: Any, rows: Any, keys: Any, integers: Any
) -> dict[str, np.ndarray]:
    """Return the operands of a paged call: NaN where nothing is stored, no page where none is."""
    page = int(rng.choice([1, 2, 3, 5, 16, 64]))
    room = -(-k.shape[1] // page) + int(rng.integers(0, 3))
    pages = len(q) * room + 2
    table = rng.permutation(pages)[: len(q) * room].reshape(len(q), room)
    stored = [np.full((pages, page, *a.shape[2:]), np.nan, np.float32) for a in (k, v)]
    for row, count in enumerate(keys):
        at = np.arange(count)
        for there, here in zip(stored, (k, v), strict=True):
            there[table[row, at // page], at % page] = here[row, :count]
        table[row, -(-count // page) :] = rng.choice([-1, pages + 9])
    arrays = {"q": q, "k_pages": stored[0], "v_pages": stored[1]}
    return arrays | {"page_table": table.astype(integers), "lengths": keys.astype(integers)}


@pytest.mark.parametrize("op", [PACKED, PAGED])
def test_every_pair_of_options_is_among_them(op: str) -> None:
    calls = [made(op, number) for number in range(COUNT)]
    seen = [
        call.arrays.keys() | {n for n, value in call.options.items() if value is not False}
        for call in calls
    ]
    assert all(any({*pair} <= names for names in seen) for pair in PAIRS)
    assert any(not keys for call in calls for keys in call.beside["key_lengths"])


@pytest.mark.slow
@pytest.mark.parametrize("op", [PACKED, PAGED])
def test_the_definition(op: str) -> None:
    """In float32, out is as near as float32 lets it; rows that see nothing give zeros."""
    hidden = 0
    for number in range(COUNT):
        arrays, options, beside = made(op, number)
        call = OPS[op]
        out, lse = call.call([arrays.get(name) for name in call.names], options)
        exact, exact_lse = dense(**beside, **options)
        if op == PACKED:
            lengths = np.diff(arrays["q_offsets"])
            real = np.arange(exact.shape[1]) < lengths[:, None]
            exact, exact_lse = exact[real], exact_lse.transpose(0, 2, 1)[real].T
        none = exact_lse == -np.inf
        assert (lse[none] == -np.inf).all()
        assert not out[np.moveaxis(none, -2, -1)].any()
        hidden += int(none.sum())
        if out.size:
            error = (out - exact) / max(1, beside["v"].std())
            assert np.abs(error).mean() < 1e-5, number
            assert np.sqrt(np.square(error).mean()) < 1e-4, number
    assert hidden


@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT) if Sample.all else range(A_RUN))
@pytest.mark.parametrize("op", [PACKED, PAGED])
def test_kernels(op: str, number: int) -> None:
    """Forward and, given their own out and lse and the definition's, backward."""
    number = number if Sample.all else (Sample.day * A_RUN + number) % COUNT
    arrays, options, _ = made(op, number)
    dtype = KERNEL_DTYPES[number % len(KERNEL_DTYPES)]
    call = Case(f"random call {number}", arrays=arrays, **options).draw(OPS[op], dtype)
    wide = call.cast(np.float64)
    exact, plain = outputs_of(wide), outputs_of(call)
    with emulator(check=False):
        own, again = outputs_of(call), outputs_of(call)
    within_rule(worst_plain(call, exact), exact, beyond_denormals(own, exact))
    _equal_bits(own, again)
    if call.op.backward is None:
        return
    seeds = _seeds(call.op, plain, np.random.default_rng(1))
    wide_seeds = {name: seed.astype(np.float64) for name, seed in seeds.items()}
    exact = outputs_of(wide.backward(exact, wide_seeds))
    for made_by in (own, plain):
        turned = call.backward(made_by, seeds)
        with emulator(check=False):
            first, second = outputs_of(turned), outputs_of(turned)
        worst = worst_gradients(call, made_by, seeds, exact)
        within_rule(worst, exact, beyond_denormals(first, exact))
        _equal_bits(first, second)
