"""Devices of arrays: code runs, and creates arrays, on the GPU of the arrays that it works with.

    @on_gpu_of_attribute("keys")  a class whose objects have an array of this name
    @on_gpu_of_first              a function of arrays by name, all on one GPU

make methods and functions run on the GPU of their arrays, if there are several.  ``to_device_of``
and ``full_like`` create arrays on the device of another array.
"""

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

PER_THREAD = 2  # CUDA's per-thread default stream: threads share this address, not the stream


def on_gpu_of_attribute(attribute: str) -> Callable[[type[T]], type[T]]:
    """Make public methods of a class and its subclasses run on the GPU of one of its arrays."""
    array_of = operator.attrgetter(attribute)

    def decorated(owner: type[T]) -> type[T]:
        for name, method in [*vars(owner).items()]:
            if inspect.isfunction(method) and (name[0] != "_" or name == "__call__"):
                setattr(owner, name, _moved(method, lambda self, *_: array_of(self)))
        setattr(owner, "__init_subclass__", classmethod(decorated))  # noqa: B010 -- of any class
        return owner

    return decorated


def on_gpu_of_first(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function whose first argument is arrays by name run on the GPU of the first array."""
    return _moved(function, _first)


def _moved(function: Callable[P, R], home: Callable[..., Any]) -> Callable[P, R]:
    if inspect.isgeneratorfunction(function):
        raise ConfigError(f"{function.__name__} yields, and its caller may move to another GPU")

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
    """Return a key of the GPU that holds ``like`` and of its current stream; () on the host.

    Arrays that are copied to a GPU once and cached have this key in the cache.  Later work on the
    same stream runs after the copy, and its memory is not reused too early.  Another stream would
    have to wait for both, which a graph that is being captured cannot do at all.
    """
    if not is_cupys(like.__class__):
        return ()
    with device_of(like):
        address: int = cupy().cuda.get_current_stream().ptr
    key: tuple[int, ...] = (like.data.device_id, address)
    return (*key, threading.get_ident()) if address == PER_THREAD else key


def synchronize_stream(like: Any) -> None:
    """Wait for the current stream of the GPU of ``like``: then any stream may use its results."""
    if is_cupys(like.__class__):
        with device_of(like):
            cupy().cuda.get_current_stream().synchronize()


def array_on_device(call: str, like: Any) -> Any:
    """Return an array on the device for new arrays: ``like``, or a NumPy array if that is None."""
    if like is None:
        return np.empty(0)
    check_library(f"{call}: like", like)
    return like


def check_library(what: str, array: Any) -> None:
    """Raise unless an array is NumPy's or CuPy's."""
    if (library := framework_of(array, what)) not in ("numpy", "cupy"):
        raise FrameworkError(f"{what} comes from {library}; pass an array of NumPy or CuPy")


def adopted(call: str, name: str, array: Any) -> Any:
    """Return an array of any library as NumPy's or CuPy's over the same memory, without gradient.

    Raises
    ------
    DTypeError, FrameworkError
        It is not an array, or its memory cannot be shared.
    """
    library = framework_of(array, f"{call}: {name}")
    if library in ("numpy", "cupy") and not isinstance(array, np.ma.MaskedArray):
        return array
    array = array.detach() if library == "torch" else array
    return adopt_all(FRAMEWORKS.get(library, DLPACK), call, [name], [array])[0]


def scipy_of(module: str, like: Any) -> Any:
    """Return a module of SciPy for a NumPy array, or the same module of cupyx.scipy for CuPy's."""
    if is_planned(like):
        return like.scipy[module]
    home = "scipy" if isinstance(like, np.ndarray) else "cupyx.scipy"
    return importlib.import_module(f"{home}.{module}")


def full_like(array: Any, number: float, shape: tuple[int, ...] | None = None) -> Any:
    """Return a new array of array's library, dtype and device, filled with a number.

    Without ``shape`` it has the shape of array.
    """
    library = framework_of(array, "the model of a new array")
    if library in ("numpy", "cupy"):
        with device_of(array):
            if shape == ():  # which CuPy takes for the shape of array
                return np.full_like(array, number, shape=(1,)).reshape(())
            return np.full_like(array, number, shape=shape)
    shape = tuple(array.shape) if shape is None else shape
    if library == "torch":
        return array.new_full(shape, number)
    return array.__array_namespace__().full(shape, number, dtype=array.dtype, device=array.device)


def array_like(numbers: Any, like: Any) -> Any:
    """Return a list of numbers as an array of like's library, dtype and device."""
    library = framework_of(like, "the model of a new array")
    if library in ("numpy", "cupy"):
        return to_device_of(np.array(numbers, like.dtype), like)
    if library == "torch":
        return like.new_tensor(numbers)
    return like.__array_namespace__().asarray(numbers, dtype=like.dtype, device=like.device)


def to_device_of(array: Any, like: Any) -> Any:
    """Return a NumPy array as one of like's library and device.

    Raises
    ------
    DeviceError
        Work is captured into a CUDA graph, which would send the same values again and again.
    """
    library = framework_of(like, "the model of a new array")
    if is_planned(like):
        return like.placed(array)
    if library in ("torch", "jax"):
        result = FRAMEWORKS[library].give_back(array, like)
        return result.to(like.device) if library == "torch" else result
    if library == "cupy" and capturing.get():
        raise DeviceError("an array of the host is sent to the GPU, which a graph cannot repeat")
    with device_of(like):
        return np.asarray(array, like=like) if library == "cupy" else array


def to_numpy(array: Any) -> Any:
    """Return array as a NumPy array, copied from its GPU if it is on one."""
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array)
    with device_of(array):  # its current stream is the one to wait for
        return array.get()
