"""Records the changes of a model, so that all of them can be undone."""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ...errors import ConfigError

HOOKED = "_old_forward"  # the attribute with the forward that accelerate's hooks call
IMPLEMENTATION = "_attn_implementation_internal"  # attributes of a config, which users may set, too
EXPERTS = "_experts_implementation_internal"
SELECTED = (IMPLEMENTATION, EXPERTS)
REPLICATE = "_replicate_for_data_parallel"  # nn.DataParallel calls it for each device


class Nothing:
    """Marks a missing attribute; a class, as a deep copy does not copy classes."""


class Change(NamedTuple):
    """One changed attribute of an object: its value now, and its value before."""

    owner: Any
    name: str
    now: Any
    before: Any

    def place(self) -> str:
        """Return the attribute with the value now; "" if another library has replaced it."""
        held = vars(self.owner)
        places = (self.name, HOOKED) if self.name == "forward" else (self.name,)
        return next((place for place in places if held.get(place, Nothing) == self.now), "")


class Changes(list[Change]):
    """Attributes of modules and configs that were changed, in order."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute in the dictionary of an object, without ``__setattr__`` of its class."""
        before = vars(owner).get(name, Nothing)
        vars(owner)[name] = value
        self.append(Change(owner, name, value, before))

    def forward(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Make a module call a function as its forward, below the hooks of accelerate."""
        self.set(module, place_of(module), types.MethodType(function, module))
        if REPLICATE not in vars(module):
            self.set(module, REPLICATE, types.MethodType(_replicated, module))

    def since(self, count: int) -> None:
        """Undo all but the first ``count`` changes."""
        while len(self) > count:
            change = self.pop()
            owner, place, before = change.owner, change.place(), change.before
            if place == HOOKED and before is Nothing:  # accelerate's hook, added later, calls this
                before = types.MethodType(type(owner).forward, owner)
            if before is Nothing:
                vars(owner).pop(place, None)
            elif place:
                vars(owner)[place] = before

    def undo(self, model: nn.Module) -> None:
        """Undo all changes, also in copies of modules: peft copies modules that it saves."""
        ours = {c.now.__func__ for c in self if isinstance(c.now, types.MethodType)}
        self.since(0)
        for module in model.modules():
            place = place_of(module)
            held = vars(module).get(place)
            if isinstance(held, types.MethodType) and held.__func__ in ours:
                vars(module)[place] = types.MethodType(type(module).forward, module)
                vars(module).pop(REPLICATE, None)

    def places(self, model: nn.Module) -> list[tuple[Any, str]]:
        """Return the attributes that ``undo`` may set, as (object, name)."""
        names = ("forward", HOOKED, REPLICATE)
        places = [(module, name) for module in model.modules() for name in names]
        return [*places, *((change.owner, change.name) for change in self)]

    def check(self, wrapped: Any) -> None:
        """Raise if another library has replaced a changed attribute, except of ``wrapped``.

        Attention and experts of a config are not checked, either: ``undo`` leaves values that
        ``set_attn_implementation`` and ``set_experts_implementation`` have set.
        """
        last = {(id(change.owner), change.name): change for change in self}
        for owner, name, change in ((c.owner, c.name, c) for c in last.values()):
            if (
                not change.place()
                and owner is not wrapped
                and name not in (IMPLEMENTATION, EXPERTS)
            ):
                raise ConfigError(
                    f"unpatch: {name} of {type(owner).__name__} was replaced by another library"
                    " after patch(); undo that first"
                )


def _replicated(self: Any) -> Any:
    """Return a replica of a module, with methods that are bound to the replica."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name, held in vars(self).items():
        if isinstance(held, types.MethodType) and held.__self__ is self:
            vars(replica)[name] = types.MethodType(held.__func__, replica)
    return replica


def place_of(module: nn.Module) -> str:
    """Return the name of the attribute with a module's forward."""
    return HOOKED if HOOKED in vars(module) else "forward"


def own_forward(module: nn.Module) -> bool:
    """Return whether a module runs the forward of its class, not a replacement."""
    own = types.MethodType(type(module).forward, module)  # accelerate's hooks store this one
    return vars(module).get(place_of(module), own) == own
