"""Tensor maps: what TMA, the copy engine of sm_90, is told of an array.

    kernel = with_maps(load("x_sm90.cu", "x", a, constants), a, ((64, 1, 128, 1),))
    kernel[blocks, threads](a, out)              the kernel's first parameter is a TensorMap

A map says where an array begins and how it lies, and which box of it one copy brings: 128 bytes
of the innermost axis, under the 128-byte swizzle.  The driver encodes it, once for each address; a
replayed launch looks the address up, and a captured graph holds the map, as it holds addresses.
"""

import copy
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core import gpu
from ...core.arrays import packed
from ...core.dtypes import BFLOAT16
from ...core.kernel import Kernel
from ...core.target import target_of
from ...errors import KernelError
from .strides import in_chunks

Box = tuple[int, ...]  # values of each axis, innermost first

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion of cuda.h
TYPES = {np.dtype("float16"): 6, BFLOAT16: 9}
SWIZZLE_128B, L2_256B, NOTHING = 3, 3, 0
BYTES, ALIGNED = 128, 64  # of a map
NVRTC = (12, 9)  # the first that takes -arch=sm_90a before CuPy's own -arch
KEPT = 4096  # maps, and arrays in other forms; a process has far fewer alive


@functools.cache
def encoder() -> Callable[..., int] | None:
    """Return cuTensorMapEncodeTiled of the driver, None where there is none or it is older."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        found = driver.cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None
    return found  # Form has its arguments as objects of C


def available(like: Any) -> bool:
    """Say whether kernels get tensor maps, and sm_90a, where an array lives."""
    target = target_of(like)
    if target is None or hasattr(target, "tensor_map"):
        return target is not None
    return encoder() is not None and gpu.cupy().cuda.nvrtc.getVersion() >= NVRTC


def mappable(array: Any) -> Any:
    """Return an array whose innermost axis TMA can copy, itself where that is so.

    Values lie side by side; an address and all strides are multiples of 16 bytes.
    """
    lie = zip(array.shape[:-1], array.strides[:-1], strict=True)
    even = all(size == 1 or (stride > 0 and stride % 16 == 0) for size, stride in lie)
    whole = even and (array.strides[-1] == array.itemsize)
    (found,) = in_chunks(array if whole else packed(array))
    return found


class Form:
    """Arrays of one shape, one dtype and one layout, and the box that a copy brings of them."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, box: Box
    ) -> None:
        rank, size = len(box), dtype.itemsize
        lead = rank - len(shape)  # axes of one that the box has and the array has not
        sizes = (*(1,) * lead, *shape)[::-1]
        row = sizes[0] * size  # that neighbours of an axis of one are said to lie apart
        steps = [
            row if n == 1 else stride
            for n, stride in zip(sizes[1:], (*(0,) * lead, *strides)[-2::-1], strict=True)
        ]
        self.what = f"a tensor map of {dtype} {shape} with strides {strides} and box {box[::-1]}"
        room = ctypes.create_string_buffer(BYTES + ALIGNED)
        first = -ctypes.addressof(room) % ALIGNED
        self.map = (ctypes.c_char * BYTES).from_buffer(room, first)
        self.address, number = ctypes.c_void_p(), ctypes.c_int
        self.arguments = (  # made once: to make them takes longer than to call
            *(ctypes.byref(self.map), number(TYPES[dtype]), ctypes.c_uint32(rank), self.address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*steps),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *map(number, (NOTHING, SWIZZLE_128B, L2_256B, NOTHING)),
        )
        self.lock = threading.Lock()

    def encode(self, address: int) -> Any:
        """Return the map of the array at an address, as a scalar."""
        call = encoder()
        if call is None:
            raise KernelError(f"{self.what}: the driver has none; update it to CUDA 12 or later")
        with self.lock:
            self.address.value = address
            error = call(*self.arguments)
            made = np.void(self.map.raw)
        if error:
            raise KernelError(f"{self.what}, at {address:#x}: CUDA error {error}")
        return made


form_of = functools.lru_cache(maxsize=KEPT)(Form)
_maps: dict[tuple[Any, ...], Any] = {}


def map_of(ready: Callable[[Any], Any], box: Box, array: Any) -> Any:
    """Return the map of an array of CuPy as a launch hands it over; the same one while it lives."""
    address = array.data.ptr
    key = address, box, array.shape, array.strides, array.dtype
    try:
        return _maps[key]
    except KeyError:
        if len(_maps) >= KEPT:
            _maps.clear()
    _maps[key] = made = ready(form_of(array.shape, array.strides, array.dtype, box).encode(address))
    return made


@functools.lru_cache(maxsize=KEPT)
def _with_maps(kernel: Kernel, target: Any, boxes: tuple[Box, ...]) -> Kernel:
    made, start, count = copy.copy(kernel), kernel.launch, len(boxes)
    own = getattr(target, "tensor_map", None)
    makes = [functools.partial(own or functools.partial(map_of, kernel.ready), b) for b in boxes]

    def launch(grid: Any, block: Any, args: Sequence[Any], shared: int) -> None:
        maps = [make(array) for make, array in zip(makes, args[:count], strict=True)]
        start(grid, block, (*maps, *args[count:]), shared)

    made.launch = launch
    made.casts = [(index, cast) for index, cast in kernel.casts if index >= count]
    return made


def with_maps(kernel: Kernel, like: Any, boxes: tuple[Box, ...]) -> Kernel:
    """Return a kernel whose first arguments are arrays, of which it gets tensor maps.

    There is a box for each; axes that it has and the array has not are of one, outermost.
    """
    target: Any = target_of(like)
    return _with_maps(kernel, target, boxes)
