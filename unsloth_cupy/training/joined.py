"""Several optimizers of different parameters behind the interface of one optimizer."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.dtypes import Array
from ..errors import ConfigError
from .optimizer import Optimizer, check_names


class Joined:
    """Several optimizers of different parameters, with the methods of one optimizer.

    ``state`` does not save the rates of groups.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = [*optimizers]
        self.call = " and ".join(each.call for each in self.optimizers)
        self.parameters = {n: p for each in self.optimizers for n, p in each.parameters.items()}

    @property
    def tensors(self) -> dict[str, Any]:
        """The arrays of each parameter."""
        return {n: tensor for each in self.optimizers for n, tensor in each.tensors.items()}

    @property
    def steps(self) -> int:
        """The number of steps that were not skipped; reading it waits for a GPU."""
        return self.optimizers[0].steps

    def keep_copies(self, copies: Mapping[str, Array]) -> None:
        """Write 16-bit copies in every step, as ``AdamW.keep_copies`` does."""
        for each in self.optimizers:
            each.keep_copies({n: copy for n, copy in copies.items() if n in each.parameters})

    def step(
        self,
        gradients: Mapping[str, Array],
        lr: float | None = None,
        *,
        finite: Any = True,
        factor: Any = 1.0,
    ) -> None:
        """Update every parameter in place; arguments and errors are as in ``AdamW.step``."""
        check_names(f"{self.call}.step", gradients, self.parameters)
        own = [{n: gradients[n] for n in each.parameters} for each in self.optimizers]
        for each, some in zip(self.optimizers, own, strict=True):
            each.check(some, lr, finite=finite, factor=factor)
        for each, some in zip(self.optimizers, own, strict=True):
            each.step(some, lr, finite=finite, factor=factor)

    def traffic(self, gradients: Mapping[str, Array]) -> int:
        """Return the bytes that a step reads and writes."""
        return sum(each.traffic(gradients) for each in self.optimizers)

    @property
    def launchers(self) -> list[Any]:
        """The launchers of all optimizers; empty if an optimizer has none."""
        every = [each.launchers for each in self.optimizers]
        return [launcher for each in every for launcher in each] if all(every) else []

    def state(self) -> dict[str, Any]:
        """Return the states of all optimizers in one dict; they share ``steps``."""
        states = {n: a for each in self.optimizers for n, a in each.state().items()}
        return {name: array for name, array in states.items() if name != "groups"}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore a ``state()``; errors are as in ``AdamW.load_state``."""
        own = [each.state().keys() - {"groups"} for each in self.optimizers]
        if unknown := sorted(state.keys() - {name for names in own for name in names}):
            cure = "pass what state() returned for the same parameters"
            raise ConfigError(f"{self.call}.load_state: unknown {unknown}; {cure}")
        for each, names in zip(self.optimizers, own, strict=True):
            each.load_state({n: array for n, array in state.items() if n in names})
