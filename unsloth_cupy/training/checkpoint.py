"""Gradient checkpointing: store the arguments of a part of the model, and recompute the rest.

    y = checkpoint(block, x, weights)                   the tape stores no results inside the block
    y = checkpoint(block, x, weights, keep=("attention_forward",))

The backward pass runs the function a second time, on a separate tape, and differentiates that.
(Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.)
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..core.call import check_options, is_number
from ..core.op import OPS
from ..errors import ConfigError, GradientError
from .offload import to_host
from .tape import Gradients, Tape, add_up
from .variable import Var

T = TypeVar("T")


@check_options
@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of gradient checkpointing.

    Parameters
    ----------
    enabled : bool
        False: nothing is recomputed.
    recompute_every : int
        Layers per part; the tape stores only the input of each part.
    keep : tuple of str
        Ops whose results are stored and not recomputed, such as ``attention_forward``, by far the
        most expensive op of a block at long contexts.
    offload : bool
        Whether inputs of parts on a GPU are stored in the memory of the host.

    Raises
    ------
    ConfigError
        ``recompute_every`` is below 1, or ``keep`` has a name that is not an op.
    """

    enabled: bool = True
    recompute_every: int = 1
    keep: tuple[str, ...] = ()
    offload: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        every = self.recompute_every
        if type(every) is not int or every < 1:
            raise ConfigError(f"CheckpointConfig(recompute_every={every!r}): pass 1 or more")
        _check_names("CheckpointConfig", self.keep)

    def memory_reduction_factor(self, layers: int) -> float:
        """Return the fraction of layer inputs that is stored, one input per part.

        The fraction is ``ceil(layers / every) / layers``: 0.25 for 32 layers in parts of 4, and 1
        without checkpointing.  While a part is recomputed, its layers are in memory too.
        """
        if not is_number(layers) or not 1 <= layers < math.inf:
            raise ConfigError(f"memory_reduction_factor({layers!r}): pass 1 layer or more")
        if not self.enabled:
            return 1.0
        return math.ceil(layers / self.recompute_every) / layers


@check_options
def checkpoint(
    function: Callable[..., Any],
    /,
    *args: Any,
    keep: Collection[str] = (),
    offload: bool = False,
    **options: Any,
) -> Any:
    """Return ``function(*args, **options)``; the backward pass calls the function again.

    The tape stores only the arguments.  Gradients have the same bits as without a checkpoint, if
    both calls compute the same.  Dropout does: its random numbers depend only on the seed.
    Checkpoints may be nested.

    Parameters
    ----------
    function : callable
        Accepts and returns arrays, Vars of a tape, and tuples, lists and dictionaries of them.
        All Vars that the function uses must be arguments.
    keep : collection of str
        Ops whose results are stored and not recomputed: ``("attention_forward",)``.
    offload : bool
        Whether arguments that are Vars are stored in pinned memory of the host until backward; a
        separate stream copies them.  Host arrays are not moved.

    Raises
    ------
    ConfigError
        ``keep`` has a name that is not an op.
    GradientError
        Arguments are on two tapes, or the second call returned other results.
    """
    if not callable(function):
        raise ConfigError(f"checkpoint({function!r}): pass a function, then its arguments")
    _check_names("checkpoint", keep)
    variables = list(_leaves((args, options), Var))
    if not variables:
        return function(*args, **options)
    tape, inputs = variables[0].tape, {var.index: var for var in variables}
    if any(var.tape is not tape for var in variables):
        raise GradientError("checkpoint: arguments are on two tapes; watch them on one")
    first = FirstCall(frozenset(keep))
    watched = {index: first.watch(var.value) for index, var in inputs.items()}
    result = function(
        *_mapped(args, Var, lambda var: watched[var.index]),
        **_mapped(options, Var, lambda var: watched[var.index]),
    )
    returned: dict[int, Var] = {}
    for var in _leaves(result, Var):
        if var.tape is not first:
            raise GradientError(
                "checkpoint: the function uses a Var that is not an argument; pass it"
            )
        returned.setdefault(var.index, Var(var.value, tape))
    moving = {arg.index for arg in args if type(arg) is Var} if offload else set()
    call = _mapped((args, options), Var, lambda var: _Slot(var.index))
    values = {i: to_host(v.value) if i in moving else v.value for i, v in inputs.items()}
    outputs = {str(index): var.index for index, var in returned.items()}
    ahead = _offloaded(tape) if moving else ()
    tape.note(Recomputed(function, call, values, outputs, first, ahead))
    return _mapped(result, Var, lambda var: returned[var.index])


class Recomputed(NamedTuple):
    """A call on a tape that stores only its arguments and recomputes the rest."""

    function: Callable[..., Any]
    call: tuple[Any, Any]  # args and options, a _Slot in the place of every Var
    values: dict[Any, Any]  # values of the Vars in ``call``, by index
    outputs: dict[str, int]
    first: "FirstCall"
    ahead: tuple[Any, ...]  # offloaded arrays of the checkpoint before: backward needs them next

    @property
    def inputs(self) -> dict[str, int]:
        """The indices of the Vars among the arguments, by name."""
        return {str(index): index for index in self.values}

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Call the function again, and propagate gradients from its results to its arguments."""
        again = SecondCall(self.first)
        indices, returned = self._recorded(again)
        # gradients that the arguments already have are the first summands: same order, same bits
        inside = {inner: grads.pop(i) for i, inner in indices.items() if i in grads}
        while take:  # the caller need not hold them while the part is differentiated
            name, grad = take.popitem()
            if grad is not None:
                inside[returned[name]] = add_up(inside.get(returned[name]), grad)
        grad = None
        again.walk_back(inside, {indices[i] for i in inputs.values()})
        grads |= {i: inside[inner] for i, inner in indices.items() if inner in inside}

    def _recorded(self, again: "SecondCall") -> tuple[dict[Any, int], dict[str, int]]:
        """Call the function on a tape; return the indices of its arguments and of its results.

        The tape stores the arrays that backward reads, and no others outlive the call.
        """
        watched = {i: again.watch(_back(value)) for i, value in self.values.items()}
        for value in self.ahead:  # they are copied back while this part is computed
            value.fetch()
        args, options = _mapped(self.call, _Slot, lambda slot: watched[slot.var])
        result = self.function(*args, **options)
        returned = {str(var.index): var.index for var in _leaves(result, Var)}
        if returned.keys() != self.outputs.keys():
            raise GradientError(
                "checkpoint: the second call of the function returned other results"
            )
        return {i: var.index for i, var in watched.items()}, returned


class _Slot(NamedTuple):
    """A placeholder for a Var in the stored arguments."""

    var: int


class FirstCall(Tape):
    """The tape of the first call, which stores only the results of the ops in ``keep``."""

    def __init__(self, keep: frozenset[str]) -> None:
        super().__init__()
        self.keep, self.results = keep, deque[Any]()

    def run(self, op: Any, values: list[Any], options: dict[str, Any]) -> Any:
        """Call an op, and store its result if the op is in ``keep``."""
        result = super().run(op, values, options)
        if op.__name__ in self.keep:
            self.results.append(result)
        return result

    def note(self, entry: Any) -> None:
        """Drop the entry instead of recording it."""


class SecondCall(Tape):
    """The tape of the second call, which reuses the results that the first tape stored."""

    def __init__(self, first: FirstCall) -> None:
        super().__init__()
        self.keep, self.results = first.keep, first.results.copy()

    def run(self, op: Any, values: list[Any], options: dict[str, Any]) -> Any:
        """Return the stored result of an op, or call the op."""
        stored = op.__name__ in self.keep
        return self.results.popleft() if stored else super().run(op, values, options)


def _check_names(call: str, keep: Any) -> None:
    listed = isinstance(keep, Sequence | Set) and not isinstance(keep, str)
    if not listed or not all(isinstance(name, str) and name in OPS for name in keep):
        raise ConfigError(
            f"{call}(keep={keep!r}): pass names of ops, such as ('attention_forward',)"
        )


def _leaves(tree: Any, kind: type[T]) -> Iterator[T]:
    """Yield the objects of a class in nested tuples, lists and dictionaries, in order."""
    if type(tree) is kind:
        yield tree
    elif isinstance(tree, tuple | list | Mapping):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(part, kind)


def _mapped(tree: Any, kind: type[T], change: Callable[[T], Any]) -> Any:
    """Return a copy of nested tuples, lists and dictionaries; objects of a class are changed."""
    if type(tree) is kind:
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(part, kind, change) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_mapped(part, kind, change) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _offloaded(tape: Tape) -> tuple[Any, ...]:
    """Return the offloaded arrays of the last checkpoint on a tape."""
    last = next((each for each in reversed(tape.entries) if type(each) is Recomputed), None)
    values = () if last is None else last.values.values()
    return tuple(value for value in values if hasattr(value, "fetch"))


def _back(value: Any) -> Any:
    return value.back() if hasattr(value, "back") else value
