"""Rotary position embedding of queries and keys, together.

y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        backward: the same with -sin

Pairs and tables are those of ``rope``.
"""

from typing import Any

import numpy as np

from .._arrays import empty, packed
from .._op import op
from .._typing import Array
from ..errors import ConfigError, GradientError
from ..tape import Var
from .rope import by_token, check_tables, launch_rope, rotated


@op(
    "q(batch, tokens, heads, dim), k(batch, tokens, kv_heads, dim), cos(length, half): table,"
    " sin(length, half): table, positions?(batch|1, tokens): int < length"
    " -> turned_q(batch, tokens, heads, dim), turned_k(batch, tokens, kv_heads, dim)"
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
    """Return ``rope`` of queries and of keys, whose tables are read once for both.

    Parameters
    ----------
    q, k : (batch, tokens, heads, dim), (batch, tokens, kv_heads, dim) float
        Queries and keys.
    cos, sin, positions, interleaved
        As in ``rope``.

    Returns
    -------
    q, k : of the shapes and the dtype of the arguments

    Raises
    ------
    RangeError
        A position lies outside the tables.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    check_tables("rope_qk", q, cos, positions)
    cos, sin = by_token(q, cos, sin, positions)
    return rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)


@rope_qk.kernel
def _launch(
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Array, Array]:
    check_tables("rope_qk", q, cos, positions)
    turned_q, turned_k = (empty(x.shape, x.dtype, like=x) for x in (q, k))
    launch_rope((q, k), (turned_q, turned_k), cos, sin, positions, interleaved)
    return turned_q, turned_k


@rope_qk.gradient(
    "dturned_q(batch, tokens, heads, dim), dturned_k(batch, tokens, kv_heads, dim),"
    " cos(length, half): table, sin(length, half): table,"
    " positions?(batch|1, tokens): int < length -> dq(batch, tokens, heads, dim),"
    " dk(batch, tokens, kv_heads, dim), dcos: none, dsin: none, dpositions: none"
)
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
    check_tables("rope_qk_backward", dturned_q, cos, positions)
    cos, sin = by_token(dturned_q, cos, sin, positions)
    dq = rotated(dturned_q, cos, -sin, interleaved)
    return dq, rotated(dturned_k, cos, -sin, interleaved), None, None, None


@rope_qk_backward.kernel
def _launch_backward(
    dturned_q: Array,
    dturned_k: Array,
    cos: Array,
    sin: Array,
    positions: Array | None,
    *,
    interleaved: bool = False,
) -> tuple[Array, Array, None, None, None]:
    check_tables("rope_qk_backward", dturned_q, cos, positions)
    dq, dk = (empty(x.shape, x.dtype, like=x) for x in (dturned_q, dturned_k))
    launch_rope((dturned_q, dturned_k), (dq, dk), cos, sin, positions, interleaved, inverse=True)
    return dq, dk, None, None, None


def rope_qk_(
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Array, Array]:
    """Write ``rope_qk`` of q and k over q and k.

    Parameters
    ----------
    q, k : (batch, tokens, heads, dim), (batch, tokens, kv_heads, dim) float
        Queries and keys, to be written to.
    cos, sin, positions, interleaved
        As in ``rope``.

    Returns
    -------
    q, k : the arguments themselves

    Raises
    ------
    ConfigError
        q or k cannot be written to.
    GradientError
        q or k is on a tape, whose record a change would falsify.
    RangeError, ShapeError, DTypeError
        As ``rope_qk``; q and k are then unchanged.
    """
    arrays: dict[str, Any] = {"q": q, "k": k}
    for name, array in arrays.items():
        if isinstance(array, Var):
            raise GradientError(f"rope_qk_: {name} is on a tape; call rope_qk, which leaves it")
        if not hasattr(array, "__setitem__") or (
            isinstance(array, np.ndarray) and not array.flags.writeable
        ):
            raise ConfigError(f"rope_qk_: {name} is read-only; call rope_qk, or pass a copy")
    rope_qk_over_(q, k, cos, sin, positions, interleaved=interleaved)
    return q, k


@op(
    "q(batch, tokens, heads, dim), k(batch, tokens, kv_heads, dim), cos(length, half): table,"
    " sin(length, half): table, positions?(batch|1, tokens): int < length"
    " -> turned_q(batch, tokens, heads, dim), turned_k(batch, tokens, kv_heads, dim)",
    widen=False,  # a widened copy would take the result in place of q
)
def rope_qk_over_(
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Array, Array]:
    """Write ``rope_qk`` of q and k over q and k, and return them."""
    q[...], k[...] = rope_qk(q, k, cos, sin, positions, interleaved=interleaved)
    return q, k


@rope_qk_over_.kernel
def _launch_over(
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Array, Array]:
    check_tables("rope_qk_", q, cos, positions)
    if q.flags.c_contiguous and k.flags.c_contiguous:
        cos, sin = packed(cos), packed(sin)
        positions = None if positions is None else packed(positions)
        launch_rope((q, k), (q, k), cos, sin, positions, interleaved)
    else:
        rope_qk_over_.definition(q, k, cos, sin, positions, interleaved=interleaved)
    return q, k
