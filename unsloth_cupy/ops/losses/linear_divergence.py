"""Divergences of a linear head from a teacher's head, without storing the full logits of either.

z = softcap * tanh(u / softcap) / temperature, u = scale * (x weight^T + bias), by chunks of rows
"""

from collections.abc import Callable, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...core.op import op
from ..common.gemm import gemm
from ._head import Rows, check_head, check_max_bytes, chunks, head_gradients, operations
from ._rows import parts
from .divergence import Head, Options, beta_of, check_options, launch, loss_and_slopes

# (z of some rows, the slice of these rows) -> (the loss of each row, its derivatives by z)
Measure = Callable[[Array, slice], tuple[Array, Array]]
# (the slice of a chunk's rows, its logits, dloss or None, out): without dloss write the loss to
# out, with dloss write the gradient of the logits.
Write = Callable[[slice, Array, Array | None, Array], None]


class Student(NamedTuple):
    """The student's head, and the function that turns its logits into losses or gradients."""

    head: Head
    kernels: bool
    write: Write


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
    """Return ``divergence`` of the logits of two heads, without storing the full logits.

    Parameters
    ----------
    x : (*rows, hidden) float
        The student's last hidden states.
    weight : (vocab, hidden) float
        The student's head; its gradient is accumulated in float32.
    teacher_x, teacher_weight : (*rows, teacher_hidden), (vocab, teacher_hidden) float
        The teacher's last hidden states and head; constants.
    bias, teacher_bias : (vocab,) float, optional
    mask : (*rows) bool, optional
        Rows where it is False are left out of the product: their loss and gradient are 0, whatever
        they hold.
    kind, beta, temperature
        As in ``divergence``.
    scale, softcap, teacher_scale, teacher_softcap : float
        As in ``linear_log_probs``.
    max_bytes : int, optional
        Limit of the memory for a chunk of the student's logits; by default as in
        ``linear_cross_entropy``.

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


def _operations(a: dict[str, Any]) -> int:
    """Return the operations of the student's products, and of the teacher's logits."""
    return operations(a) + int(2 * a["teacher_x"].size * a["weight"].shape[0])


@op(
    "x(*rows, hidden), weight(vocab, hidden), teacher_x(*rows, inner): constant,"
    " teacher_weight(vocab, inner): constant, bias?(vocab): param, teacher_bias?(vocab): constant,"
    " mask?(*rows): bool -> loss(*rows): stat",
    widen=False,  # products take 16-bit operands as they are
    operations=_operations,
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
    arrays = weight, teacher_x, teacher_weight, bias, teacher_bias, mask
    student = _student(
        *(False, *arrays, kind, beta, temperature, scale, softcap, teacher_scale, teacher_softcap)
    )
    return loss_of(x, mask, max_bytes, student)


@linear_divergence_forward.kernel
def _launch(x: Array, mask: Array | None, max_bytes: int | None, **others: Any) -> Array:
    """Return the loss: cuBLAS computes each chunk of both heads' logits, a kernel its loss."""
    return loss_of(x, mask, max_bytes, _student(True, mask=mask, **others))


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
    max_bytes: int | None = None,
    wanted: Set[str] | None = None,
    **options: Any,
) -> tuple[Array | None, Array | None, None, None, Array | None, None]:
    """Return the gradients of x, weight and bias; None for a gradient that is not ``wanted``."""
    arrays = weight, teacher_x, teacher_weight, bias, teacher_bias, mask
    student = _student(False, *arrays, **options)
    dx, dweight, dbias = gradients_of(dloss, x, mask, max_bytes, wanted, student)
    return dx, dweight, None, None, dbias, None


@linear_divergence_backward.kernel
def _launch_backward(
    dloss: Array,
    x: Array,
    mask: Array | None,
    max_bytes: int | None,
    wanted: Set[str] | None,
    **others: Any,
) -> tuple[Array | None, Array | None, None, None, Array | None, None]:
    """Return the gradients; the kernel writes the gradient of each chunk of logits."""
    student = _student(True, mask=mask, **others)
    dx, dweight, dbias = gradients_of(dloss, x, mask, max_bytes, wanted, student)
    return dx, dweight, None, None, dbias, None


def _student(
    kernels: bool,
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
) -> Student:
    """Return the student's head, with the function for a chunk of its logits."""
    head = Head(temperature, scale, softcap, bias, weight)
    teacher = Head(temperature, teacher_scale, teacher_softcap, teacher_bias, teacher_weight)
    logits, options = _logits(teacher, teacher_x, mask, kernels), Options(kind, beta, temperature)
    if kernels:
        return Student(head, True, partial(_by_kernel, (head, teacher), logits, options))

    def measure(z: Array, part: slice) -> tuple[Array, Array]:
        return loss_and_slopes(z, teacher.z(logits(part).astype(z.dtype, copy=False))[0], options)

    return Student(head, False, partial(by_parts, head, measure))


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


for each in (linear_divergence_forward, linear_divergence_backward):
    each.require(_check)
    each.require(check_max_bytes)
linear_divergence_backward.facts["operations"] = _operations


# ---- chunks -------------------------------------------------------------------------------------
def _logits(head: Head, x: Array, mask: Array | None, kernels: bool) -> Callable[[slice], Array]:
    """Return a function that computes the logits of some rows of x."""
    rows, weight = Rows(mask, kernels=kernels).of(x), head.weight
    if rows.dtype != weight.dtype:  # both operands of a product have one dtype
        rows, weight = (array.astype(FLOAT32, copy=False) for array in (rows, weight))
    return lambda part: gemm(rows[part], weight.T)


def _by_kernel(
    heads: tuple[Head, Head],
    teacher: Callable[[slice], Array],
    options: Options,
    part: slice,
    logits: Array,
    dloss: Array | None,
    out: Array,
) -> None:
    """Write the loss, or the gradient of a chunk of logits, by a kernel."""
    if dloss is None:
        launch("divergence_forward", logits, teacher(part), heads, options, out)
    else:
        launch("divergence_backward", logits, teacher(part), heads, options, dloss, out)


def by_parts(
    head: Head, measure: Measure, part: slice, logits: Array, dloss: Array | None, out: Array
) -> None:
    """Write the loss, or the gradient of a chunk of logits, some rows at a time."""
    for few in parts(logits):
        here = slice(part.start + few.start, min(part.start + few.stop, part.stop))
        z, by_logits = head.z(logits[few])
        loss, slopes = measure(z, here)
        out[few] = loss if dloss is None else slopes * dloss[few] * by_logits


def loss_of(x: Array, mask: Array | None, max_bytes: int | None, student: Student) -> Array:
    """Return the loss of each row."""
    head, kernels, write = student
    rows = Rows(mask, kernels=kernels)
    own = rows.of(x)
    loss = np.zeros_like(x, np.promote_types(x.dtype, FLOAT32), shape=(len(own),))
    for part, logits in chunks(own, head.weight, max_bytes):
        write(part, logits, None, loss[part])
    return rows.back(loss).reshape(x.shape[:-1])


def gradients_of(
    dloss: Array,
    x: Array,
    mask: Array | None,
    max_bytes: int | None,
    wanted: Set[str] | None,
    student: Student,
) -> tuple[Array | None, Array | None, Array | None]:
    """Return dx, dweight and dbias."""
    head, kernels, write = student
    return head_gradients(
        *(x, head.weight, head.bias, Rows(mask, kernels=kernels), [dloss], max_bytes, wanted),
        lambda part, logits, arrays, out: write(part, logits, arrays[0][:, None], out),
        own_buffer=kernels and x.dtype != FLOAT32,  # float32 gradients overwrite the logits
    )
