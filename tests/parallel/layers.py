"""Layers divided among ranks equal those of one device: results and every gradient, in 1e-5."""

from collections.abc import Callable
from typing import Any

import numpy as np

from unsloth_cupy import (
    LogProbs,
    Tape,
    cross_entropy,
    embedding,
    linear,
    linear_cross_entropy,
    linear_log_probs,
)
from unsloth_cupy import parallel as many
from unsloth_cupy.parallel import Communicator, part, shard

from ..harness.sampling import Sample
from .ranks import close

LOSSES = (
    {},
    {"z_loss": 0.3, "softcap": 2.0},
    {"smoothing": 0.3, "z_loss": 0.1, "softcap": 2.0},
    {"smoothing": 1.0},
)
HEADS = ({}, {"temperature": 0.7, "scale": 2.0}, {"softcap": 2.0})
RNG = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def learned(function: Callable[..., Any], arrays: list[Any], seed: Any) -> list[Any]:
    """Return the result of a function and the gradients of its arrays."""
    tape = Tape()
    watched = [tape.watch(array) for array in arrays]
    y = function(*watched)
    return [y.value, *tape.gradients(y, watched, seed)]


def exchanged(comm: Communicator) -> None:
    """Rows that go to other ranks and come back are as before, with their gradients."""
    x, w, dy = drawn(comm.size + 2, 3), drawn(3, 3), drawn(comm.size + 2, 3)
    counts = [3, *[1] * (comm.size - 1)]

    def divided(x: Any, w: Any) -> Any:
        sent, came = many.all_to_all_rows(x, counts, comm)
        return many.all_to_all_rows(linear(sent, w), came, comm)[0]

    y, dx, dw = learned(divided, [x, w], dy)
    expected = learned(linear, [x, w], dy)
    for actual, one in zip((y, dx), expected[:2], strict=True):
        close(actual, one)
    close(comm.all_reduce(dw), comm.size * expected[2])


def mlp(comm: Communicator) -> None:
    """Two layers, 7 columns between them, which no number of ranks above 1 divides."""
    arrays = [drawn(5, 3, 6), drawn(7, 6), drawn(7), drawn(4, 7), drawn(4)]
    dy = drawn(5, 3, 4)

    def alone(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
        return linear(linear(x, w, b), v) + c

    def divided(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
        h = many.column_parallel_linear(x, shard(w, 0, comm), shard(b, 0, comm), comm=comm)
        return many.row_parallel_linear(h, shard(v, 1, comm), c, comm=comm)

    def along(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
        w, b, v = shard(w, 0, comm), shard(b, 0, comm), shard(v, 1, comm)
        h = many.column_parallel_linear(shard(x, 1, comm), w, b, comm=comm, sequence_axis=1)
        y = many.row_parallel_linear(h, v, c, comm=comm, sequence_axis=-2)
        assert y.shape[1] == len(range(3)[part(3, comm)])
        return many.all_gather(y, 1, comm)

    expected = learned(alone, arrays, dy)
    for way in (divided, along):
        for one, other in zip(learned(way, arrays, dy), expected, strict=True):
            close(one, other)


def sums(comm: Communicator) -> None:
    """A sum over ranks: each gets the gradient of the sum, or of its part."""
    parts, dy = [drawn(5, 2) for _ in range(comm.size)], drawn(5, 2)
    x = parts[comm.rank]
    y, dx = learned(lambda x: many.all_reduce(x, comm), [x], dy)
    close(y, np.sum(parts, axis=0))
    close(dx, dy)
    own = part(5, comm)
    y, dx = learned(lambda x: many.reduce_scatter(x, 0, comm), [x], dy[own])
    close(y, np.sum(parts, axis=0)[own])
    close(dx, dy)


def vocabulary(comm: Communicator) -> None:
    """Words that do not divide, and some that do; ignored rows; the options of a loss.

    A run takes half of the options with each number of words, and all of them with one of both.
    """
    for number, vocab in enumerate((11, 8)):
        table, x = drawn(vocab, 6), drawn(3, 5, 6)
        tokens = RNG.integers(0, vocab, (3, 5))
        lookups(comm, vocab, table, tokens, x)
        tokens[0, :2] = -1
        dloss = drawn(3, 5)
        for options in Sample.one_in(2, (*LOSSES[number:], *LOSSES[:number])):
            losses(comm, vocab, [4 * x, table], tokens, dloss, options | {"ignore": -1})
        for options in Sample.one_in(2, (*HEADS[number:], *HEADS[:number])):
            # integers, whose sums are exact in any order: words that tie do so in every rank
            whole = [RNG.integers(-3, 4, a.shape).astype(np.float32) for a in (x, table)]
            log_probs(comm, vocab, whole, tokens, dloss, options | {"ignore": -1})


def lookups(comm: Communicator, vocab: int, table: Any, tokens: Any, dx: Any) -> None:
    def divided(w: Any) -> Any:
        return many.vocab_parallel_embedding(tokens, shard(w, 0, comm), vocab, comm=comm)

    def along(w: Any) -> Any:
        w = shard(w, 0, comm)
        x = many.vocab_parallel_embedding(tokens, w, vocab, comm=comm, sequence_axis=-2)
        assert x.shape[1] == len(range(5)[part(5, comm)])
        return many.all_gather(x, 1, comm)

    expected = learned(lambda w: embedding(tokens, w), [table], dx)
    for way in (divided, along):
        for one, other in zip(learned(way, [table], dx), expected, strict=True):
            close(one, other)


def losses(comm, vocab, arrays, labels, dloss, options) -> None:
    def head(x: Any, w: Any) -> Any:
        return linear_cross_entropy(x, w, labels, **options)

    def heads(x: Any, w: Any) -> Any:
        return many.vocab_parallel_linear_cross_entropy(
            x, shard(w, 0, comm), labels, vocab, comm=comm, max_bytes=100, **options
        )

    def along(x: Any, w: Any) -> Any:
        x, w = shard(x, 1, comm), shard(w, 0, comm)
        more = {"comm": comm, "sequence_axis": 1} | options
        return many.vocab_parallel_linear_cross_entropy(x, w, labels, vocab, **more)

    def whole(z: Any) -> Any:
        return cross_entropy(z, labels, **options)

    def columns(z: Any) -> Any:
        return many.vocab_parallel_cross_entropy(
            shard(z, -1, comm), labels, vocab, comm=comm, **options
        )

    logits = [4 * drawn(3, 5, vocab)]
    for alone, ways, given in ((head, (heads, along), arrays), (whole, (columns,), logits)):
        expected = learned(alone, given, dloss)
        for divided in ways:
            for one, other in zip(learned(divided, given, dloss), expected, strict=True):
                close(one, other)


def log_probs(comm, vocab, arrays, labels, seed, options) -> None:
    """All fields, and the gradients of both that have one; words tie, within and between ranks."""
    arrays[1][vocab // 2 :] = arrays[1][: -(vocab // 2)]
    more = options | {"comm": comm, "max_bytes": 100}
    found: list[Any] = []

    def both(result: Any) -> Any:
        found.append([getattr(each, "value", each) for each in result])
        return result.log_probs + result.entropy * (seed + 0.5)

    def alone(x: Any, w: Any) -> Any:
        return both(linear_log_probs(x, w, labels, **options))

    def heads(x: Any, w: Any) -> Any:
        w = shard(w, 0, comm)
        return both(many.vocab_parallel_linear_log_probs(x, w, labels, vocab, **more))

    def along(x: Any, w: Any) -> Any:
        x, w, axis = shard(x, 1, comm), shard(w, 0, comm), {"sequence_axis": 1}
        return both(many.vocab_parallel_linear_log_probs(x, w, labels, vocab, **more, **axis))

    expected = learned(alone, arrays, seed)
    for way in (heads, along):
        for one, other in zip(learned(way, arrays, seed), expected, strict=True):
            close(one, other)
        for name, one, other in zip(LogProbs._fields, found[-1], found[0], strict=True):
            assert one.dtype == other.dtype, name
            close(one, other)


def all_checks(comm: Communicator) -> None:
    for check in (mlp, exchanged, sums, vocabulary):
        check(comm)
