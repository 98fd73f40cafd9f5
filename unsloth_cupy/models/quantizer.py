"""Kinds of quantized weights, and rules that choose weights to quantize by name and shape."""

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
from .configs.draft_heads import TABLES as OWN_TABLES
from .configs.names import HEAD, INTO_LAYERS, SCORE, TABLE, is_norm, is_router, is_stack

if TYPE_CHECKING:
    from .configs.config import Config


class Kind(NamedTuple):
    """A kind of quantized weights: the function that quantizes, and which values share a scale."""

    make: Callable[[Array], Quantized]
    block: int | None = None  # number of consecutive values that share a scale; None: no blocks
    by_row: bool = False  # whether every row has its own scales
    stacks: bool = True  # whether stacks of experts can have this kind
    in_folders: bool = True  # whether Hugging Face folders can store weights of this kind
    stack_in_folders: bool = False  # whether they can store stacks of experts of this kind
    only_experts: bool = False  # whether all weights other than experts stay dense

    @property
    def made(self) -> bool:
        """Whether ``models.quantize`` supports this kind; other kinds are only read from files."""
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
    """Raise a ConfigError if the model has stacks of experts, which this kind does not support."""
    kind = in_any_case(kind, KINDS)
    if config.experts is not None and not KINDS[kind].stacks:
        problem = f"{kind} does not support the stacks of experts of a {config.model_type}"
        raise ConfigError(f"{call}: {problem}; choose from {', '.join(STACKED)}")


def maker_of(
    call: str, kind: Any, skip: Sequence[str] = SKIP, least: int = LEAST
) -> Callable[[Array], Quantized]:
    """Check the options, and return the function that quantizes a weight to this kind."""
    if not isinstance(kind, str) or kind not in CHOICES:
        raise ConfigError(f"{call}: kind {kind!r} is unknown; choose from {', '.join(CHOICES)}")
    words: Any = skip
    listed = isinstance(words, list | tuple)
    if not listed or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(f"{call}(skip={skip!r}): pass words of names, as in {SKIP}")
    if not is_integer(least):
        raise ConfigError(f"{call}(least={least!r}): pass a number of values, 0 or more")
    return KINDS[kind].make


def kind_of(weight: Any) -> str | None:
    """Return the name in ``KINDS`` of a quantized weight's kind; None for a dense weight."""
    if not isinstance(weight, Quantized):
        return None
    kind = str(getattr(weight, "kind", weight.KIND))
    double = f"{kind}-double"
    return double if double in KINDS and getattr(weight, "double", False) else kind


def left_dense(name: str, shape: Sequence[int], skip: Sequence[str], least: int) -> str:
    """Return the reason why a weight stays dense; an empty string if it is to be quantized."""
    if is_router(name):
        return "a router"
    if not is_stack(name) and (len(shape) != 2 or is_norm(name) or not name.endswith(".weight")):
        return "not a matrix"
    outside = ".layers." not in name and not name.endswith(f"{INTO_LAYERS}.weight")
    own_tables = name.startswith("model.layers.") and name.endswith((*OWN_TABLES,))
    if name in (TABLE, HEAD, SCORE) or outside or own_tables:
        return "read by the embedding or the loss"
    word = next((word for word in skip if word in name), None)
    if word is not None:
        return f"its name contains {word}"
    return f"fewer than {least} values" if prod(shape) < least else ""


def named(maker: Callable[[Array], Quantized], name: str, array: Array) -> Quantized:
    """Return the quantized weight; errors name the parameter."""
    try:
        return maker(array)
    except ValueError as error:
        raise type(error)(f"{name}: {error}") from None


class Quantizer:
    """A callable that quantizes the weights of a model to one kind; other parameters are unchanged.

    In a divided model, the codes of each rank's part equal the codes in the whole quantized weight.
    """

    def __init__(self, call: str, kind: str, division: Any = None) -> None:
        kind = in_any_case(kind, KINDS)
        self.call, self.kind, self.division = call, kind, division
        self.maker = KINDS[kind].make if kind in KINDS else maker_of(call, kind)
        self.rule = KINDS[kind]

    def makes(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a weight of this name and shape is to be quantized."""
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
        """Return whether these slices of an axis share no scales with other values."""
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
        """Return (step, function): the function maps a slice of rows to their quantized weight.

        Groups of ``step`` rows have scales that do not depend on other rows.  None: all rows share
        scales, or the weight is a stack.
        """
        block, by_row = self.rule.block, self.rule.by_row
        if is_stack(name) or not (by_row or block):
            return None
        step = 1 if by_row or block is None else block // gcd(block, shape[1])
        return step, lambda rows: named(self.maker, name, read(rows))

    def __call__(self, name: str, array: Any) -> Any:
        """Return a parameter, quantized if the rules choose it; in a divided model, a rank's part.

        ``array`` is this rank's part, or the whole weight if ``wants_whole``.
        """
        if isinstance(array, Quantized) and not array.IN_FOLDERS:  # a kind of GGUF files
            array = array.dequantize()
        if isinstance(array, Stored):
            problem = f"{self.call}: {name} is quantized already"
            raise ConfigError(f"{problem}; leave quantize out, or load the dense weights")
        division, whole = self.division, self.wants_whole(name)
        if not self.makes(name, array.shape if division is None else division.shapes[name]):
            return array
        result = named(self.maker, name, array)
        return division.own(name, result) if whole and division is not None else result
