"""Divergences of a linear head from a teacher's, without storing the full logits of either.

z = softcap * tanh(u / softcap) / temperature, u = scale * (x weight^T + bias), by chunks of rows
"""

from collections.abc import Callable, Set
from functools import partial

import numpy as np

from ...core.arrays import contiguous, zeroed
from ...core.dtypes import FLOAT32, Array
from ...core.op import op
from ...errors import ConfigError
from ..activations.softmax import finite
from ..common.checks import check_wanted
from ..common.gemm import gemm
from ..linear.linear import flat
from ._head import check_max_bytes, chunks, gradients
from ._rows import parts
from .divergence import Head, Options, beta_of, check_options, launch, log_softmax, measured
from .linear_log_probs import LEAST

# From z of some rows, and the rows: the loss of each, and its derivatives by z.
Measure = Callable[[Array, slice], tuple[Array, Array]]
# From the rows of a chunk, its logits and their dloss (None: forward) write the last array: the
# loss or, backward, the gradient of the logits.
Write = Callable[[slice, Array, Array | None, Array], None]


def linear_divergence(
    x: Array,
    weight: Array,
    teacher_x: Array,
    teacher_weight: Array,
    bias: Array | None = None,
    teacher_bias: Array | None = None,
    *,
    mask: Array | None = None,
    kind: str = "jsd",
    beta: float | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    teacher_scale: float = 1.0,
    teacher_softcap: float | None = None,
    max_bytes: int | None = None,
) -> Array:
    """Return ``divergence`` of two heads' logits, without storing them.

    Parameters
    ----------
    x : (*rows, hidden) float
        The student's last hidden states.
    weight : (vocab, hidden) float
        Its head; the gradient is accumulated in float32.
    teacher_x, teacher_weight : (*rows, teacher_hidden), (vocab, teacher_hidden) float
        The teacher's, constants.
    bias, teacher_bias : (vocab,) float, optional
    mask : (*rows) bool, optional
        Rows where it is False leave before the product: their loss is 0 and no gradient reaches
        them, whatever their bytes hold.
    kind, beta, temperature
        As in ``divergence``.
    scale, softcap, teacher_scale, teacher_softcap : float
        As in ``linear_log_probs``.
    max_bytes : int, optional
        Limit of the memory for a chunk of the student's logits, 512 MiB by default.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        In nats; neither summed nor averaged.

    Raises
    ------
    ConfigError
        An option is out of its range, or the kind does not use it.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import divergence, linear, linear_divergence
    >>> from unsloth_cupy import linear_divergence_backward, linear_divergence_forward
    >>> rng = np.random.default_rng(0)
    >>> x, weight = rng.standard_normal((3, 4)), rng.standard_normal((9, 4))
    >>> teacher_x, teacher_weight = rng.standard_normal((3, 6)), rng.standard_normal((9, 6))
    >>> loss = linear_divergence(x, weight, teacher_x, teacher_weight, beta=0.5)
    >>> logits = linear(x, weight), linear(teacher_x, teacher_weight)
    >>> np.testing.assert_allclose(loss, divergence(*logits, beta=0.5))
    >>> arrays = x, weight, teacher_x, teacher_weight
    >>> np.testing.assert_array_equal(loss, linear_divergence_forward(*arrays, beta=0.5))
    >>> dx, dweight, *_ = linear_divergence_backward(np.ones(3), *arrays, None, None, None)
    >>> assert dx.shape == x.shape and dweight.shape == weight.shape
    """
    return linear_divergence_forward(
        x,
        weight,
        teacher_x,
        teacher_weight,
        bias,
        teacher_bias,
        mask=mask,
        kind=kind,
        beta=beta_of("linear_divergence", kind, beta),
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        teacher_scale=teacher_scale,
        teacher_softcap=teacher_softcap,
        max_bytes=max_bytes,
    )


@op(
    "x(*rows, hidden), weight(vocab, hidden), teacher_x(*rows, inner): constant,"
    " teacher_weight(vocab, inner): constant, bias?(vocab): param, teacher_bias?(vocab): constant,"
    " mask?(*rows): bool -> loss(*rows): stat",
    widen=False,  # products take 16-bit operands as they are
    operations=lambda a: 2 * (a["x"].size + a["teacher_x"].size) * a["weight"].shape[0],
)
def linear_divergence_forward(
    x: Array,
    weight: Array,
    teacher_x: Array,
    teacher_weight: Array,
    bias: Array | None = None,
    teacher_bias: Array | None = None,
    *,
    mask: Array | None = None,
    kind: str = "jsd",
    beta: float = 0.0,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    teacher_scale: float = 1.0,
    teacher_softcap: float | None = None,
    max_bytes: int | None = None,
) -> Array:
    """Return the loss of ``linear_divergence``."""
    head = Head(temperature, scale, softcap, bias, weight)
    teacher = Head(temperature, teacher_scale, teacher_softcap, teacher_bias, teacher_weight)
    measure = _beside(teacher, teacher_x, mask, Options(kind, beta, temperature))
    return _loss(x, head, mask, max_bytes, partial(_by_parts, head, measure))


@linear_divergence_forward.kernel
def _launch(
    x: Array,
    weight: Array,
    teacher_x: Array,
    teacher_weight: Array,
    bias: Array | None,
    teacher_bias: Array | None,
    mask: Array | None,
    kind: str,
    beta: float,
    temperature: float,
    scale: float,
    softcap: float | None,
    teacher_scale: float,
    teacher_softcap: float | None,
    max_bytes: int | None,
) -> Array:
    """Return the loss: cuBLAS computes a chunk of both heads' logits, a kernel its loss."""
    head = Head(temperature, scale, softcap, bias, weight)
    teacher = Head(temperature, teacher_scale, teacher_softcap, teacher_bias, teacher_weight)
    write = _by_kernel((head, teacher), teacher_x, mask, Options(kind, beta, temperature))
    return _loss(x, head, mask, max_bytes, write)


@linear_divergence_forward.gradient(widen=False)
def linear_divergence_backward(
    dloss: Array,
    x: Array,
    weight: Array,
    teacher_x: Array,
    teacher_weight: Array,
    bias: Array | None,
    teacher_bias: Array | None,
    mask: Array | None,
    *,
    kind: str = "jsd",
    beta: float = 0.0,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    teacher_scale: float = 1.0,
    teacher_softcap: float | None = None,
    max_bytes: int | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None, None, None, Array | None, None]:
    """Return the gradients of x, weight and bias; None for one that is not ``wanted``."""
    head = Head(temperature, scale, softcap, bias, weight)
    teacher = Head(temperature, teacher_scale, teacher_softcap, teacher_bias, teacher_weight)
    measure = _beside(teacher, teacher_x, mask, Options(kind, beta, temperature))
    write = partial(_by_parts, head, measure)
    dx, dweight, dbias = _gradients(dloss, x, head, mask, max_bytes, write, wanted)
    return dx, dweight, None, None, dbias, None


@linear_divergence_backward.kernel
def _launch_backward(
    dloss: Array,
    x: Array,
    weight: Array,
    teacher_x: Array,
    teacher_weight: Array,
    bias: Array | None,
    teacher_bias: Array | None,
    mask: Array | None,
    kind: str,
    beta: float,
    temperature: float,
    scale: float,
    softcap: float | None,
    teacher_scale: float,
    teacher_softcap: float | None,
    max_bytes: int | None,
    wanted: Set[str] | None,
) -> tuple[Array | None, Array | None, None, None, Array | None, None]:
    """Return the gradients, with that of each chunk of logits from the kernel."""
    head = Head(temperature, scale, softcap, bias, weight)
    teacher = Head(temperature, teacher_scale, teacher_softcap, teacher_bias, teacher_weight)
    write = _by_kernel((head, teacher), teacher_x, mask, Options(kind, beta, temperature))
    narrow = x.dtype != FLOAT32
    of_head = dloss, x, head, mask, max_bytes
    dx, dweight, dbias = _gradients(*of_head, write, wanted, own_buffer=narrow)
    return dx, dweight, None, None, dbias, None


def _check(
    call: str,
    kind: str,
    beta: float,
    temperature: float,
    scale: float,
    softcap: float | None,
    teacher_scale: float,
    teacher_softcap: float | None,
) -> None:
    check_options(call, kind, beta, temperature)
    check_head(call, temperature, scale, softcap)
    check_head(call, temperature, teacher_scale, teacher_softcap)


def check_head(call: str, temperature: float, scale: float, softcap: float | None) -> None:
    """Raise ConfigError for an option of a head that is out of its range."""
    if not temperature > 0:
        raise ConfigError(f"{call}(temperature={temperature}): temperature must be above 0")
    if scale == 0:
        raise ConfigError(f"{call}(scale=0): all tokens would be as likely; pass another scale")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"{call}(softcap={softcap}): softcap must be positive; None for no cap")


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
    """Return KL(p_t, p_s) where only k tokens of the teacher and their log-probabilities were kept.

    Parameters
    ----------
    x : (*rows, hidden) float
        The student's last hidden states.
    weight : (vocab, hidden) float
        Its head; the gradient is accumulated in float32.
    tokens : (*rows, k) int32 or int64
        The tokens that were kept, each once in a row.
    log_probs : (*rows, k) float
        Their log-probabilities by the teacher, at the same temperature.
    bias : (vocab,) float, optional
    mask : (*rows) bool, optional
        As in ``linear_divergence``.
    tail : bool
        Whether all other tokens are one, with the rest of both probabilities: a lower bound of the
        whole divergence.  Without it they are left out.
    temperature, scale, softcap, max_bytes
        As in ``linear_log_probs``.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 arrays
        In nats; neither summed nor averaged.

    Raises
    ------
    RangeError
        A token is outside the vocabulary.
    ConfigError
        An option is out of its range.
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
    "x(*rows, hidden), weight(vocab, hidden), tokens(*rows, few): int < vocab,"
    " log_probs(*rows, few): constant, bias?(vocab): param, mask?(*rows): bool"
    " -> loss(*rows): stat",
    widen=False,
    operations=lambda a: 2 * a["x"].size * a["weight"].shape[0],
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
    head = Head(temperature, scale, softcap, bias, weight)
    measure = _of_top_k(tokens, log_probs, mask, tail=tail)
    return _loss(x, head, mask, max_bytes, partial(_by_parts, head, measure))


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
    tail: bool = True,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None, None, None, Array | None]:
    """Return the gradients of x, weight and bias; None for one that is not ``wanted``."""
    head = Head(temperature, scale, softcap, bias, weight)
    write = partial(_by_parts, head, _of_top_k(tokens, log_probs, mask, tail=tail))
    dx, dweight, dbias = _gradients(dloss, x, head, mask, max_bytes, write, wanted)
    return dx, dweight, None, None, dbias


for each, check in (
    (linear_divergence_forward, _check),
    (linear_divergence_backward, _check),
    (linear_top_k_divergence_forward, check_head),
    (linear_top_k_divergence_backward, check_head),
):
    each.require(check)
    each.require(check_max_bytes)
linear_divergence_backward.require(check_wanted)
linear_top_k_divergence_backward.require(check_wanted)


# ---- chunks -------------------------------------------------------------------------------------
def _rows_of(array: Array, mask: Array | None) -> Array:
    """Return the rows of an array that a mask keeps; on a GPU all rows, as zeros where it hides."""
    rows = flat(array)
    if mask is None:
        return rows
    kept = contiguous(mask).reshape(-1)
    if isinstance(kept, np.ndarray):
        return rows[np.flatnonzero(kept)]
    return zeroed(rows, kept)


def _spread(rows: Array, mask: Array | None) -> Array:
    """Return an array with zeros for the rows that a mask hides."""
    if mask is None:
        return rows
    kept = contiguous(mask).reshape(-1)
    if not isinstance(kept, np.ndarray):
        return zeroed(rows, kept)
    whole = np.zeros_like(rows, shape=(kept.size, *rows.shape[1:]))
    whole[kept] = rows
    return whole


def _logits(head: Head, x: Array, mask: Array | None) -> Callable[[slice], Array]:
    """Return the function that computes the logits of some rows of x."""
    rows, weight = _rows_of(x, mask), head.weight
    if rows.dtype != weight.dtype:  # products are of one dtype
        rows, weight = (array.astype(FLOAT32, copy=False) for array in (rows, weight))
    return lambda part: gemm(rows[part], weight.T)


def _beside(head: Head, x: Array, mask: Array | None, options: Options) -> Measure:
    """Return the function that measures z beside that of a teacher."""
    logits = _logits(head, x, mask)

    def measure(z: Array, part: slice) -> tuple[Array, Array]:
        return measured(z, head.z(logits(part).astype(z.dtype, copy=False))[0], options)

    return measure


def _by_kernel(
    heads: tuple[Head, Head], teacher_x: Array, mask: Array | None, options: Options
) -> Write:
    """Return the function that writes the loss, or the gradient of logits, by a kernel."""
    teacher = _logits(heads[1], teacher_x, mask)

    def write(part: slice, logits: Array, dloss: Array | None, out: Array) -> None:
        if dloss is None:
            launch("divergence_forward", logits, teacher(part), heads, options, out)
        else:
            launch("divergence_backward", logits, teacher(part), heads, options, dloss, out)

    return write


def _by_parts(
    head: Head, measure: Measure, part: slice, logits: Array, dloss: Array | None, out: Array
) -> None:
    """Write the loss, or the gradient of logits, some rows at a time."""
    for few in parts(logits):
        here = slice(part.start + few.start, min(part.start + few.stop, part.stop))
        z, by_logits = head.z(logits[few])
        loss, slopes = measure(z, here)
        out[few] = loss if dloss is None else slopes * dloss[few] * by_logits


def _of_top_k(tokens: Array, log_probs: Array, mask: Array | None, *, tail: bool) -> Measure:
    """Return the function that measures z beside the k tokens that were kept of a teacher."""
    all_tokens, all_logs = _rows_of(tokens, mask), _rows_of(log_probs, mask)

    def measure(z: Array, part: slice) -> tuple[Array, Array]:
        if not z.size:
            return np.zeros_like(z, shape=z.shape[:1]), z
        chosen, log_t = all_tokens[part], all_logs[part].astype(z.dtype)
        log_s, t = log_softmax(z), np.exp(log_t)
        p, own = np.exp(log_s), np.take_along_axis(log_s, chosen, axis=-1)
        share = t.sum(axis=-1, keepdims=True)
        loss = np.where(t > 0, t * (np.maximum(log_t, LEAST) - own), 0).sum(axis=-1)
        rows, slopes = np.arange(len(z), like=chosen)[:, None], share * p
        if tail:
            left, others = np.maximum(1 - share, 0), log_s.copy()
            others[rows, chosen] = -np.inf
            top = finite(others.max(axis=-1, keepdims=True))
            e = np.exp(others - top)
            total = e.sum(axis=-1, keepdims=True)
            left = np.where(total > 0, left, 0)  # there may be no other tokens
            some = np.where(left > 0, total, 1)
            logs = np.log(np.where(left > 0, left, 1)) - np.where(left > 0, top + np.log(some), 0)
            loss = loss + (left * logs)[:, 0]
            slopes = slopes + left * (p - e / some)
        slopes[rows, chosen] -= t
        return loss, slopes

    return measure


def _loss(x: Array, head: Head, mask: Array | None, max_bytes: int | None, write: Write) -> Array:
    """Return the loss of each row."""
    rows = _rows_of(x, mask)
    loss = np.zeros_like(x, np.promote_types(x.dtype, FLOAT32), shape=(len(rows),))
    for part, logits in chunks(rows, head.weight, max_bytes):
        write(part, logits, None, loss[part])
    return _spread(loss, mask).reshape(x.shape[:-1])


def _gradients(
    dloss: Array,
    x: Array,
    head: Head,
    mask: Array | None,
    max_bytes: int | None,
    write: Write,
    wanted: Set[str] | None,
    *,
    own_buffer: bool = False,
) -> tuple[Array | None, Array | None, Array | None]:
    """Return dx, dweight and dbias."""
    rows, of_rows, sums = _rows_of(x, mask), _rows_of(dloss.reshape(-1, 1), mask), None
    if head.bias is not None and (wanted is None or "bias" in wanted):
        kind = np.promote_types(x.dtype, FLOAT32)
        sums = np.zeros_like(x, kind, shape=(len(head.weight),))

    def write_part(part: slice, logits: Array, out: Array) -> None:
        write(part, logits, of_rows[part], out)
        if sums is not None:
            np.add(sums, out.sum(axis=0, dtype=sums.dtype), out=sums)

    dx, dweight = gradients(
        rows, head.weight, max_bytes, write_part, own_buffer=own_buffer, wanted=wanted
    )
    dx = None if dx is None else _spread(dx, mask).reshape(x.shape)
    dbias = None if sums is None or head.bias is None else sums.astype(head.bias.dtype)
    return dx, dweight, dbias
