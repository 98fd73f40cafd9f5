"""Rows of a table, selected by token.

x[t] = weight[tokens[t]]
"""

import numpy as np

from .. import _arrays
from .._op import op
from .._typing import Array


@op("tokens(*rows): int < vocab, weight(vocab, hidden) -> x(*rows, hidden)", widen=False)
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
        A token lies outside the vocabulary.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    return weight[tokens]


@embedding.gradient(
    "dx(*rows, hidden), tokens(*rows): int < vocab, weight(vocab, hidden)"
    " -> dtokens: none, dweight(vocab, hidden)"
)
def embedding_backward(dx: Array, tokens: Array, weight: Array) -> tuple[None, Array]:
    """Return the gradient of weight: to each row, the sum over its tokens, in their order."""
    vocab, hidden = weight.shape
    # That sum is a product with a sparse matrix: row v has a one for each token equal to v.
    # A stable sort fixes the order of the additions, so two runs give equal bits.
    selected = tokens.ravel()
    order = np.argsort(selected, kind="stable")
    ends = np.cumsum(np.bincount(selected, minlength=vocab))
    starts = np.concatenate([np.zeros_like(ends[:1]), ends])
    ones = np.ones_like(dx, shape=order.shape)
    sparse = _arrays.scipy_of("sparse", dx)
    one_hot = sparse.csr_matrix((ones, order, starts), shape=(vocab, order.size))
    return None, one_hot @ dx.reshape(order.size, hidden)
