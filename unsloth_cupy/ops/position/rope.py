"""Rotary position embedding: rotate pairs of columns by an angle that grows with position.

y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        backward: the same with -sin

Pairs are (i, i + rotated / 2), or neighbours (2 i, 2 i + 1) if interleaved.

Su et al., RoFormer, 2021.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import DTypeError, RangeError, ShapeError
from ..common import faults
from ..common.strides import with_head_strides

INT64 = np.dtype("int64")
REPORTER = faults.reporter("rope", "positions", "length")


@op(
    "x(batch, tokens, heads, dim), cos(length, half): table, sin(length, half): table,"
    " positions?(batch|1, tokens): int < length -> y(batch, tokens, heads, dim)",
    torch=lambda nn, t, o: nn.turned(t["x"], t),
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
        Tables from ``rope_tables``.  Columns of x from ``2 * half`` on are copied unchanged.
    positions : (tokens,) or (batch, tokens) int32 or int64, optional
        Rows of the tables, in 0 .. length - 1; by default 0 .. tokens - 1.
    interleaved : bool
        True: pairs are neighbours (2 i, 2 i + 1), as in GPT-J; False: (i, i + half), as in Llama.

    Returns
    -------
    y : (batch, tokens, heads, dim) float
        The rotated heads.

    Raises
    ------
    RangeError
        A position is outside the tables.  On a GPU the host does not read positions: the token
        becomes NaN, and the next ``check_errors()`` raises.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import rope, rope_backward, rope_tables
    >>> x = np.random.default_rng(0).standard_normal((1, 6, 4, 16), np.float32)
    >>> cos, sin = rope_tables(6, 16, base=10_000.0)
    >>> y = rope(x, cos, sin)
    >>> np.testing.assert_allclose((y**2).sum(axis=-1), (x**2).sum(axis=-1), rtol=1e-5)
    >>> np.testing.assert_allclose(rope_backward(y, cos, sin)[0], x, atol=1e-5)  # rotates back
    """
    return rotated(x, *by_token(x, cos, sin, positions), interleaved)


@rope.kernel(strided=("x",))
def _launch(x: Array, cos: Array, sin: Array, positions: Array | None, interleaved: bool) -> Array:
    return launch_rope(x, None, (cos, sin), positions, interleaved)[0]


@rope.gradient
def rope_backward(
    dy: Array, cos: Array, sin: Array, positions: Array | None, *, interleaved: bool = False
) -> tuple[Array, None, None, None]:
    """Return the gradient of x: dy rotated back."""
    cos, sin = by_token(dy, cos, sin, positions)
    return rotated(dy, cos, -sin, interleaved), None, None, None


@rope_backward.kernel(strided=("dy",))
def _launch_backward(
    dy: Array, cos: Array, sin: Array, positions: Array | None, interleaved: bool
) -> tuple[Array, None, None, None]:
    dx, _ = launch_rope(dy, None, (cos, sin), positions, interleaved, inverse=True)
    return dx, None, None, None


def check_tables(call: str, cos: Array, positions: Array | None, **rest: Any) -> None:
    """Raise if the tables differ in dtype, are too wide for a head, or too short for the tokens.

    The first array in ``rest`` is (batch, tokens, heads, dim).
    """
    (length, half), shape = cos.shape, next(iter(rest.values())).shape
    if cos.dtype != (sin := rest["sin"]).dtype:
        problem = f"{call}: cos is {cos.dtype.name} and sin is {sin.dtype.name}"
        cure = f"pass sin.astype({cos.dtype.name!r}), or make both with rope_tables"
        raise DTypeError(f"{problem}; {cure}", expected=cos.dtype, actual=sin.dtype)
    if 2 * half > shape[3]:
        raise ShapeError(
            f"{call}: cos {cos.shape} rotates {2 * half} columns, but a head of x {shape} has"
            f" {shape[3]}; make tables with rope_tables(length, dim <= {shape[3]})",
            expected=(length, shape[3] // 2),
            actual=(length, half),
        )
    if positions is None and shape[1] > length:
        raise RangeError(
            f"{call}: x {shape} has {shape[1]} tokens, but cos {cos.shape} has {length} positions;"
            f" make tables with rope_tables({shape[1]}, {2 * half})"
        )


rope.require(check_tables)
rope_backward.require(check_tables)


def reports(like: Array, positions: Array | None) -> Array | None:
    """Return the buffer for a kernel's reports of wrong positions; None without positions."""
    return None if positions is None else faults.record(like)


def tokens_of(
    q: Array, length: int, positions: Array | None, q_strides: Any, k_strides: Any
) -> dict[str, Any]:
    """Return the struct Tokens of heads.cuh: how a kernel iterates over tokens."""
    count = q.shape[0] * q.shape[1]
    period = q.shape[1] if positions is None else positions.size  # tokens after which they repeat
    return {"count": count, "period": period, "length": length, "q": q_strides, "k": k_strides}


def by_token(x: Array, cos: Array, sin: Array, positions: Array | None) -> tuple[Array, Array]:
    """Return each token's row of both tables: (tokens, 1, half) or (batch, tokens, 1, half)."""
    rows = slice(x.shape[1]) if positions is None else positions
    return cos[rows][..., None, :], sin[rows][..., None, :]


def rotated(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Return x with the pairs of its leading columns rotated, in a new array."""
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


@cache
def constants(
    dtypes: tuple[Any, Any, Any],
    token: tuple[int, int, int, int],
    lanes: int,
    interleaved: bool,
    inverse: bool,
    in_place: bool,
    angles: bool,
) -> Constants:
    """Return the constants of rope.cu for these dtypes and this shape of a token.

    A thread rotates up to four heads: this keeps enough accesses in flight, and the thread reads
    the tables once for all four.  A block has about 256 threads, and as many tokens as they can
    process.
    """
    x, table, positions = dtypes
    heads, kv_heads, dim, half = token
    pairs = lanes // 2 if interleaved and lanes > 1 else lanes  # of an access
    columns = max(1, min(half // pairs, 256))
    slots = max(1, min(-(-(heads + kv_heads) // 4), 256 // columns))
    return Constants(
        T=x,
        C=table,
        I=positions,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        LANES=lanes,
        COLUMNS=columns,
        SLOTS=slots,
        TOKENS=max(1, 256 // (columns * slots)),
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        IN_PLACE=in_place,
        ANGLES=angles,
    )


def launch_rope(
    q: Array,
    k: Array | None,
    tables: tuple[Array, Array] | None,
    positions: Array | None,
    interleaved: bool = False,
    *,
    inverse: bool = False,
    in_place: bool = False,
    base: float = 1.0,
) -> tuple[Array, Any]:
    """Return q and k rotated by the table rows of their positions.

    Without tables, the kernel computes the angles from ``base``.  With in_place, the heads of q and
    k must have strides that ``head_strides`` accepts.
    """
    outputs: Any = q, k
    if not in_place:
        outputs = [None if x is None else empty(x.shape, x.dtype, like=x) for x in outputs]
    (batch, tokens, heads, dim), kv_heads = q.shape, 0 if k is None else k.shape[2]
    length, half = (0, dim // 2) if tables is None else tables[0].shape
    cos, sin = (None, None) if tables is None else tables
    flat_q, q_strides = with_head_strides(q)
    flat_k, k_strides = (None, (0, 0)) if k is None else with_head_strides(k)
    results = (flat_q, flat_k) if in_place else outputs
    chosen = constants(
        (
            q.dtype,
            FLOAT32 if cos is None else cos.dtype,
            INT64 if positions is None else positions.dtype,
        ),
        (heads, kv_heads, dim, half),
        lanes(
            math.gcd(half * (1 + interleaved), dim, *q_strides, *k_strides),
            *(flat_q, flat_k, *results, cos, sin),
        ),
        interleaved,
        inverse,
        in_place,
        tables is None,
    )
    blocks = -(-batch * tokens // chosen["TOKENS"])
    threads = chosen["TOKENS"] * chosen["SLOTS"] * chosen["COLUMNS"]
    kernel = load("rope.cu", "rope", q, chosen)
    walk = tokens_of(q, length, positions, q_strides, k_strides)
    kernel[blocks, threads](
        *(flat_q, flat_k, cos, sin, positions, *results, walk, math.log2(base)),
        *(reports(q, positions), REPORTER),
    )
    return outputs[0], outputs[1]
