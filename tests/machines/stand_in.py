"""A stand-in for CuPy without a GPU: it records launches and does not run them.

    with gpu("90") as machine:
        rms_norm(machine.array((4, 4096), "bfloat16"), machine.array((4096,), "bfloat16"))
    machine.launches[0].source                   the source that cupy.RawModule got

The library's own launch code runs, from ``import cupy`` on.  Reading an array's value on the host
raises ``HostReadError``, as it would stall a GPU; sending a host array to the GPU raises
``HostWriteError``, as a graph would send the same values in every replay.  Both would end the
capture of a graph.
"""

import ctypes
import functools
import importlib
import importlib.util
import inspect
import math
import mmap
import operator
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import scipy.special

from unsloth_cupy import kernel_cache as cache
from unsloth_cupy.core import gpu as core_gpu
from unsloth_cupy.core import kernel as core_kernel
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.op import OPS
from unsloth_cupy.ops.common import counters, faults, gemm, tensor_map
from unsloth_cupy.ops.optimizers import gradients
from unsloth_cupy.training import captured, offload

from ..code.programs import costs_file
from . import stand_in_runs
from .stand_in_devices import Gpus, OutOfMemoryError, WrongDeviceError, cuda_names

# By compute capability: threads, blocks and bytes of shared memory of an SM (every SM has 65,536
# registers), the most bytes of shared memory of a block, and the SMs of the largest GPU.
LIMITS = {
    "80": (2048, 32, 164 << 10, 163 << 10, 108),
    "86": (1536, 16, 100 << 10, 99 << 10, 84),
    "89": (1536, 24, 100 << 10, 99 << 10, 128),
    "90": (2048, 32, 228 << 10, 227 << 10, 132),
    "100": (2048, 32, 228 << 10, 227 << 10, 148),
    "120": (1536, 24, 100 << 10, 99 << 10, 170),
}
CLUSTER_LAUNCH = 120  # cudaDevAttrClusterLaunch, for which CuPy has no name
LARGE = 1 << 17  # bytes
GRAIN = 512  # bytes: CuPy's pool rounds sizes up to a multiple of it
# Functions whose result has a size that depends on values, for which the host waits.
WAITS = {"argwhere", "bincount", "flatnonzero", "nonzero", "repeat", "unique"}
WIDENS = {"where"}  # functions of CuPy that take bfloat16 as float32, and return that
METHODS = {
    *(
        "all",
        "any",
        "argmax",
        "astype",
        "clip",
        "copy",
        "cumsum",
        "fill",
        "max",
        "mean",
        "min",
        "ravel",
    ),
    *("reshape", "sum", "swapaxes", "transpose", "view"),
}


REAL = importlib.import_module("cupy") if importlib.util.find_spec("cupy") else None


@functools.cache
def _signature(path: str) -> str:
    """Return the signature of CuPy's function with this path, as text."""
    function = functools.reduce(getattr, path.split("."), REAL)
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):  # compiled functions have it in the docstring's first line
        return (function.__doc__ or "").partition("\n")[0]


def _check(path: str, keywords: Any) -> None:
    """Raise if CuPy, where it is installed, has no such function or no such parameters."""
    unknown = [k for k in keywords if REAL and not re.search(rf"\b{k}\b", _signature(path))]
    if unknown:
        raise TypeError(f"CuPy's {path} has no parameter {', '.join(unknown)}")


def _count(shape: Any) -> int:
    """Return the number of elements of a shape, which may be one number."""
    return math.prod(shape) if isinstance(shape, tuple | list) else int(shape)


def _zeros(count: int, dtype: np.dtype[Any]) -> Any:
    """Return zeros; a large array takes pages of memory only where it is written."""
    size = count * dtype.itemsize
    return np.zeros(count, dtype) if size < LARGE else np.frombuffer(mmap.mmap(-1, size), dtype)


class HostReadError(AssertionError):
    """The host reads a value, for which it would wait for the GPU."""


class HostWriteError(AssertionError):
    """The host sends values to the GPU, which capture into a graph does not allow."""


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    source: str
    options: tuple[str, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int  # bytes, dynamic

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)


class Machine:
    """One GPU or several, and a record of the work that they are asked to do."""

    def __init__(self, capability: str, clusters: bool, devices: int | None) -> None:
        self.capability, self.clusters = capability, clusters
        numbers = [int(capability)] if devices is None else [*range(devices)]
        self.gpus, self.room = Gpus(numbers, capability), 1 << 40  # bytes
        self.launches: list[Launch] = []
        self.functions: list[str] = []  # CuPy's functions that computed a new array
        self.products: list[str] = []  # the names of the cuBLAS functions that were called
        self.held = self.peak = 0  # bytes allocated now, and at most
        self.compiler = (12, 9)  # version of NVRTC
        self.maps = Driver()
        self.strict = True  # False: the host may read and send values, as outside of a capture
        self.runs = False  # True: launches write numbers that depend on all they read
        self.places: Any = weakref.WeakValueDictionary()  # then: the buffers of arrays

    def array(self, shape: Any, dtype: Any, shift: int = 0, device: Any = None) -> "Array":
        """Return a new array of zeros, which starts ``shift`` elements after an aligned address.

        It lies on the current GPU, or the one with this number, whose streams may all use it at
        once, as no work on a stream creates it.
        """
        array = self.new(shape, dtype, shift)
        array.memory.written = None
        array.memory.device = array.memory.device if device is None else device
        return array

    def new(self, shape: Any, dtype: Any, shift: int = 0) -> "Array":
        """Return a new array of zeros, which the current stream creates, as in CuPy."""
        dtype = BFLOAT16 if str(dtype) == "bfloat16" else np.dtype(dtype)
        buffer = _zeros(shift + _count(shape), dtype)
        self.gpus.does(functools.partial(buffer.fill, 0))
        values = buffer[shift:].reshape(shape)
        return Array(shape, dtype, of=values, memory=Memory(self, shape, dtype))

    def sent(self, values: Any) -> "Array":
        """Return host values that the current stream copies to the GPU, as in CuPy."""
        if self.strict or self.gpus.stream.capturing:
            raise HostWriteError(f"the host sends an array: {values.dtype} {values.shape}")
        array = self.new(values.shape, values.dtype)
        array.values[...] = values
        return array

    def place(self, values: Any, device: Any = None) -> "Array":
        """Return an array with NumPy's values, without the checks of ``sent``."""
        array = self.array(values.shape, values.dtype, device=device)
        array.values[...] = values
        return array


class Memory:
    """The device memory that an array and its views share."""

    def __init__(self, machine: Machine, shape: Any, dtype: Any) -> None:
        size = _count(shape) * np.dtype(dtype).itemsize
        self.machine, self.size = machine, -(-size // GRAIN) * GRAIN
        if machine.held + self.size > machine.room:
            self.size, self.hooks = 0, []  # nothing is allocated, so that __del__ frees nothing
            raise OutOfMemoryError(
                f"Out of memory allocating {size:,} bytes (allocated so far: {machine.held:,}"
                " bytes)."
            )
        self.device, self.written = machine.gpus.current, machine.gpus.work("an allocation", ())
        machine.held += self.size
        machine.peak = max(machine.peak, machine.held)
        self.hooks = [*machine.gpus.hooks]
        for hook in self.hooks:
            hook.malloc_postprocess(device_id=self.device, mem_size=self.size)

    def __del__(self) -> None:
        self.machine.held -= self.size
        for hook in self.hooks:
            hook.free_postprocess(device_id=self.device, mem_size=self.size)


class Pointer:
    """An address inside of an allocation: CuPy's ``MemoryPointer``."""

    def __init__(self, memory: Memory, root: np.ndarray, offset: int) -> None:
        self.memory, self.root, self.offset = memory, root, offset
        self.device_id = memory.device

    @property
    def ptr(self) -> int:
        """The address, of which the first of an allocation is aligned."""
        return self.root.ctypes.data // 16 * 16 + self.offset

    def __add__(self, size: int) -> "Pointer":
        return Pointer(self.memory, self.root, self.offset + size)

    def view(self, shape: Any, dtype: Any, strides: Any) -> np.ndarray:
        """Return the values of an array that starts here."""
        room = self.root.ravel(order="K").view(np.uint8)
        return np.ndarray(shape, dtype, room, self.offset, strides)


def _waits(*_: Any, **__: Any) -> NoReturn:
    raise HostReadError("the host waits for the GPU")


def _check_wait(machine: Machine, what: str) -> None:
    """Raise if the host must not wait for the GPU here: not at all, or not in a capture."""
    if machine.strict:
        raise HostReadError(what)
    if machine.gpus.capturing:
        raise RuntimeError(f"cudaErrorStreamCaptureUnsupported: {what}")


def _reads(name: str) -> Callable[..., Any]:
    """Return a method of this name, which reads an array on the host."""

    def read(array: "Array", *args: Any, **more: Any) -> Any:
        _check_wait(array.memory.machine, f"{name} of {array!r} reads its values on the host")
        array.memory.machine.gpus.work(name, [array.memory])
        return getattr(array.values, name)(*args, **more)

    return read


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """A stand-in for an array of CuPy; its values are NumPy's, and launches do not write them."""

    __bool__, __complex__ = map(_reads, ("__bool__", "__complex__"))
    __float__, __index__, __int__ = map(_reads, ("__float__", "__index__", "__int__"))
    __contains__, __str__ = map(_reads, ("__contains__", "__str__"))
    item, tobytes, tolist = map(_reads, ("item", "tobytes", "tolist"))
    __hash__ = None  # type: ignore[assignment]
    base: "Array | None" = None

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: Pointer | None = None,
        strides: Any = None,
        *,
        of: Any = None,
        memory: Any = None,
    ) -> None:
        if memptr is not None:
            of, memory = memptr.view(shape, dtype, strides), memptr.memory
        machine: Machine = sys.modules["cupy"].machine if memory is None else memory.machine
        if of is None:
            of = np.zeros(shape, dtype)
            machine.gpus.does(functools.partial(of.fill, 0))
        self.values, self.memory = of, memory or Memory(machine, shape, dtype)
        if machine.runs:
            root = self.data.root
            machine.places[id(root)] = root

    def __repr__(self) -> str:
        return f"<{self.values.dtype} {self.values.shape}>"

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        if self.memory.machine.strict:
            raise HostReadError(f"__array__ of {self!r} reads its values on the host")
        raise TypeError("Implicit conversion to a NumPy array is not allowed")  # as CuPy does

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator["Array"]:
        if self.memory.machine.strict:
            raise HostReadError(f"a loop over {self!r}: a launch for each element")
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "size", "ndim", "nbytes", "itemsize", "strides", "flags"):
            return getattr(self.values, name)
        if name in METHODS:

            def method(*args: Any, **more: Any) -> Any:
                machine = self.memory.machine
                if name == "copy" and self.memory.device != machine.gpus.current:
                    machine.gpus.known_to_host(self.memory)  # CuPy copies between GPUs
                    return machine.place(self.values)
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
    def data(self) -> Pointer:
        base = self.values  # what CuPy allocates starts at a multiple of 512 bytes
        while isinstance(base.base, np.ndarray):
            base = base.base
        return Pointer(self.memory, base, self.values.ctypes.data - base.ctypes.data)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        masks = any(isinstance(p, Array) and p.dtype == np.bool_ for p in parts)
        if masks:
            _check_wait(self.memory.machine, "indexing by a mask: its result's size is a value")
        if any(isinstance(p, list) for p in parts) and self.memory.machine.gpus.capturing:
            raise HostWriteError("the host sends a list, as an index")
        if any(isinstance(p, Array) for p in parts):
            self._worked("getitem", (self, *parts))
        elif ... not in parts:
            parts = (*parts, ...)  # then NumPy returns a view of one value too, not a scalar
        inside = self._inside(parts)
        selected = self.values[inside]
        if not any(isinstance(p, Array | list) for p in parts):
            return self._view(selected)
        result = self._wrapped(selected, "getitem")
        self._repeats(lambda: self.values[inside], result)
        return result

    def get(self, out: Any = None, *, blocking: bool = True) -> Any:
        """Return the values on the host, which waits for them unless ``blocking`` is False."""
        if blocking:
            return _reads("copy")(self)
        self._worked("get", (self,))
        out[...] = self.values
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        self.memory.written = self._worked("setitem", (self, value, *parts))
        inside, new = self._inside(index), self._inside(value)
        self.memory.machine.gpus.does(lambda: operator.setitem(self.values, inside, new))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        return self._own(getattr(ufunc, method), inputs, more)

    def __array_function__(self, function: Any, _: Any, args: Any, more: Any) -> Any:
        if function.__name__.endswith("_like") and not more.get("shape", 1):
            more = {**more, "shape": None}  # CuPy takes () and 0 for the shape of the array
        _check(".".join([*function.__module__.split(".")[1:], function.__name__]), more)
        if function.__name__ in WAITS:
            what = f"np.{function.__name__}: the size of the result is a value"
            _check_wait(self.memory.machine, what)
        sends = function.__name__ == "asarray" and type(args[0]) is not Array
        if sends and self.memory.machine.gpus.capturing:
            raise HostWriteError("np.asarray sends what the host has")
        return self._own(function, args, more)

    def _own(self, function: Callable[..., Any], args: Any, more: dict[str, Any]) -> Any:
        """Apply a function of CuPy's own to the values."""
        host, machine = any(isinstance(a, np.ndarray) and a.ndim for a in args), self.memory.machine
        if host and function.__name__ != "asarray" and not machine.strict:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")  # as CuPy does
        inside, options = self._inside(args), self._inside(more)

        def compute() -> Any:
            with np.errstate(all="ignore"):
                result = function(*inside, **options)
            if function.__name__ in WIDENS and getattr(result, "dtype", None) == BFLOAT16:
                result = result.astype(np.float32)
            return result

        if machine.gpus.capturing and (more.get("out") or function.__name__ == "fill"):
            machine.gpus.does(compute)  # which changes an array
            return more["out"][0] if more.get("out") else None
        result = compute()
        operands = [self, *args, *more.values(), *more.get("out", ())]
        if not isinstance(result, np.ndarray) or not np.may_share_memory(result, self.values):
            self._worked(function.__name__, operands)
        elif any(isinstance(old, Array) and result is old.values for old in more.get("out", ())):
            self.memory.written = self._worked(function.__name__, operands)
        for old in (*args, *more.get("out", ())):
            if isinstance(old, Array) and result is old.values:
                return old  # the function changed it in place, or returned it as it was
        wrapped = self._wrapped(result, function.__name__)
        self._repeats(compute, wrapped)
        return wrapped

    def _repeats(self, compute: Callable[[], Any], wrapped: Any) -> None:
        """Let a graph write the results of a function to the same arrays again."""

        def again() -> None:
            several = isinstance(wrapped, list | tuple)
            results = compute() if several else [compute()]
            for old, new in zip(wrapped if several else [wrapped], results, strict=True):
                if isinstance(old, Array):
                    old.values[...] = new

        if self.memory.machine.gpus.capturing:
            self.memory.machine.gpus.does(again)

    def _worked(self, what: str, operands: Any) -> Any:
        """Record work of the current stream on these operands."""
        nested = (part if isinstance(part, list | tuple) else [part] for part in operands)
        memories = [a.memory for each in nested for a in each if isinstance(a, Array)]
        return self.memory.machine.gpus.work(what, memories)

    def _inside(self, value: Any) -> Any:
        """Return the values of an array, or of all arrays in a container."""
        if isinstance(value, Array):
            return value.values
        machine = self.memory.machine
        sends = machine.strict or machine.gpus.capturing
        if isinstance(value, np.ndarray) and value.ndim and sends:
            raise HostWriteError(f"the host sends an array: {value.dtype} {value.shape}")
        if isinstance(value, list | tuple):
            return type(value)(map(self._inside, value))
        if isinstance(value, dict):
            return {name: self._inside(each) for name, each in value.items()}
        return value

    def _view(self, values: np.ndarray) -> "Array":
        """Return an Array of these values in this array's memory."""
        view = Array(values.shape, values.dtype, of=values, memory=self.memory)
        view.base = self if self.base is None else self.base
        return view

    def _wrapped(self, result: Any, by: str = "") -> Any:
        """Return a function's result as an Array, with this array's memory if it is a view."""
        if isinstance(result, list | tuple):
            return type(result)(self._wrapped(each, by) for each in result)
        if not isinstance(result, np.ndarray | np.generic):
            return result
        result = np.asarray(result)
        if np.may_share_memory(result, self.values):
            return self._view(result)
        self.memory.machine.functions.append(by)
        memory = Memory(self.memory.machine, result.shape, result.dtype)
        return Array(result.shape, result.dtype, of=result, memory=memory)


Array.__module__ = "cupy"


@functools.cache
def static_memory() -> dict[str, int]:
    """Return the static shared memory of each kernel, in bytes: that of its largest variant."""
    return {
        kernel: max(numbers[1] for by in labels.values() for numbers in by.values())
        for kernel, labels in costs_file.read("kernels")["variants"].items()
    }


class Function:
    """A kernel of a module; calling it records the launch.

    Arrays and scalars of NumPy and Python are arguments where the host may send values.
    """

    max_threads_per_block = 1024

    def __init__(
        self, name: str, source: str, options: tuple[str, ...], limit: int, device: int = 0
    ) -> None:
        self.about, self._device = (name, source, options), device
        self.num_regs = 40
        self.shared_size_bytes, self.limit = static_memory().get(name, 0), limit
        self._allowed = (48 << 10) - self.shared_size_bytes

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Bytes of dynamic shared memory that a launch may have besides the static ones."""
        return self._allowed

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._check(size, self.limit - self.shared_size_bytes)
        self._allowed = size

    def _check(self, shared: int, most: int) -> None:
        if shared > most:
            raise AssertionError(
                f"{self.about[0]}: {shared} bytes of dynamic shared memory besides"
                f" {self.shared_size_bytes} of static; at most {most} are allowed"
            )

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        self._check(shared_mem, self._allowed)
        machine, kinds = sys.modules["cupy"].machine, (Array, np.generic)
        if machine.strict and any(isinstance(arg, np.ndarray) and arg.ndim for arg in args):
            raise HostWriteError(f"{self.about[0]}: an argument is an array of the host")
        one = [isinstance(arg, np.ndarray) and arg.size == 1 for arg in args]
        kinds = kinds if machine.strict else (*kinds, int, float)
        if not all(isinstance(arg, kinds) or o for arg, o in zip(args, one, strict=True)):
            raise TypeError(f"{self.about[0]}: a kernel cannot take the arguments {args}")
        launch = Launch(*self.about, tuple(grid), tuple(block), shared_mem)
        if self._device != machine.gpus.current:
            raise WrongDeviceError(f"{self.about[0]}: the kernel was loaded on GPU {self._device}")
        machine.gpus.work(self.about[0], [arg.memory for arg in args if type(arg) is Array])
        machine.launches.append(launch)
        if machine.runs:
            again = functools.partial(stand_in_runs.run, launch, args, machine.places)
            machine.gpus.does(again)


def _modules(machine: Machine) -> dict[str, types.ModuleType]:
    """Return stand-ins for CuPy's modules, with those of its names that the library uses."""

    class RawModule:
        def __init__(
            self, code: str, options: tuple[str, ...] = (), name_expressions: Any = None
        ) -> None:
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
        "getDeviceProperties": lambda device: {
            "name": b"a GPU",
            "major": int(machine.capability) // 10,
            "minor": int(machine.capability) % 10,
            "totalGlobalMem": machine.room,
            "pciDomainID": 0,
            "pciBusID": device,
            "pciDeviceID": 0,
        },
        "CUDARuntimeError": type("CUDARuntimeError", (RuntimeError,), {}),
        "memGetInfo": lambda: (machine.room - machine.held, machine.room),
        "getDevice": lambda: machine.gpus.current,
        "memcpyAsync": lambda *args: machine.gpus.copy(*args, real=machine.runs),
        "streamIsCapturing": machine.gpus.captures,
    }
    empty = lambda shape, dtype=float: machine.new(shape, dtype)  # noqa: E731

    def ones(shape: Any, dtype: Any = float) -> Array:
        array = machine.new(shape, dtype)
        array[...] = 1
        return array

    like = lambda array, dtype=None: machine.new(array.shape, dtype or array.dtype)  # noqa: E731
    asarray = lambda a: a if type(a) is Array else machine.sent(np.asarray(a))  # noqa: E731
    view = np.lib.stride_tricks.as_strided
    strided = lambda array, *args: array._wrapped(view(array.values, *args))  # noqa: E731
    contents = {
        "cupy": {
            "machine": machine,
            "ndarray": Array,
            "RawModule": RawModule,
            **dict.fromkeys(("empty", "zeros"), empty),
            "ones": ones,
            "add": np.add,
            **dict.fromkeys(("empty_like", "zeros_like"), like),
            "asarray": asarray,
            "asnumpy": _waits,
            "get_default_memory_pool": lambda: machine.gpus.pool,
            "get_default_pinned_memory_pool": lambda: machine.gpus.pool,
        },
        "cupy.cuda": {"is_available": lambda: True, **cuda_names(machine.gpus)},
        "cupy.cuda.device": {"get_cublas_handle": lambda: 0},
        "cupy.cuda.runtime": runtime,
        "cupy.lib": {},
        "cupy.lib.stride_tricks": {"as_strided": strided},
        "cupy.cuda.function": {"CNumpyArray": lambda array: array[()]},
        "cupy.cuda.compiler": {"CompileException": CompileException},
        "cupy.cuda.nvrtc": {
            "getVersion": lambda: machine.compiler,
            "getSupportedArchs": lambda: [
                *(75, 80, 86, 87, 89, 90),
                *(100, 101, 120) * (machine.compiler >= (12, 8)),
                *(103, 121) * (machine.compiler >= (12, 9)),
            ],
        },
        "cupyx": {},
        "cupyx.scipy": {},
        "cupyx.scipy.special": {"erfc": scipy.special.erfc},
        "cupy._core": {},
        "cupy._core._scalar": {"CScalar": lambda scalar: scalar},
    }
    modules = {name: types.ModuleType(name) for name in contents}
    for name, attributes_of_module in contents.items():
        vars(modules[name]).update(attributes_of_module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, modules[name])
    return modules


class Cublas:
    """A stand-in for cuBLAS that records the names of products."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Callable[..., int]:
        def record(*args: Any) -> int:
            if "Gemm" in name:
                self.machine.products.append(name)
                if self.machine.runs:
                    again = functools.partial(stand_in_runs.product, name, args)
                    self.machine.gpus.does(again)
            return 0

        return record


class Driver:
    """A stand-in for cuTensorMapEncodeTiled: the driver's checks, and a record of all requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def __call__(self, to: Any, *args: Any) -> int:
        dtype, rank, address, *rest = (getattr(one, "value", one) for one in args)
        sizes, strides, box, steps, interleave, swizzle, promotion, fill = rest
        request = {
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
        self.requests.append(request)
        ctypes.memset(place, len(self.requests) % 256, 128)
        return 0


@contextmanager
def gpu(
    capability: str = "90", clusters: bool | None = None, devices: int | None = None
) -> Iterator[Machine]:
    """Replace CuPy by a stand-in inside a ``with`` block; from sm_90 on it has clusters by default.

    A single GPU has its compute capability as its number, so that what the library caches by
    device is not shared between capabilities or with real GPUs.  So many devices as are asked for
    are numbered from 0.
    """
    machine = Machine(capability, int(capability) >= 90 if clusters is None else clusters, devices)
    modules = _modules(machine)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    products = Cublas(machine)
    cublas = gemm.cublas
    gemm.cublas = functools.wraps(cublas)(functools.cache(lambda: products))
    encoder = tensor_map.encoder
    tensor_map.encoder = functools.wraps(encoder)(functools.cache(lambda: machine.maps))
    tensor_map._maps.clear()
    folder, cache.folder = cache.folder, lambda **_: Path(os.devnull)  # no binary is cached
    records = dict(faults._records)
    for op in OPS.values():
        op.routes.clear()  # they were recorded on another machine
    gradients.tables.clear()
    counters._kept.clear()
    workspaces = dict(gemm.workspaces)
    gemm.workspaces.clear()
    _forget_streams()
    core_gpu._several.clear()
    if devices is not None:
        _forget_devices()
    try:
        yield machine
    finally:
        if devices is not None:
            _forget_devices()
        gemm.cublas, tensor_map.encoder, cache.folder = cublas, encoder, folder
        for op in OPS.values():
            op.routes.clear()  # of a machine that is gone
        tensor_map._maps.clear()  # addresses of a machine that is gone
        gradients.tables.clear()  # addresses of a machine that is gone
        _forget_streams()
        gemm.workspaces.clear()
        gemm.workspaces.update(workspaces)
        counters._kept.clear()
        core_gpu._several.clear()
        faults._records.clear()  # of devices that are gone
        faults._records.update(records)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _forget_streams() -> None:
    """Forget the streams of another machine."""
    captured.spare.clear()
    offload._side.cache_clear()


def _forget_devices() -> None:
    """Clear what is cached by a device's number, as other machines use the same numbers."""
    core_kernel._kernel.cache_clear()
    core_gpu.limits_of.cache_clear()
