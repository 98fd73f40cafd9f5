"""Attention over divided tokens equals that of one device, in 1e-5: result and gradients."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from unsloth_cupy import attention, attention_varlen
from unsloth_cupy.parallel import (
    Communicator,
    part,
    ring_attention,
    ring_order,
    ulysses_attention,
)

from ..harness.sampling import Sample
from .layers import learned
from .ranks import close

OPTIONS = (
    {},
    {"causal": True},
    {"causal": True, "window": (5, 0)},  # most pieces see no keys of other pieces
    {"window": (2, 3), "softcap": 1.5},
    {"causal": True, "scale": 0.7, "softcap": 2.0},
)


TEXTS = np.array([0, 1, 1, 9, 10, 21, 24])  # texts of one token, of none, across many ranks
HEADS = ((12, 12), (12, 1), (4, 2), (8, 2))


def todays(options: Sequence[Any], packed: Any) -> list[tuple[Any, Any]]:
    """Return each option with one text in a row or with packed ones; next day with the other."""
    turns = (None, packed), (packed, None)
    return [
        (each, texts)
        for number, each in enumerate(options)
        for texts in Sample.one_in(2, turns[number % 2])
    ]


def rings(comm: Communicator) -> None:
    """Four heads share two key heads; each of 8 ranks has two pieces of two tokens."""
    rng, few = np.random.default_rng(1), comm.size == 8
    tokens = 32 if few else 24
    packed = np.append(TEXTS[:-1], tokens)
    for options, texts in todays(OPTIONS[1:3] if few else OPTIONS, packed):
        shapes = ((2, tokens, 4, 8), (2, tokens, 2, 8), (2, tokens, 2, 6), (2, tokens, 4, 6))
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        order = ring_order(tokens, comm, causal=options.get("causal", False))
        compare(ring_attention, comm, arrays, order, options, texts)


def compare(
    way: Any, comm: Communicator, arrays: Any, order: Any, options: Any, texts: Any
) -> None:
    """Compare out, and the gradients of q, k and v, of this rank's tokens with those of all."""
    *qkv, dy = arrays
    expected = learned(lambda *x: whole(*x, texts, options), qkv, dy)
    own = [x[:, order] for x in arrays]
    actual = learned(lambda *x: way(*x, comm, offsets=texts, **options), own[:3], own[3])
    for one, other in zip(actual, expected, strict=True):
        close(one, other[:, order])


def whole(q: Any, k: Any, v: Any, texts: Any, options: Any) -> Any:
    """Return the attention of one device; all rows have the same texts."""
    if texts is None:
        return attention(q, k, v, **options)
    rows, tokens = q.shape[:2]
    offsets = np.append((texts[:-1] + tokens * np.arange(rows)[:, None]).reshape(-1), rows * tokens)
    packed = (x.reshape((rows * tokens, *x.shape[2:])) for x in (q, k, v))
    out = attention_varlen(*packed, offsets, offsets, **options)
    return out.reshape((rows, tokens, *out.shape[1:]))


def heads_instead(comm: Communicator) -> None:
    """Ulysses: tokens need not divide evenly; with more ranks than key heads, ranks have copies."""
    rng = np.random.default_rng(2)
    for heads, kv_heads in HEADS:
        if heads % comm.size or (kv_heads % comm.size and comm.size % kv_heads):
            continue
        sizes = ((heads, 8), (kv_heads, 8), (kv_heads, 6), (heads, 6))
        arrays = [rng.standard_normal((1, 25, *size)).astype(np.float32) for size in sizes]
        for options, texts in todays((OPTIONS[2], OPTIONS[4]), np.append(TEXTS, 25)):
            compare(ulysses_attention, comm, arrays, part(25, comm), options, texts)


def all_checks(comm: Communicator) -> None:
    rings(comm)
    heads_instead(comm)
