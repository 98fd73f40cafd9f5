"""Losses of the router of a mixture of experts: for balanced experts, and for small logits.

balance = experts * sum over e of (assignments of e / rows) * (mean probability of e)
z = mean of logsumexp(logits)**2

Fedus et al., Switch Transformers, 2021.  Zoph et al., ST-MoE, 2022.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import FLOAT32, Array, holds_numbers
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ShapeError
from ..activations.softmax import finite
from ..common.no_kernel import no_kernel

MOST_EXPERTS = 512  # of the kernel: the sums of its four warps have 16 KiB of shared memory
THREADS = 128  # of a block
# The number of blocks depends on the number of rows alone, so that sums have the same bits.
ROWS_OF_BLOCK, MOST_BLOCKS = 64, 128


def balance_loss(logits: Array, experts: Array, *, mask: Array | None = None) -> Array:
    """Return the load-balancing loss of a router: k if it uses its experts evenly, else more.

    ``experts_count * sum_e (assignments of e / rows) * (mean over rows of softmax(logits)[e])``,
    in float32; gradients reach the logits through the probabilities.

    Parameters
    ----------
    logits : (*rows, experts) float
        The logits of one layer, or of all layers, which are balanced together: (layers, *rows,
        experts), or the rows of one layer after another.
    experts : (*rows, k) int32 or int64
        The experts of each row, as ``route`` chose them.
    mask : (*rows) bool or 0/1, optional
        Rows that count; other rows, such as padding, may hold anything.  A mask of one layer
        applies to each layer.

    Returns
    -------
    loss : () float32, or float64 for float64 logits
        0 if no row counts.

    Raises
    ------
    RangeError
        An expert does not exist.  On a GPU the host does not read the experts, and such an expert
        is not counted.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import balance_loss, balance_loss_backward, balance_loss_forward, route
    >>> logits = np.zeros((4, 4), np.float32)
    >>> experts = np.array([[0, 1], [2, 3], [0, 1], [2, 3]])
    >>> np.testing.assert_allclose(balance_loss(logits, experts), 2)
    >>> np.testing.assert_allclose(balance_loss(logits, experts, mask=np.arange(4) < 2), 2)
    >>> loss, slopes = balance_loss_forward(logits, experts)
    >>> dlogits, *_ = balance_loss_backward(np.ones_like(loss), logits, None, slopes)
    >>> np.testing.assert_allclose(dlogits, 0)
    """
    results: Any = balance_loss_forward(logits, experts, as_bool(mask))
    loss: Array = results[0]
    return loss


@op(
    "logits(*rows, experts), experts(*rows, k): int < experts, mask?(*masked): bool"
    " -> loss(): stat, slopes(experts): stat",
    autocast="float32",
)
def balance_loss_forward(
    logits: Array, experts: Array, mask: Array | None = None
) -> tuple[Array, Array]:
    """Return the loss, and its derivatives by the sums of probabilities, for the backward op."""
    count = logits.shape[-1]
    p, weights, n = _row_statistics(logits, mask)[1:]
    counted = experts.reshape(len(p), experts.shape[-1])[weights > 0]  # (rows that count, k)
    assigned = np.bincount(counted.reshape(-1), minlength=count).astype(p.dtype)
    slopes = assigned / n * (count / n)
    return (slopes * (weights @ p)).sum(), slopes


@balance_loss_forward.kernel
def _launch(logits: Array, experts: Array, mask: Array | None) -> Any:
    if logits.shape[-1] > MOST_EXPERTS:
        return no_kernel(f"{logits.shape[-1]} experts: the kernel supports up to {MOST_EXPERTS}")
    slopes = empty(logits.shape[-1:], FLOAT32, like=logits)
    return _launch_loss(logits, experts, mask, slopes), slopes


@balance_loss_forward.gradient
def balance_loss_backward(
    dloss: Array, logits: Array, mask: Array | None, slopes: Array
) -> tuple[Array, None, None]:
    """Return the gradient of logits, 0 where mask is false."""
    _, p, weights, _ = _row_statistics(logits, mask)
    gradient = p * (slopes - (p @ slopes)[:, None])
    return (dloss * weights[:, None] * gradient).reshape(logits.shape), None, None


@balance_loss_backward.kernel
def _launch_backward(dloss: Array, logits: Array, mask: Array | None, slopes: Array) -> Any:
    if logits.shape[-1] > MOST_EXPERTS:
        return no_kernel(f"{logits.shape[-1]} experts: the kernel supports up to {MOST_EXPERTS}")
    return _launch_gradient(dloss, logits, mask, slopes, balance=True), None, None


def router_z_loss(logits: Array, *, mask: Array | None = None) -> Array:
    """Return the mean over rows of ``logsumexp(logits)**2``, which keeps a router's logits small.

    Parameters
    ----------
    logits : (*rows, experts) float
        The logits of one layer, or of all layers.
    mask : (*rows) bool or 0/1, optional
        Rows that count; other rows, such as padding, may hold anything.  A mask of one layer
        applies to each layer.

    Returns
    -------
    loss : () float32, or float64 for float64 logits
        0 if no row counts.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import router_z_loss, router_z_loss_backward, router_z_loss_forward
    >>> logits = np.zeros((3, 4), np.float32)
    >>> np.testing.assert_allclose(router_z_loss(logits), np.log(4) ** 2, rtol=1e-6)
    >>> loss, count = router_z_loss_forward(logits)
    >>> dlogits, _ = router_z_loss_backward(np.ones_like(loss), logits, None, count)
    >>> np.testing.assert_allclose(dlogits, np.log(4) / 2 / 3, rtol=1e-6)
    """
    results: Any = router_z_loss_forward(logits, as_bool(mask))
    loss: Array = results[0]
    return loss


@op(
    "logits(*rows, experts), mask?(*masked): bool -> loss(): stat, count(): stat",
    autocast="float32",
)
def router_z_loss_forward(logits: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """Return the loss, and the number of rows that count, for the backward op."""
    lse, _, weights, n = _row_statistics(logits, mask)
    return (weights * lse * lse).sum() / n, n


@router_z_loss_forward.kernel
def _launch_z(logits: Array, mask: Array | None) -> Any:
    if logits.shape[-1] > MOST_EXPERTS:
        return no_kernel(f"{logits.shape[-1]} experts: the kernel supports up to {MOST_EXPERTS}")
    count = empty((), FLOAT32, like=logits)
    return _launch_loss(logits, None, mask, count), count


@router_z_loss_forward.gradient
def router_z_loss_backward(
    dloss: Array, logits: Array, mask: Array | None, count: Array
) -> tuple[Array, None]:
    """Return the gradient of logits, 0 where mask is false."""
    lse, p, weights, _ = _row_statistics(logits, mask)
    return (dloss * (2 / count * weights * lse)[:, None] * p).reshape(logits.shape), None


@router_z_loss_backward.kernel
def _launch_z_backward(dloss: Array, logits: Array, mask: Array | None, count: Array) -> Any:
    if logits.shape[-1] > MOST_EXPERTS:
        return no_kernel(f"{logits.shape[-1]} experts: the kernel supports up to {MOST_EXPERTS}")
    return _launch_gradient(dloss, logits, mask, count, balance=False), None


def as_bool(mask: Any) -> Any:
    """Return a mask of 0 and 1, of any library, as bool; return other objects as they are."""
    return mask != 0 if holds_numbers(mask) else mask


def _check(call: str, logits: Any, mask: Any) -> None:
    """Raise ShapeError unless the mask covers all rows, or the rows of each layer."""
    rows = math.prod(logits.shape[:-1])
    if not logits.shape[-1]:
        raise ShapeError(f"{call}: logits has no experts", expected="1 or more", actual=0)
    if mask is None:
        return
    masked = math.prod(mask.shape)
    if rows % masked if masked else rows:
        problem = f"{call}: mask has {masked} rows; logits has {rows}, which is not a multiple"
        raise ShapeError(problem, expected=rows, actual=masked)


balance_loss_forward.require(_check)
balance_loss_backward.require(_check)
router_z_loss_forward.require(_check)
router_z_loss_backward.require(_check)


def _row_statistics(logits: Array, mask: Array | None) -> tuple[Array, Array, Array, Any]:
    """Return lse, probabilities and weight of each row, and the number of rows that count.

    The weight is 1 for rows that count, else 0.
    """
    x = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])  # (rows, experts)
    weights = np.ones_like(x, shape=(len(x),))
    if mask is not None and mask.size:
        counted = np.tile(mask.reshape(-1), len(x) // mask.size)
        weights = counted.astype(x.dtype)
        x = np.where(counted[:, None], x, x.dtype.type(0))
    top = finite(x.max(axis=-1, keepdims=True))
    p = np.exp(x - top)
    total = p.sum(axis=-1, keepdims=True)
    p /= total
    return (top + np.log(total))[:, 0], p, weights, np.maximum(weights.sum(), 1)


def _launch_loss(logits: Array, experts: Array | None, mask: Array | None, needed: Array) -> Array:
    """Return the loss; write to ``needed`` what the backward op needs: slopes, or the count."""
    count = logits.shape[-1]
    rows = logits.size // count
    numbers = None if experts is None else experts.dtype
    top = 1 if experts is None else experts.shape[-1]
    chosen = _constants(logits.dtype, numbers, count, top, mask is not None)
    blocks = min(MOST_BLOCKS, -(-rows // ROWS_OF_BLOCK))
    sums = 2 if experts is None else 2 * count + 1
    partial = empty((blocks, sums), FLOAT32, like=logits)
    kernel = load("router_losses.cu", "router_sums", logits, chosen)
    masked = 1 if mask is None else mask.size
    kernel[blocks, THREADS](logits, experts, mask, partial, rows, masked)
    loss = empty((), FLOAT32, like=logits)
    kernel = load("router_losses.cu", "router_loss", logits, chosen)
    kernel[1, THREADS](partial, loss, needed, blocks)
    return loss


def _launch_gradient(
    dloss: Array, logits: Array, mask: Array | None, needed: Array, *, balance: bool
) -> Array:
    """Return the gradient of logits."""
    count = logits.shape[-1]
    rows = logits.size // count
    numbers = np.dtype(np.int32) if balance else None
    chosen = _constants(logits.dtype, numbers, count, 1, mask is not None)
    dlogits = empty(logits.shape, logits.dtype, like=logits)
    kernel = load("router_losses.cu", "router_loss_backward", logits, chosen)
    blocks = -(-rows * chosen["ROW_THREADS"] // THREADS)
    masked = 1 if mask is None else mask.size
    kernel[blocks, THREADS](dloss, logits, mask, needed, dlogits, rows, masked)
    return dlogits


@cache
def _constants(dtype: Any, numbers: Any, experts: int, top: int, masked: bool) -> Constants:
    """Return the constants of router_losses.cu; without a dtype of experts, for the z-loss."""
    return Constants(
        T=dtype,
        I=numbers or np.dtype(np.int32),
        EXPERTS=experts,
        TOP=top,
        BALANCE=numbers is not None,
        HAS_MASK=masked,
        ROW_THREADS=min(32, 1 << (experts - 1).bit_length()),
        THREADS=THREADS,
    )
