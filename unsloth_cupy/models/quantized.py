"""Quantize the weights of a model, and report the bytes saved and the errors.

report = quantize(model, "nf4")
print(report)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.call import check_options, is_integer
from ..core.dtypes import FLOAT32, Array, Stored
from ..core.gpu import device_of
from ..errors import ConfigError
from ..machine import format_bytes
from ..ops.quantized.int8 import int8_weight
from ..ops.quantized.mxfp4 import mxfp4_quantize
from ..ops.quantized.nf4 import nf4_quantize
from ..ops.quantized.ternary_quantize import ternary_quantize
from ..ops.quantized.weight import Quantized, in_blocks
from .configs.names import HEAD, SCORE, TABLE, is_norm, is_router, is_stack
from .folders.joined import join_quantized

if TYPE_CHECKING:
    from .configs.config import Config
    from .ranks.division import Division
    from .transformer import Transformer

KINDS: Mapping[str, Callable[[Array], Quantized]] = {
    "nf4": nf4_quantize,
    "nf4-double": partial(nf4_quantize, double=True),
    "fp4": partial(nf4_quantize, kind="fp4"),
    "int8": int8_weight,
    "ternary": ternary_quantize,
}
STACKED = "nf4", "nf4-double", "fp4", "int8"  # the kinds that hold stacks of experts
OF_STACKS = "mxfp4"  # a kind of files, in which all but the experts is dense
SKIP = ("embed", "norm", "lm_head")
NF4_BLOCK = 64  # values that share an absmax
LEAST = 1024  # values: smaller weights save nothing
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
        """Bytes of all weights before."""
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        """Bytes of all weights after."""
        return sum(row.after for row in self.rows)

    def __str__(self) -> str:
        quantized = [row for row in self.rows if not row.reason]
        lines = [("weight", "before", "after", "error", "zeros")]
        for row in quantized:
            sizes = format_bytes(row.before), format_bytes(row.after)
            lines.append((row.name, *sizes, f"{row.error:.2%}", f"{row.sparsity:.1%}"))
        unchanged = len(self.rows) - len(quantized)
        size = sum(row.after for row in self.rows if row.reason)
        lines.append((f"{unchanged} others, as they were", "", format_bytes(size), "", ""))
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
    """Quantize the linear layers of a model and the stacks of its experts, in place.

    Each dense weight is released as soon as its codes are computed.

    Parameters
    ----------
    model : Transformer
    kind : str
        nf4, nf4-double (absmax in 8 bits too), fp4, int8 or ternary (one scale, by absmean); of a
        mixture of experts not the last.
    skip : sequence of str
        Weights whose names contain one of these words stay dense.
    least : int
        Weights with fewer values stay dense.

    Returns
    -------
    report : QuantizationReport
        By weight: bytes before and after, error, share of zeros; it prints as a table.

    Raises
    ------
    ConfigError
        The kind is unknown, an option is invalid, or the model is quantized already.
    RangeError
        A weight is not finite; the weights before it are then already quantized.
    """
    if not hasattr(model, "division"):
        raise ConfigError(f"quantize: {model!r} is not a model; pass what load or create returned")
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
                result: Any = _named(quantize_weight, name, division.gathered(name, array))
                result = division.own(name, result)
            else:
                result = _named(quantize_weight, name, array)
            error_and_zeros = error_of(array, result)
        report.rows.append(Row(name, array.nbytes, result.nbytes, *error_and_zeros, ""))
        model.parameters[name] = result
        del array
    join_quantized(model.parameters)
    return report


def check_stacks(call: str, kind: str, config: "Config") -> None:
    """Raise a ConfigError for a mixture of experts whose stacks cannot be of a kind."""
    if config.experts is not None and kind not in (*STACKED, OF_STACKS):
        problem = f"the experts of a {config.model_type} are stacks, which {kind} does not hold"
        raise ConfigError(f"{call}: {problem}; choose from {', '.join(STACKED)}")


def maker_of(
    call: str, kind: Any, skip: Sequence[str] = SKIP, least: int = LEAST
) -> Callable[[Array], Quantized]:
    """Return the function that quantizes a weight to this kind; raise for invalid options."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{call}: kind {kind!r} is not known; choose from {', '.join(KINDS)}")
    words: Any = skip
    listed = isinstance(words, list | tuple)
    if not listed or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(f"{call}(skip={skip!r}): pass words of names, as in {SKIP}")
    if not is_integer(least):
        raise ConfigError(f"{call}(least={least!r}): pass a number of values, 0 or more")
    return KINDS[kind]


def left_dense(name: str, shape: Sequence[int], skip: Sequence[str], least: int) -> str:
    """Return why a weight stays dense; an empty string for one to be quantized."""
    if is_router(name):
        return "a router"
    if not is_stack(name) and (len(shape) != 2 or is_norm(name) or name.endswith("_bias")):
        return "not a matrix"
    if name in (TABLE, HEAD, SCORE):
        return "read by the embedding or the loss"
    word = next((word for word in skip if word in name), None)
    if word is not None:
        return f"its name holds {word}"
    return f"fewer than {least} values" if prod(shape) < least else ""


def _named(maker: Callable[[Array], Quantized], name: str, array: Array) -> Quantized:
    """Return the weight quantized; errors name the parameter."""
    try:
        return maker(array)
    except ValueError as error:
        raise type(error)(f"{name}: {error}") from None


class Quantizer:
    """Quantizes weights of a model by name to one kind, and returns other parameters unchanged.

    In a divided model, each rank's part has the codes that it has in the whole quantized weight.
    """

    def __init__(self, call: str, kind: str, division: "Division | None" = None) -> None:
        self.call, self.kind, self.division = call, kind, division
        self.maker = mxfp4_quantize if kind == OF_STACKS else maker_of(call, kind)

    def makes(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a weight of this shape is to be quantized."""
        if self.kind == OF_STACKS:
            return is_stack(name)
        return not left_dense(name, shape, SKIP, LEAST)

    def wants_whole(self, name: str) -> bool:
        """Return whether a rank needs the whole weight to compute the codes of its part."""
        division = self.division
        if division is None or not self.makes(name, shape := division.shapes[name]):
            return False
        cuts = (division.cut(name, rank) for rank in range(division.comm.size))
        return not all(cut is None or self._separate(shape, *cut) for cut in cuts)

    def _separate(self, shape: Sequence[int], axis: int, places: Sequence[slice]) -> bool:
        """Return whether these rows or columns share no scale with the other values."""
        if self.kind == "int8":
            return axis == 0
        return self.kind in ("nf4", "fp4") and in_blocks(shape, axis, places, NF4_BLOCK)

    def by_rows(
        self, name: str, shape: Sequence[int], read: Callable[[slice], Array]
    ) -> tuple[int, Callable[[slice], Quantized]] | None:
        """Return (step, function from rows to their quantized weight); None if rows share scales.

        Groups of ``step`` rows have scales that do not depend on other rows.
        """
        if self.kind not in ("int8", "nf4", "fp4") or is_stack(name):
            return None
        step = 1 if self.kind == "int8" else NF4_BLOCK // gcd(NF4_BLOCK, shape[1])
        return step, lambda rows: _named(self.maker, name, read(rows))

    def __call__(self, name: str, array: Any) -> Any:
        """Return a parameter, quantized if it is to be; of a divided model, this rank's part.

        ``array`` is this rank's part, or the whole weight if ``wants_whole``.
        """
        if isinstance(array, Stored):
            problem = f"{self.call}: {name} is quantized already"
            raise ConfigError(f"{problem}; leave quantize out, or load the dense weights")
        division, whole = self.division, self.wants_whole(name)
        if not self.makes(name, array.shape if division is None else division.shapes[name]):
            return array
        result = _named(self.maker, name, array)
        return division.own(name, result) if whole and division is not None else result


def error_of(dense: Array, quantized: Quantized) -> tuple[float, float]:
    """Return the norm of the difference / the norm of the weight, and the share of zeros."""
    squared_error = squares = zeros = 0.0
    step = ROWS if dense.ndim == 2 else 1
    for top in range(0, len(dense), step):
        rows: Any = slice(top, top + step) if dense.ndim == 2 else top
        expected, actual = dense[rows].astype(FLOAT32), quantized[rows].astype(FLOAT32)
        squared_error += float(np.square(expected - actual).sum(dtype=np.float64))
        squares += float(np.square(expected).sum(dtype=np.float64))
        zeros += float((actual == 0).sum())
    return (squared_error / squares) ** 0.5 if squares else 0.0, zeros / max(1, dense.size)
