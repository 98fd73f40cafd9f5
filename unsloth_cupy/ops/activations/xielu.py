"""xIELU, the activation of Apertus' feed-forward layer, with two trainable curvatures.

y = p x**2 + beta x                             where x > 0,  p = log(1 + exp(alpha_p))
y = n (exp(min(x, eps)) - 1 - x) + beta x       elsewhere,    n = beta + log(1 + exp(alpha_n))

Huang and Schlag, Deriving Activation Functions Using Integration, 2024.
"""

from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.target import limits
from ..common.columns import column_sums
from ..common.elementwise import THREADS, constants, walk
from .swiglu import sigmoid

BLOCKS = 8  # blocks of 256 threads per SM in backward; each writes one partial sum per curvature


@op(
    "x(*axes), alpha_p(1): param, alpha_n(1): param, beta: table, eps: table -> y(*axes)",
)
def xielu(x: Array, alpha_p: Array, alpha_n: Array, beta: Array, eps: Array) -> Array:
    """Bend x upwards: a parabola where it is positive, an exponential elsewhere.

    ``y = p * x**2 + beta * x`` where x > 0, with ``p = log(1 + exp(alpha_p))``; elsewhere ``y = n *
    (exp(min(x, eps)) - 1 - x) + beta * x``, with ``n = beta + log(1 + exp(alpha_n))``.

    Parameters
    ----------
    x : (*axes) float
    alpha_p, alpha_n : (1,) dtype of x or float32
        Trainable curvatures above and below 0, before their softplus.
    beta, eps : () dtype of x or float32
        The slope at 0, and a number just below 0; the host does not read them from a GPU.

    Returns
    -------
    y : (*axes) float

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import xielu, xielu_backward
    >>> x = np.array([-1.0, 0.0, 2.0], np.float32)
    >>> up, down = np.zeros((2, 1), np.float32)  # log(1 + exp(0)) is log 2
    >>> beta, eps = np.float32(0.5), np.float32(-1e-6)
    >>> y = xielu(x, up, down, np.asarray(beta), np.asarray(eps))
    >>> np.testing.assert_allclose(y[2], np.log(2) * 4 + 1, rtol=1e-6)
    >>> dx, dup, ddown = xielu_backward(
    ...     np.ones_like(x), x, up, down, np.asarray(beta), np.asarray(eps)
    ... )[:3]
    """
    squared, bent = _terms(x, eps)
    alpha_p, alpha_n = _as_wide(x, alpha_p, alpha_n)
    p, n = np.logaddexp(alpha_p[0], 0), beta + np.logaddexp(alpha_n[0], 0)
    return p * squared + n * bent + beta * x


@xielu.gradient
def xielu_backward(
    dy: Array, x: Array, alpha_p: Array, alpha_n: Array, beta: Array, eps: Array
) -> tuple[Array, Array, Array, None, None]:
    """Return the gradients of x, alpha_p and alpha_n."""
    squared, bent = _terms(x, eps)
    alpha_p, alpha_n = _as_wide(x, alpha_p, alpha_n)
    p, n = np.logaddexp(alpha_p[0], 0), beta + np.logaddexp(alpha_n[0], 0)
    curve = np.where(x < eps, np.exp(np.minimum(x, eps)), 0) - 1
    dx = dy * (np.where(x > 0, 2 * p * np.maximum(x, 0), n * curve) + beta)
    dalpha_p = (dy * squared).sum() * sigmoid(alpha_p)
    dalpha_n = (dy * bent).sum() * sigmoid(alpha_n)
    return dx, dalpha_p, dalpha_n, None, None


def _as_wide(x: Array, *alphas: Array) -> list[Array]:
    """Return parameters in the dtype of x if that is wider, so that their softplus is as exact."""
    return [alpha.astype(np.promote_types(x.dtype, alpha.dtype), copy=False) for alpha in alphas]


def _terms(x: Array, eps: Array) -> tuple[Array, Array]:
    """Return the terms of y that p and n multiply."""
    below = np.minimum(x, 0)
    bent = np.where(x > 0, 0, np.expm1(np.minimum(below, eps)) - below)
    return np.square(np.maximum(x, 0)), bent


@xielu.kernel(strided=("x",))
def _launch(x: Array, alpha_p: Array, alpha_n: Array, beta: Array, eps: Array) -> Array:
    """Launch xielu."""
    y = empty(x.shape, x.dtype, like=x)
    plan = walk(x, y)
    kernel = load("xielu.cu", "xielu", x, _constants(plan, alpha_p, alpha_n, beta, eps))
    source, to = plan.arrays
    kernel[plan.tiles, THREADS](source, alpha_p, alpha_n, beta, eps, to, plan.rows)
    return y


@xielu_backward.kernel(strided=("dy", "x"))
def _launch_backward(
    dy: Array, x: Array, alpha_p: Array, alpha_n: Array, beta: Array, eps: Array
) -> tuple[Array, Array, Array, None, None]:
    """Launch xielu_backward, then the kernel that adds the partial sums in a fixed order."""
    dx = empty(x.shape, x.dtype, like=x)
    plan = walk(dy, x, dx)
    blocks = max(1, min(plan.tiles, BLOCKS * limits(x).processors))
    sums = empty((2, blocks, 1), FLOAT32, like=x)
    chosen = _constants(plan, alpha_p, alpha_n, beta, eps)
    kernel = load("xielu.cu", "xielu_backward", x, chosen)
    kernel[blocks, THREADS](
        *(*plan.arrays[:2], alpha_p, alpha_n, beta, eps, plan.arrays[2], sums, plan.rows),
        plan.tiles,
    )
    dalphas = [empty((1,), alpha.dtype, like=x) for alpha in (alpha_p, alpha_n)]
    column_sums(sums, *dalphas)
    return dx, *dalphas, None, None


def _constants(plan: Any, *numbers: Array) -> Any:
    """Return the constants of xielu.cu, with the dtypes of alpha_p, alpha_n, beta and eps."""
    names = dict(zip(("P", "N", "B", "E"), (each.dtype for each in numbers), strict=True))
    return constants(plan.arrays[0].dtype, plan.lanes, STRIDED=plan.strided, **names)
