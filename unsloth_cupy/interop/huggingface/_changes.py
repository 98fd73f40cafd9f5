"""Records the changes of a model, so that all of them can be undone."""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ...errors import ConfigError

HOOKED = "_old_forward"  # the attribute in which accelerate's hooks keep the forward they call
IMPLEMENTATION = "_attn_implementation_internal"  # of a config: also the user's to set
EXPERTS = "_experts_implementation_internal"  # of a config, too
SELECTED = (IMPLEMENTATION, EXPERTS)
REPLICATE = "_replicate_for_data_parallel"  # nn.DataParallel calls it for each device


class Nothing:
    """Marks a missing attribute; it is a class, as a deep copy keeps classes themselves."""


class Change(NamedTuple):
    """One changed attribute of an object: its value now, and its value before."""

    owner: Any
    name: str
    now: Any
    before: Any

    def place(self) -> str:
        """Return the attribute that holds the value now; "" if another library replaced it."""
        held = vars(self.owner)
        places = (self.name, HOOKED) if self.name == "forward" else (self.name,)
        return next((place for place in places if held.get(place, Nothing) == self.now), "")


class Changes(list[Change]):
    """Attributes of modules and configs that were changed, in order."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute in the object's own dictionary, without its class's ``__setattr__``."""
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
            if place == HOOKED and before is Nothing:  # hooked since: their forward calls this one
                before = types.MethodType(type(owner).forward, owner)
            if before is Nothing:
                vars(owner).pop(place, None)
            elif place:
                vars(owner)[place] = before

    def undo(self, model: nn.Module) -> None:
        """Undo all changes, also in copies of modules, as peft copies modules that it saves."""
        ours = {c.now.__func__ for c in self if isinstance(c.now, types.MethodType)}
        self.since(0)
        for module in model.modules():
            place = place_of(module)
            held = vars(module).get(place)
            if isinstance(held, types.MethodType) and held.__func__ in ours:
                vars(module)[place] = types.MethodType(type(module).forward, module)
                vars(module).pop(REPLICATE, None)

    def places(self, model: nn.Module) -> list[tuple[Any, str]]:
        """Return the objects, and names of their attributes, that ``undo`` may set."""
        names = ("forward", HOOKED, REPLICATE)
        places = [(module, name) for module in model.modules() for name in names]
        return [*places, *((change.owner, change.name) for change in self)]

    def check(self, wrapped: Any) -> None:
        """Raise if another library has replaced a changed attribute; ``wrapped`` is not checked.

        Nor are attention and experts of a config: ``undo`` keeps what ``set_attn_implementation``
        and ``set_experts_implementation`` have set.
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
    """Return a replica of a module, whose methods are bound to it and not to the module."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name, held in vars(self).items():
        if isinstance(held, types.MethodType) and held.__self__ is self:
            vars(replica)[name] = types.MethodType(held.__func__, replica)
    return replica


def place_of(module: nn.Module) -> str:
    """Return the name of the attribute that holds a module's forward."""
    return HOOKED if HOOKED in vars(module) else "forward"


def own_forward(module: nn.Module) -> bool:
    """Return whether a module runs the forward of its class, and not a replacement."""
    own = types.MethodType(type(module).forward, module)  # accelerate's hooks leave it there
    return vars(module).get(place_of(module), own) == own
