"""Row-wise int8 quantization with one scale per row: the definition for several ops.

absmax = max |x|        codes = round(x * (127 / absmax))        scales = absmax / 127
"""

import numpy as np

from ...core.dtypes import Array

INT8 = np.dtype("int8")
TINY = 2.0**-119  # 127 / TINY is finite in float32


def quantized(
    x: Array, size: Array | None = None, outliers: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return codes, scales and absmax of the rows of x.

    absmax is the maximum of ``size``, by default ``abs(x)``.  Columns marked in ``outliers`` get
    code 0.  A row whose absmax is below TINY counts as zeros; a row with NaN or infinity gets codes
    of 0 and a scale of NaN, so that nothing hides it.
    """
    size = np.abs(x) if size is None else size
    kind = x.dtype.type
    has_columns = x.shape[-1] > 0
    absmax = size.max(axis=-1) if has_columns else np.zeros(x.shape[:-1], x.dtype, like=x)
    not_finite = ~(absmax <= np.finfo(x.dtype).max)
    absmax = np.where(absmax < kind(TINY), kind(0), absmax)
    no_factor = not_finite | (absmax == 0)
    factor = np.where(no_factor, kind(0), kind(127) / np.where(no_factor, kind(1), absmax))
    masked = not_finite[..., None] if outliers is None else not_finite[..., None] | outliers
    codes = np.rint(np.where(masked, kind(0), x) * factor[..., None])
    absmax = np.where(not_finite, kind(np.nan), absmax)
    return codes.astype(INT8), absmax / kind(127), absmax
