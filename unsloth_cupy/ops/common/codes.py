"""Rows as integers of eight bits, and a scale a row: the definition that several ops share.

absmax = max |x|        codes = round(x * (127 / absmax))        scales = absmax / 127
"""

import numpy as np

from ...core.dtypes import Array

INT8 = np.dtype("int8")
TINY = 2.0**-119  # 127 / TINY is finite in float32


def quantized(
    x: Array, size: Array | None = None, outliers: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return codes, scales and absmax of rows, whose values count with such a size.

    Columns that are ``outliers`` have codes of 0.  A row below TINY counts as 0; one that holds
    NaN or infinity has codes of 0, and NaN for its scale.
    """
    size = np.abs(x) if size is None else size
    kind = x.dtype.type
    some = x.shape[-1] > 0
    absmax = size.max(axis=-1) if some else np.zeros(x.shape[:-1], x.dtype, like=x)
    broken = ~(absmax <= np.finfo(x.dtype).max)
    absmax = np.where(absmax < kind(TINY), kind(0), absmax)
    none = broken | (absmax == 0)
    factor = np.where(none, kind(0), kind(127) / np.where(none, kind(1), absmax))
    hidden = broken[..., None] if outliers is None else broken[..., None] | outliers
    codes = np.rint(np.where(hidden, kind(0), x) * factor[..., None])
    absmax = np.where(broken, kind(np.nan), absmax)
    return codes.astype(INT8), absmax / kind(127), absmax
