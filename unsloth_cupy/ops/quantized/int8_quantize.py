"""Row-wise int8 quantization: integers, and one scale per row.

absmax = max |x|        codes = round(x * (127 / absmax))        scales = absmax / 127

Dettmers and others, LLM.int8(), 2022; absmax and, except for ties, codes equal bitsandbytes'.
"""

from ...core.dtypes import Array
from ...core.op import op
from ..common.int8_codes import quantized
from ._int8_rows import launch_quantize


def int8_quantize(x: Array) -> tuple[Array, Array]:
    """Round each row to integers -127 .. 127 times a scale: x is about ``codes * scales[:, None]``.

    Parameters
    ----------
    x : (*rows, columns) float
        Rows; any number of leading axes.

    Returns
    -------
    codes : (*rows, columns) int8
        x / scale, rounded to the nearest integer, ties to even.
    scales : (*rows,) float32, or float64 for float64 x
        The largest absolute value of each row, divided by 127.  A row whose largest value is below
        1.5e-36 has a scale of 0 and codes of 0.  A row with NaN or infinity has a scale of NaN, so
        that the error stays visible, and codes of 0.

    Raises
    ------
    ShapeError, DTypeError
        x is not a float array with an axis.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import int8_quantize
    >>> codes, absmax, *_ = int8_quantize(np.array([[1.0, -2.0, 0.5]], np.float32))
    >>> np.testing.assert_array_equal(codes, [[64, -127, 32]])
    """
    codes, scales, _ = int8_quantize_forward(x)
    return codes, scales


@op(
    "x(*rows, columns) -> codes(*rows, columns): code, scales(*rows): stat, absmax(*rows): stat",
    no_gradient="its results are integers; int8_linear has a gradient",
)
def int8_quantize_forward(x: Array) -> tuple[Array, Array, Array]:
    """Return codes and scales of int8_quantize, and the largest absolute value of each row."""
    return quantized(x)


@int8_quantize_forward.kernel(strided=("x",))
def _launch(x: Array) -> tuple[Array, Array, Array]:
    """Return codes, scales and absmax from the kernel."""
    return launch_quantize(x)
