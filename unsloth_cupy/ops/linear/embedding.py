"""The embedding of tokens: each token selects a row of a table.

x[t] = weight[tokens[t]]
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...placement import scipy_of
from ..common import faults
from ..common.checks import refuse_number

REPORTER = faults.reporter("embedding", "tokens", "vocab")


@op(
    "tokens(*rows): int < vocab, weight(vocab, hidden) -> x(*rows, hidden)",
    widen=False,
    torch=lambda nn, t, o: nn.embedding(t["tokens"], t["weight"]),
    traffic=lambda a: a["tokens"].nbytes + 2 * a["x"].nbytes,
)
def embedding(tokens: Array, weight: Array) -> Array:
    """Look up the row of each token: ``x = weight[tokens]``.

    Parameters
    ----------
    tokens : (*rows) int32 or int64
        Each in 0 .. vocab - 1.
    weight : (vocab, hidden) float
        One row per token.

    Returns
    -------
    x : (*rows, hidden) float

    Raises
    ------
    RangeError
        A token is outside the vocabulary.  On a GPU the host does not read the tokens: the row of
        such a token is NaN, and the next ``check_errors()`` raises.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import embedding, embedding_backward
    >>> tokens, weight = np.array([2, 0, 2]), np.arange(12, dtype=np.float32).reshape(4, 3)
    >>> x = embedding(tokens, weight)
    >>> np.testing.assert_array_equal(x, weight[tokens])
    >>> _, dweight = embedding_backward(np.ones_like(x), tokens, weight)
    >>> np.testing.assert_array_equal(dweight[:, 0], [1, 0, 2, 0])
    """
    return weight[tokens]


@embedding.require
def _check(call: str, tokens: Array) -> None:
    """Raise DTypeError if tokens is a number."""
    refuse_number(call, "tokens", tokens)


@cache
def _constants(weight: Any, tokens: Any, hidden: int, lanes: int) -> Constants:
    """Return the constants of embedding.cu.

    A thread has one vector, or one in each of ROWS rows of dweight, so blocks may be small.  CHUNK
    is about the square root of how often the most frequent token occurs, so that both a chunk and
    the list of a token's chunks are short.
    """
    sizes = {"HIDDEN": hidden, "LANES": lanes, "THREADS": 128, "CHUNK": 64, "ROWS": 4}
    return Constants(T=weight, I=tokens, **sizes)


@embedding.kernel
def _launch(tokens: Array, weight: Array) -> Array:
    """Return x from the kernel embedding."""
    tokens, weight = contiguous(tokens), contiguous(weight)
    vocab, hidden = weight.shape
    x = empty((*tokens.shape, hidden), weight.dtype, like=weight)
    constants = _constants(weight.dtype, tokens.dtype, hidden, lanes(hidden, weight))
    vectors, threads = x.size // constants["LANES"], constants["THREADS"]
    kernel = load("embedding.cu", "embedding", weight, constants)
    kernel[-(-vectors // threads), threads](
        tokens, weight, x, faults.record(weight), REPORTER, tokens.size, vocab
    )
    return x


@embedding.gradient
def embedding_backward(dx: Array, tokens: Array, weight: Array) -> tuple[None, Array]:
    """Return None and dweight: each row is the sum of dx over its tokens, in order."""
    vocab, hidden = weight.shape
    if not dx.size:
        return None, np.zeros_like(dx, shape=weight.shape)
    # This sum is a product with a sparse matrix: row v has a one for each token equal to v.
    # A stable sort fixes the order of the additions, so two runs give equal bits.
    selected = tokens.ravel()
    order = np.argsort(selected, kind="stable")
    ends = np.cumsum(np.bincount(selected, minlength=vocab))
    starts = np.concatenate([np.zeros_like(ends[:1]), ends])
    ones = np.ones_like(dx, shape=order.shape)
    sparse = scipy_of("sparse", dx)
    one_hot = sparse.csr_matrix((ones, order, starts), shape=(vocab, order.size))
    return None, one_hot @ dx.reshape(order.size, hidden)  # (vocab, tokens) @ (tokens, hidden)


@embedding_backward.kernel
def _launch_backward(dx: Array, tokens: Array, weight: Array) -> tuple[None, Array]:
    """Return None and dweight by three launches: starts of rows, sums of chunks, rows."""
    vocab, hidden = weight.shape
    order = np.argsort(tokens.ravel(), kind="stable")
    selected = tokens.ravel()[order]
    constants = _constants(dx.dtype, tokens.dtype, hidden, lanes(hidden, dx))
    threads, chunks = constants["THREADS"], tokens.size // constants["CHUNK"]
    tiles = -(-hidden // (threads * constants["LANES"]))
    starts = empty((vocab + 1,), np.int64, like=weight)
    partial = empty((chunks, hidden), np.float32, like=weight)
    dweight = empty(weight.shape, weight.dtype, like=weight)
    kernel = load("embedding.cu", "embedding_starts", dx, constants)
    kernel[-(-(vocab + 1) // threads), threads](selected, starts, tokens.size, vocab)
    kernel = load("embedding.cu", "embedding_partial", dx, constants)
    kernel[chunks * tiles, threads](dx, selected, order, partial)
    kernel = load("embedding.cu", "embedding_backward", dx, constants)
    blocks = -(-vocab // constants["ROWS"]) * tiles
    kernel[blocks, threads](dx, order, starts, partial, dweight, vocab)
    return None, dweight


embedding_backward.require(_check)
embedding_backward.facts["traffic"] = lambda a: (
    a["tokens"].nbytes + a["dx"].nbytes + a["dweight"].nbytes
)
