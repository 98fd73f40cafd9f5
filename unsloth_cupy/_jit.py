"""Where kernels run, and their launch."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from . import _devices
from ._replay import Recorded
from ._source import Constants, check_arguments, parameters, translation_unit
from .errors import KernelError

NULL = np.uintp(0)  # the pointer of an absent array
Launch = Callable[[Any, Any, tuple[Any, ...], int], None]  # (grid, block, arguments, shared)


class Target(Protocol):
    """A place kernels run: it owns some arrays and compiles kernels for them."""

    def owns(self, array: Any) -> bool:
        """Say whether this target runs kernels on this array."""

    def compile(self, name: str, source: str) -> Launch:
        """Return kernel ``name`` of a translation unit as ``launch(grid, block, args, shared)``."""


targets: tuple[Target, ...] = ()  # _cupy enters the first


@contextmanager
def using(target: Target) -> Iterator[None]:
    """Ask this target first, inside a ``with`` block."""
    global targets  # noqa: PLW0603 -- the one seam between the library and the machine
    before, targets = targets, (target, *targets)
    try:
        yield
    finally:
        targets = before


def target_of(array: Any) -> Target | None:
    """Return the target that runs kernels on this array, if any does."""
    return next((target for target in targets if target.owns(array)), None)


class Kernel:
    """A compiled kernel that knows its parameters: ``kernel[grid, block](*args)``.

    Neither CUDA nor CuPy checks arguments.  This class checks those of the first launch, as later
    ones come from the same line, and turns Python scalars into the types that the source declares.
    """

    def __init__(
        self, target: Any, device: int, file: str, name: str, constants: Constants
    ) -> None:
        self.name = f"{name} of {file} with {constants}"
        self.parameters = parameters(file, name, constants)
        self.casts = [(i, d.type) for i, (d, pointer) in enumerate(self.parameters) if not pointer]
        self.checked = False
        self.launch = target.compile(name, translation_unit(file, constants))
        self.ready = getattr(target, "ready", lambda scalar: scalar)  # for replays

    def __getitem__(self, shape: tuple[Any, ...]) -> Callable[..., None]:
        """Take the launch shape: blocks, threads and, where needed, bytes of shared memory."""
        return functools.partial(self._run, *(shape if len(shape) == 3 else (*shape, 0)))

    def _run(self, grid: Any, block: Any, shared: int, *args: Any) -> None:
        if not self.checked:
            check_arguments(self.name, self.parameters, args)
            self.checked = True
        values = [NULL if arg is None else arg for arg in args]
        for index, cast in self.casts:
            values[index] = cast(values[index])
        grid = grid if grid.__class__ is tuple else (grid,)
        if 0 in grid:  # nothing to do for an empty axis
            return
        recorded: Any = next((value for value in values if type(value) is Recorded), None)
        start = self.launch if recorded is None else recorded.recording.starting(self)
        start(grid, block if block.__class__ is tuple else (block,), tuple(values), shared)


_kernel: Any = functools.lru_cache(maxsize=4096)(Kernel)


def load(file: str, name: str, like: Any, constants: Constants) -> Kernel:
    """Return kernel ``name`` of kernels_cu/``file`` for these constants, where ``like`` lives."""
    for target in targets:
        if target.owns(like):
            with _devices.at(like):
                return _kernel(target, _devices.number(like), file, name, constants)
    raise KernelError(f"{name}: no target runs kernels on {type(like).__name__}")
