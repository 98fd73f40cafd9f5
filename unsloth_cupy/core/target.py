"""Targets, which run kernels: a target owns arrays, compiles and allocates, and has limits."""

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
    processors: int = 1  # SMs
    clusters: bool = False  # whether blocks can form clusters, as on most GPUs from sm_90 on


class Target(Protocol):
    """A machine that runs kernels."""

    def owns(self, array: Any) -> bool:
        """Return whether this target runs kernels on this array."""

    def compile(self, name: str, source: str) -> Launch:
        """Compile a source; return kernel ``name`` as ``launch(grid, block, args, shared)``."""

    def limits(self, array: Any) -> Limits:
        """Return the limits of the device on which an array of this target is."""

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        """Return a new, uninitialised array on the device of ``like``, an array of this target."""


def unwatched(op: Any, arrays: Sequence[Any], run: Run, defined: bool) -> Run:
    """Return ``run`` unchanged.

    Profiling wraps ``run``, which runs calls of one form, or with ``defined`` their definition.
    """
    return run


watch: Callable[[Any, Sequence[Any], Run, bool], Run] = unwatched  # profiling replaces it
targets: tuple[Target, ...] = ()  # gpu.py adds the target of CuPy


@contextmanager
def using(target: Target) -> Iterator[None]:
    """Give this target precedence over the others inside a ``with`` block."""
    global targets  # noqa: PLW0603 -- all that the library knows of a machine is in its target
    targets = (target, *targets)
    try:
        yield
    finally:  # not the first one: ``with`` blocks of several threads may end in any order
        place = next(i for i, each in enumerate(targets) if each is target)
        targets = (*targets[:place], *targets[place + 1 :])


def target_of(array: Any) -> Target | None:
    """Return the target that runs kernels on this array; None if no target does."""
    return next((target for target in targets if target.owns(array)), None)


def limits(like: Any) -> Limits:
    """Return the limits of the device on which an array is."""
    target = target_of(like)
    if target is None:
        raise KernelError(f"no target runs kernels on {type(like).__name__}")
    return target.limits(like)
