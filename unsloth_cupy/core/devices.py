"""Several GPUs: what is done with an array is done on the GPU that holds it.

CuPy allocates and launches on the GPU that is current for the thread, wherever the arrays of a call
lie.  So all that launches, allocates or calls CuPy goes through one of

    launch = bound(launch)       a kernel starts where it was loaded
    with at(array): ...          lines that make arrays, or compute with them
    @at_home("keys")             a class whose objects have an array of this name
    @at_first                    a function of arrays by name, all on one GPU

and of these nothing is left where there is one GPU, or none.
"""

import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

HERE: AbstractContextManager[Any] = nullcontext()
PER_THREAD = 2  # the address of CUDA's default stream of each thread, which is another in each
_seen: tuple[Any, bool] = (None, False)  # CuPy, and whether it sees several GPUs


def count() -> int:
    """Return how many GPUs CuPy sees; 0 where nobody has imported it."""
    cupy = sys.modules.get("cupy")
    return cupy.cuda.runtime.getDeviceCount() if cupy and cupy.cuda.is_available() else 0


def several() -> bool:
    """Say whether there is a choice of GPUs."""
    global _seen  # noqa: PLW0603 -- asked once of a driver
    cupy = sys.modules.get("cupy")
    if cupy is not _seen[0]:
        _seen = cupy, count() > 1
    return _seen[1]


def number(array: Any) -> int:
    """Return the number of the GPU that holds an array; 0 on the host."""
    return 0 if array.__class__ is np.ndarray else int(array.device.id)


def at(array: Any) -> AbstractContextManager[Any]:
    """Return a context in which the GPU that holds an array is the current one."""
    if array.__class__ is np.ndarray or not several() or not on_gpu(array):
        return HERE
    device: AbstractContextManager[Any] = array.device
    return device


def on(device: Any) -> AbstractContextManager[Any]:
    """Return a context in which a device of CuPy's is the current one."""
    return device if several() else HERE


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


def bound(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a launch that starts on the GPU that is current now, whichever is later."""
    if not several():
        return launch
    cuda = sys.modules["cupy"].cuda
    device, current = cuda.Device(), cuda.runtime.getDevice

    def launch_there(*given: Any) -> None:
        if current() == device.id:
            launch(*given)
        else:
            with device:
                launch(*given)

    return launch_there


def stream(like: Any) -> tuple[int, ...]:
    """Return a key of the GPU that holds ``like`` and of its current stream; () on the host.

    What is sent once and kept is kept by this key.  Work on a stream comes after what was sent on
    it before, and its memory is not given away too soon; another stream could be told neither
    without waiting, and a graph that is captured not at all.
    """
    if not on_gpu(like):
        return ()
    with at(like):
        address: int = sys.modules["cupy"].cuda.get_current_stream().ptr
    key: tuple[int, ...] = (like.data.device_id, address)
    return (*key, threading.get_ident()) if address == PER_THREAD else key


def settle(like: Any) -> None:
    """Wait for what the current stream was asked where ``like`` lives: any may go on from it."""
    if on_gpu(like):
        with at(like):
            sys.modules["cupy"].cuda.get_current_stream().synchronize()


def on_gpu(array: Any) -> bool:
    """Say whether array is one of CuPy's."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)
