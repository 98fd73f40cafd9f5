"""Divergences of a student's distribution from a teacher's distribution, which is a constant.

p_s, p_t = softmax(logits / temperature), softmax(teacher_logits / temperature)
KL(p, q) = sum(p log(p / q))        m = (1 - beta) p_s + beta p_t
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ConfigError
from ..activations.softmax import finite
from ..common.checks import check_choice
from ._launch import Access, access_of, row_threads
from .linear_log_probs import logits_to_z

KINDS = ("jsd", "tvd", "cosine")  # in the order of KIND in divergence.cu
LEAST = 1e-8  # the least length by which a row is divided, as in torch's cosine_similarity


class Options(NamedTuple):
    """How the distance of two rows of logits is computed."""

    kind: str
    beta: float
    temperature: float


class Head(NamedTuple):
    """An output head: weight and bias, and the options that turn logits into z."""

    temperature: float
    scale: float = 1.0
    softcap: float | None = None
    bias: Array | None = None
    weight: Any = None

    def z(self, logits: Array) -> tuple[Array, Any]:
        """Return z, and its derivative by the logits."""
        return logits_to_z(logits, self.bias, self.temperature, self.scale, self.softcap)


def divergence(
    logits: Array,
    teacher_logits: Array,
    *,
    kind: str = "jsd",
    beta: float | None = None,
    temperature: float = 1.0,
) -> Array:
    """Return the divergence of a student's distribution from a teacher's distribution, by row.

    ====== =======================================================================================
    jsd    beta 0 (default): KL(p_t, p_s), forward; 1: KL(p_s, p_t), reverse; between:
           beta KL(p_t, m) + (1 - beta) KL(p_s, m), m = (1 - beta) p_s + beta p_t
    tvd    total variation, sum(abs(p_s - p_t)) / 2
    cosine 1 - sum(a b), where a and b are the two rows of logits, each divided by max(its length,
           1e-8); it is 1 for rows of zeros
    ====== =======================================================================================

    The loss is not multiplied by temperature**2.

    Parameters
    ----------
    logits, teacher_logits : (*rows, vocab) float
        The logits of student and teacher; the teacher's logits are a constant.
    kind : str
        "jsd", "tvd" or "cosine".
    beta : float, optional
        Interpolation of jsd, in [0, 1]; 0 by default.
    temperature : float
        Divides both logits; above 0.

    Returns
    -------
    loss : (*rows) float32, or float64 for float64 logits
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
    >>> from unsloth_cupy import divergence, divergence_backward, divergence_forward
    >>> student, teacher = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    >>> forward = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    >>> np.testing.assert_allclose(divergence(student, teacher), forward)
    >>> np.testing.assert_allclose(divergence(student, teacher, kind="tvd"), 0.4)
    >>> dlogits, _ = divergence_backward(np.ones(1), student, teacher)
    >>> np.testing.assert_allclose(dlogits, [[0.5 - 0.9, 0.5 - 0.1]])
    >>> np.testing.assert_allclose(divergence_forward(student, teacher), forward)
    """
    return divergence_forward(
        logits,
        teacher_logits,
        kind=kind,
        beta=beta_of("divergence", kind, beta),
        temperature=temperature,
    )


def beta_of(call: str, kind: str, beta: float | None) -> float:
    """Return beta, 0 by default; raise for a kind that does not use it."""
    if beta is not None and kind in KINDS and kind != "jsd":
        raise ConfigError(f"{call}: kind={kind!r} does not use beta; leave it out")
    return 0.0 if beta is None else beta


@op("logits(*rows, vocab), teacher_logits(*rows, vocab): constant -> loss(*rows): stat")
def divergence_forward(
    logits: Array,
    teacher_logits: Array,
    *,
    kind: str = "jsd",
    beta: float = 0.0,
    temperature: float = 1.0,
) -> Array:
    """Return the loss of ``divergence``."""
    factor = logits.dtype.type(1 / temperature)
    rows = logits * factor, teacher_logits.astype(logits.dtype) * factor
    return loss_and_slopes(*rows, Options(kind, beta, temperature))[0]


@divergence_forward.kernel
def _launch(
    logits: Array, teacher_logits: Array, kind: str, beta: float, temperature: float
) -> Array:
    loss = empty(logits.shape[:-1], FLOAT32, like=logits)
    options, head = Options(kind, beta, temperature), Head(temperature)
    launch("divergence_forward", logits, teacher_logits, (head, head), options, loss)
    return loss


@divergence_forward.gradient
def divergence_backward(
    dloss: Array,
    logits: Array,
    teacher_logits: Array,
    *,
    kind: str = "jsd",
    beta: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Array, None]:
    """Return the gradient of the student's logits; the teacher's logits are a constant."""
    factor = logits.dtype.type(1 / temperature)
    rows = logits * factor, teacher_logits.astype(logits.dtype) * factor
    slopes = loss_and_slopes(*rows, Options(kind, beta, temperature))[1]
    return slopes * (dloss * factor)[..., None], None


@divergence_backward.kernel
def _launch_backward(
    dloss: Array,
    logits: Array,
    teacher_logits: Array,
    kind: str,
    beta: float,
    temperature: float,
) -> tuple[Array, None]:
    dlogits = empty(logits.shape, logits.dtype, like=logits)
    options, head = Options(kind, beta, temperature), Head(temperature)
    launch("divergence_backward", logits, teacher_logits, (head, head), options, dloss, dlogits)
    return dlogits, None


def check_options(call: str, kind: str, beta: float, temperature: float) -> None:
    """Raise ConfigError for an option out of its range."""
    check_choice(call, "kind", kind, KINDS)
    if not 0 <= beta <= 1:
        raise ConfigError(f"{call}(beta={beta}): beta must be in [0, 1]")
    if not temperature > 0:
        raise ConfigError(f"{call}(temperature={temperature}): temperature must be above 0")


divergence_forward.require(check_options)
divergence_backward.require(check_options)


def log_softmax(z: Array) -> Array:
    """Return log(softmax(z)) over the last axis."""
    if not z.size:
        return z
    below = z - finite(z.max(axis=-1, keepdims=True))
    with np.errstate(divide="ignore"):
        below -= np.log(np.exp(below).sum(axis=-1, keepdims=True))
    return below


def loss_and_slopes(z: Array, teacher: Array, options: Options) -> tuple[Array, Array]:
    """Return the divergence of each row of z, and its derivatives with respect to z."""
    if options.kind == "cosine":
        return _cosine(z, teacher)
    log_s, log_t = log_softmax(z), log_softmax(teacher)
    s, t = np.exp(log_s), np.exp(log_t)
    if options.kind == "tvd":
        sign = np.sign(s - t)
        mean = (s * sign).sum(axis=-1, keepdims=True)
        return np.abs(s - t).sum(axis=-1) / 2, s * (sign - mean) / 2
    beta = options.beta
    if beta == 0:
        return _kl(t, log_t, log_s)[0], s - t
    if beta == 1:
        loss, logs = _kl(s, log_s, log_t)
        with np.errstate(invalid="ignore"):  # the loss is infinite if the teacher excludes a token
            return loss, s * (logs - loss[..., None])
    log_m = np.logaddexp(log_s + np.log1p(-beta), log_t + np.log(beta))
    from_teacher, _ = _kl(t, log_t, log_m)
    from_student, logs = _kl(s, log_s, log_m)
    slopes = (1 - beta) * s * (logs - from_student[..., None])
    return beta * from_teacher + (1 - beta) * from_student, slopes


def _kl(p: Array, log_p: Array, log_q: Array) -> tuple[Array, Array]:
    """Return KL(p, q) of each row, and log(p / q), which is 0 where p is 0."""
    with np.errstate(invalid="ignore"):  # -inf - -inf
        logs = np.where(p > 0, log_p - log_q, 0)
    return (p * logs).sum(axis=-1), logs


def _cosine(z: Array, teacher: Array) -> tuple[Array, Array]:
    """Return 1 - cosine of each row, and its derivatives with respect to z."""
    if not z.size:
        return np.ones_like(z, shape=z.shape[:-1]), z
    (one, length), (two, _) = _divided(z), _divided(teacher)
    cosine = np.clip((one * two).sum(axis=-1, keepdims=True), -1, 1)
    along = np.where(length > LEAST, cosine * one, 0)  # a length of LEAST is a constant
    return 1 - cosine[..., 0], (along - two) / length


def _divided(z: Array) -> tuple[Array, Array]:
    """Return the rows divided by their lengths, which are at least LEAST, and the lengths."""
    unit = np.maximum(np.abs(z).max(axis=-1, keepdims=True), LEAST)
    rows = z / unit  # so that no square overflows
    length = np.maximum(np.sqrt((rows * rows).sum(axis=-1, keepdims=True)), LEAST / unit)
    with np.errstate(over="ignore"):  # the length may exceed the dtype
        return rows / length, length * unit


# ---- launches -----------------------------------------------------------------------------------
def launch(
    name: str,
    logits: Array,
    teacher: Array,
    heads: tuple[Head, Head],
    options: Options,
    *results: Array,
) -> None:
    """Launch a kernel of divergence.cu, which writes the last of ``results``.

    ``results`` are the loss, or dloss and the gradient of the logits, which may be the logits.
    """
    vocab, (student, other) = logits.shape[-1], heads
    teacher, bias, teacher_bias = map(of_kernels, (teacher, student.bias, other.bias))
    rows = logits, teacher, *results[1:]
    chosen = _constants(
        *(None if a is None else a.dtype for a in (*rows[:2], rows[-1], bias, teacher_bias)),
        vocab,
        # the widest dtype first: its accesses have 16 bytes
        access_of(vocab, *sorted(rows, key=lambda array: -array.dtype.itemsize)),
        student.softcap is not None,
        other.softcap is not None,
        _number(options),
    )
    count = logits.size // vocab
    kernel = load("divergence.cu", name, logits, chosen)
    kernel[-(-count * chosen["ROW_THREADS"] // chosen["THREADS"]), chosen["THREADS"]](
        *(logits, teacher, bias, teacher_bias, *results, count), _numbers(heads, options)
    )


def of_kernels(array: Any) -> Any:
    """Return a contiguous array in a dtype that kernels can read; None as it is."""
    array = array if array is None else contiguous(array)
    return array if array is None or array.dtype in KERNEL_DTYPES else array.astype(FLOAT32)


def _number(options: Options) -> int:
    """Return the number KIND of divergence.cu."""
    if options.kind == "jsd":
        return 0 if options.beta == 0 else 1 if options.beta == 1 else 2
    return 2 + KINDS.index(options.kind)


@cache
def _constants(
    logits: Any, teacher: Any, dlogits: Any, bias: Any, teacher_bias: Any, vocab: int,
    access: Access, cap: bool, teacher_cap: bool, kind: int,
) -> Constants:  # fmt: skip
    """Return the constants of divergence.cu."""
    shared = row_threads(-(-(vocab + access.ragged * (access.lanes - 1)) // access.lanes))
    return Constants(
        T=logits,
        U=teacher,
        G=dlogits,
        B=bias or logits,
        C=teacher_bias or logits,
        COLUMNS=vocab,
        LANES=access.lanes,
        RAGGED=access.ragged,
        ROW_THREADS=shared,
        THREADS=shared if shared > 32 else 128,  # short rows share a block
        SOFTCAP=cap,
        TEACHER_SOFTCAP=teacher_cap,
        BIAS=bias is not None,
        TEACHER_BIAS=teacher_bias is not None,
        KIND=kind,
    )


def numbers_of(head: Head) -> dict[str, float]:
    """Return the factors with which kernels turn the logits of a head into z."""
    inner = head.scale / (head.temperature if head.softcap is None else head.softcap)
    return {"inner": inner, "outer": (head.softcap or 1.0) / head.temperature}


def _numbers(heads: tuple[Head, Head], options: Options) -> dict[str, float]:
    """Return the struct of numbers of divergence.cu."""
    student, teacher = map(numbers_of, heads)
    return {
        **student,
        **{f"teacher_{name}": value for name, value in teacher.items()},
        "beta": options.beta,
        "rest": 1 - options.beta,
    }
