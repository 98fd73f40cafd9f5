"""Further elementwise arithmetic: clip, and the ops with which users write losses."""

from collections.abc import Set

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ...errors import ConfigError
from ..common.elementwise import by_element


@op("a(*axes), b(*axes) -> c(*axes)")
def subtract(a: Array, b: Array) -> Array:
    """Return ``c = a - b``, element by element; both have the same shape and dtype."""
    return a - b


@subtract.gradient
def subtract_backward(
    dc: Array, *, wanted: Set[str] | None = None
) -> tuple[Array | None, Array | None]:
    """Return the gradients of a and b; None for gradients that are not ``wanted``."""
    return dc, -dc if wanted is None or "b" in wanted else None


@op("a(*axes), b(*axes) -> c(*axes)", autocast="float32")
def divide(a: Array, b: Array) -> Array:
    """Return ``c = a / b``, element by element; both have the same shape and dtype."""
    return a / b


@divide.gradient
def divide_backward(
    dc: Array, a: Array, b: Array, *, wanted: Set[str] | None = None
) -> tuple[Array | None, Array | None]:
    """Return the gradients ``dc / b`` of a and ``-dc a / b**2`` of b; None if not ``wanted``."""
    da = dc / b
    return da, -da * (a / b) if wanted is None or "b" in wanted else None


@op("x(*axes) -> y(*axes)", autocast="float32")
def power(x: Array, *, exponent: float) -> Array:
    """Return ``y = x ** exponent``; NaN where x is negative and the exponent is not an integer."""
    return x ** x.dtype.type(exponent)


@power.gradient
def power_backward(dy: Array, x: Array, *, exponent: float) -> Array:
    """Return the gradient of x, dy * exponent * x ** (exponent - 1); 0 for exponent 0."""
    if exponent == 0:  # 0 * x ** -1 would be NaN at x = 0
        return np.zeros_like(dy)
    return dy * (x.dtype.type(exponent) * x ** x.dtype.type(exponent - 1))


@op("x(*axes) -> y(*axes)", autocast="float32")
def exp(x: Array) -> Array:
    """Return ``y = e ** x``."""
    return np.exp(x)


@exp.gradient
def exp_backward(dy: Array, y: Array) -> Array:
    """Return the gradient of x."""
    return dy * y


@op("x(*axes) -> y(*axes)", autocast="float32")
def log(x: Array) -> Array:
    """Return the natural logarithm of x; -inf for 0, and NaN for negative values."""
    return np.log(x)


@log.gradient
def log_backward(dy: Array, x: Array) -> Array:
    """Return the gradient of x."""
    return dy / x


@op("x(*axes) -> y(*axes)", torch=lambda nn, t, o: t["x"].clamp(-o["bound"], o["bound"]))
def clip(x: Array, *, bound: float) -> Array:
    """Return ``y = min(max(x, -bound), bound)``, as OLMo does with queries, keys and values.

    Parameters
    ----------
    x : (*axes) float
    bound : float
        The largest magnitude.

    Returns
    -------
    y : (*axes) float

    Raises
    ------
    ConfigError
        bound is not a positive number.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import clip, clip_backward
    >>> x = np.array([-9.0, 0.5, 8.0], np.float32)
    >>> np.testing.assert_array_equal(clip(x, bound=8.0), [-8, 0.5, 8])
    >>> np.testing.assert_array_equal(clip_backward(np.ones_like(x), x, bound=8.0), [0, 1, 1])
    """
    return x.clip(-bound, bound)


@clip.gradient
def clip_backward(dy: Array, x: Array, *, bound: float) -> Array:
    """Return the gradient of x: dy where ``|x| <= bound``, else 0."""
    return np.where(np.abs(x) <= bound, dy, dy.dtype.type(0))


def _check_bound(call: str, bound: float) -> None:
    """Raise ConfigError unless the bound is positive."""
    if bound <= 0:
        raise ConfigError(f"{call}: bound={bound!r}; pass a positive number, such as 8")


clip.require(_check_bound)
clip_backward.require(_check_bound)
by_element(clip, "arithmetic.cu")
by_element(clip_backward, "arithmetic.cu")
