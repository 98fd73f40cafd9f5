"""Tensor maps: descriptors of arrays for the tensor memory accelerator (TMA) of sm_90.

    kernel = with_maps(load("x_sm90.cu", "x", a, constants), a, ((64, 1, 128, 1),))
    kernel[blocks, threads](a, out)              the kernel's first parameter is a TensorMap

A map has the address and layout of an array, and the box that one copy transfers: 128 bytes of the
innermost axis, with the 128-byte swizzle.  The driver encodes a map once for each address.  A
replayed launch looks up the map of an address; a captured graph stores maps, as it does addresses.
"""

import copy
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core import gpu
from ...core.arrays import contiguous
from ...core.dtypes import BFLOAT16
from ...core.kernel import Kernel
from ...core.target import limits, target_of
from ...errors import KernelError
from .strides import in_chunks

Box = tuple[int, ...]  # values of each axis, innermost first

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion of cuda.h
TYPES = {np.dtype("float16"): 6, BFLOAT16: 9}
SWIZZLE_128B, L2_256B, NOTHING = 3, 3, 0
BYTES, ALIGNED = 128, 64  # size and alignment of a map
NVRTC = (12, 9)  # the first version that accepts -arch=sm_90a before CuPy's own -arch
LOGGER = logging.getLogger(__name__)
KEPT = 4096  # entries of each cache; a process has far fewer such arrays at a time


@functools.cache
def driver() -> Any:
    """Return the library of NVIDIA's driver; None if there is no driver."""
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None


@functools.cache
def encoder() -> Callable[..., int] | None:
    """Return the driver's cuTensorMapEncodeTiled; None if there is no driver or it is too old."""
    # no argtypes: Form passes objects of ctypes
    return getattr(driver(), "cuTensorMapEncodeTiled", None)


def available(like: Any) -> bool:
    """Return whether kernels on the device of ``like`` can use tensor maps and sm_90a."""
    target = target_of(like)
    if target is None or hasattr(target, "tensor_map"):  # the emulator has maps of its own
        return target is not None
    return encoder() is not None and gpu.cupy().cuda.nvrtc.getVersion() >= NVRTC


def warpgroups(like: Any) -> bool:
    """Return whether kernels on the device of ``like`` can multiply by warpgroups, as on sm_90.

    If only the compiler or the driver does not support that, a message is logged once.
    """
    if limits(like).architecture != 90:  # wgmma is in no other architecture
        return False
    supported = available(like)
    if not supported:
        _warn_once()
    return supported


@functools.cache
def _warn_once() -> None:
    """Log once that the compiler or the driver does not support warpgroups."""
    LOGGER.warning(
        "kernels run without warpgroups: they need NVRTC %s or newer and a driver of CUDA 12; "
        "pip install -U nvidia-cuda-nvrtc-cu12",
        ".".join(map(str, NVRTC)),
    )


def mappable(array: Any) -> Any:
    """Return the array if TMA can read it, else a copy.

    TMA needs a contiguous innermost axis, and an address and strides that are multiples of 16
    bytes.
    """
    axes = zip(array.shape[:-1], array.strides[:-1], strict=True)
    aligned = all(size == 1 or (stride > 0 and stride % 16 == 0) for size, stride in axes)
    whole = aligned and (array.strides[-1] == array.itemsize)
    (result,) = in_chunks(array if whole else contiguous(array))
    return result


class Form:
    """The encoder of the maps of all arrays with one shape, layout, dtype and box."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, box: Box
    ) -> None:
        rank, size = len(box), dtype.itemsize
        lead = rank - len(shape)  # outermost axes of the box that the array lacks: length 1
        sizes = (*(1,) * lead, *shape)[::-1]  # innermost first, as in all arguments of the driver
        row = sizes[0] * size  # bytes; the stride of axes of length 1, whose own may be anything
        steps = [
            row if n == 1 else stride
            for n, stride in zip(sizes[1:], (*(0,) * lead, *strides)[-2::-1], strict=True)
        ]
        self.what = f"a tensor map of {dtype} {shape} with strides {strides} and box {box[::-1]}"
        buffer = ctypes.create_string_buffer(BYTES + ALIGNED)
        first = -ctypes.addressof(buffer) % ALIGNED
        self.map = (ctypes.c_char * BYTES).from_buffer(buffer, first)
        self.address, number = ctypes.c_void_p(), ctypes.c_int
        self.arguments = (  # created once: that takes longer than the call
            *(ctypes.byref(self.map), number(TYPES[dtype]), ctypes.c_uint32(rank), self.address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*steps),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *map(number, (NOTHING, SWIZZLE_128B, L2_256B, NOTHING)),
        )
        self.lock = threading.Lock()  # for the address and the buffer, which all calls share

    def encode(self, address: int) -> Any:
        """Return the map of the array at an address, as a scalar."""
        call = encoder()
        if call is None:
            raise KernelError(
                f"{self.what}: the driver has no cuTensorMapEncodeTiled;"
                " update it to CUDA 12 or later"
            )
        with self.lock:
            self.address.value = address
            error = call(*self.arguments)
            encoded = np.void(self.map.raw)
        if error:
            raise KernelError(f"{self.what}, at {address:#x}: CUDA error {error}")
        return encoded


form_of = functools.lru_cache(maxsize=KEPT)(Form)
_maps: dict[tuple[Any, ...], Any] = {}


def map_of(ready: Callable[[Any], Any], box: Box, array: Any) -> Any:
    """Return the map of a CuPy array as a kernel argument, from a cache by address and form."""
    address = array.data.ptr
    key = address, box, array.shape, array.strides, array.dtype
    try:
        return _maps[key]
    except KeyError:
        if len(_maps) >= KEPT:
            _maps.clear()
    form = form_of(array.shape, array.strides, array.dtype, box)
    _maps[key] = argument = ready(form.encode(address))
    return argument


@functools.lru_cache(maxsize=KEPT)
def _with_maps(kernel: Kernel, target: Any, boxes: tuple[Box, ...]) -> Kernel:
    """Return the kernel of ``with_maps`` from a cache."""
    result, start, count = copy.copy(kernel), kernel.launch, len(boxes)
    custom = getattr(target, "tensor_map", None)
    encode = [
        functools.partial(custom or functools.partial(map_of, kernel.ready), b) for b in boxes
    ]

    def launch(grid: Any, block: Any, args: Sequence[Any], shared: int) -> None:
        maps = [each(array) for each, array in zip(encode, args[:count], strict=True)]
        start(grid, block, (*maps, *args[count:]), shared)

    result.launch = launch
    result.casts = [(index, cast) for index, cast in kernel.casts if index >= count]
    return result


def with_maps(kernel: Kernel, like: Any, boxes: tuple[Box, ...]) -> Kernel:
    """Return a kernel whose first arguments, one for each box, become tensor maps.

    A box may have more axes than its array: the missing outermost axes have length 1.
    """
    target: Any = target_of(like)
    return _with_maps(kernel, target, boxes)
