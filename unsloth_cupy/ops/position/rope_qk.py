"""Rotary position embedding of queries and keys in one launch.

y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        backward: the same with -sin

Pairs of columns and tables are as in ``rope``.
"""

from ...core.arrays import contiguous
from ...core.dtypes import Array
from ...core.op import op
from ..common.in_place import in_place, written_over
from ..common.no_kernel import no_kernel
from ..common.strides import head_strides
from .rope import by_token, check_tables, launch_rope, rotated


@op(
    "q(batch, tokens, heads, dim), k(batch, tokens, kv_heads, dim), cos(length, half): table,"
    " sin(length, half): table, positions?(batch|1, tokens): int < length"
    " -> turned_q(batch, tokens, heads, dim), turned_k(batch, tokens, kv_heads, dim)",
    torch=lambda nn, t, o: (nn.turned(t["q"], t), nn.turned(t["k"], t)),
)
def rope_qk(
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Array, Array]:
    """Return ``rope`` of queries and of keys; the tables are read once for both.

    Parameters
    ----------
    q, k : (batch, tokens, heads, dim), (batch, tokens, kv_heads, dim) float
        Queries and keys.
    cos, sin, positions, interleaved
        As in ``rope``.

    Returns
    -------
    q, k : with the shapes and the dtype of the arguments
        The rotated queries and keys.

    Raises
    ------
    RangeError
        A position is outside the tables; on a GPU as in ``rope``.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import rope, rope_qk, rope_qk_, rope_qk_backward, rope_tables
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 6, 4, 16), np.float32)
    >>> cos, sin = rope_tables(6, 16)
    >>> turned_q, turned_k = rope_qk(q, k, cos, sin)
    >>> np.testing.assert_array_equal(turned_k, rope(k, cos, sin))
    >>> dq, dk, *_ = rope_qk_backward(turned_q, turned_k, cos, sin)
    >>> np.testing.assert_allclose(dq, q, atol=1e-5)
    >>> _ = rope_qk_(q, k, cos, sin)  # in place
    >>> np.testing.assert_array_equal(q, turned_q)
    """
    cos, sin = by_token(q, cos, sin, positions)
    return rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)


@rope_qk.kernel(strided=("q", "k"))
def _launch(
    q: Array, k: Array, cos: Array, sin: Array, positions: Array | None, interleaved: bool
) -> tuple[Array, Array]:
    return launch_rope(q, k, (cos, sin), positions, interleaved)


@rope_qk.gradient
def rope_qk_backward(
    dturned_q: Array,
    dturned_k: Array,
    cos: Array,
    sin: Array,
    positions: Array | None,
    *,
    interleaved: bool = False,
) -> tuple[Array, Array, None, None, None]:
    """Return the gradients of q and k."""
    cos, sin = by_token(dturned_q, cos, sin, positions)
    dq = rotated(dturned_q, cos, -sin, interleaved)
    return dq, rotated(dturned_k, cos, -sin, interleaved), None, None, None


@rope_qk_backward.kernel(strided=("dturned_q", "dturned_k"))
def _launch_backward(
    dturned_q: Array,
    dturned_k: Array,
    cos: Array,
    sin: Array,
    positions: Array | None,
    interleaved: bool,
) -> tuple[Array, Array, None, None, None]:
    tables = cos, sin
    gradients = launch_rope(dturned_q, dturned_k, tables, positions, interleaved, inverse=True)
    return *gradients, None, None, None


rope_qk_over_ = written_over(rope_qk, "q", "k")
rope_qk_ = in_place(rope_qk_over_)


@rope_qk_over_.kernel
def _launch_over(
    q: Array, k: Array, cos: Array, sin: Array, positions: Array | None, interleaved: bool
) -> tuple[Array, Array]:
    if head_strides(q) is None or head_strides(k) is None:
        return no_kernel("heads of q or k are not contiguous, or the stride of tokens changes")
    tables = contiguous(cos), contiguous(sin)
    return launch_rope(q, k, tables, contiguous(positions), interleaved, in_place=True)


rope_qk.require(check_tables)
rope_qk_backward.require(check_tables)
rope_qk_over_.require(check_tables)
