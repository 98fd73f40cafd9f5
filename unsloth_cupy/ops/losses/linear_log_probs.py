"""Log-probabilities of labels by a linear head, without storing the full logits.

z = softcap * tanh(u / softcap) / temperature, u = scale * (x weight^T + bias), by chunks of rows
log_probs = z[label] - lse        entropy = lse - sum(p z)        p = exp(z - lse)
"""

from collections.abc import Callable, Set
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.target import target_of
from ..activations.softmax import finite
from ..common import faults
from ..common.checks import refuse_number
from ._head import Rows, check_head, check_max_bytes, chunks, head_gradients, operations
from ._launch import Access, access_of, row_threads
from ._rows import check_labels, parts

IGNORE = -100  # the default label of rows that do not count, as in torch
LEAST = -1e30  # stands for -inf, whose product with a probability of 0 would be NaN
REPORTER = faults.reporter(
    "linear_log_probs", "labels", "vocab", ", or equal to ignore, for a row without a label"
)


class LogProbs(NamedTuple):
    """The results of ``linear_log_probs``, each ``(*rows)``.

    Attributes
    ----------
    log_probs : float
        Log-probability of the label; it has a gradient.
    entropy : float
        ``-sum(p log(p))``, in nats; it has a gradient.
    log_sum_squares : float
        ``log(sum(p**2))``.
    mean_logit : float
        The mean of z over the vocabulary.
    top1 : bool
        Whether the label has the largest logit; of equal logits, the lowest index counts.
    """

    log_probs: Any
    entropy: Any
    log_sum_squares: Any
    mean_logit: Any
    top1: Any


class Options(NamedTuple):
    """The options that turn logits into z."""

    temperature: float
    scale: float
    softcap: float | None
    ignore: int
    keep_all: bool = False  # whether rows without a label are computed, too


def linear_log_probs(
    x: Array,
    weight: Array,
    labels: Array,
    bias: Array | None = None,
    *,
    ignore: int = -100,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> LogProbs:
    """Return log-probability, entropy and more for each row, without storing the full logits.

    ``z = cap(scale * (x weight^T + bias)) / temperature`` with ``cap(t) = softcap * tanh(t /
    softcap)``, and ``p = softmax(z)``.  Rows whose label is ignore are left out of the product:
    their results are 0 (False) and their gradient is 0, whatever they hold.

    Parameters
    ----------
    x : (*rows, hidden) float
        The output of the last layer before the head.
    weight : (vocab, hidden) float, or a quantized weight
        The output head; its gradient is accumulated in float32.  A quantized weight is frozen.
    labels : (*rows) int32 or int64
        Each in 0 .. vocab - 1, or equal to ignore.
    bias : (vocab,) float, optional
    ignore : int
    temperature : float
        Temperature of sampling, above 0; it divides logits, not log-probabilities.
    scale : float
        Factor of the logits, which some models have.
    softcap : float, optional
        Bound of the logits before the temperature; None for no bound.
    max_bytes : int, optional
        Limit of the memory for a chunk of logits and its gradient; by default as in
        ``linear_cross_entropy``.

    Returns
    -------
    result : LogProbs
        float32, or float64 for float64 arrays.

    Raises
    ------
    RangeError
        A label is neither in the vocabulary nor equal to ignore.  On a GPU the host does not read
        the labels: the row is NaN, and the next ``check_errors()`` raises.
    ConfigError
        An option is out of its range.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import LogProbs, linear_log_probs, linear_log_probs_backward
    >>> from unsloth_cupy import linear_log_probs_forward
    >>> weight = np.random.default_rng(0).standard_normal((50, 16), np.float32)
    >>> x, labels = weight[:3], np.array([0, 7, -100])  # one is ignored
    >>> result = linear_log_probs(x, weight, labels, temperature=2.0)
    >>> z = x @ weight.T / 2
    >>> p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    >>> np.testing.assert_allclose(result.log_probs, [np.log(p[0, 0]), np.log(p[1, 7]), 0], 1e-4)
    >>> np.testing.assert_allclose(result.entropy[0], -(p[0] * np.log(p[0])).sum(), rtol=1e-4)
    >>> assert isinstance(result, LogProbs) and result.top1.tolist() == [True, False, False]
    >>> *_, lse, largest = linear_log_probs_forward(x, weight, labels, temperature=2.0)
    >>> ones = np.ones(3, np.float32)
    >>> dx, dweight, _, _ = linear_log_probs_backward(
    ...     ones, None, None, x, weight, labels, None, result.entropy, lse, temperature=2.0
    ... )
    >>> assert not dx[2].any()
    """
    results: Any = linear_log_probs_forward(
        x,
        weight,
        labels,
        bias,
        ignore=ignore,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        max_bytes=max_bytes,
    )
    return LogProbs(*results[:5])


@op(
    "x(*rows, hidden), weight(vocab, hidden): weight, labels(*rows): int, bias?(vocab): param"
    " -> log_probs(*rows): stat, entropy(*rows): stat, log_sum_squares(*rows): stat,"
    " mean_logit(*rows): stat, top1(*rows): bool, lse(*rows): stat, largest(*rows): stat",
    widen=False,  # products take 16-bit operands as they are
    operations=operations,
)
def linear_log_probs_forward(
    x: Array,
    weight: Array,
    labels: Array,
    bias: Array | None = None,
    *,
    ignore: int = -100,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
) -> tuple[Array, ...]:
    """Return the fields of ``LogProbs``, then lse for the backward op, then the largest z."""
    check_labels("linear_log_probs", labels, ignore, len(weight))
    options = Options(temperature, scale, softcap, ignore)

    return _forward(x, weight, labels, options, max_bytes, partial(_by_parts, bias, options))


def of_logits(
    logits: Array, labels: Array, temperature: float, softcap: float | None = None
) -> Array:
    """Return the log-probabilities of labels from logits (rows, vocab), in float32 or float64.

    They have the same bits as from ``linear_log_probs`` with the same logits.
    """
    options = Options(temperature, 1.0, softcap, IGNORE, keep_all=True)
    results = _results(logits, labels)
    write = _by_parts if target_of(logits) is None else _by_kernel
    write(None, options, logits, labels, results)
    return results[0]


def _by_parts(
    bias: Array | None,
    options: Options,
    logits: Array,
    labels: Array,
    results: tuple[Array, ...],
) -> None:
    """Write all results of a chunk of logits, some rows at a time."""
    for part in parts(logits):
        row = tuple(result[part] for result in results)
        _write_results(logits[part], labels[part], bias, options, row)


@linear_log_probs_forward.kernel
def _launch(
    x: Array,
    weight: Array,
    labels: Array,
    bias: Array | None,
    ignore: int,
    temperature: float,
    scale: float,
    softcap: float | None,
    max_bytes: int | None,
) -> tuple[Array, ...]:
    """Return all results: cuBLAS computes each chunk of logits, a kernel its results."""
    options = Options(temperature, scale, softcap, ignore, keep_all=True)
    bias = None if bias is None else contiguous(bias)

    return _forward(x, weight, labels, options, max_bytes, partial(_by_kernel, bias, options))


def _by_kernel(
    bias: Array | None,
    options: Options,
    logits: Array,
    labels: Array,
    results: tuple[Array, ...],
) -> None:
    """Write all results of a chunk of logits by the kernel."""
    softcap = options.softcap is not None
    chosen = _constants(*_forms(logits, logits, labels, bias), softcap, True)
    threads = chosen["THREADS"]
    blocks = -(-labels.size * chosen["ROW_THREADS"] // threads)
    kernel = load("log_probs.cu", "log_probs_forward", logits, chosen)
    kernel[blocks, threads](
        *(logits, labels, bias, *results, faults.record(logits), REPORTER, labels.size),
        _numbers(options),
    )


def _forward(
    x: Array,
    weight: Array,
    labels: Array,
    options: Options,
    max_bytes: int | None,
    write: Callable[[Array, Array, tuple[Array, ...]], None],
) -> tuple[Array, ...]:
    """Return all results; ``write(logits, labels, results)`` writes the results of a chunk."""
    rows = _rows(x, labels, options, forward=True)
    own, labelled = rows.of(x), rows.beside(labels)
    results = _results(x, labelled)
    for part, logits in chunks(own, weight, max_bytes):
        write(logits, labelled[part], tuple(result[part] for result in results))
    return tuple(rows.back(result).reshape(labels.shape) for result in results)


def _results(x: Array, labels: Array) -> tuple[Array, ...]:
    """Allocate the arrays of all results, with one element for each label."""
    wide = np.promote_types(x.dtype, FLOAT32)
    kinds = wide, wide, wide, wide, bool, wide, wide
    return tuple(empty(labels.shape, np.dtype(kind), like=x) for kind in kinds)


def _rows(x: Array, labels: Array, options: Options, *, forward: bool = False) -> Rows:
    """Return the rows with a label; in forward, kernels and GPUs compute the other rows, too."""
    every = options.keep_all or not isinstance(x, np.ndarray)
    mask = None if every and forward else labels != options.ignore
    return Rows(mask, kernels=every, writes_zeros=True)


@linear_log_probs_forward.gradient(widen=False)
def linear_log_probs_backward(
    dlog_probs: Array | None,
    dentropy: Array | None,
    dlse: Array | None,
    x: Array,
    weight: Array,
    labels: Array,
    bias: Array | None,
    entropy: Array,
    lse: Array,
    *,
    ignore: int = -100,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    max_bytes: int | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None, None, Array | None]:
    """Return the gradients of x, weight and bias; None for a gradient that is not ``wanted``.

    A process that has a part of the vocabulary passes the entropy and lse of the whole vocabulary.
    """
    check_labels("linear_log_probs_backward", labels, ignore, len(weight))
    options = Options(temperature, scale, softcap, ignore)

    def write(_: slice, logits: Array, rows: Any, out: Array) -> None:
        for part in parts(logits):
            each = tuple(None if a is None else a[part] for a in rows)
            _write_gradient(logits[part], each, bias, options, out[part])

    arrays = labels, dlog_probs, dentropy, dlse, entropy, lse
    dx, dweight, dbias = head_gradients(
        *(x, weight, bias, _rows(x, labels, options), arrays, max_bytes, wanted, write),
        own_buffer=False,
    )
    return dx, dweight, None, dbias


@linear_log_probs_backward.kernel
def _launch_backward(
    dlog_probs: Array | None,
    dentropy: Array | None,
    dlse: Array | None,
    x: Array,
    weight: Array,
    labels: Array,
    bias: Array | None,
    entropy: Array,
    lse: Array,
    ignore: int,
    temperature: float,
    scale: float,
    softcap: float | None,
    max_bytes: int | None,
    wanted: Set[str] | None,
) -> tuple[Array | None, Array | None, None, Array | None]:
    """Return all gradients; the kernel writes the gradient of each chunk of logits."""
    options = Options(temperature, scale, softcap, ignore, keep_all=True)
    bias = None if bias is None else contiguous(bias)

    def write(_: slice, logits: Array, rows: Any, out: Array) -> None:
        labels, *others = rows
        chosen = _constants(*_forms(logits, out, labels, bias), softcap is not None, False)
        threads, lanes = chosen["THREADS"], chosen["LANES"]
        width = logits.shape[-1] + chosen["RAGGED"] * (lanes - 1)
        kernel = load("log_probs.cu", "log_probs_backward", logits, chosen)
        kernel[labels.size * -(-width // (threads * lanes)), threads](
            *(logits, labels, bias, *others, out), _numbers(options)
        )

    arrays = labels, dlog_probs, dentropy, dlse, entropy, lse
    dx, dweight, dbias = head_gradients(
        *(x, weight, bias, _rows(x, labels, options), arrays, max_bytes, wanted, write),
        own_buffer=x.dtype != FLOAT32,  # float32 gradients are written over the logits
    )
    return dx, dweight, None, dbias


def _check(call: str, labels: Any) -> None:
    """Raise DTypeError if labels is a number."""
    refuse_number(call, "labels", labels)


for each in (linear_log_probs_forward, linear_log_probs_backward):
    each.require(_check)
    each.require(check_head)
    each.require(check_max_bytes)
linear_log_probs_backward.facts["operations"] = operations


# ---- rows ---------------------------------------------------------------------------------------
def logits_to_z(
    logits: Array, bias: Array | None, temperature: float, scale: float, softcap: float | None
) -> tuple[Array, Any]:
    """Return z, and its derivative by the logits."""
    kind = logits.dtype.type
    u = logits if bias is None else logits + bias.astype(logits.dtype)
    if softcap is None:
        factor = scale / temperature
        return u if factor == 1 else u * kind(factor), factor
    tanh = np.tanh(u * kind(scale / softcap))
    return tanh * kind(softcap / temperature), (1 - tanh * tanh) * kind(scale / temperature)


def _write_results(
    logits: Array, labels: Array, bias: Array | None, options: Options, results: tuple[Array, ...]
) -> None:
    """Write all results of some rows to the arrays of results."""
    if not logits.size:
        for result in results:
            result[...] = 0
        return
    z, _ = logits_to_z(logits, bias, *options[:3])
    has_label = labels != options.ignore
    labels = np.where(has_label, labels, 0)  # rows without a label read class 0
    target = np.take_along_axis(z, labels[:, None], axis=-1)[:, 0]
    top = finite(z.max(axis=-1))
    below = z - top[:, None]
    e = np.exp(below)
    total = e.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):  # logits of -inf
        log, squares = np.log(total), np.log(np.einsum("rv,rv->r", e, e))
        products = np.einsum("rv,rv->r", e, np.maximum(below, LEAST))
    some = np.where(total > 0, total, 1)
    values = (
        (target - top) - finite(log),
        finite(log) - products / some,
        squares - 2 * finite(log),
        z.sum(axis=-1) / z.shape[-1],
        z.argmax(axis=-1) == labels,
        log + top,
        np.where(total > 0, top, -np.inf),
    )
    for result, value in zip(results, values, strict=True):
        result[...] = np.where(has_label, value, 0)


def _write_gradient(
    logits: Array, arrays: tuple[Any, ...], bias: Array | None, options: Options, out: Array
) -> None:
    """Write the gradient of the logits of some rows to out, which may be the logits."""
    labels, dlog_probs, dentropy, dlse, entropy, lse = arrays
    has_label = labels != options.ignore
    z, slope = logits_to_z(logits, bias, *options[:3])
    log_p = z - finite(lse)[:, None]
    result = np.exp(log_p)
    on_label = np.zeros_like(lse) if dlog_probs is None else dlog_probs
    of_lse = -on_label if dlse is None else dlse - on_label
    if dentropy is None:
        result *= of_lse[:, None]
    else:
        factor = np.maximum(log_p, LEAST)
        factor += entropy[:, None]
        factor *= -dentropy[:, None]
        factor += of_lse[:, None]
        result *= factor
    columns = np.where(has_label, labels, 0)
    result[np.arange(labels.size, like=labels), columns] += on_label
    np.multiply(result, slope, out=result)
    out[...] = np.where(has_label[:, None], result, 0)


# ---- launches -----------------------------------------------------------------------------------
def _forms(logits: Array, dlogits: Array, labels: Array, bias: Array | None) -> tuple[Any, ...]:
    """Return the dtypes, size and access on which the constants depend."""
    access = access_of(logits.shape[-1], logits, dlogits)
    return (
        *(logits.dtype, dlogits.dtype, labels.dtype, None if bias is None else bias.dtype),
        *(logits.shape[-1], access),
    )


@cache
def _constants(
    logits: Any, dlogits: Any, labels: Any, bias: Any, vocab: int, access: Access, cap: bool,
    forward: bool,
) -> Constants:  # fmt: skip
    """Return the constants of log_probs.cu.

    Forward, the threads of a block share a row, or several rows.  Backward, several blocks share a
    row, with one access for each thread.
    """
    vectors = -(-(vocab + access.ragged * (access.lanes - 1)) // access.lanes)
    shared = row_threads(vectors) if forward else max(64, min(256, -(-vectors // 32) * 32))
    return Constants(
        T=logits,
        G=dlogits,
        I=labels,
        B=bias or logits,
        COLUMNS=vocab,
        LANES=access.lanes,
        RAGGED=access.ragged,
        ROW_THREADS=shared,
        THREADS=shared if shared > 32 or not forward else 128,  # short rows share a block
        SOFTCAP=cap,
        BIAS=bias is not None,
    )


def _numbers(options: Options) -> dict[str, float]:
    """Return the struct Options of log_probs.cu."""
    return {
        "ignore": options.ignore,
        "scale": options.scale,
        "softcap": options.softcap or 0.0,
        "inverse_temperature": 1 / options.temperature,
    }
