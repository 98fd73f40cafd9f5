"""Which weights of a model are kept in fewer bits, and what that saves and loses.

report = quantize(model, "nf4")
print(report)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.call import checked, is_integer
from ..core.dtypes import FLOAT32, Array, Stored
from ..core.gpu import at
from ..errors import ConfigError
from ..machine import format_bytes
from ..ops.quantized.int8 import int8_weight
from ..ops.quantized.nf4 import nf4_quantize
from ..ops.quantized.ternary_quantize import ternary_quantize
from ..ops.quantized.weight import Quantized, in_blocks

if TYPE_CHECKING:
    from .division import Division
    from .transformer import Transformer

KINDS: Mapping[str, Callable[[Array], Quantized]] = {
    "nf4": nf4_quantize,
    "nf4-double": partial(nf4_quantize, double=True),
    "fp4": partial(nf4_quantize, kind="fp4"),
    "int8": int8_weight,
    "ternary": ternary_quantize,
}
SKIP = ("embed", "norm", "lm_head")
NF4_BLOCK = 64  # values that share an absmax
LEAST = 1024  # values: what is smaller saves nothing
ROWS = 256  # of a weight, whose error is found at a time


class Row(NamedTuple):
    """One weight: its bytes before and after, and what it lost."""

    name: str
    before: int
    after: int
    error: float  # norm of the difference, over the norm of the weight
    sparsity: float  # share of values that are 0
    reason: str  # why it was left; empty where it was quantized


class QuantizationReport:
    """What ``quantize`` did, as a table.

    Attributes
    ----------
    kind : str
        What the weights were quantized to.
    rows : list of Row
        ``(name, before, after, error, sparsity, reason)`` of every weight: bytes, the norm of the
        difference over the norm of the weight, the share of zeros, and why it was left as it is.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rows: list[Row] = []

    @property
    def before(self) -> int:
        """Bytes of all weights, as they were."""
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        """Bytes of all weights, as they are."""
        return sum(row.after for row in self.rows)

    def __str__(self) -> str:
        made = [row for row in self.rows if not row.reason]
        lines = [("weight", "before", "after", "error", "zeros")]
        for row in made:
            sizes = format_bytes(row.before), format_bytes(row.after)
            lines.append((row.name, *sizes, f"{row.error:.2%}", f"{row.sparsity:.1%}"))
        left = len(self.rows) - len(made)
        size = sum(row.after for row in self.rows if row.reason)
        lines.append((f"{left} others, as they were", "", format_bytes(size), "", ""))
        lines.append(("all", format_bytes(self.before), format_bytes(self.after), "", ""))
        wide = [max(len(line[i]) for line in lines) for i in range(5)]
        text = (
            "  ".join([f"{line[0]:{wide[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], wide[1:]))])  # noqa: B905
            for line in lines
        )
        return "\n".join([f"{self.kind}:", *(line.rstrip() for line in text)])

    def __repr__(self) -> str:
        made = sum(not row.reason for row in self.rows)
        return f"QuantizationReport({self.kind}, {made} of {len(self.rows)} weights)"


@checked
def quantize(
    model: "Transformer", kind: str, *, skip: Sequence[str] = SKIP, least: int = LEAST
) -> QuantizationReport:
    """Keep the linear layers of a model in fewer bits, in place.

    Each dense weight is let go of as soon as its codes are made.

    Parameters
    ----------
    model : Transformer
    kind : str
        nf4, nf4-double (absmax in 8 bits too), fp4, int8 or ternary (one scale, by absmean).
    skip : sequence of str
        Weights whose names hold one of these words stay as they are.
    least : int
        Weights of fewer values stay as they are.

    Returns
    -------
    report : QuantizationReport
        By weight: bytes before and after, error, zeros; it prints as a table.

    Raises
    ------
    ConfigError
        The kind is not known, an option makes no sense, or the model is quantized already.
    RangeError
        A weight is not finite; the model is then as it was up to that weight.
    """
    maker, division = maker_of("quantize", kind, skip, least), model.division
    wants = Quantizer("quantize", kind, division)
    if frozen := [name for name, array in model.parameters.items() if isinstance(array, Stored)]:
        raise ConfigError(f"quantize: {frozen[0]} is quantized already; load the model anew")
    report = QuantizationReport(kind)
    for name in [*model.parameters]:
        array: Any = model.parameters[name]
        shape = array.shape if division is None else division.shapes[name]
        reason = left_dense(name, shape, skip, least)
        if reason:
            report.rows.append(Row(name, array.nbytes, array.nbytes, 0.0, 0.0, reason))
            continue
        with at(array):
            if division is not None and wants.wants_whole(name):
                made: Any = _named(maker, name, division.gathered(name, array))
                made = division.own(name, made)
            else:
                made = _named(maker, name, array)
            lost = error_of(array, made)
        report.rows.append(Row(name, array.nbytes, made.nbytes, *lost, ""))
        model.parameters[name] = made
        del array
    return report


def maker_of(
    call: str, kind: Any, skip: Sequence[str] = SKIP, least: int = LEAST
) -> Callable[[Array], Quantized]:
    """Return what quantizes a weight to this kind."""
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
    """Return why a weight stays as it is; nothing for one that is to be quantized."""
    if len(shape) != 2:
        return "not a matrix"
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return "read by the embedding or the loss"
    word = next((word for word in skip if word in name), None)
    if word is not None:
        return f"its name holds {word}"
    return f"fewer than {least} values" if shape[0] * shape[1] < least else ""


def _named(maker: Callable[[Array], Quantized], name: str, array: Array) -> Quantized:
    """Return the weight quantized; an error names it."""
    try:
        return maker(array)
    except ValueError as error:
        raise type(error)(f"{name}: {error}") from None


class Quantizer:
    """Makes the weights of a model, by name, into one kind, and leaves the others.

    Where ranks divide the model, a part has the codes of the whole weight.
    """

    def __init__(self, call: str, kind: str, division: "Division | None" = None) -> None:
        self.call, self.kind, self.division = call, kind, division
        self.maker = maker_of(call, kind)

    def makes(self, name: str, shape: Sequence[int]) -> bool:
        """Say whether a weight of this shape is to be quantized."""
        return not left_dense(name, shape, SKIP, LEAST)

    def wants_whole(self, name: str) -> bool:
        """Say whether a rank needs all of a weight to know the codes of its part."""
        division = self.division
        if division is None or not self.makes(name, shape := division.shapes[name]):
            return False
        cuts = (division.cut(name, rank) for rank in range(division.comm.size))
        return not all(cut is None or self._apart(shape, *cut) for cut in cuts)

    def _apart(self, shape: Sequence[int], axis: int, places: Sequence[slice]) -> bool:
        """Say whether values in some rows or columns share no scale with others."""
        if self.kind == "int8":
            return axis == 0
        return self.kind in ("nf4", "fp4") and in_blocks(shape, axis, places, NF4_BLOCK)

    def by_rows(
        self, name: str, shape: Sequence[int], read: Callable[[slice], Array]
    ) -> tuple[int, Callable[[slice], Quantized]] | None:
        """Return of how many rows scales tell nothing of others, and what makes rows, if any."""
        if self.kind not in ("int8", "nf4", "fp4"):
            return None
        step = 1 if self.kind == "int8" else NF4_BLOCK // gcd(NF4_BLOCK, shape[1])
        return step, lambda rows: _named(self.maker, name, read(rows))

    def __call__(self, name: str, array: Any) -> Any:
        """Return the weight as it is kept: of a part, or of the whole that is wanted, the part."""
        if isinstance(array, Stored):
            problem = f"{self.call}: {name} is quantized already"
            raise ConfigError(f"{problem}; leave quantize out, or load the dense weights")
        division, whole = self.division, self.wants_whole(name)
        if not self.makes(name, array.shape if division is None else division.shapes[name]):
            return array
        made = _named(self.maker, name, array)
        return division.own(name, made) if whole and division is not None else made


def error_of(dense: Array, made: Quantized) -> tuple[float, float]:
    """Return the norm of the difference over that of the weight, and the share of zeros."""
    lost = size = zeros = 0.0
    for top in range(0, len(dense), ROWS):
        rows = slice(top, top + ROWS)
        wide, found = dense[rows].astype(FLOAT32), made[rows].astype(FLOAT32)
        lost += float(np.square(wide - found).sum(dtype=np.float64))
        size += float(np.square(wide).sum(dtype=np.float64))
        zeros += float((found == 0).sum())
    return (lost / size) ** 0.5 if size else 0.0, zeros / max(1, dense.size)
