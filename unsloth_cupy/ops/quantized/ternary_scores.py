"""Products of the rows of two ternary matrices, computed by counting bits.

s[i, j] = q_scale[i] * k_scale[j] * sum over d of q[i, d] k[j, d]

The sum is an integer: the number of columns with equal signs minus the number of columns with
different signs, where both codes are not 0.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ConfigError, DTypeError, ShapeError
from ..common.gemm import gemm
from ..common.no_kernel import no_kernel
from ._planes import WORD, codes_of, row_blocks
from .ternary import Ternary

SIDE = 16  # threads of a block along each axis
FEW = 16  # rows of q up to which a thread has one row instead of four: a block then has 16 rows


def ternary_scores(q: Any, k: Any) -> Array:
    """Multiply every row of q by every row of k: sums of integers, times both scales.

    Parameters
    ----------
    q : Ternary
        (q rows, inputs), with one scale per tensor or row.
    k : Ternary
        (k rows, inputs), with one scale per tensor or row.

    Returns
    -------
    scores : (q rows, k rows) float32
        Each is the product of an exact integer and the scales, rounded once.

    Raises
    ------
    DTypeError
        q or k is not a Ternary.
    ConfigError
        q or k has one scale per group.
    ShapeError
        The rows of q and k differ in length.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import ternary_quantize, ternary_scores
    >>> q, k = (ternary_quantize(a) for a in np.random.default_rng(0).standard_normal((2, 4, 64)))
    >>> assert ternary_scores(q, k).shape == (4, 4)
    """
    for name, each in (("q", q), ("k", k)):
        if not isinstance(each, Ternary):
            problem = f"{name} is {type(each).__name__}, not a Ternary"
            raise DTypeError(f"ternary_scores: {problem}; pass ternary_quantize({name}, per='row')")
        if each.group is not None:
            problem = f"{name} has a scale for {each.group} columns"
            raise ConfigError(f"ternary_scores: {problem}; quantize it per='row' or 'tensor'")
    if q.shape[1] != k.shape[1]:
        raise ShapeError(
            f"ternary_scores: q is {q.shape} and k is {k.shape}; their rows must be of one length",
            expected=q.shape[1],
            actual=k.shape[1],
        )
    scales = (each.scales[:, 0].astype(np.float32, copy=False) for each in (q, k))
    return ternary_scores_forward(q.planes, k.planes, *scales)


@op(
    "q(q_rows, signs, bytes): byte, k(k_rows, signs, bytes): byte, q_scale(q_rows|1),"
    " k_scale(k_rows|1) -> scores(q_rows, k_rows)",
    no_gradient="codes are integers",
    operations=lambda a: 16 * a["q"].size // 2 * len(a["k"]),
    integers=True,  # products of codes
)
def ternary_scores_forward(q: Array, k: Array, q_scale: Array, k_scale: Array) -> Array:
    """Return the scores of two pairs of planes, with one scale per row or one for all rows."""
    columns, wide = q.shape[2] * 8, q_scale.dtype
    scores = empty((len(q), len(k)), wide, like=q_scale)
    rows = codes_of(q, columns).astype(wide)
    for part in row_blocks(len(k), columns):
        gemm(rows, codes_of(k[part], columns).astype(wide).T, out=scores[:, part])
    scores *= q_scale.reshape(-1, 1) * k_scale
    return scores


@ternary_scores_forward.require
def _check(call: str, q: Array) -> None:
    """Raise ShapeError unless q has two planes."""
    if q.shape[1] != 2:
        raise ShapeError(
            f"{call}: q has {q.shape[1]} planes; pass 2", expected=2, actual=q.shape[1]
        )


@ternary_scores_forward.kernel
def _launch(q: Array, k: Array, q_scale: Array, k_scale: Array) -> Any:
    """Return the scores from the kernel."""
    words = q.shape[2] * 8 // WORD
    if q.shape[2] % 4 or lanes(q.shape[2], q, k) < 4:
        return no_kernel("rows of the planes are not aligned to 4 bytes")
    scores = empty((q.shape[0], k.shape[0]), q_scale.dtype, like=q_scale)
    q_rows = 1 if q.shape[0] <= FEW else 4  # rows of a thread
    kernel = load("ternary_scores.cu", "ternary_scores", q, _constants(q_scale.dtype, q_rows))
    tiles = -(-q.shape[0] // (SIDE * q_rows))
    kernel[-(-k.shape[0] // (SIDE * 4)) * tiles, SIDE * SIDE](
        *(q, k, q_scale, k_scale, scores, q.shape[0], k.shape[0], words, tiles),
        *(int(q_scale.size > 1), int(k_scale.size > 1)),
    )
    return scores


@cache
def _constants(dtype: Any, q_rows: int) -> Constants:
    """Return the constants of ternary_scores.cu."""
    return Constants(T=dtype, OWN=q_rows)
