"""Runs ops on XLA's buffers on a GPU: on XLA's stream, with results in XLA's buffers.

A call of an op shows which of its allocations become results.  The next call with the same shapes
gets XLA's buffers for these allocations.  A result in other memory is copied to its buffer.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from ..core.dtypes import BFLOAT16
from ..core.frameworks import cupy
from ..ops.common.tensor_map import driver

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
ALIGNED = 16  # bytes: the alignment that kernels require of new arrays


class OnGpu:
    """A callable that runs an op on buffers.

    While XLA captures a graph, allocations other than results are kept alive by the addresses of
    the call: the graph uses this memory in each run, and for other addresses XLA captures a new
    graph.
    """

    def __init__(self, call: Callable[..., Sequence[Any]]) -> None:
        self.call = call
        # by shapes: the index of the result that each allocation, by its number, becomes
        self.places: dict[Any, dict[int, int]] = {}
        # by addresses: the memory of each allocation, by its number
        self.kept: dict[Any, dict[int, Any]] = {}

    def __call__(self, context: Any, results: Sequence[Any], buffers: Sequence[Any]) -> None:
        """Run the op on XLA's stream, on the device of the buffers."""
        cuda, device = cupy().cuda, results[0].__dlpack_device__()[1]
        own = SimpleNamespace(__cuda_stream__=lambda: (0, context.stream))
        with cuda.Device(device), cuda.Stream.from_external(own):
            targets = [array_of(buffer, device) for buffer in results]
            arrays = [array_of(buffer, device) for buffer in buffers]
            form = tuple(array.shape for array in arrays)
            kept = None
            if cuda.runtime.streamIsCapturing(context.stream):
                addresses = tuple(array.data.ptr for array in (*arrays, *targets))
                kept = self.kept.setdefault((device, addresses), {})
            allocator = Allocator(targets, self.places.get(form, {}), kept)
            with (
                nullcontext() if kept is None else allocation_allowed(),
                cuda.using_allocator(allocator.allocate),
            ):
                self.places[form] = allocator.settle(self.call(*arrays))


@contextmanager
def allocation_allowed() -> Iterator[None]:
    """Allow this thread to allocate and to load kernels in a block while a stream is captured.

    XLA captures in a mode that forbids both.  They are safe here, as they are no part of the graph.
    """
    exchange = getattr(driver(), "cuThreadExchangeStreamCaptureMode", None)
    mode = ctypes.byref(ctypes.c_int(RELAXED))
    if exchange is None or exchange(mode):  # a call also writes the old mode to ``mode``
        yield
        return
    try:
        yield
    finally:
        exchange(mode)


class Allocator:
    """The allocator of one call: XLA's buffers for results, other memory for the rest."""

    def __init__(
        self, targets: Sequence[Any], places: Mapping[int, int], kept: dict[int, Any] | None
    ) -> None:
        self.targets, self.places, self.kept = targets, places, kept
        self.other = cupy().cuda.get_allocator()
        self.allocated: list[int] = []  # addresses, in the order of allocations

    def allocate(self, size: int) -> Any:
        """Return memory for an allocation of CuPy."""
        number = len(self.allocated)
        target = self.targets[self.places[number]] if number in self.places else None
        if target is not None and size == target.nbytes and target.data.ptr % ALIGNED == 0:
            memory = target.data
        elif self.kept is None:
            memory = self.other(size)
        else:
            memory = self.kept.get(number)
            if memory is None or memory.mem.size < size:
                memory = self.kept[number] = self.other(size)
        self.allocated.append(memory.ptr)
        return memory

    def settle(self, results: Sequence[Any]) -> dict[int, int]:
        """Copy results to XLA's buffers where needed; return the result of each allocation."""
        places: dict[int, int] = {}
        elsewhere = []
        for index, (target, array) in enumerate(zip(self.targets, results, strict=True)):
            whole = array.flags.c_contiguous and array.dtype == target.dtype
            if whole and array.data.ptr == target.data.ptr:
                places |= {n: i for n, i in self.places.items() if i == index}
                continue
            numbers = [n for n, address in enumerate(self.allocated) if address == array.data.ptr]
            if whole and numbers:
                places[numbers[-1]] = index  # earlier allocations at this address were freed
            elsewhere.append((target, array))
        ready = [(target, self._apart(array)) for target, array in elsewhere]
        for target, array in ready:
            put(target, array)
        return places

    def _apart(self, array: Any) -> Any:
        """Return an array, or a copy if it overlaps a buffer to which a result is written."""
        overlaps = any(cupy().may_share_memory(array, target) for target in self.targets)
        return copied(array) if overlaps else array


def put(target: Any, array: Any) -> None:
    """Write the elements of an array to another array."""
    target[...] = array


def copied(array: Any) -> Any:
    """Return a new array with the same elements."""
    return array.copy()


def array_of(buffer: Any, device: int) -> Any:
    """Return an array of CuPy over a buffer of XLA."""
    cp = cupy()
    if buffer.dtype == BFLOAT16:  # __cuda_array_interface__ has no name for it
        return cp.from_dlpack(buffer)
    address = buffer.__cuda_array_interface__["data"][0]
    size = buffer.dtype.itemsize
    for extent in buffer.shape:
        size *= extent
    memory = cp.cuda.UnownedMemory(address, size, buffer, device)
    return cp.ndarray(buffer.shape, buffer.dtype, cp.cuda.MemoryPointer(memory, 0))
