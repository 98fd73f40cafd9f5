"""RMS norm of each head of queries and keys, then rotary position embedding.

z = x * rstd * (weight + offset)        rstd = 1 / sqrt(mean(x**2) + eps), over each head
y1 = z1 cos - z2 sin        y2 = z2 cos + z1 sin

Pairs of columns and tables are as in ``rope``.  Qwen3 and Gemma 3 do this before attention.

Henry et al., Query-Key Normalization for Transformers, 2020.  Su et al., RoFormer, 2021.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.target import limits
from ..common import faults
from ..common.checks import check_eps
from ..common.columns import column_sums
from ..common.no_kernel import no_kernel
from ..common.strides import with_head_strides
from ..norms.rms_norm import rms_norm_backward, rms_norm_forward
from .rope import INT64, by_token, check_tables, reports, rotated, tokens_of

REPORTER = faults.reporter("qk_norm_rope", "positions", "length")
VALUES = 16  # the most values of a head in a thread: head dims up to 512, for a warp of 32 threads


def qk_norm_rope(
    q: Array,
    k: Array,
    q_weight: Array,
    k_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Array, Array]:
    """Return ``rope_qk`` of queries and keys, after ``rms_norm`` of each head.

    ``z = x / sqrt(mean(x**2) + eps) * (weight + offset)``, the mean over dim; then
    ``y1 = z1 cos - z2 sin`` and ``y2 = z2 cos + z1 sin``.  The result is rounded once.

    Parameters
    ----------
    q, k : (batch, tokens, heads, dim), (batch, tokens, kv_heads, dim) float
        Queries and keys.
    q_weight, k_weight : (dim,) dtype of q or float32
        Scale of each column, the same for all heads.
    cos, sin : (length, half) dtype of q or float32
        Tables from ``rope_tables``.  Columns from ``2 * half`` on are normalised but not rotated.
    positions : (tokens,) or (batch, tokens) int32 or int64, optional
        Rows of the tables, in 0 .. length - 1; by default 0 .. tokens - 1.
    eps : float
        Added to the mean square, in units of q squared.
    offset : float
        Added to the weights: 1.0 if the checkpoint stores the weights minus 1, as in Gemma.
    interleaved : bool
        True: pairs are neighbours (2 i, 2 i + 1), as in GPT-J; False: (i, i + half), as in Llama.

    Returns
    -------
    q, k : with the shapes and the dtype of the arguments
        The normalised and rotated queries and keys.

    Raises
    ------
    ConfigError
        eps is negative.
    RangeError
        A position is outside the tables; on a GPU as in ``rope``.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import qk_norm_rope, qk_norm_rope_backward, qk_norm_rope_forward
    >>> from unsloth_cupy import rms_norm, rope_qk, rope_tables
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 6, 4, 16), np.float32)
    >>> weight, (cos, sin) = np.ones(16, np.float32), rope_tables(6, 16)
    >>> inputs = q, k, weight, weight, cos, sin
    >>> rotated = qk_norm_rope(*inputs)
    >>> separate = rope_qk(rms_norm(q, weight), rms_norm(k, weight), cos, sin)
    >>> np.testing.assert_allclose(rotated[0], separate[0], atol=1e-5)
    >>> *rotated, q_rstd, k_rstd = qk_norm_rope_forward(*inputs)
    >>> grads = qk_norm_rope_backward(*rotated, *inputs, q_rstd=q_rstd, k_rstd=k_rstd)
    """
    arrays = q, k, q_weight, k_weight, cos, sin, positions
    return qk_norm_rope_forward(*arrays, eps=eps, offset=offset, interleaved=interleaved)[:2]


@op(
    "q(batch, tokens, heads, dim), k(batch, tokens, kv_heads, dim), q_weight(dim): param,"
    " k_weight(dim): param, cos(length, half): table, sin(length, half): table,"
    " positions?(batch|1, tokens): int < length"
    " -> turned_q(batch, tokens, heads, dim), turned_k(batch, tokens, kv_heads, dim),"
    " q_rstd(batch, tokens, heads): stat, k_rstd(batch, tokens, kv_heads): stat",
    torch=lambda nn, t, o: tuple(
        nn.turned(nn.rms_norm(t[x], t[w].shape, t[w], o["eps"]), t)
        for x, w in (("q", "q_weight"), ("k", "k_weight"))
    ),
)
def qk_norm_rope_forward(
    q: Array,
    k: Array,
    q_weight: Array,
    k_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """Return q and k of ``qk_norm_rope``, and rstd of each head for the backward op."""
    cos, sin = by_token(q, cos, sin, positions)
    normalised = rms_norm_forward.definition
    z_q, _, q_rstd = normalised(q, q_weight, eps=eps, offset=offset)
    z_k, _, k_rstd = normalised(k, k_weight, eps=eps, offset=offset)
    turned_q, turned_k = (rotated(z, cos, sin, interleaved) for z in (z_q, z_k))
    return turned_q, turned_k, q_rstd, k_rstd


@cache
def _constants(
    dtypes: tuple[Any, ...], token: tuple[int, ...], lanes: int, interleaved: bool
) -> Constants:
    """Return the constants of qk_norm_rope.cu for these dtypes and this shape of a token.

    A thread holds the values of two accesses to a head, so 8 threads process a head of 128 columns
    in 16 bits, and a warp processes four heads at a time; two such rounds are in flight.
    """
    x, q_weight, k_weight, table, positions = dtypes
    heads, kv_heads, dim, half = token
    pairs = lanes // 2 if interleaved and lanes > 1 else lanes
    chunks = -(-dim // (2 * pairs))
    return Constants(
        T=x,
        W=q_weight,
        B=k_weight,
        C=table,
        I=positions,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        LANES=lanes,
        GROUP=min(32, 1 << (chunks - 1).bit_length()),
        THREADS=128,
        # blocks of an SM, which leave a thread 72 registers, or 168 for sums of both weights
        FORWARD_RESIDENT=7,
        RESIDENT=3,
        INTERLEAVED=interleaved,
    )


@qk_norm_rope_forward.kernel(strided=("q", "k"))
def _launch_forward(
    q: Array,
    k: Array,
    q_weight: Array,
    k_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array | None,
    eps: float,
    offset: float,
    interleaved: bool,
) -> tuple[Array, Array, Array, Array]:
    if q.shape[3] > 32 * VALUES:
        return no_kernel(f"head dim {q.shape[3]} is above {32 * VALUES}")
    turned = [empty(x.shape, x.dtype, like=x) for x in (q, k)]
    rstd = [empty(x.shape[:3], np.float32, like=x) for x in (q, k)]
    arrays, constants, kernel, walk = _chosen(
        "qk_norm_rope_forward", (q, k, q_weight, k_weight, cos, sin, positions), interleaved
    )
    blocks = -(-walk["count"] * 32 // constants["THREADS"])
    kernel[blocks, constants["THREADS"]](
        *(*arrays, *turned, *rstd, walk, eps, offset), *(reports(q, positions), REPORTER)
    )
    return *turned, *rstd


def _chosen(
    name: str, arrays: tuple[Any, ...], interleaved: bool, *gradients: Any
) -> tuple[tuple[Any, ...], Constants, Any, dict[str, Any]]:
    """Return the arrays of a forward call as the kernel reads them, constants, kernel and Tokens.

    ``gradients``: further arrays that the kernel reads with the same accesses as q and k.
    """
    q, k, q_weight, k_weight, cos, sin, positions = arrays
    (_, _, heads, dim), (length, half) = q.shape, cos.shape
    flat_q, q_strides = with_head_strides(q)
    flat_k, k_strides = with_head_strides(k)
    whole = math.gcd(half * (1 + interleaved), dim, *q_strides, *k_strides)
    dtypes = q.dtype, q_weight.dtype, k_weight.dtype, cos.dtype
    constants = _constants(
        (*dtypes, INT64 if positions is None else positions.dtype),
        (heads, k.shape[2], dim, half),
        lanes(whole, flat_q, flat_k, q_weight, k_weight, cos, sin, *gradients),
        interleaved,
    )
    walk = tokens_of(q, length, positions, q_strides, k_strides)
    kernel = load("qk_norm_rope.cu", name, q, constants)
    return (flat_q, flat_k, *arrays[2:]), constants, kernel, walk


@qk_norm_rope_forward.gradient
def qk_norm_rope_backward(
    dturned_q: Array,
    dturned_k: Array,
    q: Array,
    k: Array,
    q_weight: Array,
    k_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array | None,
    q_rstd: Array,
    k_rstd: Array,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Array, Array, Array, Array, None, None, None]:
    """Return the gradients of q, k and their weights."""
    cos, sin = by_token(q, cos, sin, positions)
    dz_q, dz_k = (rotated(dy, cos, -sin, interleaved) for dy in (dturned_q, dturned_k))
    back = rms_norm_backward.definition
    dq, dq_weight, *_ = back(dz_q, None, q, q_weight, None, None, q_rstd, offset=offset)
    dk, dk_weight, *_ = back(dz_k, None, k, k_weight, None, None, k_rstd, offset=offset)
    return dq, dk, dq_weight, dk_weight, None, None, None


@qk_norm_rope_backward.kernel(strided=("q", "k"))
def _launch_backward(
    dturned_q: Array,
    dturned_k: Array,
    q: Array,
    k: Array,
    q_weight: Array,
    k_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array | None,
    q_rstd: Array,
    k_rstd: Array,
    offset: float,
    interleaved: bool,
) -> tuple[Array, Array, Array, Array, None, None, None]:
    dim = q.shape[3]
    if dim > 32 * VALUES:
        return no_kernel(f"head dim {dim} is above {32 * VALUES}")
    dq, dk = (empty(x.shape, x.dtype, like=x) for x in (q, k))
    dq_weight, dk_weight = (empty(w.shape, w.dtype, like=q) for w in (q_weight, k_weight))
    arrays, constants, kernel, walk = _chosen(
        "qk_norm_rope_backward",
        (q, k, q_weight, k_weight, cos, sin, positions),
        interleaved,
        *(dturned_q, dturned_k),
    )
    threads = constants["THREADS"]
    # as many blocks as the device holds at once, so that each sums many heads before it writes
    blocks = min(-(-walk["count"] * 32 // threads), limits(q).processors * constants["RESIDENT"])
    partial = empty((2, blocks, dim), np.float32, like=q)
    kernel[blocks, threads](
        dturned_q, dturned_k, *arrays, q_rstd, k_rstd, dq, dk, partial, walk, offset
    )
    column_sums(partial, dq_weight, dk_weight)
    return dq, dk, dq_weight, dk_weight, None, None, None


qk_norm_rope_forward.require(check_eps)
qk_norm_rope_forward.require(check_tables)
qk_norm_rope_backward.require(check_tables)
