"""Products of matrices, one or a batch of them.

c = a b        da = dc b^T        db = a^T dc
"""

import math
from collections.abc import Set

from ...core.dtypes import Array
from ...core.op import op
from ..common.gemm import gemm


@op(
    "a(*matrices, height, inner), b(*matrices, inner, width) -> c(*matrices, height, width)",
    widen=False,  # products take 16-bit operands as they are
    operations=lambda a: 2 * a["a"].size * a["b"].shape[-1],
)
def matmul(a: Array, b: Array) -> Array:
    """Multiply matrices, one pair or a batch of pairs: ``c = a @ b``.

    For rows times one weight, use ``linear``.

    Parameters
    ----------
    a : (*matrices, height, inner) float
    b : (*matrices, inner, width) float

    Returns
    -------
    c : (*matrices, height, width) float
        Accumulated in float32 (float64 for float64 arrays) and rounded once.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import matmul
    >>> a, b = np.random.default_rng(0).standard_normal((2, 5, 4, 4), np.float32)
    >>> np.testing.assert_allclose(matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)
    """
    return _batched(a, b)


@matmul.gradient(widen=False)
def matmul_backward(
    dc: Array, a: Array, b: Array, *, wanted: Set[str] | None = None
) -> tuple[Array | None, Array | None]:
    """Return the gradients of a and b; None for a gradient that is not ``wanted``."""
    da = _batched(dc, b.swapaxes(-1, -2)) if wanted is None or "a" in wanted else None
    db = _batched(a.swapaxes(-1, -2), dc) if wanted is None or "b" in wanted else None
    return da, db


def _batched(a: Array, b: Array) -> Array:
    """Return a @ b, with all batch axes flattened into one for the product."""
    batch = a.shape[:-2]
    if not batch:
        return gemm(a, b)
    # both (matrices, rows, columns)
    a, b = (x.reshape(math.prod(batch), *x.shape[-2:]) for x in (a, b))
    c = gemm(a, b)
    return c.reshape(*batch, *c.shape[-2:])  # (*matrices, height, width)


matmul_backward.facts["operations"] = lambda a: (
    2 * a["dc"].size * a["a"].shape[-1] * sum(a.get(n) is not None for n in ("da", "db"))
)
