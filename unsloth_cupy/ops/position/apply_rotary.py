"""Rotary position embedding of queries and keys, whose angles the kernel computes.

y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        backward: the same with -sin

Pairs are (i, i + dim / 2); angle = position * rope_theta**(-2 i / dim).
"""

from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ...errors import ShapeError
from ..common.no_kernel import no_kernel
from .rope import launch_rope, rotated
from .rope_tables import check_base, frequencies

WIDEST = 4096  # the most columns of a head: a block stores the angles of a token in shared memory


def apply_rotary_embedding(
    q: Array, k: Array, positions: Array, rope_theta: float = 10000.0
) -> tuple[Array, Array]:
    """Return ``rope_qk`` of q and k, computing the angles instead of reading tables.

    ``angle = position * rope_theta**(-2 i / dim)``, in float32.

    Parameters
    ----------
    q, k : (batch, tokens, heads, dim), (batch, tokens, kv_heads, dim) float
        Queries and keys; dim is even.
    positions : (tokens,) or (batch, tokens) int32 or int64
        Any integers: there is no table whose length they could exceed.
    rope_theta : float
        Wavelengths, in positions, range from 2 pi to almost 2 pi times rope_theta.

    Returns
    -------
    q, k : with the shapes and the dtype of the arguments
        The rotated queries and keys.

    Raises
    ------
    ConfigError
        rope_theta is not above 1.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import apply_rotary_embedding, apply_rotary_embedding_backward
    >>> from unsloth_cupy import apply_rotary_embedding_forward, rope_qk, rope_tables
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 6, 4, 16), np.float32)
    >>> positions = np.arange(6)[None]
    >>> turned_q, turned_k = apply_rotary_embedding(q, k, positions)  # no table is needed
    >>> np.testing.assert_allclose(turned_q, rope_qk(q, k, *rope_tables(6, 16))[0], atol=1e-5)
    >>> turned = apply_rotary_embedding_forward(q, k, positions)
    >>> dq, dk, _ = apply_rotary_embedding_backward(*turned, positions)
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
    """Return the rotated q and k of ``apply_rotary_embedding``."""
    cos, sin = _angles(q, positions, rope_theta)
    return rotated(q, cos, sin, False), rotated(k, cos, sin, False)


@apply_rotary_embedding_forward.kernel(strided=("q", "k"))
def _launch(q: Array, k: Array, positions: Array, rope_theta: float) -> tuple[Array, Array]:
    return _rotate(q, k, positions, rope_theta, False)


@apply_rotary_embedding_forward.gradient
def apply_rotary_embedding_backward(
    dturned_q: Array, dturned_k: Array, positions: Array, *, rope_theta: float = 10000.0
) -> tuple[Array, Array, None]:
    """Return the gradients of q and k."""
    cos, sin = _angles(dturned_q, positions, rope_theta)
    dq, dk = (rotated(d, cos, -sin, False) for d in (dturned_q, dturned_k))
    return dq, dk, None


@apply_rotary_embedding_backward.kernel(strided=("dturned_q", "dturned_k"))
def _launch_backward(
    dturned_q: Array, dturned_k: Array, positions: Array, rope_theta: float
) -> tuple[Array, Array, None]:
    gradients = _rotate(dturned_q, dturned_k, positions, rope_theta, True)
    return NotImplemented if gradients is NotImplemented else (*gradients, None)


def _rotate(
    q: Array, k: Array, positions: Array, base: float, inverse: bool
) -> tuple[Array, Array]:
    """Rotate q and k by angles that the kernel computes: no table is copied to the device."""
    if q.shape[3] > WIDEST:
        return no_kernel(f"head dim {q.shape[3]} is above {WIDEST}")
    return launch_rope(q, k, None, positions, inverse=inverse, base=base)


def _check(call: str, rope_theta: float, **rest: Any) -> None:
    """Raise ConfigError for an invalid base, and ShapeError for an odd head dim."""
    check_base(call, rope_theta)
    shape = next(iter(rest.values())).shape
    if shape[3] % 2:
        problem = f"{call}: q {shape} has an odd dim; it must be even"
        raise ShapeError(problem, expected="an even dim", actual=tuple(shape))


apply_rotary_embedding_forward.require(_check)
apply_rotary_embedding_backward.require(_check)


def _angles(x: Array, positions: Array, base: float) -> tuple[Array, Array]:
    """Return cosines and sines of each token: (tokens, 1, half) or (batch, tokens, 1, half)."""
    frequency = frequencies(x.shape[3], base, like=x)
    angle = positions.astype(np.float32)[..., None, None] * frequency
    return np.cos(angle), np.sin(angle)
