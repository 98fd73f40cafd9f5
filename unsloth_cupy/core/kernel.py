"""Compiles a kernel for the device of the arrays, checks its arguments and launches it."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import KernelError
from . import gpu
from .replay import Recorded
from .source import Constants, check_arguments, fields, parameters, translation_unit
from .target import target_of

NULL = np.uintp(0)  # the pointer of an absent array
_is_contiguous = operator.attrgetter("flags.c_contiguous")


class Kernel:
    """A compiled kernel that knows its parameters: ``kernel[grid, block](*args)``.

    Neither CUDA nor CuPy checks arguments.  This class checks all arguments of the first launch;
    later launches come from the same line of code.  In each launch it checks that arrays are
    contiguous, as a kernel gets only their addresses.  A replay skips this class, as its key has
    all strides.  Python scalars, and dicts with the fields of a struct, are converted to the types
    that the source declares.
    """

    def __init__(
        self, target: Any, device: int, file: str, name: str, constants: Constants
    ) -> None:
        self.name = f"{name} of {file} with {constants}"
        self.parameters = parameters(file, name, constants)
        # converts a scalar to the target's own type once, for structs and replays
        self.ready = getattr(target, "ready", lambda scalar: scalar)
        pointers = [i for i, (_, pointer) in enumerate(self.parameters) if pointer]
        # the first one twice: itemgetter of a single index returns no tuple
        self.arrays = operator.itemgetter(*pointers, pointers[0])
        values = [(i, dtype) for i, (dtype, pointer) in enumerate(self.parameters) if not pointer]
        self.casts = [(i, self._struct(d) if d.names else d.type) for i, d in values]
        self.checked = False
        self.launch = target.compile(name, translation_unit(file, constants))

    def __getitem__(self, shape: tuple[Any, ...]) -> Callable[..., None]:
        """Return a launch of this shape: blocks, threads and, if needed, bytes of shared memory."""
        return functools.partial(self._run, *(shape if len(shape) == 3 else (*shape, 0)))

    def _struct(self, dtype: np.dtype[Any]) -> Callable[[Any], Any]:
        """Return the function that converts a dict to a struct argument."""
        return lambda struct: self.ready(np.array(fields(struct, dtype), dtype)[()])

    def _run(self, grid: Any, block: Any, shared: int, *args: Any) -> None:
        """Check the arguments, convert them and launch."""
        values = [NULL if arg is None else arg for arg in args]
        start = self.launch
        # the first call with this layout was checked; a strided array stands here with its gaps
        if Recorded in map(type, values):
            recorded: Any = next(value for value in values if type(value) is Recorded)
            start = recorded.recording.starting(self)
        elif not (self.checked and all(map(_is_contiguous, self.arrays(values)))):
            check_arguments(self.name, self.parameters, args)
            self.checked = True
        for index, cast in self.casts:
            values[index] = cast(values[index])
        grid = grid if grid.__class__ is tuple else (grid,)
        if 0 in grid:  # an empty axis: nothing to compute, and CUDA refuses such a grid
            return
        start(grid, block if block.__class__ is tuple else (block,), tuple(values), shared)


# by target, device, file, name and constants; beyond 4096 the least recently used one is dropped
_kernel: Any = functools.lru_cache(maxsize=4096)(Kernel)


def load(file: str, name: str, like: Any, constants: Constants) -> Kernel:
    """Return kernel ``name`` of kernels_cu/``file`` for these constants and the device of like."""
    target = target_of(like)
    if target is None:
        raise KernelError(f"{name}: no target runs kernels on {type(like).__name__}")
    with gpu.device_of(like):
        return _kernel(target, gpu.number(like), file, name, constants)
