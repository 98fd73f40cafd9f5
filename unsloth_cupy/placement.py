"""Where arrays live: what is made or kept for one lives there, and is worked on there.

    @at_home("keys")             a class whose objects have an array of this name
    @at_first                    a function of arrays by name, all on one GPU

let methods and functions run on the GPU of their arrays, where there are several.  ``placed`` and
``full_like`` make arrays where another lives.
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
from .core.frameworks import FRAMEWORKS
from .core.gpu import at, cupy, is_cupys, several
from .core.stand_in import is_planned
from .errors import ConfigError, FrameworkError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

PER_THREAD = 2  # the address of CUDA's default stream of each thread, which is another in each


def at_home(attribute: str) -> Callable[[type[T]], type[T]]:
    """Let every public method of a class, and of those under it, run where an array of it lives."""
    found = operator.attrgetter(attribute)

    def decorated(owner: type[T]) -> type[T]:
        for name, method in [*vars(owner).items()]:
            if inspect.isfunction(method) and (name[0] != "_" or name == "__call__"):
                setattr(owner, name, _moved(method, lambda self, *_: found(self)))
        setattr(owner, "__init_subclass__", classmethod(decorated))  # noqa: B010 -- of any class
        return owner

    return decorated


def at_first(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function whose first argument is arrays by name run where the first of them lives."""
    return _moved(function, _first)


def _moved(function: Callable[P, R], home: Callable[..., Any]) -> Callable[P, R]:
    if inspect.isgeneratorfunction(function):
        raise ConfigError(f"{function.__name__} yields, and its caller may move to another GPU")

    @functools.wraps(function)
    def there(*args: P.args, **options: P.kwargs) -> R:
        if not several():
            return function(*args, **options)
        with at(home(*args, *options.values())):
            return function(*args, **options)

    return there


def _first(*given: Any) -> Any:
    arrays = next((each for each in given if isinstance(each, Mapping)), {})  # also by its name
    return next(iter(arrays.values()), None)


def stream(like: Any) -> tuple[int, ...]:
    """Return a key of the GPU that holds ``like`` and of its current stream; () on the host.

    What is sent once and kept is kept by this key.  Work on a stream comes after what was sent on
    it before, and its memory is not given away too soon; another stream could be told neither
    without waiting, and a graph that is captured not at all.
    """
    if not is_cupys(like.__class__):
        return ()
    with at(like):
        address: int = cupy().cuda.get_current_stream().ptr
    key: tuple[int, ...] = (like.data.device_id, address)
    return (*key, threading.get_ident()) if address == PER_THREAD else key


def settle(like: Any) -> None:
    """Wait for what the current stream was asked where ``like`` lives: any may go on from it."""
    if is_cupys(like.__class__):
        with at(like):
            cupy().cuda.get_current_stream().synchronize()


def home_of(call: str, like: Any) -> Any:
    """Return an array that lives where something new is to live: ``like``, or else NumPy's."""
    if like is None:
        return np.empty(0)
    check_library(f"{call}: like", like)
    return like


def check_library(what: str, array: Any) -> None:
    """Raise unless an array is NumPy's or CuPy's."""
    if (library := framework_of(array, what)) not in ("numpy", "cupy"):
        raise FrameworkError(f"{what} comes from {library}; pass an array of NumPy or CuPy")


def scipy_of(module: str, like: Any) -> Any:
    """Return a module of SciPy, or of CuPy's twin of it, by where an array lives."""
    if is_planned(like):
        return like.scipy[module]
    home = "scipy" if isinstance(like, np.ndarray) else "cupyx.scipy"
    return importlib.import_module(f"{home}.{module}")


def full_like(array: Any, number: float, shape: tuple[int, ...] | None = None) -> Any:
    """Return a new array of array's library, dtype and device, filled with a number.

    It has the shape of array where none is given.
    """
    library = framework_of(array, "the model of a new array")
    if library in ("numpy", "cupy"):
        with at(array):
            return np.full_like(array, number, shape=shape)
    shape = tuple(array.shape) if shape is None else shape
    if library == "torch":
        return array.new_full(shape, number)
    return array.__array_namespace__().full(shape, number, dtype=array.dtype, device=array.device)


def placed(array: Any, like: Any) -> Any:
    """Return a NumPy array as one of like's library and device."""
    library = framework_of(like, "the model of a new array")
    if is_planned(like):
        return like.placed(array)
    if library in ("torch", "jax"):
        given = FRAMEWORKS[library].give_back(array, like)
        return given.to(like.device) if library == "torch" else given
    with at(like):
        return np.asarray(array, like=like) if library == "cupy" else array


def to_numpy(array: Any) -> Any:
    """Return array as NumPy's, copied from its GPU where it lives on one."""
    if isinstance(array, np.ndarray):
        return array
    with at(array):  # its current stream is the one to wait for
        return array.get()
