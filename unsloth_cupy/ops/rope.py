"""Rotary position embedding: each pair of columns turns by an angle that grows with position.

y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        backward: the same with -sin

Pairs are (i, i + rotated / 2), or neighbours (2 i, 2 i + 1) where interleaved.

Su et al., RoFormer, 2021.
"""

from typing import Any

import numpy as np

from .._op import op
from .._typing import Array
from ..errors import ConfigError, GradientError, RangeError, ShapeError
from ..tape import Var
from .rope_tables import frequencies


@op(
    "x(batch, tokens, heads, dim), cos(length, half): table, sin(length, half): table,"
    " positions?(batch|1, tokens): int < length -> y(batch, tokens, heads, dim)"
)
def rope(
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    interleaved: bool = False,
) -> Array:
    """Rotate each pair of columns of a head by the angle of its token's position.

    ``y1 = x1 cos - x2 sin`` and ``y2 = x2 cos + x1 sin``.

    Parameters
    ----------
    x : (batch, tokens, heads, dim) float
        Queries or keys.
    cos, sin : (length, half) dtype of x or float32
        As ``rope_tables`` makes them.  Columns from ``2 * half`` on are left as they are.
    positions : (tokens,) or (batch, tokens) int32 or int64, optional
        Rows of the tables, in 0 .. length - 1; 0 .. tokens - 1 where absent.
    interleaved : bool
        Pairs are neighbours (2 i, 2 i + 1), as in GPT-J, and not (i, i + half), as in Llama.

    Returns
    -------
    y : (batch, tokens, heads, dim) float

    Raises
    ------
    RangeError
        A position lies outside the tables.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    check_tables("rope", x, cos, positions)
    return _rotated(x, *_by_token(x, cos, sin, positions), interleaved)


@rope.gradient(
    "dy(batch, tokens, heads, dim), cos(length, half): table, sin(length, half): table,"
    " positions?(batch|1, tokens): int < length"
    " -> dx(batch, tokens, heads, dim), dcos: none, dsin: none, dpositions: none"
)
def rope_backward(
    dy: Array, cos: Array, sin: Array, positions: Array | None, *, interleaved: bool = False
) -> tuple[Array, None, None, None]:
    """Return the gradient of x: dy, turned back."""
    cos, sin = _by_token(dy, cos, sin, positions)
    return _rotated(dy, cos, -sin, interleaved), None, None, None


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
    cos, sin = _by_token(q, cos, sin, positions)
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


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
    cos, sin = _by_token(dturned_q, cos, sin, positions)
    dq = _rotated(dturned_q, cos, -sin, interleaved)
    return dq, _rotated(dturned_k, cos, -sin, interleaved), None, None, None


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
    q[...], k[...] = rope_qk(q, k, cos, sin, positions, interleaved=interleaved)
    return q, k


def apply_rotary_embedding(
    q: Array, k: Array, positions: Array, rope_theta: float = 10000.0
) -> tuple[Array, Array]:
    """Return ``rope_qk`` of q and k with angles worked out on the spot.

    ``angle = position * rope_theta**(-2 i / dim)``, in float32.

    Parameters
    ----------
    q, k : (batch, tokens, heads, dim), (batch, tokens, kv_heads, dim) float
        Queries and keys; dim is even.
    positions : (tokens,) or (batch, tokens) int32 or int64
        Any integers: there is no table to leave.
    rope_theta : float
        Wavelengths, in positions, run from 2 pi to almost 2 pi times rope_theta.

    Returns
    -------
    q, k : of the shapes and the dtype of the arguments

    Raises
    ------
    ConfigError
        rope_theta is not above 1.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    return apply_rotary_embedding_forward(q, k, positions, rope_theta=rope_theta)


@op(
    "q(batch, tokens, heads, dim), k(batch, tokens, kv_heads, dim),"
    " positions(batch|1, tokens): int"
    " -> turned_q(batch, tokens, heads, dim), turned_k(batch, tokens, kv_heads, dim)"
)
def apply_rotary_embedding_forward(
    q: Array, k: Array, positions: Array, *, rope_theta: float = 10000.0
) -> tuple[Array, Array]:
    """Return q and k as apply_rotary_embedding does."""
    cos, sin = _angles(q, positions, rope_theta)
    return _rotated(q, cos, sin, False), _rotated(k, cos, sin, False)


@apply_rotary_embedding_forward.gradient(
    "dturned_q(batch, tokens, heads, dim), dturned_k(batch, tokens, kv_heads, dim),"
    " positions(batch|1, tokens): int -> dq(batch, tokens, heads, dim),"
    " dk(batch, tokens, kv_heads, dim), dpositions: none"
)
def apply_rotary_embedding_backward(
    dturned_q: Array, dturned_k: Array, positions: Array, *, rope_theta: float = 10000.0
) -> tuple[Array, Array, None]:
    """Return the gradients of q and k."""
    cos, sin = _angles(dturned_q, positions, rope_theta)
    dq, dk = (_rotated(d, cos, -sin, False) for d in (dturned_q, dturned_k))
    return dq, dk, None


def check_tables(call: str, x: Array, cos: Array, positions: Array | None) -> None:
    """Raise for tables too wide for a head, or too short for tokens without positions."""
    length, half = cos.shape
    if 2 * half > x.shape[3]:
        raise ShapeError(
            f"{call}: cos {cos.shape} turns {2 * half} columns and a head of x {x.shape} has"
            f" {x.shape[3]}; make tables with rope_tables(length, dim <= {x.shape[3]})"
        )
    if positions is None and x.shape[1] > length:
        raise RangeError(
            f"{call}: x {x.shape} has {x.shape[1]} tokens and cos {cos.shape} {length} positions;"
            f" make tables with rope_tables({x.shape[1]}, {2 * half})"
        )


def _by_token(x: Array, cos: Array, sin: Array, positions: Array | None) -> tuple[Array, Array]:
    """Return the row of each token: (tokens, 1, half) or (batch, tokens, 1, half)."""
    rows = slice(x.shape[1]) if positions is None else positions
    return cos[rows][..., None, :], sin[rows][..., None, :]


def _angles(x: Array, positions: Array, base: float) -> tuple[Array, Array]:
    """Return cosines and sines as _by_token does."""
    dim = x.shape[3]
    if dim % 2:
        raise ShapeError(f"apply_rotary_embedding: q {x.shape} has an odd dim; pairs turn")
    frequency = np.asarray(frequencies(dim, base), like=x)
    angle = positions.astype(np.float32)[..., None, None] * frequency
    return np.cos(angle), np.sin(angle)


def _rotated(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Return x with the pairs of its leading columns turned, in a new array."""
    half = cos.shape[-1]
    pairs = [slice(0, 2 * half, 2), slice(1, 2 * half, 2)]
    if not interleaved:
        pairs = [slice(half), slice(half, 2 * half)]
    y = np.empty_like(x)
    first, second = (x[..., columns] for columns in pairs)
    for columns, one, other, sine in zip(
        pairs, (first, second), (second, first), (-sin, sin), strict=True
    ):
        part = y[..., columns]
        np.multiply(one, cos, out=part)
        part += other * sine
    y[..., 2 * half :] = x[..., 2 * half :]
    return y
