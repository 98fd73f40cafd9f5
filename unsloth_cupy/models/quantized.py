"""Quantize the weights of a model, and report the bytes saved and the errors.

report = quantize(model, "nf4")
print(report)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.call import check_options, in_any_case
from ..core.dtypes import FLOAT32, Array, Stored
from ..core.gpu import device_of
from ..errors import ConfigError
from ..machine import format_bytes
from ..ops.quantized.weight import Quantized
from .folders.joined import join_quantized
from .quantizer import CHOICES, LEAST, SKIP, Quantizer, check_stacks, left_dense, maker_of, named

if TYPE_CHECKING:
    from .transformer import Transformer

ROWS = 256  # rows whose error is computed at a time, to bound memory


class Row(NamedTuple):
    """One weight: its bytes before and after, and its quantization error."""

    name: str
    before: int
    after: int
    error: float  # norm of the difference / norm of the weight
    sparsity: float  # share of values that are 0
    reason: str  # why it stayed dense; empty if it was quantized


class QuantizationReport:
    """A table of all weights after ``quantize``, changed or not; ``print`` shows it.

    Attributes
    ----------
    kind : str
        The kind of quantized weights, such as nf4.
    rows : list of Row
        ``(name, before, after, error, sparsity, reason)`` of every weight: bytes, the norm of the
        difference / the norm of the weight, the share of zeros, and why it stayed dense.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rows: list[Row] = []

    @property
    def before(self) -> int:
        """Bytes of all weights before quantization."""
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        """Bytes of all weights after quantization."""
        return sum(row.after for row in self.rows)

    def __str__(self) -> str:
        quantized = [row for row in self.rows if not row.reason]
        lines = [("weight", "before", "after", "error", "zeros")]
        for row in quantized:
            sizes = format_bytes(row.before), format_bytes(row.after)
            lines.append((row.name, *sizes, f"{row.error:.2%}", f"{row.sparsity:.1%}"))
        unchanged = len(self.rows) - len(quantized)
        size = sum(row.after for row in self.rows if row.reason)
        lines.append((f"{unchanged} others, unchanged", "", format_bytes(size), "", ""))
        lines.append(("all", format_bytes(self.before), format_bytes(self.after), "", ""))
        wide = [max(len(line[i]) for line in lines) for i in range(5)]
        text = (
            "  ".join([f"{line[0]:{wide[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], wide[1:]))])  # noqa: B905
            for line in lines
        )
        return "\n".join([f"{self.kind}:", *(line.rstrip() for line in text)])

    def __repr__(self) -> str:
        quantized = sum(not row.reason for row in self.rows)
        return f"QuantizationReport({self.kind}, {quantized} of {len(self.rows)} weights)"


@check_options
def quantize(
    model: "Transformer", kind: str, *, skip: Sequence[str] = SKIP, least: int = LEAST
) -> QuantizationReport:
    """Quantize the linear layers and the stacked experts of a model, in place.

    Each dense weight is released as soon as its codes are computed.

    Parameters
    ----------
    model : Transformer
    kind : str
        nf4, nf4-double (absmax values are also quantized, to 8 bits), fp4, int8, or ternary (one
        scale, the mean absolute value). ternary does not support mixtures of experts.
    skip : sequence of str
        Weights whose names contain one of these words stay dense.
    least : int
        Weights with fewer than ``least`` values stay dense.

    Returns
    -------
    report : QuantizationReport
        For each weight: bytes before and after, error, fraction of zeros.  ``print`` shows a table.

    Raises
    ------
    ConfigError
        The kind is unknown, an option is invalid, or the model is quantized already.
    RangeError
        A weight is not finite.  The weights before it have then already been quantized.
    """
    if not hasattr(model, "division"):
        raise ConfigError(f"quantize: {model!r} is not a model; pass what load or create returned")
    kind = in_any_case(kind, CHOICES)
    quantize_weight, division = maker_of("quantize", kind, skip, least), model.division
    check_stacks("quantize", kind, model.config)
    quantizer = Quantizer("quantize", kind, division)
    if frozen := [name for name, array in model.parameters.items() if isinstance(array, Stored)]:
        raise ConfigError(f"quantize: {frozen[0]} is quantized already; load the model again")
    report = QuantizationReport(kind)
    for name in [*model.parameters]:
        array: Any = model.parameters[name]
        shape = array.shape if division is None else division.shapes[name]
        reason = left_dense(name, shape, skip, least)
        if reason:
            report.rows.append(Row(name, array.nbytes, array.nbytes, 0.0, 0.0, reason))
            continue
        with device_of(array):
            if division is not None and quantizer.wants_whole(name):
                result: Any = named(quantize_weight, name, division.gathered(name, array))
                result = division.own(name, result)
            else:
                result = named(quantize_weight, name, array)
            error_and_zeros = error_of(array, result)
        report.rows.append(Row(name, array.nbytes, result.nbytes, *error_and_zeros, ""))
        model.parameters[name] = result
        del array
    join_quantized(model.parameters)
    return report


def error_of(dense: Array, quantized: Quantized) -> tuple[float, float]:
    """Return the relative error, norm(difference) / norm(weight), and the share of zeros."""
    squared_error = squares = zeros = 0.0
    step = ROWS if dense.ndim == 2 else 1
    for top in range(0, len(dense), step):
        rows: Any = slice(top, top + step) if dense.ndim == 2 else top
        expected, actual = dense[rows].astype(FLOAT32), quantized[rows].astype(FLOAT32)
        squared_error += float(np.square(expected - actual).sum(dtype=np.float64))
        squares += float(np.square(expected).sum(dtype=np.float64))
        zeros += float((actual == 0).sum())
    return (squared_error / squares) ** 0.5 if squares else 0.0, zeros / max(1, dense.size)
