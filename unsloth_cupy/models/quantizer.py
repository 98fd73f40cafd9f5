"""Which weights of a model are quantized to a kind, and how: by name and shape, one at a time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.call import in_any_case, is_integer
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


class Kind(NamedTuple):
    """A kind of quantized weights: how they are made, and which values share a scale."""

    make: Callable[[Array], Quantized]
    block: int | None = None  # consecutive values that share a scale; None: other values do
    by_row: bool = False  # no two rows share a scale
    stacks: bool = True  # whether it holds stacks of experts
    in_folders: bool = True  # whether Hugging Face folders have a form of it
    stack_in_folders: bool = False  # and of stacks of experts
    only_experts: bool = False  # all but the experts of such a model is dense

    @property
    def made(self) -> bool:
        """Whether ``models.quantize`` makes it; other kinds are read from files."""
        return self.in_folders and not self.only_experts


KINDS: Mapping[str, Kind] = {
    "nf4": Kind(nf4_quantize, block=64, stack_in_folders=True),
    "nf4-double": Kind(partial(nf4_quantize, double=True), stack_in_folders=True),
    "fp4": Kind(partial(nf4_quantize, kind="fp4"), block=64, stack_in_folders=True),
    "int8": Kind(int8_weight, by_row=True),
    "ternary": Kind(ternary_quantize, stacks=False),
    "mxfp4": Kind(
        mxfp4_quantize, block=BLOCK, by_row=True, stack_in_folders=True, only_experts=True
    ),
    "q4_0": Kind(Q40.quantized, block=BLOCK, by_row=True, in_folders=False),
    "q8_0": Kind(Q80.quantized, block=BLOCK, by_row=True, in_folders=False),
}
CHOICES = tuple(name for name, kind in KINDS.items() if kind.made)  # of ``models.quantize``
IN_FOLDERS = tuple(name for name, kind in KINDS.items() if kind.in_folders)
OF_STACKS = tuple(name for name, kind in KINDS.items() if kind.only_experts)
STACKED = tuple(name for name in CHOICES if KINDS[name].stacks)
SKIP = ("embed", "norm", "lm_head")
LEAST = 1024  # values: smaller weights save nothing


def check_stacks(call: str, kind: str, config: "Config") -> None:
    """Raise a ConfigError for a mixture of experts whose stacks cannot be of a kind."""
    kind = in_any_case(kind, KINDS)
    if config.experts is not None and not KINDS[kind].stacks:
        problem = f"the experts of a {config.model_type} are stacks, which {kind} does not hold"
        raise ConfigError(f"{call}: {problem}; choose from {', '.join(STACKED)}")


def maker_of(
    call: str, kind: Any, skip: Sequence[str] = SKIP, least: int = LEAST
) -> Callable[[Array], Quantized]:
    """Return the function that quantizes a weight to this kind; raise for invalid options."""
    if not isinstance(kind, str) or kind not in CHOICES:
        raise ConfigError(f"{call}: kind {kind!r} is not known; choose from {', '.join(CHOICES)}")
    words: Any = skip
    listed = isinstance(words, list | tuple)
    if not listed or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(f"{call}(skip={skip!r}): pass words of names, as in {SKIP}")
    if not is_integer(least):
        raise ConfigError(f"{call}(least={least!r}): pass a number of values, 0 or more")
    return KINDS[kind].make


def kind_of(weight: Any) -> str | None:
    """Return the kind of a quantized weight, by its name in ``KINDS``; None: it is dense."""
    if not isinstance(weight, Quantized):
        return None
    kind = str(getattr(weight, "kind", weight.KIND))
    double = f"{kind}-double"
    return double if double in KINDS and getattr(weight, "double", False) else kind


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
        kind = in_any_case(kind, KINDS)
        self.call, self.kind, self.division = call, kind, division
        self.maker = KINDS[kind].make if kind in KINDS else maker_of(call, kind)
        self.rule = KINDS[kind]

    def makes(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a weight of this shape is to be quantized."""
        if self.rule.only_experts:
            return is_stack(name)
        if not self.rule.in_folders and shape[-1] % BLOCK:
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
        block = self.rule.block
        if self.rule.by_row:
            matrix = prod(shape[:-1]), shape[-1]
            by_block = block is not None and in_blocks(matrix, 1, places, block)
            return axis < len(shape) - 1 or by_block
        if block is None:
            return False
        if len(shape) > 2 and axis == 0:
            shape = shape[0], prod(shape[1:])
        elif len(shape) > 2:
            if prod(shape[1:]) % block:
                return False
            shape, axis = shape[1:], axis - 1
        return in_blocks(shape, axis, places, block)

    def by_rows(
        self, name: str, shape: Sequence[int], read: Callable[[slice], Array]
    ) -> tuple[int, Callable[[slice], Quantized]] | None:
        """Return (step, function from rows to their quantized weight); None if rows share scales.

        Groups of ``step`` rows have scales that do not depend on other rows.
        """
        block, by_row = self.rule.block, self.rule.by_row
        if is_stack(name) or not (by_row or block):
            return None
        step = 1 if by_row or block is None else block // gcd(block, shape[1])
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
