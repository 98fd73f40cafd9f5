"""Quantization of weights to -1, 0 or 1 times a scale.

w is about code * scale, with one scale per tensor, row or group of columns; code is the sign of w
if |w| is large enough, else 0:

absmean     |w| > mean(|w|) / 2           scale mean(|w|), at least 1e-5
twn         |w| > 0.7 mean(|w|)           scale the mean of |w| where the code is not 0
absmax      |w| >= max(|w|) / 2           scale max(|w|)
percentile  |w| > its percentile          scale as twn
mean_std    |w| > mean + c std of |w|     scale as twn
manual      |w| > threshold               scale as passed, or as twn

Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits, 2024 (absmean).
Li, Zhang and Liu, Ternary Weight Networks, 2016 (twn).
"""

from ...core.call import check_options
from ...core.dtypes import Array
from ...core.gpu import device_of
from ...errors import ConfigError
from ..common.checks import check_choice
from ._planes import check_group
from ._ternary_rules import parts_of
from .ternary import Ternary
from .weight import dense_weight

METHODS = ("absmean", "twn", "absmax", "percentile", "mean_std", "manual")
PER = ("tensor", "row", "group")


@check_options
def ternary_quantize(
    w: Array,
    *,
    method: str = "absmean",
    per: str = "tensor",
    group: int = 128,
    percentile: float = 50.0,
    deviations: float = 0.5,
    threshold: float | None = None,
    scale: float | None = None,
) -> Ternary:
    """Quantize a weight to codes -1, 0 and 1, two bits each: ``w`` is about ``codes * scale``.

    Parameters
    ----------
    w : (outputs, inputs) float
        The dense weight, as an array of any library.
    method : str
        ``absmean``, ``twn``, ``absmax``, ``percentile``, ``mean_std`` or ``manual``: the rule for
        zeros and scales; the docstring of the module defines each.
    per : str
        The weights that share a scale: all weights of the ``tensor``, of a ``row``, or of a
        ``group`` of neighbouring columns in a row.
    group : int
        Columns of a group: a multiple of 32.
    percentile : float
        The percentile of ``abs(w)``, from 0 to 100, for ``method="percentile"``.
    deviations : float
        Standard deviations between the mean of ``abs(w)`` and the threshold of ``mean_std``.
    threshold, scale : float, optional
        For ``method="manual"``; ``threshold`` is required there.

    Returns
    -------
    quantized : Ternary
        Its ``statistics`` have the shares of 0, 1 and -1, and the mean and the largest error.

    Raises
    ------
    ConfigError
        An option is invalid.
    RangeError
        ``w`` holds NaN or an infinity; the message names its position.
    ShapeError, DTypeError
        ``w`` is not a matrix of floats, or is quantized already.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import Ternary, ternary_linear, ternary_quantize
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.standard_normal((4, 64), np.float32), rng.standard_normal((32, 64), np.float32)
    >>> weight = ternary_quantize(w)  # -1, 0 and 1, times a scale
    >>> assert isinstance(weight, Ternary)
    >>> assert ternary_linear(x, weight).shape == (4, 32)
    """
    w = dense_weight("ternary_quantize", w)
    check_choice("ternary_quantize", "per", per, PER)
    if per == "group":
        check_group("ternary_quantize", group)
    _check_method(method, percentile, deviations, threshold, scale)
    options = percentile, deviations, threshold, scale
    columns = group if per == "group" else None
    with device_of(w):
        planes, scales, errors = parts_of(w, per, group, method, *options)
        return Ternary(planes, scales, w.shape, group=columns, dtype=w.dtype, errors=errors)


# ---- checks -------------------------------------------------------------------------------------
def _check_method(
    method: str, percentile: float, deviations: float, threshold: float | None, scale: float | None
) -> None:
    """Raise ConfigError unless the method and its options are valid."""
    check_choice("ternary_quantize", "method", method, METHODS)
    if not 0 <= percentile <= 100:
        raise ConfigError(f"ternary_quantize: percentile={percentile!r}; it must be in 0 .. 100")
    if deviations < 0:
        raise ConfigError(f"ternary_quantize: deviations={deviations!r}; it must be 0 or more")
    manual_options = {"threshold": threshold, "scale": scale}
    for name, value in manual_options.items():
        if value is None:
            continue
        if method != "manual":
            raise ConfigError(f"ternary_quantize: {name} is an option of method='manual' alone")
        if value < 0:
            raise ConfigError(f"ternary_quantize: {name}={value!r}; it must be 0 or more")
    if method == "manual" and threshold is None:
        raise ConfigError("ternary_quantize: method='manual' needs a threshold; pass threshold=...")
