"""Which weights of a model are quantized to a kind, and how: by name and shape, one at a time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from ..core.call import is_integer
from ..core.dtypes import Array, Stored
from ..errors import ConfigError
from ..ops.quantized.blocks import BLOCK, Q40, Q80
from ..ops.quantized.int8 import int8_weight
from ..ops.quantized.mxfp4 import mxfp4_quantize
from ..ops.quantized.nf4 import nf4_quantize
from ..ops.quantized.ternary_quantize import ternary_quantize
from ..ops.quantized.weight import Quantized, in_blocks
from .configs.names import HEAD, SCORE, TABLE, is_norm, is_router, is_stack

if TYPE_CHECKING:
    from .configs.config import Config

KINDS: Mapping[str, Callable[[Array], Quantized]] = {
    "nf4": nf4_quantize,
    "nf4-double": partial(nf4_quantize, double=True),
    "fp4": partial(nf4_quantize, kind="fp4"),
    "int8": int8_weight,
    "ternary": ternary_quantize,
}
STACKED = "nf4", "nf4-double", "fp4", "int8"  # the kinds that hold stacks of experts
OF_STACKS = "mxfp4"  # a kind of files, in which all but the experts is dense
OF_FILES: Mapping[str, Callable[[Array], Quantized]] = {  # kinds that only files have
    OF_STACKS: mxfp4_quantize,
    "q4_0": Q40.quantized,
    "q8_0": Q80.quantized,
}
SKIP = ("embed", "norm", "lm_head")
NF4_BLOCK = 64  # values that share an absmax
LEAST = 1024  # values: smaller weights save nothing


def check_stacks(call: str, kind: str, config: "Config") -> None:
    """Raise a ConfigError for a mixture of experts whose stacks cannot be of a kind."""
    if config.experts is not None and kind not in (*STACKED, *OF_FILES):
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


def named(maker: Callable[[Array], Quantized], name: str, array: Array) -> Quantized:
    """Return the weight quantized; errors name the parameter."""
    try:
        return maker(array)
    except ValueError as error:
        raise type(error)(f"{name}: {error}") from None


class Quantizer:
    """Quantizes weights of a model by name to one kind, and returns other parameters unchanged.

    In a divided model, each rank's part has the codes that it has in the whole quantized weight.
    """

    def __init__(self, call: str, kind: str, division: Any = None) -> None:
        self.call, self.kind, self.division = call, kind, division
        self.maker = OF_FILES[kind] if kind in OF_FILES else maker_of(call, kind)

    def makes(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a weight of this shape is to be quantized."""
        if self.kind == OF_STACKS:
            return is_stack(name)
        if self.kind in OF_FILES and shape[-1] % BLOCK:
            return False
        return not left_dense(name, shape, SKIP, LEAST)

    def wants_whole(self, name: str) -> bool:
        """Return whether a rank needs the whole weight to compute the codes of its part."""
        division = self.division
        if division is None or not self.makes(name, shape := division.shapes[name]):
            return False
        groups = division.groups
        cuts = (division.cut(name, each, rank) for each in groups for rank in range(each.size))
        return not all(cut is None or self._separate(shape, *cut) for cut in cuts)

    def _separate(self, shape: Sequence[int], axis: int, places: Sequence[slice]) -> bool:
        """Return whether these slices along an axis share no scale with the other values."""
        if self.kind == "int8":
            return axis < len(shape) - 1
        if self.kind in OF_FILES:  # each row has whole blocks
            matrix = prod(shape[:-1]), shape[-1]
            return axis < len(shape) - 1 or in_blocks(matrix, 1, places, BLOCK)
        if len(shape) > 2 and axis == 0:
            shape = shape[0], prod(shape[1:])
        elif len(shape) > 2:
            if prod(shape[1:]) % NF4_BLOCK:
                return False
            shape, axis = shape[1:], axis - 1
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
        return step, lambda rows: named(self.maker, name, read(rows))

    def __call__(self, name: str, array: Any) -> Any:
        """Return a parameter, quantized if it is to be; of a divided model, this rank's part.

        ``array`` is this rank's part, or the whole weight if ``wants_whole``.
        """
        if isinstance(array, Quantized) and not array.IN_FOLDERS:  # of a GGUF file
            array = array.dequantize()
        if isinstance(array, Stored):
            problem = f"{self.call}: {name} is quantized already"
            raise ConfigError(f"{problem}; leave quantize out, or load the dense weights")
        division, whole = self.division, self.wants_whole(name)
        if not self.makes(name, array.shape if division is None else division.shapes[name]):
            return array
        result = named(self.maker, name, array)
        return division.own(name, result) if whole and division is not None else result
