"""Low-rank adapters of expert stacks and single matrices, by peft's ``target_parameters``.

    A (rank * experts, in)       the rows of one expert are contiguous
    B (out, rank * experts)      the columns of one rank index are contiguous
    weight[e] + scale * B[:, :, e] A[e]        with A as (experts, rank, in), B (out, rank, experts)

If both stacks of a layer are adapted, peft nests their modules: ``experts.base_layer`` has the
tensors of gate_up, ``experts`` the tensors of down.  A stack that is adapted alone is ``experts``.
Forward passes never compute the sum.

A matrix in ``target_parameters``, such as ``mlp.gate.weight``, has the layout of a linear layer.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...ops.linear.lora_merge import lora_merge, lora_sum
from ...ops.quantized.weight import Quantized
from ..configs.config import STACKS, Config
from ..configs.draft_heads import without_heads
from ..folders.initial_weights import INITIAL
from .adapter_base import MERGE
from .kept import Kept

EXPERTS = "experts."  # before the names of stacks among targets


class Stack(NamedTuple):
    """A stack that has an adapter, and the module that peft names its tensors after."""

    parameter: str
    module: str
    shape: tuple[int, int, int]  # (experts, outputs, inputs)
    in_turns: bool  # rows of B alternate between gate and up, as in the file of the stack

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows and columns of one expert."""
        return self.shape[1:]


def stacks_of(config: Config, chosen: Callable[[str], bool]) -> dict[str, Stack]:
    """Return the stacks for which ``chosen(name)`` is true, by module in an adapter."""
    stacks: dict[str, Stack] = {}
    experts, shapes = config.experts, config.shapes()
    for layer in range(config.layers) if experts is not None else ():
        if experts is None or not experts.sparse[layer]:
            continue
        outer = f"{config.prefix_of(layer)}{experts.prefix}experts"
        names = [f"{outer}.{name}" for name in experts.names if chosen(f"{outer}.{name}")]
        for name in names:
            module = f"{outer}.base_layer" if len(names) > 1 and name == names[0] else outer
            count, outputs, inputs = shapes[name]
            turns = experts.transposed and not experts.halves and name.endswith(STACKS[0])
            stacks[module] = Stack(name, module, (count, outputs, inputs), turns)
    return stacks


def targets_of(config: Config) -> tuple[str, ...]:
    """Return the names of stacks that ``targets`` of a new adapter may contain."""
    return () if config.experts is None else tuple(EXPERTS + n for n in config.experts.names)


def target_parameters(config: Config, targets: Collection[str]) -> list[str]:
    """Return peft's target_parameters for the stacks among targets."""
    own, experts = targets_of(config), config.experts
    return [] if experts is None else [f"{experts.prefix}{n}" for n in own if n in targets]


def named_alone(settings: Mapping[str, Any], name: str) -> bool:
    """Return whether ``target_parameters`` contains the end of a parameter's name."""
    listed = settings.get("target_parameters") or []
    return f".{name}".endswith(tuple(f".{each}" for each in listed))


def pattern_name(
    settings: Mapping[str, Any], stacks: Mapping[str, Stack], module: str, layer: str
) -> str:
    """Return the name that patterns of rank and alpha match: of a module, or of a parameter."""
    if module in stacks:
        return stacks[module].parameter
    return f"{layer}.weight" if named_alone(settings, f"{layer}.weight") else layer


def listed_stacks(
    path: Any, config: Config, settings: Mapping[str, Any], layers: Collection[str]
) -> dict[str, Stack]:
    """Return the stacks that ``target_parameters`` names, by module.

    It may also name the weights of ``layers``.

    Raises
    ------
    ConfigError
        It names another parameter, or peft does not support a setting for stacks.
    """
    listed: Any = settings.get("target_parameters") or []
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ConfigError(f"{path}: target_parameters is {listed!r}; it must be a list of names")
    shapes = without_heads(config).shapes() if listed else {}  # draft heads stay frozen
    own = [name for name in shapes if named_alone(settings, name)]
    stacks = stacks_of(config, own.__contains__) if own else {}
    known = {stack.parameter for stack in stacks.values()}
    known |= {f"{layer}.weight" for layer in layers}
    unknown = [each for each in listed if not any(f".{n}".endswith(f".{each}") for n in known)]
    if unknown or (other := next((name for name in own if name not in known), None)):
        problem = f"target_parameters names {unknown[0] if unknown else other}"
        raise ConfigError(
            f"{path}: {problem}, which is neither an expert stack of a {config.model_type} nor the"
            f" weight of a linear layer in its blocks; {MERGE}"
        )
    if own:
        if (init := settings.get("init_lora_weights")) in INITIAL:
            problem = f"init_lora_weights is {init!r}, which target_parameters do not support"
            raise ConfigError(f"{path}: {problem}; train the adapter without it")
        for key in ("lora_dropout", "lora_bias", "use_dora"):
            if settings.get(key):
                problem = f"{key} is {settings[key]!r}, which target_parameters do not support"
                raise ConfigError(f"{path}: {problem}; train the adapter without it")
    return stacks


class Adapted(NamedTuple):
    """The names of a stack's two adapter tensors, and the scale of their product."""

    stack: Stack
    down: str
    up: str
    scale: float
    into: Any = None  # the quantizer that the adapter is trained through

    def pair(self, parameters: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return A as (experts, rank, in) and B as (experts, out, rank), on arrays or a tape."""
        count, outputs, inputs = self.stack.shape
        a = parameters[self.down].reshape(count, -1, inputs)  # (experts, rank, in)
        b = parameters[self.up]
        if self.stack.in_turns:
            b = b.reshape(outputs // 2, 2, -1, count).transpose(3, 1, 0, 2)
            return a, b.reshape(count, outputs, -1)  # (experts, out, rank)
        return a, b.reshape(outputs, -1, count).transpose(2, 0, 1)  # (experts, out, rank)

    def sums(self, weight: Any, parameters: Mapping[str, Any]) -> Array:
        """Return the stack with the adapter added, in float32, by ``lora_sum``."""
        return lora_sum(weight, *self.pair(parameters), self.scale)

    def merge(
        self,
        weight: Any,
        parameters: Mapping[str, Any],
        requantize: bool = False,
        kept: Kept | None = None,
        exact: bool = False,
    ) -> Any:
        """Return the stack with the adapter added: see ``Adapter.merge``."""
        a, b = self.pair(parameters)
        wide = np.promote_types(weight.dtype, FLOAT32)

        def total(expert: int) -> Array:
            one = weight[expert].astype(wide, copy=False)
            return lora_merge(one, a[expert], b[expert], scale=self.scale)

        result: Any = empty(weight.shape, wide if exact else weight.dtype, like=a)
        for expert in range(len(weight)):
            result[expert] = total(expert)
        coded = requantize and isinstance(weight, Quantized)
        result = weight.requantized(result) if coded else result
        if kept is not None and (coded or result.dtype != wide):
            for expert in range(len(weight)):
                rows = result[expert].__getitem__
                kept.measure(self.stack.parameter, weight[expert], total(expert), rows)
        return result
