"""Where kernels run: a target owns some arrays, and answers all that is asked of a machine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from ..errors import KernelError

Launch = Callable[[Any, Any, tuple[Any, ...], int], None]  # (grid, block, arguments, shared)
Run = Callable[[list[Any], dict[str, Any]], Any]  # (arrays, options)


class Limits(NamedTuple):
    """What the tables of launches are resolved against."""

    architecture: int  # compute capability: 86 for 8.6
    shared: int  # bytes of shared memory that a block may ask for
    processors: int = 1
    clusters: bool = False  # blocks can form them, as on most GPUs from sm_90 on


class Target(Protocol):
    """A machine that runs kernels."""

    def owns(self, array: Any) -> bool:
        """Say whether this target runs kernels on this array."""

    def compile(self, name: str, source: str) -> Launch:
        """Return kernel ``name`` of a translation unit as ``launch(grid, block, args, shared)``."""

    def limits(self, array: Any) -> Limits:
        """Return the limits of the device that holds an array of this target."""

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        """Return a new array, uninitialised, where an array of this target lives."""


def unwatched(op: Any, arrays: Sequence[Any], run: Run, defined: bool) -> Run:
    """Return how a new form of call is to run, or the definition inside of it: as it would."""
    return run


watch: Callable[[Any, Sequence[Any], Run, bool], Run] = unwatched  # others may stand here
targets: tuple[Target, ...] = ()  # gpu.py enters the first


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


def limits(like: Any) -> Limits:
    """Return the limits of the device that holds an array."""
    target = target_of(like)
    if target is None:
        raise KernelError(f"no target runs kernels on {type(like).__name__}")
    return target.limits(like)
