"""Devices of arrays: runs code, and creates arrays, on the GPU of the arrays it uses.

    @on_gpu_of_attribute("keys")  for a class whose objects have an array of this name
    @on_gpu_of_first              for a function of arrays by name, all on one GPU

With several GPUs, these decorators run methods and functions on the GPU of their arrays.
``to_device_of`` and ``full_like`` create arrays on the device of another array.
"""

import contextlib
import functools
import importlib
import inspect
import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .core.arrays import framework_of
from .core.frameworks import DLPACK, FRAMEWORKS, adopt_all
from .core.gpu import capturing, cupy, device_of, is_cupys, several_gpus
from .core.stand_in import is_planned
from .errors import ConfigError, DeviceError, FrameworkError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

PER_THREAD = 2  # per-thread default stream of CUDA: one address, but a stream per thread


def on_gpu_of_attribute(attribute: str) -> Callable[[type[T]], type[T]]:
    """Make public methods of a class and its subclasses run on the GPU of an attribute."""
    array_of = operator.attrgetter(attribute)

    def decorated(owner: type[T]) -> type[T]:
        for name, method in [*vars(owner).items()]:
            if inspect.isfunction(method) and (name[0] != "_" or name == "__call__"):
                setattr(owner, name, _moved(method, lambda self, *_: array_of(self)))
        setattr(owner, "__init_subclass__", classmethod(decorated))  # noqa: B010 -- works for any class
        return owner

    return decorated


def on_gpu_of_first(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function of {name: array} run on the GPU of the first array."""
    return _moved(function, _first)


def _moved(function: Callable[P, R], home: Callable[..., Any]) -> Callable[P, R]:
    if inspect.isgeneratorfunction(function):
        raise ConfigError(f"{function.__name__} is a generator: its caller may change the GPU")

    @functools.wraps(function)
    def moved(*args: P.args, **options: P.kwargs) -> R:
        if not several_gpus():
            return function(*args, **options)
        with device_of(home(*args, *options.values())):
            return function(*args, **options)

    return moved


def _first(*args: Any) -> Any:
    arrays = next((each for each in args if isinstance(each, Mapping)), {})  # or passed by keyword
    return next(iter(arrays.values()), None)


def stream(like: Any) -> tuple[int, ...]:
    """Return a key of the GPU of ``like`` and of its current stream; () on the host.

    It is the cache key of arrays that are copied to a GPU once.  Later work on the same stream runs
    after the copy, and the memory is not reused too early.  Another stream would have to wait for
    both, which is impossible while a graph is captured.
    """
    if not is_cupys(like.__class__):
        return ()
    with device_of(like):
        address: int = cupy().cuda.get_current_stream().ptr
    key: tuple[int, ...] = (like.data.device_id, address)
    return (*key, threading.get_ident()) if address == PER_THREAD else key


def synchronize_stream(like: Any) -> None:
    """Wait for the current stream of the GPU of ``like``, so any stream may use its results."""
    if is_cupys(like.__class__):
        with device_of(like):
            cupy().cuda.get_current_stream().synchronize()


def array_on_device(call: str, like: Any) -> Any:
    """Return an array on the device for new arrays: ``like``, or a NumPy array for None."""
    if like is None:
        return np.empty(0)
    check_library(f"{call}: like", like)
    return like


def check_library(what: str, array: Any) -> None:
    """Raise a FrameworkError unless an array belongs to NumPy or CuPy."""
    if (library := framework_of(array, what)) not in ("numpy", "cupy"):
        raise FrameworkError(f"{what} comes from {library}; pass an array of NumPy or CuPy")


def adopted(call: str, name: str, array: Any) -> Any:
    """Return an array of any library as a NumPy or CuPy array that shares its memory.

    The result has no gradient.

    Raises
    ------
    DTypeError, FrameworkError
        The value is not an array, or its memory cannot be shared.
    """
    library = framework_of(array, f"{call}: {name}")
    if library in ("numpy", "cupy") and not isinstance(array, np.ma.MaskedArray):
        return array
    array = array.detach() if library == "torch" else array
    return adopt_all(FRAMEWORKS.get(library, DLPACK), call, [name], [array])[0]


def scipy_of(module: str, like: Any) -> Any:
    """Return a module of scipy for a NumPy array, or of cupyx.scipy for a CuPy array."""
    if is_planned(like):
        return like.scipy[module]
    home = "scipy" if isinstance(like, np.ndarray) else "cupyx.scipy"
    return importlib.import_module(f"{home}.{module}")


def full_like(array: Any, number: float, shape: tuple[int, ...] | None = None) -> Any:
    """Return a new array with the library, dtype and device of ``array``, filled with a number.

    ``shape`` defaults to the shape of ``array``.
    """
    library = framework_of(array, "the model of a new array")
    if library in ("numpy", "cupy"):
        with device_of(array):
            if shape == ():  # CuPy would use the shape of array
                return np.full_like(array, number, shape=(1,)).reshape(())
            return np.full_like(array, number, shape=shape)
    shape = tuple(array.shape) if shape is None else shape
    if library == "torch":
        return array.new_full(shape, number)
    return array.__array_namespace__().full(shape, number, dtype=array.dtype, device=array.device)


def array_like(numbers: Any, like: Any) -> Any:
    """Return numbers as an array with the library, dtype and device of ``like``."""
    library = framework_of(like, "the model of a new array")
    if library in ("numpy", "cupy"):
        return to_device_of(np.array(numbers, like.dtype), like)
    if library == "torch":
        return like.new_tensor(numbers)
    return like.__array_namespace__().asarray(numbers, dtype=like.dtype, device=like.device)


def to_device_of(array: Any, like: Any) -> Any:
    """Copy a NumPy array to the library and device of ``like``.

    Raises
    ------
    DeviceError
        A CUDA graph is being captured, which would repeat the copy of the same values.
    """
    library = framework_of(like, "the model of a new array")
    if is_planned(like):
        return like.placed(array)
    if library in ("torch", "jax"):
        result = FRAMEWORKS[library].give_back(array, like)
        return result.to(like.device) if library == "torch" else result
    if library == "cupy" and capturing.get():
        raise DeviceError("a host array is copied to the GPU, which a graph cannot repeat")
    with device_of(like):
        return np.asarray(array, like=like) if library == "cupy" else array


def to_numpy(array: Any) -> Any:
    """Return an array as a NumPy array, copied from its GPU if necessary."""
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array)
    with device_of(array):  # waits for the current stream of that GPU
        return array.get()


class Arriving:
    """An asynchronous copy of an array to the host, after the current stream's earlier work."""

    def __init__(self, array: Any) -> None:
        self.values, self.end = np.empty(array.shape, array.dtype), None
        if isinstance(array, np.ndarray):
            self.values[...] = array
            return
        cuda = cupy().cuda
        memory = cuda.alloc_pinned_memory(array.nbytes)  # copies to other memory are synchronous
        self.values = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
        array.get(out=self.values, blocking=False)
        self.end = cuda.get_current_stream().record()

    def wait(self) -> Any:
        """Wait for the copy and return the values."""
        if self.end is not None:
            self.end.synchronize()
        return self.values

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the memory must not be reused during the copy
            self.wait()
