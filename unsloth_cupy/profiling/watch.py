"""Lets watchers, such as a profile, wrap all calls of ops inside a ``with`` block.

Inside ``watching``, the list of targets has one more target: ``machine``, or a marker that owns no
array.  ``Op.routes`` depend on the targets, so calls outside the block are not affected.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ..core import gpu, target
from ..core.dtypes import KERNEL_DTYPES, Stored
from ..core.target import Run, using
from ..ops.common import spans
from ..ops.common.no_kernel import reason_of
from ..ops.common.spans import Owner, forget_routes

LOGGER = logging.getLogger("unsloth_cupy")


class Watcher(Protocol):
    """An object that wraps calls of ops."""

    def wrapped(self, op: Any, run: Run, why: str | None) -> Run:
        """Return a function to run in place of ``run``.

        If ``why`` is None, ``run`` is a whole call; else ``run`` is the definition inside a call,
        and ``why`` is the reason why it runs instead of a kernel.
        """


_watchers: tuple[Watcher, ...] = ()
warned: set[str] = set()  # names of ops for which a warning was logged


@contextmanager
def watching(watcher: Watcher, machine: Any = None) -> Iterator[None]:
    """Let a watcher wrap all calls inside a ``with`` block, with ``machine`` as their target."""
    global _watchers  # noqa: PLW0603 -- watches all threads: they share the targets
    marker: Any = Owner() if machine is None else machine
    _watchers = (*_watchers, watcher)
    own = (watcher,) if hasattr(watcher, "span") else ()
    spans.watchers = (*spans.watchers, *own)
    try:
        with using(marker):
            yield
    finally:
        _watchers = tuple(each for each in _watchers if each is not watcher)
        spans.watchers = tuple(each for each in spans.watchers if each is not watcher)
        forget_routes(marker)


def watch(op: Any, arrays: Sequence[Any], run: Run, defined: bool) -> Run:
    """Return ``run`` wrapped by all watchers; ``defined``: ``run`` is the definition of the op."""
    why = None
    if defined:
        why = why_defined(op, arrays)
        _warn(op, arrays, why)
    for watcher in _watchers:
        run = watcher.wrapped(op, run, why)
    return run


def by_products(op: Any) -> bool:
    """Return whether an op needs no kernel: on a GPU, its definition calls cuBLAS or moves values.

    Such ops have ``widen=False``: their definitions compute on 16-bit operands directly.
    """
    return op.launch is None and not op.widen


def why_defined(op: Any, arrays: Sequence[Any]) -> str:
    """Return the reason why a call runs its definition."""
    reason = reason_of()
    if not any(target.target_of(array) for array in arrays):
        return "its arrays are NumPy arrays; kernels run on GPU arrays"
    if op.launch is None:
        if by_products(op):
            return "it calls cuBLAS or moves values, and needs no kernel"
        return "the op has no kernel"
    for name, array in zip(op.names, arrays, strict=True):
        if array is not None and 0 in getattr(array, "shape", ()):
            return f"{name} has an empty axis: {tuple(array.shape)}"
    dtype = dtype_of(op, arrays)
    if dtype not in KERNEL_DTYPES:
        return f"there is no kernel for {dtype}, only for float16, bfloat16 and float32"
    return reason or "its kernel does not support these sizes, strides or options"


def dtype_of(op: Any, arrays: Sequence[Any]) -> Any:
    """Return the dtype of the first float operand of a call, or else of its first array."""
    dtypes = [
        (operand.kind, array.dtype)
        for operand, array in zip(op.contract.inputs, arrays, strict=True)
        if hasattr(array, "dtype") and not isinstance(array, Stored)
    ]
    floats = [dtype for kind, dtype in dtypes if kind == "float"]
    return next(iter(floats or [dtype for _, dtype in dtypes]), None)


def _warn(op: Any, arrays: Sequence[Any], why: str) -> None:
    """Log a warning, once per op, that its definition runs on a GPU."""
    if op.__name__ in warned or by_products(op) or "empty axis" in why:
        return
    if any(gpu.is_cupys(array.__class__) for array in arrays):
        warned.add(op.__name__)
        see = "unsloth_cupy.explain shows the call"
        LOGGER.warning("%s runs its definition on the GPU: %s; %s", op.called, why, see)


target.watch = watch
