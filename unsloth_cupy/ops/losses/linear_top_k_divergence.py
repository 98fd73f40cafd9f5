"""Divergence of a linear head from a teacher whose top k tokens alone are stored.

loss = sum(t (log(t) - log(s))) over the stored tokens + left log(left / rest)
left = 1 - sum(t), rest = sum(s) over all other tokens        the full logits are never stored
"""

from collections.abc import Set
from functools import cache, partial
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ConfigError, RangeError
from ..activations.softmax import finite
from ..common import faults
from ..linear.linear import flat
from ._head import Rows, check_head, check_max_bytes, operations
from ._launch import Access, access_of, row_threads
from .divergence import Head, log_softmax, numbers_of, of_kernels
from .linear_divergence import Student, by_parts, gradients_of, loss_of
from .linear_log_probs import LEAST

# The largest sum of a row's probabilities, 1 but for rounding: bfloat16 rounds each log_t by 2**-9
# of it, so their sum by 2**-9 of the entropy, which is below 16 nats.
MOST = 1 + 2**-5
REPORTER = faults.reporter(
    "linear_top_k_divergence", "tokens", "vocab", ", and stand once in its row"
)


def linear_top_k_divergence(
    x: Array,
    weight: Array,
    tokens: Array,
    log_probs: Array,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    tail: bool = True,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> Array:
    """Return KL(p_t, p_s) from k tokens of the teacher and their log-probabilities.

    Parameters
    ----------
    x : (*rows, hidden) float
        The student's last hidden states.
    weight : (vocab, hidden) float
        The student's head; its gradient is accumulated in float32.
    tokens : (*rows, k) int32 or int64
        The stored tokens of the teacher, each once in a row.
    log_probs : (*rows, k) float
        The teacher's log-probabilities of these tokens, at the same temperature; the probabilities
        of a row sum to 1 at most, up to rounding.
    bias : (vocab,) float, optional
    mask : (*rows) bool, optional
        As in ``linear_divergence``.
    tail : bool
        True: all other tokens count as one, with the remaining probability of teacher and student,
        so that the loss is a lower bound of the full divergence.  False: they are left out.
    temperature, scale, softcap, max_bytes
        As in ``linear_log_probs``.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        In nats; neither summed nor averaged.

    Raises
    ------
    RangeError
        In a row that is not hidden, a token is outside the vocabulary or occurs twice.  On a GPU
        that row is NaN, and the next ``check_errors()`` raises.
    ConfigError
        An option is out of its range; the probabilities of a row that is not hidden sum to more
        than 1 (on a GPU that row is NaN).
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import linear_top_k_divergence, linear_top_k_divergence_backward
    >>> from unsloth_cupy import linear_top_k_divergence_forward
    >>> x, weight = np.ones((1, 1)), np.log([[0.5], [0.25], [0.25]])
    >>> tokens, log_probs = np.array([[0]]), np.log([[0.8]])
    >>> loss = linear_top_k_divergence(x, weight, tokens, log_probs)
    >>> np.testing.assert_allclose(loss, 0.8 * np.log(0.8 / 0.5) + 0.2 * np.log(0.2 / 0.5))
    >>> arrays = x, weight, tokens, log_probs
    >>> np.testing.assert_array_equal(loss, linear_top_k_divergence_forward(*arrays))
    >>> dx, *_ = linear_top_k_divergence_backward(np.ones(1), *arrays, None, None)
    """
    return linear_top_k_divergence_forward(
        x,
        weight,
        tokens,
        log_probs,
        bias,
        mask=mask,
        tail=tail,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        max_bytes=max_bytes,
    )


@op(
    "x(*rows, hidden), weight(vocab, hidden), tokens(*rows, few): int,"
    " log_probs(*rows, few): constant, bias?(vocab): param, mask?(*rows): bool"
    " -> loss(*rows): stat",
    widen=False,
    operations=operations,
)
def linear_top_k_divergence_forward(
    x: Array,
    weight: Array,
    tokens: Array,
    log_probs: Array,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    tail: bool = True,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> Array:
    """Return the loss of ``linear_top_k_divergence``."""
    _check_teacher("linear_top_k_divergence", tokens, log_probs, mask, len(weight))
    options = tail, temperature, scale, softcap
    student = _student(False, weight, tokens, log_probs, bias, mask, *options)
    return loss_of(x, mask, max_bytes, student)


@linear_top_k_divergence_forward.kernel
def _launch(x: Array, mask: Array | None, max_bytes: int | None, **others: Any) -> Array:
    """Return the loss: cuBLAS computes each chunk of logits, a kernel its loss."""
    return loss_of(x, mask, max_bytes, _student(True, mask=mask, **others))


@linear_top_k_divergence_forward.gradient(widen=False)
def linear_top_k_divergence_backward(
    dloss: Array,
    x: Array,
    weight: Array,
    tokens: Array,
    log_probs: Array,
    bias: Array | None,
    mask: Array | None,
    *,
    max_bytes: int | None = None,
    wanted: Set[str] | None = None,
    **options: Any,
) -> tuple[Array | None, Array | None, None, None, Array | None]:
    """Return the gradients of x, weight and bias; None for a gradient that is not ``wanted``."""
    _check_teacher("linear_top_k_divergence_backward", tokens, log_probs, mask, len(weight))
    student = _student(False, weight, tokens, log_probs, bias, mask, **options)
    dx, dweight, dbias = gradients_of(dloss, x, mask, max_bytes, wanted, student)
    return dx, dweight, None, None, dbias


@linear_top_k_divergence_backward.kernel
def _launch_backward(
    dloss: Array,
    x: Array,
    mask: Array | None,
    max_bytes: int | None,
    wanted: Set[str] | None,
    **others: Any,
) -> tuple[Array | None, Array | None, None, None, Array | None]:
    """Return the gradients; the kernel writes the gradient of each chunk of logits."""
    student = _student(True, mask=mask, **others)
    dx, dweight, dbias = gradients_of(dloss, x, mask, max_bytes, wanted, student)
    return dx, dweight, None, None, dbias


for each in (linear_top_k_divergence_forward, linear_top_k_divergence_backward):
    each.require(check_head)
    each.require(check_max_bytes)
linear_top_k_divergence_backward.facts["operations"] = operations


def _student(
    kernels: bool,
    weight: Array,
    tokens: Array,
    log_probs: Array,
    bias: Array | None,
    mask: Array | None,
    tail: bool,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> Student:
    """Return the student's head, with the function for a chunk of its logits."""
    head = Head(temperature, scale, softcap, bias, weight)
    if kernels:
        kept = None if mask is None else contiguous(mask).reshape(-1)
        rows = *(contiguous(flat(array)) for array in (tokens, of_kernels(log_probs))), kept
        return Student(head, True, partial(_by_kernel, head, rows, tail))
    chosen, logs = map(Rows(mask, kernels=False).of, (tokens, log_probs))
    return Student(
        head, False, partial(by_parts, head, partial(_loss_and_slopes, chosen, logs, tail))
    )


def _check_teacher(call: str, tokens: Any, log_probs: Any, mask: Array | None, vocab: int) -> None:
    """Raise for tokens and log-probabilities that no teacher can have, in NumPy arrays only.

    The host does not wait for arrays of a GPU: kernels write NaN, and report such tokens.

    Raises
    ------
    RangeError
        A token is outside the vocabulary, or occurs twice in a row.
    ConfigError
        The probabilities of a row sum to more than 1.
    """
    if not isinstance(tokens, np.ndarray) or not tokens.size:
        return
    ordered = np.sort(Rows(mask, kernels=False).of(tokens), axis=-1)
    wrong = ordered[(ordered < 0) | (ordered >= vocab)]
    twice = ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]
    if wrong.size:
        problem = f"{wrong[0]}; it must be in 0 .. {vocab - 1}, the vocab axis"
        raise RangeError(f"{call}: tokens holds {problem}")
    if twice.size:
        problem = f"{twice[0]} twice in a row; keep each token once"
        raise RangeError(f"{call}: tokens holds {problem}")
    if isinstance(log_probs, np.ndarray):
        with np.errstate(over="ignore"):
            shares = np.exp(Rows(mask, kernels=False).of(log_probs).astype(np.float64)).sum(axis=-1)
        if (shares > MOST).any():
            problem = f"log_probs of a row are of probabilities that sum to {shares.max():.4g}"
            raise ConfigError(
                f"{call}: {problem}; pass the logarithms of the softmax of all tokens"
            )


def _loss_and_slopes(
    tokens: Array, log_probs: Array, tail: bool, z: Array, part: slice
) -> tuple[Array, Array]:
    """Return the loss of some rows of z, and its derivatives with respect to z."""
    if not z.size:
        return np.zeros_like(z, shape=z.shape[:1]), z
    chosen, log_t = tokens[part], log_probs[part].astype(z.dtype)
    log_s, t = log_softmax(z), np.exp(log_t)
    p, own = np.exp(log_s), np.take_along_axis(log_s, chosen, axis=-1)
    share = t.sum(axis=-1, keepdims=True)
    share = np.where(share > MOST, share.dtype.type(np.nan), share)
    loss = np.where(t != 0, t * (np.maximum(log_t, LEAST) - own), 0).sum(axis=-1)
    rows, slopes = np.arange(len(z), like=chosen)[:, None], share * p
    if tail:
        left, others = np.maximum(1 - share, 0), log_s.copy()
        others[rows, chosen] = -np.inf
        top = finite(others.max(axis=-1, keepdims=True))
        e = np.exp(others - top)
        total = e.sum(axis=-1, keepdims=True)
        left = np.where(total > 0, left, 0)  # k may be the whole vocabulary
        some = np.where(left > 0, total, 1)
        logs = np.log(np.where(left > 0, left, 1)) - np.where(left > 0, top + np.log(some), 0)
        loss = loss + (left * logs)[:, 0]
        slopes = slopes + left * (p - e / some)
    slopes[rows, chosen] -= t
    return loss, slopes


# ---- launches -----------------------------------------------------------------------------------
def _by_kernel(
    head: Head,
    teacher: tuple[Any, Any, Any],  # tokens, log-probabilities, which rows to compute
    tail: bool,
    part: slice,
    logits: Array,
    dloss: Array | None,
    out: Array,
) -> None:
    """Write the loss, or the gradient of a chunk of logits, by a kernel that changes the logits."""
    bias, vocab = of_kernels(head.bias), logits.shape[-1]
    tokens, log_probs, mask = teacher
    tokens, log_probs, mask = tokens[part], log_probs[part], None if mask is None else mask[part]
    chosen = _constants(
        *(array.dtype for array in (logits, out, tokens, log_probs)),
        *(None if bias is None else bias.dtype, vocab),
        access_of(vocab, logits) if dloss is None else access_of(vocab, logits, out),
        *(head.softcap is not None, tail),
    )
    rows, few = tokens.shape
    arrays = logits, tokens, log_probs, bias, mask, empty((rows, few), FLOAT32, like=logits)
    backward = dloss is not None
    name = f"top_k_divergence_{'backward' if backward else 'forward'}"
    kernel = load("top_k_divergence.cu", name, logits, chosen)
    results = (dloss, out) if backward else (out, faults.record(logits), REPORTER)
    kernel[-(-rows * chosen["ROW_THREADS"] // chosen["THREADS"]), chosen["THREADS"]](
        *(*arrays, *results, rows, few), numbers_of(head)
    )


@cache
def _constants(
    logits: Any, dlogits: Any, tokens: Any, log_probs: Any, bias: Any, vocab: int,
    access: Access, cap: bool, tail: bool,
) -> Constants:  # fmt: skip
    """Return the constants of top_k_divergence.cu."""
    shared = row_threads(-(-(vocab + access.ragged * (access.lanes - 1)) // access.lanes))
    return Constants(
        T=logits,
        G=dlogits,
        I=tokens,
        L=log_probs,
        B=bias or logits,
        COLUMNS=vocab,
        LANES=access.lanes,
        RAGGED=access.ragged,
        ROW_THREADS=shared,
        THREADS=shared if shared > 32 else 128,  # short rows share a block
        SOFTCAP=cap,
        BIAS=bias is not None,
        TAIL=tail,
    )
