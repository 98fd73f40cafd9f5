"""Merge two attention results of the same queries over different keys.

lse = log(exp(lse_a) + exp(lse_b))      out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    dlse_a = w_a * (rowsum(dout * (out_a - out)) + dlse)      dout_a = w_a * dout

with w_a = exp(lse_a - lse), and the same for b.  Milakov and Gimelshein, Online normalizer
calculation for softmax, 2018.
"""

import math

import numpy as np

from ...core.dtypes import Array
from ...core.op import op


@op(
    "out_a(batch, queries, heads, dim), lse_a(batch, heads, queries): stat,"
    " out_b(batch, queries, heads, dim), lse_b(batch, heads, queries): stat"
    " -> out(batch, queries, heads, dim), lse(batch, heads, queries): stat"
)
def merge_attention(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Return the attention over the keys of a and b together; ring and cascade attention need it.

    Parameters
    ----------
    out_a, out_b : (batch, queries, heads, dim) float
        Results of attention_forward; no key may be in both.
    lse_a, lse_b : (batch, heads, queries) float32, or float64 for float64 operands
        Natural log of the sum of exp(score); -inf where a query sees no key.

    Returns
    -------
    out : (batch, queries, heads, dim) float
        0 where a query sees no key, neither in a nor in b.
    lse : (batch, heads, queries) float32, or float64 for float64 operands
        Natural log of the sum of exp(score) over the keys of both.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import attention, attention_forward
    >>> from unsloth_cupy import merge_attention, merge_attention_backward
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 8, 2, 16), np.float32)
    >>> first, second = (attention_forward(q, part, part) for part in (k[:, :5], k[:, 5:]))
    >>> out, lse = merge_attention(*first, *second)  # the same as over all keys at once
    >>> np.testing.assert_allclose(out, attention(q, k, k), rtol=1e-5, atol=1e-5)
    >>> grads = merge_attention_backward(out, None, *first, *second, out, lse)
    """
    lse = np.logaddexp(lse_a, lse_b)
    return _weight(lse_a, lse) * out_a + _weight(lse_b, lse) * out_b, lse


@merge_attention.gradient
def merge_attention_backward(
    dout: Array,
    dlse: Array | None,
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    out: Array,
    lse: Array,
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of out_a, lse_a, out_b and lse_b."""

    def one(part: Array, part_lse: Array) -> tuple[Array, Array]:
        """Return the gradients of one out and its lse."""
        weight = _weight(part_lse, lse)  # (batch, queries, heads, 1)
        row_sum = (dout * (part - out)).sum(axis=-1, keepdims=True)
        row_sum = row_sum if dlse is None else row_sum + _by_query(dlse)
        # lse: (batch, heads, queries)
        return weight * dout, (weight * row_sum)[..., 0].transpose(0, 2, 1)

    return *one(out_a, lse_a), *one(out_b, lse_b)


def _weight(part: Array, lse: Array) -> Array:
    """Return exp(part - lse) with axes that broadcast to out; 0, not NaN, where both are -inf."""
    return _by_query(np.exp(part - np.where(lse == -math.inf, 0, lse)))


def _by_query(rows: Array) -> Array:
    """Return (batch, heads, queries) as (batch, queries, heads, 1)."""
    return rows.transpose(0, 2, 1)[..., None]  # (batch, queries, heads, 1)
