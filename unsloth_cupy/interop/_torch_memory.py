"""Converts between tensors of torch and arrays of NumPy or CuPy over the same memory.

torch does not support negative strides or read-only memory: such results are copied.  On a GPU, an
op runs on torch's current stream, in memory of torch's allocator.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..core.dtypes import BFLOAT16, Stored
from ..core.frameworks import cupy
from ..errors import FrameworkError

DTYPES = {torch.from_numpy(np.empty(0, d)).dtype: np.dtype(d) for d in "?bBilefd"}
DTYPES[torch.bfloat16] = BFLOAT16
TORCH = {ours: theirs for theirs, ours in DTYPES.items()}
# returns whether torch has a group of processes; bool() is False
in_group = torch.distributed.is_initialized if torch.distributed.is_available() else bool


class Stream(NamedTuple):
    """A stream with the protocol that CuPy accepts, which torch's streams have from 2.10 on."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the stream."""
        return 0, self.address


def adopt(tensor: Any) -> Any:
    """Return a view of a tensor as an array, for a call that autograd does not record."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise FrameworkError(
            "requires a gradient, but torch's autograd does not see this call: pass .detach(),"
            " or call under torch.no_grad()"
        )
    return array_of(tensor)


def give_back(array: Any, operand: Any) -> Any:
    """Return a result as a tensor over the same memory."""
    return tensor_of(array, (), ())


def array_of(tensor: Any) -> Any:
    """Return a view of a tensor as an array of NumPy or CuPy."""
    if tensor.is_neg():  # DLPack would lose the negative bit
        raise FrameworkError(
            "is a view with signs flipped, such as .conj().imag; pass .resolve_neg()"
        )
    if tensor.is_cuda:
        return cupy().from_dlpack(tensor.detach())
    # neither NumPy's DLPack nor torch's .numpy() supports bfloat16
    if tensor.dtype is torch.bfloat16:
        return _numpy_of(tensor.detach().view(torch.int16)).view(BFLOAT16)
    return _numpy_of(tensor.detach())


def _numpy_of(tensor: Any) -> Any:
    """Return a NumPy view of a tensor on the CPU."""
    # fully_shard frees whole weights by resizing their storage, which torch forbids after .numpy():
    # so .numpy() is called on another tensor over the same memory
    if in_group():
        tensor = from_dlpack(to_dlpack(tensor))
    return tensor.numpy()


def tensor_of(array: Any, arrays: Sequence[Any], tensors: Sequence[Any]) -> Any:
    """Return a result as a tensor; ``arrays`` are the operands, as views of ``tensors``.

    A result that is an operand, or is in its memory, becomes the operand's tensor or a view of it.
    Other results have their elements in C order, as results of ``torch.compile`` have.
    """
    if array.__class__ is np.ndarray and array.base is None and array.dtype != BFLOAT16:
        # a new array: operands are views and have a base
        return torch.from_numpy(array if array.flags.c_contiguous else array.copy())
    for operand, tensor in zip(arrays, tensors, strict=True):
        if array is operand:
            return tensor
    if not isinstance(array, np.ndarray):
        return _on_gpu(array, arrays, tensors)
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    for operand, tensor in zip(arrays, tensors, strict=True):
        if isinstance(operand, np.ndarray) and np.may_share_memory(array, operand):
            return _view(array, array.ctypes.data - operand.ctypes.data, tensor)
    array = _in_order(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _in_order(array: Any) -> Any:
    """Return a new result with its axes in C order, as torch's own results have.

    NumPy's results have their axes in the order of the operands.  Columns of a wider array, such as
    halves of a gradient, stay as they are.
    """
    steps = [step for size, step in zip(array.shape, array.strides, strict=True) if size > 1]
    return array if steps == sorted(steps, reverse=True) else array.copy()


def _view(array: Any, offset: int, tensor: Any) -> Any:
    """Return an array that starts ``offset`` bytes after a tensor as a view of the tensor."""
    size = array.itemsize
    steps = [stride // size for stride in array.strides]
    return tensor.as_strided(array.shape, steps, tensor.storage_offset() + offset // size)


def _on_gpu(array: Any, arrays: Sequence[Any], tensors: Sequence[Any]) -> Any:
    """Return a CuPy array as a tensor; in memory of torch's allocator, with torch's storage."""
    for operand, tensor in zip(arrays, tensors, strict=True):
        is_array = hasattr(operand, "strides") and not isinstance(operand, Stored)
        if is_array and cupy().may_share_memory(array, operand):
            return _view(array, array.data.ptr - operand.data.ptr, tensor)
    array = _in_order(array)
    owner = getattr(array.data.mem, "_owner", None)
    if not isinstance(owner, torch.Tensor):
        return from_dlpack(array)
    size = array.itemsize
    start, steps = array.data.ptr - owner.data_ptr(), [s // size for s in array.strides]
    result = torch.empty(0, dtype=TORCH[array.dtype], device=owner.device)
    return result.set_(owner.untyped_storage(), start // size, array.shape, steps)


def allocate(size: int) -> Any:
    """Return memory of torch's allocator for CuPy, on the current GPU and stream."""
    number, device = current_device()
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    cuda = cupy().cuda
    return cuda.MemoryPointer(cuda.UnownedMemory(memory.data_ptr(), size, memory, number), 0)


def current_device() -> tuple[int, torch.device]:
    """Return the number of CuPy's current GPU, and torch's device for it."""
    number = cupy().cuda.runtime.getDevice()
    return number, torch.device("cuda", number)


@contextmanager
def stream(tensor: Any) -> Iterator[None]:
    """Make CuPy use the tensor's GPU, torch's current stream and torch's allocator in a block."""
    if not tensor.is_cuda:
        yield
        return
    cuda, current = cupy().cuda, Stream(torch.cuda.current_stream(tensor.device).cuda_stream)
    with (
        cuda.Device(tensor.device.index),
        cuda.Stream.from_external(current),
        cuda.using_allocator(allocate),
    ):
        yield
