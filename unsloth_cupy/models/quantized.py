"""Which weights of a model are kept in fewer bits, and what that saves and loses.

report = quantize(model, "nf4")
print(report)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from ..ops.quantized.weight import Quantized

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
    maker = maker_of("quantize", kind, skip, least)
    if frozen := [name for name, array in model.parameters.items() if isinstance(array, Stored)]:
        raise ConfigError(f"quantize: {frozen[0]} is quantized already; load the model anew")
    report = QuantizationReport(kind)
    for name in [*model.parameters]:
        array: Any = model.parameters[name]
        reason = left_dense(name, array.shape, skip, least)
        if reason:
            report.rows.append(Row(name, array.nbytes, array.nbytes, 0.0, 0.0, reason))
            continue
        with at(array):
            made: Any = _named(maker, name, array)
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


def quantizing(call: str, kind: str) -> Callable[[str, Any], Any]:
    """Return what quantizes the weights of a model, by name, and leaves the others."""
    maker = maker_of(call, kind)

    def kept(name: str, array: Any) -> Any:
        if isinstance(array, Stored):
            problem = f"{call}: {name} is quantized already"
            raise ConfigError(f"{problem}; leave quantize out, or load the dense weights")
        dense = left_dense(name, array.shape, SKIP, LEAST)
        return array if dense else _named(maker, name, array)

    return kept


def cut_by_ranks(division: "Division", kind: str) -> list[str]:
    """Return the layers of which slices are not quantized as slices of the whole weight would be.

    Blocks, or rows that share a scale, are cut there, or slices are too small to be quantized.
    """
    found, ranks = set[str](), range(division.comm.size)
    for name, shape in division.shapes.items():
        cuts = [division.cut(name, rank) for rank in ranks]
        if left_dense(name, shape, SKIP, LEAST) or len(ranks) == 1:
            continue
        for axis, places in (cut for cut in cuts if cut is not None):
            held = sum(where.stop - where.start for where in places)
            borders = [at for where in places for at in (where.start, where.stop)]
            least = held * shape[1 - axis] < LEAST
            if least or not _fits(kind, axis, borders, shape[1]):
                found.add(name.split(".")[-2])
    return sorted(found)


def _fits(kind: str, axis: int, borders: Sequence[int], inputs: int) -> bool:
    """Say whether borders of slices are borders of what shares a scale."""
    if kind == "int8":
        return axis == 0
    if kind not in ("nf4", "fp4"):  # scales of scales, or one of all
        return False
    if axis == 0:
        return all(border * inputs % NF4_BLOCK == 0 for border in borders)
    return inputs % NF4_BLOCK == 0 and all(border % NF4_BLOCK == 0 for border in borders)


def keeping(
    place: Callable[[Any], Any], make: Callable[[str, Any], Any] | None
) -> Callable[[str, Any], Any]:
    """Return what puts a parameter where it is to be, and makes of it what is kept."""

    def kept(name: str, value: Any) -> Any:
        there = value.moved(place) if isinstance(value, Quantized) else place(value)
        return there if make is None else make(name, there)

    return kept


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
