"""CuPy without a GPU: arrays that nobody may read, launches that are written down and not run.

    with gpu("90") as machine:
        rms_norm(machine.array((4, 4096), "bfloat16"), machine.array((4096,), "bfloat16"))
    machine.launches[0].source                   what cupy.RawModule got

The library's own launch code runs, from ``import cupy`` on.  A value that it reads on the host
raises ``HostReadError``, as that would stall a GPU; an array that it sends there raises
``HostWriteError``, as a graph would send it again and again; both would end the capture of a graph.
"""

import ctypes
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import scipy.special

from unsloth_cupy.compiled import cache
from unsloth_cupy.core import gpu as core_gpu
from unsloth_cupy.core import kernel as core_kernel
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.op import OPS
from unsloth_cupy.ops.common import counters, faults, gemm, tensor_map
from unsloth_cupy.ops.optimizers import gradients

from . import table
from .stand_in_devices import Gpus, OutOfMemoryError, WrongDeviceError
from .stand_in_devices import faces as faces_of

# Of an SM: threads, blocks, bytes of shared memory; all have 65,536 registers.  Then the bytes of
# shared memory of a block, and the SMs of the largest GPU.
LIMITS = {
    "80": (2048, 32, 164 << 10, 163 << 10, 108),
    "86": (1536, 16, 100 << 10, 99 << 10, 84),
    "89": (1536, 24, 100 << 10, 99 << 10, 128),
    "90": (2048, 32, 228 << 10, 227 << 10, 132),
    "100": (2048, 32, 228 << 10, 227 << 10, 148),
    "120": (1536, 24, 100 << 10, 99 << 10, 170),
}
CLUSTER_LAUNCH = 120  # of cudaDeviceAttr; CuPy has no name for it
GRAIN = 512  # bytes: CuPy's pool rounds up to them
WAITS = {"argwhere", "bincount", "flatnonzero", "nonzero", "repeat", "unique"}  # sizes are values
METHODS = {
    *("all", "argmax", "astype", "clip", "copy", "cumsum", "fill", "max", "mean", "min", "ravel"),
    *("reshape", "sum", "swapaxes", "transpose", "view"),
}


REAL = importlib.import_module("cupy") if importlib.util.find_spec("cupy") else None


@functools.cache
def _signature(path: str) -> str:
    """Return what a function of CuPy takes, by its name there."""
    made = functools.reduce(getattr, path.split("."), REAL)
    try:
        return str(inspect.signature(made))
    except (TypeError, ValueError):  # it is compiled, and says so in words
        return (made.__doc__ or "").partition("\n")[0]


def _check(path: str, given: Any) -> None:
    """Raise where CuPy would, as it has no such function or parameter."""
    lacking = [word for word in given if REAL and not re.search(rf"\b{word}\b", _signature(path))]
    if lacking:
        raise TypeError(f"{path} of CuPy takes no {', '.join(lacking)}")


class HostReadError(AssertionError):
    """The host asked for a value, and would wait for the GPU."""


class HostWriteError(AssertionError):
    """The host sent values, which capture into a graph does not allow."""


class Launch(NamedTuple):
    """One kernel and how it is launched."""

    kernel: str
    source: str
    options: tuple[str, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int  # bytes, dynamic

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return int(np.prod(self.block))


class Machine:
    """A GPU, or several, that note what they are asked to do."""

    def __init__(self, capability: str, clusters: bool, devices: int = 1) -> None:
        self.capability, self.clusters = capability, clusters
        numbers = [int(capability)] if devices == 1 else [*range(devices)]
        self.gpus, self.room = Gpus(numbers, capability), 1 << 40  # bytes
        self.launches: list[Launch] = []
        self.functions: list[str] = []  # of CuPy, for what the launches do not compute themselves
        self.products: list[str] = []  # that cuBLAS is asked for
        self.held = self.peak = 0
        self.compiler = (12, 9)  # NVRTC
        self.maps = Driver()
        self.strict = True  # False: values may be read and sent, as before a capture

    def array(self, shape: Any, dtype: Any, shift: int = 0, device: Any = None) -> "Array":
        """Return a new array of zeros, which starts so many elements after an aligned address.

        It is there already, for every stream of its GPU: the current one, or that of this number.
        """
        made = self.new(shape, dtype, shift)
        made.memory.made = None
        made.memory.device = made.memory.device if device is None else device
        return made

    def new(self, shape: Any, dtype: Any, shift: int = 0) -> "Array":
        """Return the same as CuPy makes it, on the current stream."""
        dtype = BFLOAT16 if str(dtype) == "bfloat16" else np.dtype(dtype)
        room = np.zeros(shift + int(np.prod(shape, dtype=np.int64)), dtype)
        values = room[shift:].reshape(shape)
        return Array(shape, dtype, of=values, memory=Memory(self, shape, dtype))

    def sent(self, values: Any) -> "Array":
        """Return the same as CuPy sends it, on the current stream."""
        if self.strict or self.gpus.stream.capturing:
            raise HostWriteError(f"{values.dtype} {values.shape} of the host")
        made = self.new(values.shape, values.dtype)
        made.values[...] = values
        return made

    def place(self, values: Any, device: Any = None) -> "Array":
        """Return a copy of NumPy's values on this machine."""
        made = self.array(values.shape, values.dtype, device=device)
        made.values[...] = values
        return made


class Memory:
    """What one array, and its views, hold of a machine."""

    def __init__(self, machine: Machine, shape: Any, dtype: Any) -> None:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.machine, self.size = machine, -(-size // GRAIN) * GRAIN
        if machine.held + self.size > machine.room:
            self.size = 0  # it takes nothing, and gives nothing back
            raise OutOfMemoryError(
                f"Out of memory allocating {size:,} bytes (allocated so far: {machine.held:,}"
                " bytes)."
            )
        self.device, self.made = machine.gpus.current, machine.gpus.work("an allocation", ())
        machine.held += self.size
        machine.peak = max(machine.peak, machine.held)

    def __del__(self) -> None:
        self.machine.held -= self.size


def _waits(*_: Any, **__: Any) -> NoReturn:
    raise HostReadError("the host waits for the device")


def _reads(name: str) -> Callable[..., Any]:
    """Return the method of an array that reads it on the host."""

    def read(array: "Array", *args: Any, **more: Any) -> Any:
        if array.memory.machine.strict:
            raise HostReadError(f"{name} of {array!r}: a value is read on the host")
        array.memory.machine.gpus.work(name, [array.memory])
        return getattr(array.values, name)(*args, **more)

    return read


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """What stands for an array of CuPy; its values are its own affair."""

    __array__, __bool__, __complex__ = map(_reads, ("__array__", "__bool__", "__complex__"))
    __float__, __index__, __int__ = map(_reads, ("__float__", "__index__", "__int__"))
    __contains__, __iter__, __str__ = map(_reads, ("__contains__", "__iter__", "__str__"))
    get, item, tobytes, tolist = map(_reads, ("copy", "item", "tobytes", "tolist"))
    __hash__ = None  # type: ignore[assignment]
    base = None

    def __init__(
        self, shape: Any, dtype: Any = float, *, of: Any = None, memory: Any = None
    ) -> None:
        machine = None if memory else sys.modules["cupy"].machine
        self.values = np.zeros(shape, dtype) if of is None else of
        self.memory = memory or Memory(machine, shape, dtype)

    def __repr__(self) -> str:
        return f"<{self.values.dtype} {self.values.shape}>"

    def __len__(self) -> int:
        return len(self.values)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "size", "ndim", "nbytes", "itemsize", "strides", "flags"):
            return getattr(self.values, name)
        if name in METHODS:

            def method(*args: Any, **more: Any) -> Any:
                _check(f"ndarray.{name}", more)
                return self._own(getattr(self.values, name), args, more)

            return method
        raise AttributeError(name)

    @property
    def T(self) -> "Array":  # noqa: N802 -- NumPy's name
        return self._wrapped(self.values.T)

    @property
    def device(self) -> Any:
        return sys.modules["cupy"].cuda.Device(self.memory.device)

    @property
    def data(self) -> Any:
        base = self.values  # what CuPy allocates starts at a multiple of 512 bytes
        while isinstance(base.base, np.ndarray):
            base = base.base
        first = self.values.ctypes.data
        address = first // 16 * 16 + (first - base.ctypes.data) % 16
        return types.SimpleNamespace(ptr=address, device_id=self.memory.device)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        masks = any(isinstance(p, Array) and p.dtype == np.bool_ for p in parts)
        if masks and self.memory.machine.strict:
            raise HostReadError("a mask selects, and the size of what it selects is a value")
        if any(isinstance(p, Array) for p in parts):
            self._worked("getitem", (self, *parts))
        elif ... not in parts:
            parts = (*parts, ...)  # one value, or none, is a view too
        found = self.values[self._inside(parts)]
        if not any(isinstance(p, Array | list) for p in parts):
            return Array(found.shape, found.dtype, of=found, memory=self.memory)
        return self._wrapped(found, "getitem")

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        self.memory.made = self._worked("setitem", (self, value, *parts))
        self.values[self._inside(index)] = self._inside(value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        return self._own(getattr(ufunc, method), inputs, more)

    def __array_function__(self, function: Any, _: Any, args: Any, more: Any) -> Any:
        _check(".".join([*function.__module__.split(".")[1:], function.__name__]), more)
        if function.__name__ in WAITS and self.memory.machine.strict:
            raise HostReadError(f"np.{function.__name__} gives as many values as it finds")
        return self._own(function, args, more)

    def _own(self, function: Callable[..., Any], args: Any, more: dict[str, Any]) -> Any:
        """Compute with the values, as CuPy does with its own functions."""
        with np.errstate(all="ignore"):
            made = function(*self._inside(args), **self._inside(more))
        given = [self, *args, *more.values(), *more.get("out", ())]
        if not isinstance(made, np.ndarray) or not np.may_share_memory(made, self.values):
            self._worked(function.__name__, given)
        elif any(isinstance(old, Array) and made is old.values for old in more.get("out", ())):
            self.memory.made = self._worked(function.__name__, given)
        for old in (*args, *more.get("out", ())):
            if isinstance(old, Array) and made is old.values:
                return old  # changed in place, or nothing to change
        return self._wrapped(made, function.__name__)

    def _worked(self, what: str, given: Any) -> Any:
        arrays = [a for part in given for a in (part if isinstance(part, list | tuple) else [part])]
        memories = [a.memory for a in arrays if isinstance(a, Array)]
        return self.memory.machine.gpus.work(what, memories)

    def _inside(self, given: Any) -> Any:
        if isinstance(given, Array):
            return given.values
        if isinstance(given, np.ndarray) and given.ndim and self.memory.machine.strict:
            raise HostWriteError(f"{given.dtype} {given.shape} of the host")
        if isinstance(given, list | tuple):
            return type(given)(map(self._inside, given))
        if isinstance(given, dict):
            return {name: self._inside(value) for name, value in given.items()}
        return given

    def _wrapped(self, made: Any, by: str = "") -> Any:
        if isinstance(made, list | tuple):
            return type(made)(self._wrapped(each, by) for each in made)
        if not isinstance(made, np.ndarray | np.generic):
            return made
        made = np.asarray(made)
        if np.may_share_memory(made, self.values):
            return Array(made.shape, made.dtype, of=made, memory=self.memory)
        self.memory.machine.functions.append(by)
        memory = Memory(self.memory.machine, made.shape, made.dtype)
        return Array(made.shape, made.dtype, of=made, memory=memory)


Array.__module__ = "cupy"


@functools.cache
def static_memory() -> dict[str, int]:
    """Return the most bytes of static shared memory that a variant of each kernel takes."""
    return {
        kernel: max(numbers[1] for by in several.values() for numbers in by.values())
        for kernel, several in table.read("kernels")["variants"].items()
    }


class Function:
    """A kernel of a module: a launch is a note."""

    def __init__(
        self, name: str, source: str, options: tuple[str, ...], limit: int, device: int = 0
    ) -> None:
        self.about, self._device = (name, source, options), device
        self.num_regs = 40
        self.shared_size_bytes, self.limit = static_memory().get(name, 0), limit
        self._leave = (48 << 10) - self.shared_size_bytes

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Bytes of dynamic shared memory that a launch may ask for beside the static ones."""
        return self._leave

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, leave: int) -> None:
        self._check(leave, self.limit - self.shared_size_bytes)
        self._leave = leave

    def _check(self, shared: int, most: int) -> None:
        if shared > most:
            raise AssertionError(
                f"{self.about[0]}: {shared} bytes of dynamic shared memory beside"
                f" {self.shared_size_bytes} of static; leave is for {most}"
            )

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        self._check(shared_mem, self._leave)
        if any(isinstance(arg, np.ndarray) and arg.ndim for arg in args):
            raise HostWriteError(f"{self.about[0]}: an array of the host is an argument")
        if not all(type(arg) is Array or isinstance(arg, np.generic) for arg in args):
            raise TypeError(f"{self.about[0]}: {args} are not arguments of a kernel")
        made = Launch(*self.about, tuple(grid), tuple(block), shared_mem)
        machine = sys.modules["cupy"].machine
        if self._device != machine.gpus.current:
            raise WrongDeviceError(f"{self.about[0]}: a kernel of GPU {self._device}")
        machine.gpus.work(self.about[0], [arg.memory for arg in args if type(arg) is Array])
        machine.launches.append(made)


def _modules(machine: Machine) -> dict[str, types.ModuleType]:
    """Return CuPy, as far as the library asks for it."""

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
            self.code, self.options = code, options

        def get_function(self, name: str) -> Function:
            most = LIMITS[machine.capability][3]
            return Function(name, self.code, self.options, most, machine.gpus.current)

    class CompileException(Exception):  # noqa: N818 -- CuPy's name
        pass

    *_, per_sm, shared, processors = LIMITS[machine.capability]
    attributes = {
        "MaxSharedMemoryPerBlockOptin": shared,
        "MaxSharedMemoryPerMultiprocessor": per_sm,
        "MultiProcessorCount": processors,
    }
    runtime = {f"cudaDevAttr{name}": name for name in attributes} | {
        "deviceGetAttribute": lambda name, device: (
            int(machine.clusters) if name == CLUSTER_LAUNCH else attributes[name]
        ),
        "getDeviceCount": lambda: len(machine.gpus.numbers),
        "memGetInfo": lambda: (machine.room - machine.held, machine.room),
        "getDevice": lambda: machine.gpus.current,
        "memcpyAsync": machine.gpus.copy,
        "streamIsCapturing": machine.gpus.captures,
    }
    empty = lambda shape, dtype=float: machine.new(shape, dtype)  # noqa: E731
    like = lambda array, dtype=None: machine.new(array.shape, dtype or array.dtype)  # noqa: E731
    asarray = lambda values: values if type(values) is Array else machine.sent(values)  # noqa: E731
    view = np.lib.stride_tricks.as_strided
    strided = lambda array, *how: array._wrapped(view(array.values, *how))  # noqa: E731
    faces = {
        "cupy": {
            "machine": machine,
            "ndarray": Array,
            "RawModule": RawModule,
            **dict.fromkeys(("empty", "zeros"), empty),
            **dict.fromkeys(("empty_like", "zeros_like"), like),
            "asarray": asarray,
            "asnumpy": _waits,
            "get_default_memory_pool": lambda: machine.gpus.pool,
        },
        "cupy.cuda": {"is_available": lambda: True, **faces_of(machine.gpus)},
        "cupy.cuda.device": {"get_cublas_handle": lambda: 0},
        "cupy.cuda.runtime": runtime,
        "cupy.lib": {},
        "cupy.lib.stride_tricks": {"as_strided": strided},
        "cupy.cuda.function": {"CNumpyArray": lambda array: array[()]},
        "cupy.cuda.compiler": {"CompileException": CompileException},
        "cupy.cuda.nvrtc": {"getVersion": lambda: machine.compiler},
        "cupyx": {},
        "cupyx.scipy": {},
        "cupyx.scipy.special": {"erfc": scipy.special.erfc},
        "cupy._core": {},
        "cupy._core._scalar": {"CScalar": lambda scalar: scalar},
    }
    made = {name: types.ModuleType(name) for name in faces}
    for name, face in faces.items():
        vars(made[name]).update(face)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, made[name])
    return made


class Cublas:
    """A product is a note."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Callable[..., int]:
        def noted(*_: Any) -> int:
            if "Gemm" in name:
                self.machine.products.append(name)
            return 0

        return noted


class Driver:
    """cuTensorMapEncodeTiled: it demands what the driver does, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, to: Any, *given: Any) -> int:
        dtype, rank, address, *rest = (getattr(one, "value", one) for one in given)
        sizes, strides, box, steps, interleave, swizzle, promotion, fill = rest
        asked = {
            "dtype": dtype,
            "address": address,
            "sizes": [*sizes],
            "strides": [*strides],
            "box": [*box],
            "modes": (interleave, swizzle, promotion, fill),
        }
        place = ctypes.addressof(to._obj)
        fits = place % 64 == address % 16 == 0 and 3 <= rank <= 5 and dtype in (6, 9)
        fits &= [len(one) for one in (sizes, strides, box, steps)] == [rank, rank - 1, rank, rank]
        fits &= all(0 < size < 2**32 for size in sizes)
        fits &= all(0 < stride < 2**40 and stride % 16 == 0 for stride in strides)
        fits &= all(0 < side <= 256 for side in box) and box[0] * 2 <= 128
        if not fits or [*steps] != [1] * rank:
            return 1  # CUDA_ERROR_INVALID_VALUE
        self.asked.append(asked)
        ctypes.memset(place, len(self.asked) % 256, 128)
        return 0


@contextmanager
def gpu(
    capability: str = "90", clusters: bool | None = None, devices: int = 1
) -> Iterator[Machine]:
    """Put a machine in the place of CuPy inside a ``with`` block; clusters begin with sm_90.

    The number of one GPU is its compute capability, so that what is kept by device keeps
    capabilities apart from each other and from real GPUs.  Several are numbered from 0.
    """
    machine = Machine(capability, int(capability) >= 90 if clusters is None else clusters, devices)
    made = _modules(machine)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    found, gemm.cublas = gemm.cublas, lambda: Cublas(machine)
    encoder = tensor_map.encoder
    tensor_map.encoder = functools.wraps(encoder)(functools.cache(lambda: machine.maps))
    tensor_map._maps.clear()
    folder, cache.folder = cache.folder, lambda: Path(os.devnull)  # none is kept
    records = dict(faults._records)
    for op in OPS.values():
        op.routes.clear()  # what was recorded on another machine
    gradients.tables.clear()
    counters._kept.clear()
    if devices > 1:
        _forget_devices()
    try:
        yield machine
    finally:
        if devices > 1:
            _forget_devices()
        gemm.cublas, tensor_map.encoder, cache.folder = found, encoder, folder
        tensor_map._maps.clear()  # addresses of a machine that is gone
        gradients.tables.clear()  # addresses of a machine that is gone
        counters._kept.clear()
        faults._records.clear()  # of devices that are gone
        faults._records.update(records)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _forget_devices() -> None:
    """Let go of what is kept by the number of a device: others have it too."""
    core_kernel._kernel.cache_clear()
    core_gpu.limits_of.cache_clear()
