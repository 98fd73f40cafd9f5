"""Activation checkpointing: keep the arguments of a part of the model, and compute it again.

    y = checkpoint(block, x, weights)                what happens inside takes no memory of the tape
    y = checkpoint(block, x, weights, keep=("attention_forward",))

The way back runs the function a second time, on a tape of its own, and goes back through that.
(Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.)
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..core.call import checked, is_number
from ..core.op import OPS
from ..errors import ConfigError, GradientError
from .offload import Offloaded, to_host
from .tape import Gradients, Tape, add_up
from .variable import Var

T = TypeVar("T")


@checked
@dataclass(frozen=True)
class CheckpointConfig:
    """Which parts of a model are checkpointed.

    Parameters
    ----------
    enabled : bool
        False: nothing is computed twice.
    checkpoint_every : int
        How many layers make one part: of each part the tape keeps the input alone.
    keep : tuple of str
        Ops whose results are kept as well and not computed again, such as
        ``attention_forward``, by far the dearest part of a block at long contexts.
    offload : bool
        Whether the inputs of parts wait in the memory of the host, where arrays are on a GPU.

    Raises
    ------
    ConfigError
        ``checkpoint_every`` is below 1, or ``keep`` names no op.
    """

    enabled: bool = True
    checkpoint_every: int = 1
    keep: tuple[str, ...] = ()
    offload: bool = False

    def __post_init__(self) -> None:
        """Check what was given."""
        every = self.checkpoint_every
        if type(every) is not int or every < 1:
            raise ConfigError(f"CheckpointConfig(checkpoint_every={every!r}): pass 1 or more")
        _check_names("CheckpointConfig", self.keep)

    def memory_reduction_factor(self, layers: int) -> float:
        """Return the share of the layers' inputs that is kept, one for each part.

        ``ceil(layers / every) / layers``: 0.25 of 32 layers where every 4 make a part, and 1
        without checkpoints.  While a part is computed again its own layers are held, too.
        """
        if not is_number(layers) or not 1 <= layers < math.inf:
            raise ConfigError(f"memory_reduction_factor({layers!r}): pass 1 layer or more")
        if not self.enabled:
            return 1.0
        return math.ceil(layers / self.checkpoint_every) / layers


@checked
def checkpoint(
    function: Callable[..., Any],
    /,
    *args: Any,
    keep: Collection[str] = (),
    offload: bool = False,
    **options: Any,
) -> Any:
    """Return ``function(*args, **options)``; the tape keeps the arguments and computes it again.

    Gradients are equal to the last bit to those without a checkpoint, as long as the function
    does the same in both calls: ops draw random numbers by their seed alone, so dropout does.
    Checkpoints may stand inside each other.

    Parameters
    ----------
    function : callable
        Takes and returns arrays; Vars of a tape, and tuples, lists and dictionaries of them.
        Vars that it uses must be among its arguments.
    keep : collection of str
        Ops whose results are kept, and not computed again: ``("attention_forward",)``.
    offload : bool
        Whether arguments that are Vars themselves wait in pinned memory of the host until they
        are needed, copied by a stream of their own.  Arrays of the host stay where they are.

    Raises
    ------
    ConfigError
        ``keep`` names no op.
    GradientError
        Arguments are on two tapes, or the function returned other results the second time.
    """
    if not callable(function):
        raise ConfigError(f"checkpoint({function!r}): pass a function, then its arguments")
    _check_names("checkpoint", keep)
    found = list(_leaves((args, options), Var))
    if not found:
        return function(*args, **options)
    tape, given = found[0].tape, {var.index: var for var in found}
    if any(var.tape is not tape for var in found):
        raise GradientError("checkpoint: arguments are on two tapes; watch them on one")
    first = _First(frozenset(keep))
    watched = {index: first.watch(var.value) for index, var in given.items()}
    result = function(
        *_mapped(args, Var, lambda var: watched[var.index]),
        **_mapped(options, Var, lambda var: watched[var.index]),
    )
    made: dict[int, Var] = {}
    for var in _leaves(result, Var):
        if var.tape is not first:
            raise GradientError(
                "checkpoint: the function uses a Var that is not an argument; pass it"
            )
        made.setdefault(var.index, Var(var.value, tape))
    moving = {arg.index for arg in args if type(arg) is Var} if offload else set()
    call = _mapped((args, options), Var, lambda var: _Slot(var.index))
    values = {i: to_host(v.value) if i in moving else v.value for i, v in given.items()}
    outputs = {str(index): var.index for index, var in made.items()}
    tape.note(Recomputed(function, call, values, outputs, first))
    return _mapped(result, Var, lambda var: made[var.index])


class Recomputed(NamedTuple):
    """A call on a tape of which only the arguments are kept."""

    function: Callable[..., Any]
    call: tuple[Any, Any]  # args and options, a _Slot in the place of every Var
    values: dict[Any, Any]  # what stood there, by index
    outputs: dict[str, int]
    first: "_First"

    @property
    def inputs(self) -> dict[str, int]:
        """The indices of the Vars among the arguments, by name."""
        return {str(index): index for index in self.values}

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Call the function again, and go back through it from gradients of its results."""
        again = _Again(self.first)
        watched = {i: again.watch(_back(value)) for i, value in self.values.items()}
        args, options = _mapped(self.call, _Slot, lambda slot: watched[slot.var])
        result = self.function(*args, **options)
        made = {str(var.index): var.index for var in _leaves(result, Var)}
        if made.keys() != self.outputs.keys():
            raise GradientError("checkpoint: the function did something else the second time")
        # what came back to the arguments so far goes in first: sums keep their order, and bits
        inside = {var.index: grads.pop(i) for i, var in watched.items() if i in grads}
        for name, grad in take.items():
            if grad is not None:
                inside[made[name]] = add_up(inside.get(made[name]), grad)
        again.walk_back(inside, {watched[i].index for i in inputs.values()})
        grads |= {i: inside[var.index] for i, var in watched.items() if var.index in inside}


class _Slot(NamedTuple):
    """Where a Var stood among the arguments."""

    var: int


class _First(Tape):
    """The tape of the first call: it keeps nothing but the results of some ops."""

    def __init__(self, keep: frozenset[str]) -> None:
        super().__init__()
        self.keep, self.results = keep, deque[Any]()

    def run(self, op: Any, values: list[Any], options: dict[str, Any]) -> Any:
        """Call an op, and keep what it returns if it is one of those."""
        result = super().run(op, values, options)
        if op.__name__ in self.keep:
            self.results.append(result)
        return result

    def note(self, entry: Any) -> None:
        """Forget the call."""


class _Again(Tape):
    """The tape of the second call: it has the results that the first one kept."""

    def __init__(self, first: _First) -> None:
        super().__init__()
        self.keep, self.results = first.keep, first.results.copy()

    def run(self, op: Any, values: list[Any], options: dict[str, Any]) -> Any:
        """Call an op, unless its result was kept."""
        kept = op.__name__ in self.keep
        return self.results.popleft() if kept else super().run(op, values, options)


def _check_names(call: str, keep: Any) -> None:
    listed = isinstance(keep, Collection) and not isinstance(keep, str)
    if not listed or not all(isinstance(name, str) and name in OPS for name in keep):
        raise ConfigError(f"{call}(keep={keep!r}): pass names of ops, as ('attention_forward',)")


def _leaves(tree: Any, kind: type[T]) -> Iterator[T]:
    """Yield what is of a kind in tuples, lists and dictionaries, in order."""
    if type(tree) is kind:
        yield tree
    elif isinstance(tree, tuple | list | Mapping):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(part, kind)


def _mapped(tree: Any, kind: type[T], change: Callable[[T], Any]) -> Any:
    """Return tuples, lists and dictionaries like these, with what is of a kind changed."""
    if type(tree) is kind:
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(part, kind, change) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_mapped(part, kind, change) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _back(value: Any) -> Any:
    return value.back() if type(value) is Offloaded else value
