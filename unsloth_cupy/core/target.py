"""Targets run kernels: each owns some arrays, compiles and allocates for them and has limits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from ..errors import KernelError

Launch = Callable[[Any, Any, tuple[Any, ...], int], None]  # (grid, block, arguments, shared)
Run = Callable[[list[Any], dict[str, Any]], Any]  # (arrays, options)


class Limits(NamedTuple):
    """The limits of a device, from which launches choose their tiles and grids."""

    architecture: int  # compute capability: 86 for 8.6
    shared: int  # bytes of shared memory that a block may request
    processors: int = 1
    clusters: bool = False  # blocks can form them, as on most GPUs from sm_90 on


class Target(Protocol):
    """A machine that runs kernels."""

    def owns(self, array: Any) -> bool:
        """Return whether this target runs kernels on this array."""

    def compile(self, name: str, source: str) -> Launch:
        """Return kernel ``name`` of a translation unit as ``launch(grid, block, args, shared)``."""

    def limits(self, array: Any) -> Limits:
        """Return the limits of the device that holds an array of this target."""

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        """Return a new, uninitialised array on the device of ``like``, an array of this target."""


def unwatched(op: Any, arrays: Sequence[Any], run: Run, defined: bool) -> Run:
    """Return the function that runs a new form of call, or the definition in it: unchanged."""
    return run


watch: Callable[[Any, Sequence[Any], Run, bool], Run] = unwatched  # profiling replaces it
targets: tuple[Target, ...] = ()  # gpu.py adds the first


@contextmanager
def using(target: Target) -> Iterator[None]:
    """Give this target precedence over the others inside a ``with`` block."""
    global targets  # noqa: PLW0603 -- the one seam between the library and the machine
    targets = (target, *targets)
    try:
        yield
    finally:  # blocks of several threads may end in any order
        place = next(i for i, each in enumerate(targets) if each is target)
        targets = (*targets[:place], *targets[place + 1 :])


def target_of(array: Any) -> Target | None:
    """Return the target that runs kernels on this array, if any does."""
    return next((target for target in targets if target.owns(array)), None)


def limits(like: Any) -> Limits:
    """Return the limits of the device that holds an array."""
    target = target_of(like)
    if target is None:
        raise KernelError(f"no target runs kernels on {type(like).__name__}")
    return target.limits(like)
